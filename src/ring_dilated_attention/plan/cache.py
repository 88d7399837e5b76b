"""Decoding: what a KV cache keeps, and which keys a query on every rank sees. Integers only.

A head with offset o sees, in a branch (w, r), the members of one progression in each segment:
``range(segment_start + o, segment_stop, r)``. Every full segment has R = ceil((w - o) / r) of them,
so the members of all segments are numbered through: member g is the (g mod R)-th of segment g // R.
A position that is member g is shown, causally, the members from ``g // R * R`` to g. Of all that
came before position n a cache therefore keeps, where member g is the next at or behind n, those
from ``g // R * R`` to g - 1; and with R slots a head, member g in slot g mod R, nothing is ever
moved: a new segment overwrites the one before. Where up to k positions may be taken back, a cache
keeps what is shown to these too; it then has as many slots as there are members in the first w + k
positions of a document.

A branch whose segment is the whole document, or longer than any document may become, has one
segment, and as many slots as members.

A sliding window is such a segment too, of rate 1, but position n is shown members ``max(0, n -
left)`` to n alone: a cache has left + k + 1 slots for it. Dilated windows are refused: the next
positions need one row in r each, but all rows of the window between them.

Sharded over p ranks, member g is held by rank g mod p: evenly, wherever the prompt was, and still
evenly when members are added.

Queries that every rank holds, against the keys of one rank. Per branch, and per range of keys:

- the positions that are queries and keys alike are cut into segments as any shard is: the run of
  full segments is ONE batched tile, a diagonal one where causal;
- queries before or behind them, and keys before or behind them, are disjoint ranges, so any two of
  them share at most one segment: one tile, which is plain. Causal: only keys before the queries.

Queries within one segment that see all its keys need no such cuts: one tile a range of keys. That
is a single position (decoding), causal or not, since keys behind it are left out from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..layout import SequenceLayout
from ..pattern import DilatedPattern, HeadOffset, Window
from .attention import AttentionPlan
from .rows import Link, Part, Tile, TileGroup, cut, own_segments, spans
from .tiling import tiling_of, zero_key_groups

NO_END = 1 << 62
"""Length of a segment that has no end."""


@dataclass(frozen=True)
class CachedBranch:
    """The keys of one branch that a cache keeps."""

    index: int  # of the branch in the pattern
    segment_length: int  # in positions; `NO_END`: there is one segment, which has no end
    window: int  # the most members before itself that a position is shown; `NO_END`: all
    dilation_rate: int  # in positions
    heads: tuple[HeadOffset, ...]  # the KV heads that it shows anything, each with its offset
    # rows that a rank has for each of them, enough for the next member to be written before
    # anything is dropped
    slots: int
    first_row: int  # of the first head's slots, among the rows of a batch row

    def per_segment(self, offset: int) -> int:
        """Members of a full segment."""
        return len(range(offset, self.segment_length, self.dilation_rate))

    def members_before(self, offset: int, position: int) -> int:
        """Number of members before a position, which is the number of the next one."""
        segment, within = divmod(position, self.segment_length)
        return segment * self.per_segment(offset) + len(range(offset, within, self.dilation_rate))

    def first_shown(self, offset: int, member: int) -> int:
        """The first member of the segment that `member` lies in, or of its window."""
        return max(member - member % self.per_segment(offset), member - self.window)

    def kept(self, offset: int, length: int, rewind: int = 0) -> range:
        """The members before position `length` that a later position can still be shown.

        Of a head at `offset`, if up to `rewind` positions may be taken back.
        """
        earliest = self.members_before(offset, max(0, length - rewind))
        return range(self.first_shown(offset, earliest), self.members_before(offset, length))

    def positions(self, offset: int, members: range) -> Iterator[tuple[range, range]]:
        """Consecutive members as (members, positions), segment by segment."""
        first, per_segment, rate = members.start, self.per_segment(offset), self.dilation_rate
        while first < members.stop:
            segment, within = divmod(first, per_segment)
            last = min(members.stop, first - within + per_segment)
            begin = segment * self.segment_length + offset + within * rate
            yield range(first, last), range(begin, begin + (last - first) * rate, rate)
            first = last

    @cached_property
    def by_offset(self) -> tuple[tuple[int, slice, slice], ...]:
        """Heads of the same offset, as (offset, places in `heads`, KV heads): evenly spaced."""
        places: dict[int, list[int]] = {}
        for place, (_, offset) in enumerate(self.heads):
            places.setdefault(offset, []).append(place)
        return tuple(
            (offset, _as_slice(found), _as_slice([self.heads[place].head for place in found]))
            for offset, found in places.items()
        )


class NewTile(NamedTuple):
    """New positions of one segment that the same heads see each other in."""

    branch: CachedBranch  # that shows them to each other
    heads: slice  # of `branch.heads`, which
    kv_heads: slice  # the same ones, among all KV heads
    queries: slice  # which of the new positions
    # in which they do, as `TileInputs` has it; None: each sees all that came before it
    band: tuple[int, int] | None
    kept: range  # the members that came before and that the first of them is shown


class KeptRows(NamedTuple):
    """Rows that a rank keeps."""

    branch: CachedBranch  # that shows them
    heads: slice  # of `branch.heads`, which
    kv_heads: slice  # the same ones, among all KV heads
    rows: slice  # of the tensor that they come from
    members: range  # as which the rank keeps them: its own numbers, consecutive


@dataclass(frozen=True)
class CachePlan:
    """The keys that a cache keeps, and the rows where they are."""

    pattern: DilatedPattern  # which keys each head sees
    num_kv_heads: int  # key and value heads
    max_length: int | None  # the most positions of a document; None: any number
    max_rewind: int  # the most positions that are taken back
    shards: int  # the ranks that share it; 1: each rank that has it has it whole
    branches: tuple[CachedBranch, ...]  # those of the pattern that show a head anything
    rows: int  # of keys, and of values, that a rank has for a batch row, of all heads

    def __str__(self) -> str:
        return (
            f"{self.pattern}, {self.num_kv_heads} KV heads, max_length={self.max_length}, "
            f"max_rewind={self.max_rewind}, on {self.shards} ranks"
        )

    def nbytes(self, batch: int, head_dim: int, itemsize: int) -> int:
        """Bytes of keys and values on each rank."""
        return 2 * batch * self.rows * head_dim * itemsize

    @property
    def has_windows(self) -> bool:
        """Whether new positions see different rows of a window."""
        return any(branch.window < NO_END for branch in self.branches)

    def own_members(self, members: range, shard: int) -> range:
        """The part of consecutive members that a rank holds, in its own numbers."""
        if self.shards == 1:
            return members
        first, stop = (-(-(end - shard) // self.shards) for end in (members.start, members.stop))
        return range(first, stop)

    def new_tiles(self, length: int, count: int) -> Iterator[NewTile]:
        """`count` new positions behind `length`: what each sees, by segments and heads."""
        for branch in self.branches:
            for offset, heads, kv_heads in branch.by_offset:
                stop = branch.members_before(offset, length + count)
                new = range(branch.members_before(offset, length), stop)
                for members, positions in branch.positions(offset, new):
                    kept = range(branch.first_shown(offset, members.start), members.start)
                    queries = range_slice(shifted(positions, -length))
                    band = (-branch.window, 0) if len(members) > branch.window + 1 else None
                    yield NewTile(branch, heads, kv_heads, queries, band, kept)

    def shown(
        self, tile: NewTile, own: range, shard: int
    ) -> Iterator[tuple[slice, slice, tuple[int, int] | None]]:
        """Who is shown which of consecutive members, in a rank's own numbers.

        Yields new positions, the part of `own` that they see, and its band, as `TileInputs` has it;
        None: each sees all of it. In a window a position sees one member less than the one before
        it: one less of this rank's, where p ranks share them, than the p-th one before it.
        """
        if tile.branch.window == NO_END:
            yield tile.queries, slice(len(own)), None
            return
        for first in range(min(self.shards, tile.queries.stop)):
            least = tile.kept.stop + first - tile.branch.window
            least = -((shard - least) // self.shards)
            keys = slice(max(least - own.start, 0), len(own))
            rows = range(first, tile.queries.stop, self.shards)[: max(own.stop - least, 0)]
            if rows:
                low = least - own.start - keys.start
                band = (low, len(own) - keys.start - 1) if len(rows) + low > 1 else None
                yield range_slice(rows), keys, band

    def appended(self, length: int, count: int, shard: int) -> Iterator[KeptRows]:
        """Rows to keep of `count` new positions behind `length`, all of which the rank has."""
        for branch in self.branches:
            most = branch.slots * self.shards
            for offset, heads, kv_heads in branch.by_offset:
                stop = branch.members_before(offset, length + count)
                first = max(branch.members_before(offset, length), stop - most)
                for members, positions in branch.positions(offset, range(first, stop)):
                    rows = shifted(positions, -length)
                    yield from self._kept(branch, heads, kv_heads, members, rows, shard)

    def handed_over(
        self, layout: SequenceLayout, document: range, rank: int, shard: int
    ) -> Iterator[KeptRows]:
        """Rows of a prompt's last document that `rank` has, and that `shard` is to keep.

        `shard` is 0 where every rank keeps all.
        """
        for branch in self.branches:
            for offset, heads, kv_heads in branch.by_offset:
                kept = branch.kept(offset, len(document), self.max_rewind)
                for members, positions in branch.positions(offset, kept):
                    there = shifted(positions, document.start)
                    for held, rows in _held(members, there, layout.ranges[rank]):
                        yield from self._kept(branch, heads, kv_heads, held, rows, shard)

    def _kept(
        self,
        branch: CachedBranch,
        heads: slice,
        kv_heads: slice,
        members: range,
        rows: range,
        shard: int,
    ) -> Iterator[KeptRows]:
        """The part of consecutive members that a rank keeps, and their rows."""
        own = self.own_members(members, shard)
        if own:
            first = own.start * self.shards + shard - members.start
            yield KeptRows(branch, heads, kv_heads, range_slice(rows[first :: self.shards]), own)


def _held(
    members: range, positions: range, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[range, range]]:
    """The parts of consecutive members that a rank holds, as (members, its rows)."""
    row = 0  # where a range of the rank begins
    for low, high in ranges:
        first, stop = (
            min(max(0, -(-(end - positions.start) // positions.step)), len(positions))
            for end in (low, high)
        )
        if first < stop:
            yield members[first:stop], shifted(positions[first:stop], row - low)
        row += high - low


def shifted(numbers: range, by: int) -> range:
    """The range with `by` added to each number."""
    return range(numbers.start + by, numbers.stop + by, numbers.step)


def range_slice(rows: range) -> slice:
    """A range, which is not empty, as a slice of what it indexes."""
    return slice(rows.start, rows[-1] + 1, rows.step)


def _as_slice(numbers: list[int]) -> slice:
    """Evenly spaced numbers."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    assert numbers == list(range(numbers[0], numbers[-1] + 1, step))
    return slice(numbers[0], numbers[-1] + 1, step)


