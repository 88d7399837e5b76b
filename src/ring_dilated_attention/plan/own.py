"""What a rank computes of its own positions: row by row, or branch by branch. Integers only.

A branch by itself is tiles, as large as a kernel likes them. Where they are too small for a kernel
call each, one launch goes through all rows instead, and for each row through its branches.

Zero keys (patterns with ``zero_keys=True``): a cell has ceil(w / r) rows, w being the segment
length clamped to its document. Those that the document does not hold have key and value 0: a score
of 0 in the softmax, and nothing else. They are the same for every query of the cell, so they need
no rows, no rank holds them and none travels.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import xor
from typing import NamedTuple

from .parts import Link, OwnRun, OwnRuns, Part, join_runs, own_runs, own_segments
from .rows import Rows, Tile, TileGroup
from .tiling import Tiling


class OwnBranch(NamedTuple):
    """A branch of what a rank computes of its own positions.

    Attributes:
        number: which branch.
        length: of its segments; None: no document is longer.
        without: local rows at which runs begin that are left out.
    """

    number: int
    length: int | None
    without: frozenset[int] = frozenset()


class OwnRange(NamedTuple):
    """Consecutive rows of a part, and the branches that are computed there row by row.

    Positions count from the start of their document.

    Attributes:
        start: the first position of the part.
        stop: the position behind its last.
        shift: position p is local row ``p + shift``.
        document: positions of the document.
        low: the first position of the range.
        high: the position behind its last.
        branches: bit b says whether branch b is among them.
    """

    start: int
    stop: int
    shift: int
    document: int
    low: int
    high: int
    branches: int


class OwnWork(NamedTuple):
    """What a rank computes of its own positions.

    Attributes:
        ranges: what is computed row by row.
        groups: what is left, one group of tiles for each branch that has any.
        crossing: further tiles, whose queries and keys are in different parts.
        zero_keys: where anything is computed row by row, which queries of `groups` see how many
            zero keys; see `zero_key_groups`.
    """

    ranges: tuple[OwnRange, ...]
    groups: tuple[TileGroup, ...]
    crossing: tuple[TileGroup, ...]
    zero_keys: tuple[TileGroup, ...]


def own_work(
    tiling: Tiling,
    branches: Sequence[OwnBranch],
    parts: Sequence[Part],
    links: Sequence[Link],
    group_links: Callable[[tuple[Link, ...]], tuple[TileGroup, ...]],
    by_rows: Callable[[int, OwnRuns], Sequence[bool]] | None,
    *,
    joins: bool = True,
) -> OwnWork:
    """Split the work of a rank on its own positions.

    Args:
        tiling: of the pattern.
        branches: in the order in which groups are to come.
        parts: what the rank holds.
        links: between two different ones of these parts.
        group_links: makes the tiles of links.
        by_rows: of each run of a branch, whether it is computed row by row; None: none is.
        joins: whether parts that lie in one segment make one tile where they can.
    """
    groups: list[TileGroup] = []
    apart: list[Link] = []
    runs: dict[int | None, OwnRuns] = {}
    chosen: dict[int, _Intervals] = {}
    for branch, length, without in branches:
        if length not in runs:
            runs[length] = own_runs(parts, length)
        held = runs[length]
        if without:
            held = OwnRuns([run for run in held if run.local not in without])
        left: Sequence[OwnRun] = held
        if by_rows is not None:
            flags = by_rows(branch, held)
            each = iter(flags)
            of_all = [run.local not in without and next(each) for run in runs[length]]
            chosen[branch] = _Intervals(runs[length], of_all)
            left = [run for run, flag in zip(held, flags, strict=True) if not flag]
        between = [link for link in links if link.branch == branch]
        if between and joins:
            left, between = join_runs(left, between, tiling.pattern.dilation_rates[branch])
        apart += between
        own = tiling.own_group(branch, left) if left else None
        groups.extend([own] if own else [])
    crossing = group_links(tuple(apart))
    ranges = tuple(_ranges(parts, chosen)) if any(x.any for x in chosen.values()) else ()
    return OwnWork(ranges, tuple(groups), crossing, _zero_keys_left(tiling, parts, chosen))


def _ranges(parts: Sequence[Part], chosen: Mapping[int, _Intervals]) -> Iterator[OwnRange]:
    """Parts, cut where the branches that are computed row by row change."""
    changes: dict[int, int] = {}  # which branches change at a local row
    for branch, each in chosen.items():
        for border in each.borders:
            changes[border] = changes.get(border, 0) ^ 1 << branch
    borders = sorted(changes)
    first = sum(1 << branch for branch, each in chosen.items() if each.first)
    kinds = [*accumulate(map(changes.__getitem__, borders), xor, initial=first)]
    for begin, end, _, local, document_start, document_stop in parts:
        start, stop = begin - document_start, end - document_start
        shift, document = local - start, document_stop - document_start
        low, number = start, bisect_right(borders, local)
        for border in borders[number : bisect_left(borders, stop + shift)]:
            if kinds[number]:
                yield OwnRange(start, stop, shift, document, low, border - shift, kinds[number])
            low, number = border - shift, number + 1
        if kinds[number]:
            yield OwnRange(start, stop, shift, document, low, stop, kinds[number])


class _Intervals:
    """Which local rows are chosen.

    Args:
        runs: of rows, one behind the other.
        flags: of each run, whether its rows are chosen.

    Attributes:
        first: whether the first run is.
        any: whether some run is.
        borders: rows at which that changes.
    """

    def __init__(self, runs: Sequence[OwnRun], flags: Sequence[bool]) -> None:
        self.first, self.any = bool(flags) and flags[0], any(flags)
        self.borders: list[int] = []
        if self.any and not all(flags):
            self.borders = [
                run.local
                for run, last, flag in zip(runs[1:], flags[:-1], flags[1:], strict=True)
                if flag is not last
            ]

    def holds(self, row: int) -> bool:
        """Whether a row is chosen."""
        return self.first ^ bool(bisect_right(self.borders, row) % 2)

    def cut_parts(self, parts: Sequence[Part], starts: Sequence[int]) -> list[Part]:
        """Parts not all of whose rows are chosen.

        Args:
            parts: that the runs are of.
            starts: the first local row of each.
        """
        edges = [*([] if self.first else [-1]), *self.borders, math.inf]
        found: list[Part] = []
        done = 0
        for low, high in zip(edges[::2], edges[1::2], strict=False):  # of rows that are not chosen
            first = max(done, bisect_right(starts, low) - 1)
            done = max(done, bisect_left(starts, high))
            found += parts[first:done]
        return found


def _zero_keys_left(
    tiling: Tiling, parts: Sequence[Part], chosen: Mapping[int, _Intervals]
) -> tuple[TileGroup, ...]:
    """The zero keys of what is not computed row by row, where that counts its own."""
    if not tiling.pattern.zero_keys or tiling.is_causal:
        return ()
    found, starts = [], [part.local for part in parts]
    for branch, each in chosen.items():
        own = each.cut_parts(parts, starts)
        left = tuple(x for part in own for x in zero_key_tiles(tiling, branch, part, each.holds))
        found.extend([TileGroup(left)] if left else [])
    return tuple(found)


def zero_key_groups(tiling: Tiling, parts: Iterable[Part]) -> tuple[TileGroup, ...]:
    """The queries of `parts` that see zero keys, and how many.

    Every such query sees its own key too, so its lse is finite without them. Causal queries see
    none: zero keys come last in their cell.

    Args:
        tiling: of the pattern.
        parts: positions that a rank holds in consecutive local rows.

    Returns:
        One group per branch that has any. The queries of a tile are local rows; its keys are rows
        of nothing, and their `length` is how many zero keys each of the queries sees.
    """
    if not tiling.pattern.zero_keys or tiling.is_causal:
        return ()
    parts = tuple(parts)
    groups = (
        tuple(tile for part in parts for tile in zero_key_tiles(tiling, branch, part))
        for branch in range(len(tiling.heads))
    )
    return tuple(TileGroup(tiles) for tiles in groups if tiles)


def zero_key_tiles(
    tiling: Tiling, branch: int, part: Part, skips: Callable[[int], bool] = lambda row: False
) -> Iterator[Tile]:
    """The tiles of `zero_key_groups` of one branch and one part.

    Args:
        tiling: of the pattern.
        branch: which branch.
        part: positions that a rank holds in consecutive local rows.
        skips: whether the segments of the branch that a local row is in are left out.
    """
    length, rate = tiling.pattern.branches[branch]
    w = part.segment_length(length)
    full = -(-w // rate)
    offsets = dict(tiling.heads[branch])
    for start, stop, count in own_segments(part, length):
        size, first_row = stop - start, part.local_row(max(start, part.start))
        if full * rate == size or skips(first_row):
            continue  # as all full segments of a length that the rate divides
        if part.start <= start and stop <= part.stop:
            for tile in tiling.run_tiles(branch, OwnRun(size, 0, first_row, count)):
                if zeros := full - tile.queries.length:
                    yield tile._replace(keys=Rows(0, zeros, 0, 0))
            continue
        missing = {head: full - len(range(own, size, rate)) for head, own in offsets.items()}
        for tile in tiling.tiles(Link(branch, part, part, start, stop), segments=count):
            # Heads of a tile have as many rows in the part, but not always in the segment.
            first = 0
            for zeros, alike in groupby([missing[head] for head in tile.heads]):
                heads = len(list(alike))
                if zeros:
                    rows = tile.queries
                    yield tile._replace(
                        heads=tile.heads[first : first + heads],
                        queries=rows._replace(start=rows.start + first * rows.head_stride),
                        keys=Rows(0, zeros, 0, 0),
                    )
                first += heads
