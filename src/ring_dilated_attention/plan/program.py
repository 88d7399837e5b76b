"""The program of a rank: its part of a plan as actions, run one after the other. Integers only.

    fetch    start a message: send rows of K and V to one rank, receive rows of another
    wait     until it has arrived
    tiles    compute: the rank's own rows, or those that have arrived last
    return   start a message: send gradients of the rows that have arrived to the rank that holds
             them, receive those of the rows that were sent
    add      wait for these, the oldest first, and add them to the gradients of own rows
    zero     merge zero keys

`lower` writes it down. Messages are waited for in the order in which they start, so a queue holds
them. They start in the same order on every rank: the fetch of step s + 1 before the tiles of step
s, its return behind these. Between two ranks the messages are thus the same on both, and no rank
waits for one that waits for it (`check_plan` proves both).

A ring has one message of rows in flight, behind the tiles of the step before: at most two are held,
O(n / p). A gather starts all of them first. That is all that tells the two apart here; of a ring
that is cut into rounds, a few heads at a time, each round is a ring of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Literal, NamedTuple

from .attention import RankPlan, Step
from .rows import Message, TensorSize, TileGroup

Kind = Literal["fetch", "wait", "tiles", "return", "add", "zero"]


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind  # which; see the docstring of the module
    rank: RankPlan  # the plan of the heads that it is done for
    step: Step | None = None  # whose rows it is about; None: the rank's own
    # of own tiles, which: all of them, or the first group alone, or the others. Backward
    # leaves the others for later: gradients return behind them.
    part: Literal["all", "first", "rest"] = "all"
    # of a fetch, whether the next one sends the same rows, which are packed once
    keeps: bool = False
    behind: bool = False  # of an addition, whether tiles come next, behind which it can be done

    @property
    def groups(self) -> tuple[TileGroup, ...]:
        """The tiles that it computes."""
        if self.kind != "tiles":
            return ()
        if self.step is not None:
            return self.step.groups
        first = {"all": None, "first": slice(1), "rest": slice(1, None)}[self.part]
        return self.rank.local_groups if first is None else self.rank.local_groups[first]

    @property
    def sends(self) -> tuple[int, int] | None:
        """The rank that it sends to, and how many (row, head) pairs of K and V; None: nothing."""
        return self._ends[0]

    @property
    def receives(self) -> tuple[int, int] | None:
        """The rank that it receives from, and how many (row, head) pairs; None: nothing."""
        return self._ends[1]

    @property
    def _ends(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        if self.step is None or self.kind not in ("fetch", "return"):
            return None, None
        send, receive = self.step.send, self.step.receive
        to = None if send is None else (send.receiver, send.rows)
        source = None if receive is None else (receive.sender, receive.rows)
        return (to, source) if self.kind == "fetch" else (source, to)

    def nbytes(self, size: TensorSize) -> tuple[int, int]:
        """Bytes that it sends, and that it receives."""
        wide = self.kind == "return" and self.rank.plan.returns_wide
        element = size.accumulate_size if wide else size.element_size
        sent, received = (0 if x is None else x[1] for x in self._ends)
        return size.key_value_bytes(sent, element), size.key_value_bytes(received, element)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that it computes, over all query heads, per batch entry."""
        plan = self.rank.plan
        pairs = sum(tile.pairs for group in self.groups for tile in group.tiles)
        return pairs * (plan.num_heads // plan.num_kv_heads)

    def __str__(self) -> str:
        words = [] if self.step is None else [f"step {self.step.step}"]
        if self.kind == "tiles":
            own = {"all": "own rows", "first": "own rows, first group", "rest": "own rows, others"}
            words = words or [own[self.part]]
            tiles = sum(len(group.tiles) for group in self.groups)
            words.append(f"{tiles:,} tiles, {self.pairs:,} pairs")
        ways = (("to", self.sends), ("from", self.receives))
        words += [f"{x[1]:,} rows {way} rank {x[0]}" for way, x in ways if x is not None]
        heads = self.rank.plan.kv_heads
        if len(heads) < self.rank.plan.num_kv_heads:
            words.append(f"KV heads {heads.start} to {heads.stop - 1}")
        return f"{self.kind:<7}{'; '.join(words)}".rstrip()


class Program(tuple[Action, ...]):
    """The actions of a rank, in order. Its text has a line for each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def lower(rank: RankPlan, *, gathers: bool, backward: bool) -> Program:
    """The program of a rank in one direction of a call.

    Args:
        rank: what the rank does, by steps.
        gathers: whether all messages of rows are in flight at once, or one.
        backward: the direction.
    """
    return Program(_lower(rank, gathers, backward))


def _lower(rank: RankPlan, gathers: bool, backward: bool) -> Iterator[Action]:
    rounds = rank.rounds(gathers=gathers)
    steps = [] if rank.is_alone else [(one, step) for one in rounds for step in one.steps()]
    # Empty ones have their place in the order, which has to be the same on all ranks.
    fetches = _fetches(steps)
    yield from chain.from_iterable(islice(fetches, None if gathers else 1))
    returned: deque[Action] = deque()  # and not yet added
    # In a gather as many (row, head) pairs as the rank holds: rows are many where steps are long.
    most = rank.held_rows if gathers else 0
    left = sum(step.moves for _, step in steps)
    for one in rounds:
        splits = backward and one is rounds[-1] and left > 0
        yield Action("tiles", one, part="first" if splits else "all")
        for step in one.steps() if steps else ():
            if step.moves:
                left -= 1
                yield Action("wait", one, step)
            yield from chain.from_iterable(islice(fetches, 1))
            if not step.moves:
                continue
            # What the last step but one returns has the last one, and what follows, to travel.
            while left and sum(map(_rows_of, returned)) > most:
                yield Action("add", *returned.popleft()[1:3], behind=True)
            if step.groups:
                yield Action("tiles", one, step)
            if backward:
                returned.append(Action("return", one, step))
                yield returned[-1]
        if splits:
            yield Action("tiles", one, part="rest")
    yield from (Action("add", action.rank, action.step) for action in returned)
    if not backward:
        yield from (Action("zero", one) for one in rounds if one.plan.tiling.has_zero_keys)


def _fetches(steps: Sequence[tuple[RankPlan, Step]]) -> Iterator[list[Action]]:
    """The fetch of each step, if it is not empty. What is sent twice in a row is packed once."""
    found: list[list[Action]] = []
    following: Message | None = None
    for one, step in reversed(steps):
        keeps = bool(step.send and following and step.send.runs == following.runs)
        found.append([Action("fetch", one, step, keeps=keeps)] * step.moves)
        following = step.send or following
    return reversed(found)


def _rows_of(action: Action) -> int:
    return sum(x[1] for x in (action.sends, action.receives) if x is not None)
