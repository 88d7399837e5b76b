"""All-to-all by heads: ranks exchange rows for heads. Integers only.

Consecutive ranks form groups. Those of a group deal out the heads: each gets the rows that all of
them hold, of its heads alone, computes attention of these, and sends the results to the ranks that
hold the rows. If one group has all ranks, each computes as a single rank does, with as few kernel
calls. Else (a hybrid) the ranks that have the same heads, one of each group, run a ring or a gather
in which a group's rows are one shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..layout import SequenceLayout
from ..pattern import DilatedPattern, HeadSlice
from .attention import AttentionPlan, RankPlan
from .rows import TensorSize

EVEN = 1.05
"""Largest share of a rank, over the mean of all, at which KV heads are dealt out whole."""


class Stretch(NamedTuple):
    """Consecutive positions of a rank, and where they lie among the rows of its group."""

    local: int  # the first local row of the rank
    place: int  # the first row of the group's
    length: int


class HeadShare(NamedTuple):
    """What one rank does in an all-to-all by heads; see `HeadSplit`."""

    rank: int  # the rank
    peers: range  # the ranks that compute the same heads: one of each group
    units: dict[int, range]  # by member of the rank's group, the units that it computes
    # by member, where its rows lie among those of the group
    stretches: dict[int, tuple[Stretch, ...]]
    local_length: int  # rows that the rank holds
    group_length: int  # rows that its group holds
    all_units: int  # number of units, of all ranks
    repeats: int  # units of a KV head
    query_heads: slice  # the query heads that it computes


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank computes, and which rows it gets for them.

    Heads are dealt out in units: a KV head and the query heads that it serves, or, where there are
    too few of these, a part of them, and the KV head for each part.
    """

    layout: SequenceLayout  # which rank holds which positions
    num_heads: int  # number of query heads
    num_kv_heads: int  # number of KV heads
    parts: int  # the most units of a KV head
    ranks: int  # in a group

    @cached_property
    def repeats(self) -> int:
        """Units of a KV head: the fewest that deal out heads evenly, or as evenly as can be."""
        shares = {}
        for parts in (x for x in range(1, self.parts + 1) if self.parts % x == 0):
            units = self.num_kv_heads * parts
            if units >= self.ranks:
                shares[parts] = max(-(-units // self.ranks) * self.ranks / units, EVEN)
        return min(shares, key=lambda parts: (shares[parts], parts))

    @property
    def units(self) -> int:
        """Number of units."""
        return self.num_kv_heads * self.repeats

    def members(self, rank: int) -> range:
        """The ranks of a rank's group."""
        first = rank - rank % self.ranks
        return range(first, first + self.ranks)

    def share_of(self, rank: int) -> HeadShare:
        """What a rank does."""
        units, members = self.units_of(rank), self.members(rank)
        heads = self.num_heads // self.units  # of a unit
        return HeadShare(
            rank,
            range(rank % self.ranks, self.layout.world_size, self.ranks),
            {member: self.units_of(member) for member in members},
            {member: self.stretches[member] for member in members},
            self.layout.local_length(rank),
            self.inner_layout.local_length(rank // self.ranks),
            self.units,
            self.repeats,
            slice(units.start * heads, units.stop * heads),
        )

    def units_of(self, rank: int) -> range:
        """The units that a rank computes."""
        member = rank % self.ranks
        low, high = (self.units * i // self.ranks for i in (member, member + 1))
        return range(low, high)

    @cached_property
    def inner_layout(self) -> SequenceLayout:
        """The layout of the groups' rows, in the order of their positions."""
        ranges = self.layout.ranges
        groups = (self.members(first) for first in range(0, len(ranges), self.ranks))
        return SequenceLayout(
            sorted(each for rank in group for each in ranges[rank]) for group in groups
        )

    @cached_property
    def stretches(self) -> list[tuple[Stretch, ...]]:
        """Of each rank, where its rows lie among those of its group."""
        found: list[list[Stretch]] = [[] for _ in self.layout.ranges]
        whole = iter(self.inner_layout.pieces)
        piece = next(whole)
        for start, stop, rank, local in self.layout.pieces:
            while piece.stop <= start:
                piece = next(whole)
            found[rank].append(Stretch(local, piece.local + start - piece.start, stop - start))
        return [tuple(sorted(each)) for each in found]

    def plan_of(self, plan: AttentionPlan, rank: int) -> RankPlan:
        """The part of a plan that a rank computes: its heads of the rows that its group holds."""
        own, pattern = self.units_of(rank), plan.pattern
        if pattern.heads_are_alike:
            pattern = replace(pattern, head_slice=None)
        else:
            first, _, total = pattern.head_slice or HeadSlice(0, 0, self.num_kv_heads)
            of_layer = HeadSlice(first + own.start, first + own.stop, total)
            pattern = replace(pattern, head_slice=of_layer)
        heads = replace(
            plan,
            pattern=pattern,
            layout=self.inner_layout,
            num_heads=len(own) * self.num_heads // self.units,
            num_kv_heads=len(own),
        )
        return heads.rank(rank // self.ranks)

    def sizes(self, rank: int, other: int) -> tuple[int, int]:
        """(row, unit) pairs that a rank sends to another of its group, and that it gets from it."""
        length = self.layout.local_length
        return length(rank) * len(self.units_of(other)), length(other) * len(self.units_of(rank))

    def messages(self, rank: int) -> int:
        """Messages that a rank starts in one all-to-all: one a range of the longer list."""
        counts = {x: len(self.stretches[x]) for x in self.members(rank)}
        return sum(max(counts[rank], count) for x, count in counts.items() if x != rank)

    def traffic(self, rank: int, size: TensorSize) -> tuple[int, int]:
        """Bytes that a rank sends to its group in forward and in backward."""
        heads = self.num_heads // self.units
        row = size.batch * size.head_dim * size.element_size
        forward = backward = 0
        for other in self.members(rank):
            if other != rank:
                sent, computed = self.sizes(rank, other)
                forward += sent * (heads + 2) * row
                forward += computed * heads * (row + size.batch * size.accumulate_size)
                backward += (sent * heads + computed * (heads + 2)) * row
        return forward, backward


def head_split(
    exchange: str,
    pattern: DilatedPattern,
    layout: SequenceLayout,
    num_heads: int,
    num_kv_heads: int,
) -> HeadSplit | None:
    """How rows are exchanged for heads; None: they are not.

    Args:
        exchange: ``"heads:4"``: groups of 4 ranks; ``"heads"``: of as many as there are heads for,
            all ranks or a divisor of their number; or another.
        pattern: of the call. Where heads see different keys, a KV head is not dealt out in parts.
        layout: of the call.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads.

    Raises:
        ValueError: the number of ranks is no multiple of the groups', or there are fewer heads.
    """
    name, _, given = exchange.partition(":")
    if name != "heads":
        return None
    parts = num_heads // num_kv_heads if pattern.heads_are_alike else 1
    world_size = layout.world_size
    most = num_kv_heads * parts
    divisors = [m for m in range(1, world_size + 1) if world_size % m == 0 and m <= most]
    ranks = int(given) if given else divisors[-1]
    if ranks not in divisors:
        kind = "heads" if parts > 1 or num_heads == num_kv_heads else "KV heads"
        raise ValueError(
            f"exchange {exchange!r} needs a number of ranks that {ranks} divides, and as many "
            f"{kind}; got {world_size} ranks and {most} {kind}"
        )
    return HeadSplit(layout, num_heads, num_kv_heads, parts, ranks) if ranks > 1 else None
