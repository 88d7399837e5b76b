"""What heads see, as arrays, read off the tiles and messages of a plan.

A picture has at most some hundred cells a side, a sequence up to 2**48 positions. A `Grid` cuts it
into blocks, one a cell; a cell of (query block, key block) is set if any query of the one sees any
key of the other. With blocks of one position that is the mask itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..layout import SequenceLayout
from ..pattern import check_positive_int
from ..plan import AttentionPlan, Message, RankPlan, Rows, Tile

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

NOBODY = -1
"""In place of a rank: the cell shows nothing."""


@dataclass(frozen=True)
class Grid:
    """Which positions the cells of a picture are.

    Attributes:
        start: the first position.
        stop: the position after the last.
        size: positions of a block; the last block may have fewer.
    """

    start: int
    stop: int
    size: int

    @classmethod
    def of(
        cls,
        length: int,
        most: int,
        window: range | None = None,
        *,
        called: str = "the sequence length",
    ) -> Grid:
        """The finest grid of at most `most` blocks, of a power of two of positions each.

        Args:
            length: positions of the sequence.
            most: blocks.
            window: which positions to show; None: all.
            called: what an error calls `length`.

        Raises:
            ValueError: the window is empty or reaches beyond the sequence.
        """
        check_positive_int("most", most)
        shown = range(length) if window is None else window
        if not (0 <= shown.start < shown.stop <= length and shown.step == 1):
            raise ValueError(
                f"positions to draw must be START:STOP with 0 <= START < STOP <= {length}, "
                f"{called}; got {shown.start}:{shown.stop}"
            )
        size = -(-len(shown) // most)
        return cls(shown.start, shown.stop, 1 << (size - 1).bit_length())

    @property
    def count(self) -> int:
        """Number of blocks, and of cells a side."""
        return -(-(self.stop - self.start) // self.size)

    @property
    def end(self) -> int:
        """The position at which the last block would end if it were whole."""
        return self.start + self.count * self.size

    def in_words(self) -> str:
        """What a cell is, for a caption."""
        if self.size == 1:
            return "1 cell = 1 position"
        return f"1 cell = {self.size:,} × {self.size:,} positions, set if any pair in it is visible"


class Shown(NamedTuple):
    """What a head's queries see.

    Attributes:
        branches: bool (branches, cells, cells): whether a branch shows the query (first) the key.
        sender: int (cells, cells): the rank that holds the key; `NOBODY` where nothing is visible.
            Where a cell has keys of several ranks, one that sends them comes before the rank that
            computes, and of several senders the last.
    """

    branches: Bools
    sender: Ints


class _Intervals(NamedTuple):
    """Local rows of a rank that lie in blocks of a grid, in local order."""

    low: Ints
    high: Ints
    block: Ints


class _Hits(NamedTuple):
    """The intervals that have rows of a tile, and the first and last of its segments there."""

    intervals: Ints
    first: Ints
    last: Ints


def shown_to(plan: AttentionPlan, kv_head: int, grid: Grid) -> Shown:
    """What queries of a head see, read off the tiles that all ranks compute.

    Args:
        plan: of all ranks; time grows with the square of their number.
        kv_head: the KV head.
        grid: which positions.
    """
    cells = (grid.count, grid.count)
    branches = np.zeros((len(plan.pattern.branches), *cells), dtype=np.bool_)
    sender = np.full(cells, NOBODY, dtype=np.int64)
    remote = []
    held = [_intervals(plan, rank, grid) for rank in range(plan.layout.world_size)]
    for index, own in enumerate(held):
        rank = plan.rank(index)
        for branch, cell in _local_cells(rank, kv_head, own):
            branches[branch][cell] = True
            sender[cell] = index
        for other, branch, cell in _remote_cells(rank, kv_head, held):
            branches[branch][cell] = True
            remote.append((other, cell))
    for other, cell in remote:
        sender[cell] = other
    return Shown(branches, sender)


_Cells: TypeAlias = tuple[Ints, Ints]


def _local_cells(rank: RankPlan, kv_head: int, own: _Intervals) -> Iterator[tuple[int, _Cells]]:
    for tile in rank.local:
        if kv_head not in tile.heads or not len(own.low):
            continue
        queries = _hits(tile.queries, tile, kv_head, own)
        keys = _hits(tile.keys, tile, kv_head, own)
        seen = _share_segment(queries, keys, tile.is_causal)
        q, k = np.nonzero(seen)
        yield tile.branch, (own.block[queries.intervals[q]], own.block[keys.intervals[k]])


def _remote_cells(
    rank: RankPlan, kv_head: int, held: list[_Intervals]
) -> Iterator[tuple[int, int, _Cells]]:
    for step in rank.steps():
        if step.receive is None:
            continue
        sender = step.receive.sender
        for tile in step.tiles:
            if kv_head not in tile.heads or not len(held[rank.index].low):
                continue
            own, theirs = held[rank.index], held[sender]
            queries = own.block[_hits(tile.queries, tile, kv_head, own).intervals]
            for rows in _received(step.receive, tile, kv_head):
                keys = theirs.block[_hits_of(rows, 1, rows.start, theirs).intervals]
                q, k = np.meshgrid(queries, keys, indexing="ij")
                yield sender, tile.branch, (q.ravel(), k.ravel())


def _intervals(plan: AttentionPlan, rank: int, grid: Grid) -> _Intervals:
    low, high, block = [], [], []
    local = 0
    for start, stop in plan.layout.ranges[rank]:
        begin, end = max(start, grid.start), min(stop, grid.stop)
        if begin < end:
            first, last = (begin - grid.start) // grid.size, (end - 1 - grid.start) // grid.size
            blocks = np.arange(first, last + 1, dtype=np.int64)
            starts = grid.start + blocks * grid.size
            low.append(np.maximum(starts, begin) - start + local)
            high.append(np.minimum(starts + grid.size, end) - start + local)
            block.append(blocks)
        local += stop - start
    none = [np.zeros(0, dtype=np.int64)]
    return _Intervals(*(np.concatenate(x or none) for x in (low, high, block)))


def _hits(rows: Rows, tile: Tile, kv_head: int, held: _Intervals) -> _Hits:
    start = rows.start + tile.heads.index(kv_head) * rows.head_stride
    return _hits_of(rows, tile.segments, start, held)


def _hits_of(rows: Rows, segments: int, start: int, held: _Intervals) -> _Hits:
    """Intervals that have rows ``start + s * segment_stride + i * stride``, with s < `segments`."""
    span = (rows.length - 1) * rows.stride + 1
    stride, every = rows.stride, rows.segment_stride if segments > 1 else span
    after = held.low - start
    segment = np.maximum(after // every, 0)
    row = -(-np.maximum(after - segment * every, 0) // stride)
    past = row >= rows.length  # of this segment: the first row of the next one
    first = segment + past
    found = start + first * every + np.where(past, 0, row) * stride
    hit = (first < segments) & (found < held.high)
    last = np.minimum((held.high - 1 - start) // every, segments - 1)
    return _Hits(np.flatnonzero(hit), first[hit], last[hit])


def _share_segment(queries: _Hits, keys: _Hits, is_causal: bool) -> Bools:
    """Which intervals of queries and keys have rows of one segment, not later than the query's.

    Intervals do not overlap and are in order: two different ones share at most one segment.
    """
    q, k = queries.intervals[:, None], keys.intervals[None, :]
    seen: Bools = (q == k) | ((q > k) & (queries.first[:, None] == keys.last[None, :]))
    if not is_causal:
        seen |= (q < k) & (queries.last[:, None] == keys.first[None, :])
    return seen


def _received(message: Message, tile: Tile, kv_head: int) -> Iterator[Rows]:
    """The local rows of the sender whose slots of a message a head reads in a tile."""
    slot = tile.keys.start + tile.heads.index(kv_head) * tile.keys.head_stride
    for run in message.runs:
        if kv_head not in run.heads:
            continue
        number = run.heads.index(kv_head)
        begin = run.slot + number * run.rows.length
        first = max(slot, begin)
        count = min(slot + tile.keys.length, begin + run.rows.length) - first
        if count > 0:
            start = run.rows.start + number * run.rows.head_stride
            start += (first - begin) * run.rows.stride
            yield Rows(start, count, run.rows.stride, 0)


def rows_sent(plan: AttentionPlan, ranks: range | None = None) -> Ints:
    """How many (row, head) pairs each rank sends each other one in forward.

    Args:
        plan: of all ranks.
        ranks: which of them; None: all.

    Returns:
        int64 (ranks, ranks): entry (i, j) is what the i-th of them sends the j-th, 0 where i = j.
    """
    shown = range(plan.layout.world_size) if ranks is None else ranks
    found = np.zeros((len(shown), len(shown)), dtype=np.int64)
    for j, receiver in enumerate(shown):
        for i, sender in enumerate(shown):
            if i != j:
                found[i, j] = plan.rank(receiver).received_rows(sender)
    return found


def holders(layout: SequenceLayout, grid: Grid) -> Ints:
    """The rank that holds the first position of each block: int64, (blocks,)."""
    starts = np.array([piece.start for piece in layout.pieces])
    ranks = np.array([piece.rank for piece in layout.pieces], dtype=np.int64)
    firsts = grid.start + np.arange(grid.count) * grid.size
    found: Ints = ranks[np.searchsorted(starts, firsts, side="right") - 1]
    return found
