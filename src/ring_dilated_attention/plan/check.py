"""A proof, by enumeration, that a plan is right: for tests and small plans.

It runs the programs of all ranks with positions in place of tensors, and compares what they compute
with the definition of the pattern. Its cost is the number of (branch, head, query, key) quadruples.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from typing import Any, TypeAlias

from ..pattern import Window
from .attention import AttentionPlan, RankPlan, Step
from .program import Action, Program, lower
from .rows import Message, Rows, Tile, TileGroup

_Quadruples: TypeAlias = Counter[tuple[int, int, int, int | None]]


class PlanError(AssertionError):
    """A plan that does not compute what its pattern means."""


def check_plan(plan: AttentionPlan) -> None:
    """Prove over all ranks that `plan` is complete, consistent and minimal, as ring and as gather.

    - Each (branch, KV head, query, visible key) is computed exactly once, on the query's rank.
    - Messages between two ranks are the same for both, in the same order, and no rank waits for one
      that waits for it: the programs of all ranks are run to their ends.
    - A message holds each (row, head) that the receiver's queries need once and no other, so the
      bytes moved are the lower bound; a message of nothing is not sent.
    - Every key a tile reads is the computing rank's own, or in the message that it has received
      last, whose rows the sender owns: so each remote gradient, sent back the same way, reaches its
      owner, who adds it.
    - Tiles of a group share no query row of a head and no key row; where the plan says that its
      first group covers, that one has every row of every head as query and as key.
    - Each (branch, KV head, query) is given, by its rank, the zero keys of its cell.

    Raises:
        PlanError: the first violation found.
    """
    ranks = list(map(plan.rank, range(plan.layout.world_size)))
    world = _World([list(chain(*(range(*each) for each in x))) for x in plan.layout.ranges])
    expected = Counter(_expected(plan))
    for gathers, backward in product((True, False), repeat=2):
        world.run([lower(rank, gathers=gathers, backward=backward) for rank in ranks], backward)
        for rank in ranks:
            world.computed.update(_zero_keys(rank, world.held[rank.index]))
        if world.computed != expected:
            missing, extra = expected - world.computed, world.computed - expected
            raise PlanError(
                f"(branch, head, query, key; zero keys are None): {missing.total()} missing "
                f"{list(missing)[:3]}, {extra.total()} too many {list(extra)[:3]}"
            )


@dataclass
class _World:
    """All ranks, and what they have done."""

    held: list[list[int]]  # of each rank, the positions of its local rows
    # (branch, head, query, key), and how often
    computed: _Quadruples = field(default_factory=Counter)
    # by sender and receiver, what was sent in order: kind, rows and message
    sent: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    # the same, as receivers expect it
    expected: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    # what was computed by a group, once it has been checked; and checked steps, by id
    known: dict[Any, _Quadruples] = field(default_factory=dict)

    def run(self, programs: Sequence[Program], backward: bool) -> None:
        """Run the programs of all ranks together, each until it waits for what is not sent yet."""
        self.computed, self.sent, self.expected = Counter(), defaultdict(list), defaultdict(list)
        running = {r: self._run(r, each, backward) for r, each in enumerate(programs)}
        before = None
        while running:
            waiting = {rank: next(run, None) for rank, run in running.items()}
            if waiting == before:
                rank, action = next(iter(waiting.items()))
                raise PlanError(f"rank {rank} waits for ever at {action}")
            running = {rank: running[rank] for rank, action in waiting.items() if action}
            before = waiting
        if self.sent != self.expected:
            raise PlanError("a rank does not receive all that another sends it")

    def _run(self, rank: int, program: Program, backward: bool) -> Iterator[Action]:
        """Run a program; yield the action that waits, as long as it does."""
        started: dict[str, deque[Any]] = {"wait": deque(), "add": deque()}
        arrived: list[Step | None] = []
        returned: list[Step | None] = []
        for action in program:
            step = action.step
            if action.kind == "fetch":
                started["wait"].append(self._start(rank, action))
            elif action.kind == "tiles":
                if step is not None and (not arrived or arrived[-1] is not step):
                    raise PlanError(f"rank {rank}: {action} computes what has not arrived last")
                for group in action.groups:
                    self.computed.update(self._quadruples_of(rank, action, group))
            elif action.kind == "return":
                if not arrived or arrived[-1] is not step:
                    raise PlanError(f"rank {rank}: {action} returns what has not arrived last")
                returned.append(step)
                started["add"].append(self._start(rank, action))
            elif action.kind in started:
                if not started[action.kind]:
                    raise PlanError(f"rank {rank} waits for a message before it is started")
                first, channel, place = started[action.kind].popleft()
                if first is not step:
                    raise PlanError(f"rank {rank}: {action} is not what was started first")
                if channel is not None:
                    sent, expected = self.sent[channel], self.expected[channel][place]
                    while place >= len(sent):
                        yield action
                    if sent[place] != expected:
                        text = f"receives {expected}, but {sent[place]} is sent"
                        raise PlanError(f"rank {rank} {text}")
                if action.kind == "wait":
                    self._check_step(step)
                    arrived.append(step)
        if any(started.values()):
            raise PlanError(f"rank {rank}: not every message is waited for:\n{program}")
        if backward and list(map(id, arrived)) != list(map(id, returned)):
            raise PlanError(f"rank {rank}: not every message is returned:\n{program}")

    def _start(self, rank: int, action: Action) -> tuple[Step | None, Any, int]:
        """Start a message; return its step, and the channel and place where its rows arrive."""
        assert action.step is not None
        ends = action.step.send, action.step.receive
        outward, inward = ends if action.kind == "fetch" else ends[::-1]
        if action.sends is not None:
            given = action.kind, action.sends[1], outward
            self.sent[rank, action.sends[0]].append(given)
        if action.receives is None:
            return action.step, None, 0
        channel = action.receives[0], rank
        self.expected[channel].append((action.kind, action.receives[1], inward))
        return action.step, channel, len(self.expected[channel]) - 1

    def _quadruples_of(self, rank: int, action: Action, group: TileGroup) -> _Quadruples:
        """The (branch, head, query, key) of a group; the group is checked the first time."""
        key = group, id(action.step)  # steps that are alike share groups
        if key not in self.known:
            one, own = action.rank, self.held[rank]
            covers = action.step is None and one.covers and group is one.local_groups[0]
            _check_group(group, one.held_rows if covers else None)
            received = None if action.step is None else action.step.receive
            keys = own if received is None else [p for _, p in self._slots(received)]
            self.known[key] = Counter(chain(*(_quadruples(x, own, keys) for x in group.tiles)))
        return self.known[key]

    def _check_step(self, step: Step | None) -> None:
        """That the message of a step has exactly the rows that its tiles read."""
        if step is None or id(step) in self.known:
            return
        self.known[id(step)] = Counter()
        if step.receive is None:
            if step.groups:
                raise PlanError(f"{step} computes tiles but receives nothing")
            return
        slots = self._slots(step.receive)
        needed: set[tuple[int, int]] = set()
        for tile in step.tiles:
            if tile.is_causal:
                raise PlanError(f"a tile with remote keys is diagonal: {tile}")
            for head, rows in zip(tile.heads, _expand(tile.keys, len(tile.heads)), strict=True):
                if any(slots[slot][0] != head for slot in rows):
                    raise PlanError(f"head {head} reads another head's slots: {tile}")
                needed.update(slots[slot] for slot in rows)
        if needed != set(slots) or len(needed) != step.receive.rows or not needed:
            raise PlanError(f"{step.receive} carries {len(set(slots))} rows, not {len(needed)}")

    def _slots(self, message: Message) -> list[tuple[int, int]]:
        """The head and the position of each slot."""
        held = self.held[message.sender]
        slots: list[tuple[int, int]] = []
        for run in message.runs:
            if run.slot != len(slots):
                raise PlanError(f"run {run} does not start at slot {len(slots)}")
            for head, rows in zip(run.heads, _expand(run.rows, len(run.heads)), strict=True):
                slots.extend((head, held[row]) for row in rows)
        if len(slots) != message.slots:
            raise PlanError(f"{message} fills {len(slots)} slots")
        return slots


def _zero_keys(rank: RankPlan, positions: Sequence[int]) -> Iterator[tuple[int, int, int, None]]:
    """(branch, KV head, query, None) for each zero key that a query of the rank is given."""
    for tile in chain(*(group.tiles for group in rank.zero_keys)):
        for segment in range(tile.segments):
            rows = _expand(tile.queries, len(tile.heads), segment)
            for head, head_rows in zip(tile.heads, rows, strict=True):
                for row in head_rows:
                    yield from [(tile.branch, head, positions[row], None)] * tile.keys.length


def _check_group(group: TileGroup, num_rows: int | None) -> None:
    for name in ("queries", "keys"):
        rows = Counter(
            (head, row)
            for tile in group.tiles
            for segment in range(tile.segments)
            for head, rows in zip(
                tile.heads, _expand(getattr(tile, name), len(tile.heads), segment), strict=True
            )
            for row in rows
        )
        if max(rows.values()) > 1:
            raise PlanError(f"tiles of a group share {name}: {group.tiles}")
        if num_rows is not None and len(rows) != num_rows:
            raise PlanError(f"the first group has {len(rows)} {name}, not all {num_rows}")


def _expand(rows: Rows, heads: int, segment: int = 0) -> list[range]:
    """The rows of each head in a segment."""
    start = rows.start + segment * rows.segment_stride
    firsts = (start + head * rows.head_stride for head in range(heads))
    return [range(first, first + rows.length * rows.stride, rows.stride) for first in firsts]


def _quadruples(
    tile: Tile, queries: Sequence[int], keys: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    heads = tile.heads
    for segment in range(tile.segments):
        query_rows = _expand(tile.queries, len(heads), segment)
        key_rows = _expand(tile.keys, len(heads), segment)
        for head, q_rows, k_rows in zip(heads, query_rows, key_rows, strict=True):
            for i, q in enumerate(q_rows):
                first, last = tile.band or (-i, 0 if tile.is_causal else len(k_rows))
                for k in k_rows[max(i + first, 0) : max(i + last + 1, 0)]:
                    yield tile.branch, head, queries[q], keys[k]


def _expected(plan: AttentionPlan) -> Iterator[tuple[int, int, int, int | None]]:
    """(branch, KV head, query, visible key), position by position; a zero key is None."""
    zeros = plan.pattern.zero_keys and not plan.is_causal
    for branch, (length, rate) in enumerate(plan.pattern.branches):
        for start, stop in pairwise(plan.documents):
            if isinstance(length, Window):
                left, right = length.seen(plan.is_causal)
                for q, k in product(range(start, stop), repeat=2):
                    if -left <= k - q <= right and (k - q) % rate == 0:
                        for head, _ in plan.pattern.heads(branch, plan.num_kv_heads):
                            yield branch, head, q, k
                continue
            w = stop - start if length is None else min(length, stop - start)
            for segment in range(start, stop, w):
                for head, offset in plan.pattern.heads(branch, plan.num_kv_heads):
                    cell = range(segment + offset, min(segment + w, stop), rate)
                    # ceil(w / rate) keys, as if the rate divided the segment's length
                    missing = -(-w // rate) - len(cell) if zeros else 0
                    for q in cell:
                        yield from [(branch, head, q, None)] * missing
                        for k in cell:
                            if k <= q or not plan.is_causal:
                                yield branch, head, q, k
