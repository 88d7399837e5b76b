"""What one rank computes and exchanges: its tiles, and its messages step by step. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from .grouping import group_tiles
from .own import OwnWork, own_work
from .parts import Link, OwnRuns, within_rows
from .passing import PassingStep, passing_steps
from .rows import Message, Tile, TileGroup
from .zero_keys import zero_key_groups

if TYPE_CHECKING:
    from .attention import AttentionPlan


class Step(NamedTuple):
    """Step s of a rank: it works with the rows of rank ``(rank - s) mod p``, or a piece of them.

    The keys of its tiles are slots of the received message.
    """

    step: int
    piece: int
    receive: Message | None
    send: Message | None
    groups: tuple[TileGroup, ...]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of all groups."""
        return _tiles(self.groups)

    @property
    def covers(self) -> bool:
        """Whether the first group reads every slot; being a group, it reads none twice."""
        if self.receive is None:
            return False
        read = sum(len(t.heads) * t.segments * t.keys.length for t in self.groups[0].tiles)
        return read == self.receive.slots


class LocalHalves(NamedTuple):
    """Local groups to compute before remote ones, and behind them.

    Attributes:
        early: the first group at least, so that it may be stored.
        late: the others.
        late_heads: the KV heads whose rows `late` alone has to itself; None: `early` has them too.
    """

    early: tuple[TileGroup, ...]
    late: tuple[TileGroup, ...]
    late_heads: range | None


