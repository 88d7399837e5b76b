"""Rows that several ranks of a host need of a rank elsewhere: they cross to the host once.

One rank of the host, the relay, receives a load: all rows that ranks of its host need. It passes on
to each what that one needs. Their gradients are returned the same way: to the relay, which adds
them up and returns those of the load. Where no row would cross twice, no rank relays.

Steps are in an order that is the same on all ranks: piece by piece, each from the ranks of the own
host, then from those of the next one, and so on. Rank number g of a host with G ranks relays for
those ranks of another host whose number is g modulo G; G of these make a turn, at whose first step
loads cross. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .progression import union_size
from .rows import Message, Run

if TYPE_CHECKING:
    from .rank import RankPlan, Step


class PassingStep(NamedTuple):
    """A step of a rank where ranks relay; what a `Step` sends does not count.

    Attributes:
        step: what to compute with which received rows.
        load: what these rows are a part of; None: they come from their owner as they are.
        source: the rank that holds the load, this one or another of its host.
        sends: own rows to send: what the receiver needs, or a load.
        sends_load: which of these.
        receives: what comes from its owner: the rows of the step, or a load.
        passes_on: a part of `held` to send to another rank of this host.
        held: a load of this rank's, of which `passes_on` is a part.
        behind: by how many steps it comes after the one at which loads of its turn cross, on every
            rank; 0: it does not need them.
        ends_turn: whether no later step of this turn passes on anything, on any rank.
        completes: at the end of a turn, the load of this rank's that no later step needs: its
            gradients are complete when those of this step have come.
        returned: the load of own rows whose gradients come back then.
    """

    step: Step
    load: Message | None = None
    source: int | None = None
    sends: Message | None = None
    sends_load: bool = False
    receives: Message | None = None
    passes_on: Message | None = None
    held: Message | None = None
    behind: int = 0
    ends_turn: bool = False
    completes: Message | None = None
    returned: Message | None = None


class _Loads(NamedTuple):
    """The loads from one rank to one host: of each piece, or one that serves all pieces."""

    by_piece: tuple[Message | None, ...]

    def serving(self, piece: int) -> Message | None:
        """The load that has the rows of a piece."""
        return self.by_piece[min(piece, len(self.by_piece) - 1)]

    def crossing(self, piece: int) -> Message | None:
        """The load that crosses with a piece."""
        return self.by_piece[piece] if piece < len(self.by_piece) else None

    def complete(self, piece: int, pieces: int) -> Message | None:
        """The load that no later piece needs."""
        is_complete = len(self.by_piece) == pieces or piece == pieces - 1
        return self.serving(piece) if is_complete else None


class Passing:
    """The steps of a rank where ranks of several hosts pass on rows.

    Args:
        rank: of which plan.
        hosts: host of each rank, numbered from 0.
    """

    def __init__(self, rank: RankPlan, hosts: tuple[int, ...]) -> None:
        self._plan, self._own, self._hosts = rank.plan, rank.index, hosts
        self._members = [
            tuple(r for r, host in enumerate(hosts) if host == each)
            for each in range(max(hosts) + 1)
        ]
        self._known: dict[tuple[int, int], _Loads | None] = {}

    @cached_property
    def _most(self) -> int:
        """How many ranks a host has at most."""
        return max(map(len, self._members))

    @cached_property
    def steps(self) -> tuple[PassingStep, ...]:
        """Every step in order; there are as many on every rank."""
        turns = -(-self._most // min(map(len, self._members)))
        return tuple(
            self._far(piece, away, turn, distance) if away else self._near(piece, distance)
            for piece in range(self._plan.pieces)
            for away in range(len(self._members))
            for turn in range(turns if away else 1)
            for distance in range(0 if away else 1, self._most)
        )

    def _near(self, piece: int, distance: int) -> PassingStep:
        """Rows of ranks of the own host."""
        own = self._members[self._hosts[self._own]]
        number, count = own.index(self._own), len(own)
        if distance >= count:
            return PassingStep(self._nothing(piece))
        step = self._step(own[(number - distance) % count], self._own, piece)
        sends = self._message(self._own, own[(number + distance) % count], piece)
        return PassingStep(step, sends=sends, receives=step.receive)

    def _far(self, piece: int, away: int, turn: int, distance: int) -> PassingStep:
        """Rows of ranks of the host that many before this one."""
        found = self._received(piece, away, turn, distance)
        sends, loads = self._sent(piece, away, turn, distance)
        found = found._replace(sends=sends, sends_load=loads is not None, behind=distance)
        if distance < self._most - 1:
            return found
        held = self._held(away, turn)
        return found._replace(
            ends_turn=True,
            completes=held and held.complete(piece, self._plan.pieces),
            returned=loads and loads.complete(piece, self._plan.pieces),
        )

    def _held(self, away: int, turn: int) -> _Loads | None:
        """What this rank relays in a turn."""
        here = self._hosts[self._own]
        own, there = self._members[here], self._members[(here - away) % len(self._members)]
        owner = turn * len(own) + own.index(self._own)
        return self._loads(there[owner], here) if owner < len(there) else None

    def _received(self, piece: int, away: int, turn: int, distance: int) -> PassingStep:
        """A step without what it sends of its own rows."""
        here = self._hosts[self._own]
        own, there = self._members[here], self._members[(here - away) % len(self._members)]
        number, count = own.index(self._own), len(own)
        found = PassingStep(self._nothing(piece))
        owner = turn * count + (number - distance) % count
        if distance < count and owner < len(there):
            step = self._step(there[owner], self._own, piece)
            loads = self._loads(there[owner], here)
            found = PassingStep(step, receives=step.receive)
            if loads is not None:
                relay = own[(number - distance) % count]
                load = loads.serving(piece) if step.receive is not None else None
                found = PassingStep(step, load, relay if load is not None else None)
                if distance == 0:
                    found = found._replace(receives=loads.crossing(piece))
        loads = self._held(away, turn)
        if loads is not None and 0 < distance < count:
            owner = there[turn * count + number]
            passes_on = self._message(owner, own[(number + distance) % count], piece)
            held = loads.serving(piece) if passes_on is not None else None
            found = found._replace(passes_on=passes_on, held=held)
        return found

    def _sent(
        self, piece: int, away: int, turn: int, distance: int
    ) -> tuple[Message | None, _Loads | None]:
        """Own rows to send at a step, and the loads of own rows of this turn."""
        here = self._hosts[self._own]
        host = (here + away) % len(self._members)
        there, number = self._members[host], self._members[here].index(self._own)
        if number // len(there) != turn:
            return None, None
        loads = self._loads(self._own, host)
        if loads is not None:
            return loads.crossing(piece) if distance == 0 else None, loads
        if distance >= len(there):
            return None, None
        receiver = there[(number + distance) % len(there)]
        return self._message(self._own, receiver, piece), None

    def _step(self, sender: int, receiver: int, piece: int) -> Step:
        return self._plan.rank(receiver).step((receiver - sender) % len(self._hosts), piece)

    def _nothing(self, piece: int) -> Step:
        """A step without rows."""
        step = self._plan.rank(self._own).step(1, piece)
        return step._replace(step=0, receive=None, send=None, groups=())

    def _message(self, sender: int, receiver: int, piece: int) -> Message | None:
        return self._step(sender, receiver, piece).receive

    def _loads(self, owner: int, host: int) -> _Loads | None:
        """What crosses from a rank to a host for several ranks there; None: to each its own."""
        if (owner, host) not in self._known:
            self._known[owner, host] = self._make_loads(owner, host)
        return self._known[owner, host]

    def _make_loads(self, owner: int, host: int) -> _Loads | None:
        there = self._members[host]
        if len(there) == 1:
            return None
        number = self._members[self._hosts[owner]].index(owner)
        relay = there[number % len(there)]
        by_piece = [
            [x for r in there if (x := self._message(owner, r, piece)) is not None]
            for piece in range(self._plan.pieces)
        ]
        all_pieces = [message for messages in by_piece for message in messages]
        whole = merged(all_pieces, owner, relay)
        if whole is None or whole.rows == sum(message.rows for message in all_pieces):
            return None
        loads = tuple(merged(messages, owner, relay) for messages in by_piece)
        if sum(load.rows for load in loads if load is not None) == whole.rows:
            return _Loads(loads)
        return _Loads((whole,))  # pieces differ from rank to rank


def passing_steps(rank: RankPlan, hosts: tuple[int, ...]) -> tuple[PassingStep, ...] | None:
    """The steps of a rank where ranks relay; None if all are on one host, or each on its own."""
    if not any(hosts) or len(set(hosts)) == len(hosts):
        return None
    return Passing(rank, hosts).steps


def merged(messages: Sequence[Message], sender: int, receiver: int) -> Message | None:
    """A message with the rows of several ones of the same sender, each once; None: of none."""
    runs: dict[tuple[range, tuple[int, ...]], Run] = {}
    slots = 0
    for run in (run for message in messages for run in message.runs):
        key = run.heads, run.rows
        if key not in runs:
            runs[key] = run._replace(slot=slots)
            slots += len(run.heads) * run.rows.length
    if not runs:
        return None
    return Message(sender, receiver, tuple(runs.values()), slots, _distinct(runs.values()))


def _distinct(runs: Iterable[Run]) -> int:
    """Distinct (row, head) pairs of runs."""
    by_head: dict[int, list[range]] = {}
    for head, rows in (one for run in runs for one in _rows_by_head(run)):
        by_head.setdefault(head, []).append(rows)
    return sum(map(union_size, by_head.values()))


def _rows_by_head(run: Run) -> Iterator[tuple[int, range]]:
    for number, head in enumerate(run.heads):
        start = run.rows.start + number * run.rows.head_stride
        yield head, range(start, start + run.rows.length * run.rows.stride, run.rows.stride)