@lru_cache(maxsize=64)
def plan_cache(
    pattern: DilatedPattern,
    num_kv_heads: int,
    max_length: int | None,
    max_rewind: int = 0,
    shards: int = 1,
) -> CachePlan:
    """Lay out a cache.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads, at least one.
        max_length: the most positions of a document, at least one; None: any number.
        max_rewind: the most positions that are taken back.
        shards: the ranks that share it.

    Raises:
        ValueError: there is no `max_length`, and a branch keeps rows of the whole document; or a
            window is dilated.
    """
    if max_length is None and None in pattern.segment_lengths:
        raise ValueError(
            "max_length must be given, since a segment length of the pattern is None: that branch "
            "keeps every row of its progression, and memory for them is allocated at once; got "
            "max_length=None"
        )
    most = NO_END if max_length is None else max_length
    branches, rows = [], 0
    for index, (length, rate) in enumerate(pattern.branches):
        segment = window = NO_END
        if isinstance(length, Window):
            if rate > 1:
                raise ValueError(
                    f"a KV cache takes windows of dilation rate 1; got {pattern}: give that window "
                    "a rate of 1, or attend to the whole text with dilated_attention"
                )
            window = length.left if length.left + 1 < most else NO_END
        elif length is not None and length < most:
            segment = length
        heads = tuple(
            x for x in pattern.heads(index, num_kv_heads) if x.offset < min(segment, most)
        )
        if not heads:
            continue
        branch = CachedBranch(index, segment, window, rate, heads, 0, rows)
        longest = min(min(segment, window + 1) + max_rewind, most)
        slots = -(-branch.members_before(0, longest) // shards)
        branches.append(replace(branch, slots=slots))
        rows += slots * len(heads)
    return CachePlan(pattern, num_kv_heads, max_length, max_rewind, shards, tuple(branches), rows)


def replicated_groups(plan: AttentionPlan, positions: range, rank: int) -> tuple[TileGroup, ...]:
    """The tiles of `rank`, with its own keys, for queries that every rank holds.

    Args:
        plan: the pattern, and which rank holds which keys.
        positions: of the queries: consecutive, not empty, within [0, plan.layout.length).
        rank: whose keys.

    Returns:
        Groups of tiles; row i of their queries is ``positions[i]``, their keys are local rows.
    """
    assert positions.step == 1
    assert 0 <= positions.start < positions.stop <= plan.layout.length
    queries = cut([(positions.start, positions.stop)], plan.documents, rank)
    keys = plan.parts_of(rank)
    if plan.is_causal:
        keys = [k.within(0, positions.stop) for k in keys if k.start < positions.stop]
    is_causal = plan.is_causal and len(positions) > 1
    tiling = tiling_of(plan.pattern, plan.num_kv_heads, is_causal, plan.kv_heads)
    found: dict[object, list[Tile]] = {}
    for branch, (length, _) in enumerate(plan.pattern.branches):
        assert not isinstance(length, Window)  # `replicated_query_attention` refuses them
        pairs = ((q, k) for q in queries for k in keys if q.document_start == k.document_start)
        for link, segments in (x for p in pairs for x in _links(branch, length, *p, is_causal)):
            # Tiles of a branch whose queries are their keys are of disjoint positions.
            group = branch if link.is_own else link
            found.setdefault(group, []).extend(tiling.tiles(link, segments=segments))
    return tuple(TileGroup(tuple(tiles)) for tiles in found.values() if tiles)


def replicated_zero_keys(plan: AttentionPlan, positions: range) -> tuple[TileGroup, ...]:
    """The zero keys that the queries of `replicated_groups` see: see `zero_key_groups`."""
    queries = cut([(positions.start, positions.stop)], plan.documents, 0)
    return zero_key_groups(plan.tiling, queries)


def _links(
    branch: int, length: int | None, queries: Part, keys: Part, is_causal: bool
) -> Iterator[tuple[Link, int]]:
    """The segments that two parts of a document share, as (link, number of such segments)."""
    w = queries.segment_length(length)
    start = queries.start - (queries.start - queries.document_start) % w
    stop = min(start + w, queries.document_stop)
    if not is_causal and queries.stop <= stop:
        if keys.start < stop and start < keys.stop:
            yield Link(branch, keys, queries, start, stop), 1
        return
    low, high = max(queries.start, keys.start), min(queries.stop, keys.stop)
    for q in _pieces(queries, low, high):
        for k in _pieces(keys, low, high):
            if q[:2] == k[:2]:
                for start, stop, count in own_segments(q, length):
                    yield Link(branch, k, q, start, stop), count
                continue
            for span in spans(branch, q, length):
                if span.reaches(k) and (span.is_before or not is_causal):
                    yield Link(branch, k, q, span.start, span.stop), 1


def _pieces(part: Part, low: int, high: int) -> list[Part]:
    """A part cut into what lies before, in and behind ``range(low, high)``."""
    if low >= high:
        return [part]
    cuts = (part.within(0, low), part.within(low, high), part.within(high, part.stop))
    return [piece for piece in cuts if piece.start < piece.stop]


def replicated_strips(
    plan: AttentionPlan, positions: range, rank: int
) -> list[list[tuple[int, ...]]]:
    """The keys of `rank` that the queries of `replicated_groups` see, head by head.

    Returns:
        For each KV head, equally many strips of evenly spaced keys: the first local row, the step
        from one to the next, how many there are, and of each query before which of them it sees
        all: 0 or more. No query sees a key twice, but for each branch that shows it.
    """
    strips: list[list[tuple[int, ...]]] = [[] for _ in range(plan.num_kv_heads)]
    groups = replicated_groups(plan, positions, rank)
    found = ((x, i) for group in groups for x in group.tiles for i in range(x.segments))
    for tile, segment in found:
        for number, head in enumerate(tile.heads):
            query, key = (
                rows.start + segment * rows.segment_stride + number * rows.head_stride
                for rows in (tile.queries, tile.keys)
            )
            limits = [0] * len(positions)
            for i in range(tile.queries.length):
                seen = i + 1 if tile.is_causal else tile.keys.length
                limits[query + i * tile.queries.stride] = seen
            strips[head].append((key, tile.keys.stride, tile.keys.length, *limits))
    most = max(map(len, strips))
    nothing = 0, 1, 0, *[0] * len(positions)
    return [own + [nothing] * (most - len(own)) for own in strips]