class RankPlan:
    """What one rank computes and exchanges; the messages of a step are worked out when asked for.

    Attributes:
        plan: the plan of all ranks.
        index: the rank.
        world_size: number of ranks.
        covers: whether the first group has every local row of every head as query and as key once.
            It then needs no result to add to.
    """

    def __init__(self, plan: AttentionPlan, rank: int) -> None:
        self.plan = plan
        self.index = rank
        self.world_size = plan.layout.world_size
        self._steps: dict[tuple[int, int], Step] = {}
        self._passing: dict[tuple[int, ...], tuple[PassingStep, ...] | None] = {}
        self._parts = plan.parts_of(rank)
        # Rows that belong to no document are in no tile.
        held = sum(part.stop - part.start for part in self._parts)
        self.covers = plan.covering is not None and held == plan.layout.local_length(rank)
        self._seen, self._shown = plan.crossing_spans(self._parts)

    @property
    def is_alone(self) -> bool:
        """Whether no segment that this rank holds a part of is anywhere else: nor in another part.

        A rank may hold several ranges of positions, between which there are other positions.
        """
        return not (self._seen or self._shown)

    @cached_property
    def local_groups(self) -> tuple[TileGroup, ...]:
        """Tiles whose queries and keys this rank holds: a group a branch, and `crossing_groups`."""
        return (*self.own_work(None).groups, *self.crossing_groups)

    @cached_property
    def crossing_groups(self) -> tuple[TileGroup, ...]:
        """Tiles whose queries and keys this rank holds in different ranges of positions."""
        links = self._links_from(self.index)
        tiling = self.plan.tiling
        return group_tiles((link, list(tiling.tiles(link))) for link in links)

    def own_work(self, by_rows: Callable[[int, OwnRuns], Sequence[bool]] | None) -> OwnWork:
        """What this rank computes within parts, split by whether it is computed row by row.

        Args:
            by_rows: of each run of a branch, whether it is; None: none is.
        """
        longest = max((part.document_stop - part.document_start for part in self._parts), default=0)
        branches = [
            (branch, None if length is None or length >= longest else length)
            for branch, length in self.plan.branches
        ]
        return own_work(self.plan.tiling, branches, self._parts, by_rows)

    @property
    def local(self) -> tuple[Tile, ...]:
        """The tiles whose queries and keys this rank holds."""
        return _tiles(self.local_groups)

    @cached_property
    def zero_keys(self) -> tuple[TileGroup, ...]:
        """Which of this rank's queries see how many zero keys; see `zero_key_groups`."""
        return zero_key_groups(self.plan.tiling, self._parts)

    def rounds(self, *, gathers: bool) -> tuple[RankPlan, ...]:
        """What the rank does one after the other: all at once, or some heads at a time.

        Args:
            gathers: whether all transfers are in flight at once; a ring is cut by heads.
        """
        if gathers or self.world_size == 1:
            return (self,)
        return tuple(plan.rank(self.index) for plan in self.plan.rounds)

    @cached_property
    def local_halves(self) -> LocalHalves:
        """The local work cut in two, so that some is left to do while the last gradients return."""
        if len(self.local_groups) > 1:
            return LocalHalves(self.local_groups[:1], self.local_groups[1:], None)
        heads = self.plan.kv_heads
        if len(heads) < 2 or not (self._seen or self._shown):
            return LocalHalves(self.local_groups, (), None)
        middle = len(heads) // 2
        early, late = (
            self.plan.narrowed(half).rank(self.index).local_groups
            for half in (heads[:middle], heads[middle:])
        )
        return LocalHalves(early, late, heads[middle:])

    def _links_from(self, sender: int, keys: range | None = None) -> list[Link]:
        """This rank's queries that see keys of `sender`: all, or those at some local rows."""
        if not self._seen:
            return []
        parts = within_rows(self.plan.parts_of(sender), keys)
        return [
            Link(span.branch, other, span.part, span.start, span.stop)
            for span in self._seen
            for other in parts
            if span.reaches(other)
        ]

    def _links_to(self, receiver: int, keys: range | None = None) -> list[Link]:
        """Queries of `receiver` that see this rank's keys: all, or those at some local rows."""
        if not self._shown:
            return []
        parts = self.plan.parts_of(receiver)
        return [
            Link(span.branch, own, other, span.start, span.stop)
            for span in self._shown
            for own in within_rows([span.part], keys)
            if own.start < span.stop and span.start < own.stop  # a piece may be elsewhere
            for other in parts
            if span.reaches(other)
        ]

    @cached_property
    def mean_additions(self) -> float:
        """A bound on how many tiles add to a row of a head, on average over rows and heads.

        A branch reaches one row in its rate; where it crosses ranks, each part that shares the
        segment adds once.
        """
        crossing = {span.branch for span in (*self._seen, *self._shown)}
        fetched = [self.plan.fetched_ranges(x, self.index) for x in range(self.world_size)]
        others = sum(fetched) - 1  # of a document
        mean = 0.0
        for branch, rate in enumerate(self.plan.pattern.dilation_rates):
            heads = len(self.plan.tiling.heads[branch]) / len(self.plan.kv_heads)
            mean += heads / rate * (1 + others * (branch in crossing))
        return mean

    def received_rows(self, sender: int, piece: int | None = None) -> int:
        """Distinct (row, head) pairs that `sender` sends this rank: in all, or of a piece."""
        keys = None if piece is None else self.plan.piece(sender, self.index, piece)
        return self.plan.tiling.count_rows(self._links_from(sender, keys))

    def sent_rows(self, receiver: int) -> int:
        """Distinct (row, head) pairs that this rank sends `receiver`."""
        return self.plan.tiling.count_rows(self._links_to(receiver))

    @cached_property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.index]

    @cached_property
    def total_received_rows(self) -> int:
        """Distinct (row, head) pairs that this rank receives, over all peers."""
        return sum(map(self.received_rows, self._peers))

    @cached_property
    def total_sent_rows(self) -> int:
        """Distinct (row, head) pairs that this rank sends, over all peers."""
        return sum(map(self.sent_rows, self._peers))

    def step(self, step: int, piece: int = 0) -> Step:
        """What this rank exchanges and computes at step 1 <= `step` < world size, of a piece."""
        if (step, piece) not in self._steps:
            self._steps[step, piece] = self._make_step(step, piece)
        return self._steps[step, piece]

    def _make_step(self, step: int, piece: int) -> Step:
        sender = (self.index - step) % self.world_size
        receiver = (self.index + step) % self.world_size
        received = self._links_from(sender, self.plan.piece(sender, self.index, piece))
        shown = self._links_to(receiver, self.plan.piece(self.index, receiver, piece))
        tiling = self.plan.tiling
        receive, slots = tiling.message(sender, self.index, received)
        send, _ = tiling.message(self.index, receiver, shown)
        groups = group_tiles(
            (link, list(tiling.tiles(link, slots=slots.get(link.message_entry, {}))))
            for link in received
        )
        return Step(step, piece, receive, send, groups)

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return self.plan.pieces * (self.world_size - 1)

    def steps(self) -> Iterator[Step]:
        """Every step in order; most exchange nothing when segments are shorter than shards.

        A piece goes to all ranks before the next: it is packed once where they need the same.
        """
        order = product(range(self.plan.pieces), range(1, self.world_size))
        return (self.step(step, piece) for piece, step in order)

    def passing_steps(self, hosts: tuple[int, ...]) -> tuple[PassingStep, ...] | None:
        """Every step in order where ranks pass on rows within hosts; None: no rank does.

        Args:
            hosts: host of each rank, numbered from 0; empty: all are on one.
        """
        if hosts not in self._passing:
            self._passing[hosts] = passing_steps(self, hosts)
        return self._passing[hosts]

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs this rank computes, over all query heads, per batch entry."""
        tiles = [*self.local, *(tile for step in self.steps() for tile in step.tiles)]
        return sum(t.pairs for t in tiles) * (self.plan.num_heads // self.plan.num_kv_heads)


def _tiles(groups: Sequence[TileGroup]) -> tuple[Tile, ...]:
    return tuple(tile for group in groups for tile in group.tiles)
