"""What a rank computes of its own positions: row by row, or branch by branch. Integers only.

A branch by itself is tiles, as large as a kernel likes them. Where they are too small for a kernel
call each, one launch goes through all rows instead, and for each row through its branches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from .parts import OwnRun, Part, own_runs
from .rows import TileGroup
from .tiling import Tiling
from .zero_keys import zero_key_tiles


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
        zero_keys: where anything is computed row by row, which queries of `groups` see how many
            zero keys; see `zero_key_groups`.
    """

    ranges: tuple[OwnRange, ...]
    groups: tuple[TileGroup, ...]
    zero_keys: tuple[TileGroup, ...]


def own_work(
    tiling: Tiling,
    branches: Sequence[tuple[int, int | None]],
    parts: Sequence[Part],
    by_rows: Callable[[int, OwnRun], bool] | None,
) -> OwnWork:
    """Split the work of a rank on its own positions, part by part.

    Args:
        tiling: of the pattern.
        branches: number and segment length of each, in the order in which groups are to come.
        parts: what the rank holds.
        by_rows: whether runs of a branch are computed row by row; None: none is.
    """
    groups: list[TileGroup] = []
    runs: dict[int | None, list[OwnRun]] = {}
    chosen: dict[int, _Intervals] = {}
    for branch, length in branches:
        if length not in runs:
            runs[length] = list(own_runs(parts, length))
        left = runs[length]
        if by_rows is not None:
            flags = [by_rows(branch, run) for run in left]
            chosen[branch] = _Intervals(left, flags)
            left = [run for run, flag in zip(left, flags, strict=True) if not flag]
        own = tiling.own_group(branch, left) if left else None
        groups.extend([own] if own else [])
    ranges = tuple(_ranges(parts, chosen)) if any(x.any for x in chosen.values()) else ()
    return OwnWork(ranges, tuple(groups), _zero_keys_left(tiling, parts, chosen))


def _ranges(parts: Sequence[Part], chosen: Mapping[int, _Intervals]) -> Iterator[OwnRange]:
    """Parts, cut where the branches that are computed row by row change."""
    borders = sorted({border for each in chosen.values() for border in each.borders})
    alike = sum(1 << branch for branch, each in chosen.items() if each.all)
    mixed = {branch: each for branch, each in chosen.items() if each.any and not each.all}
    for part in parts:
        start, stop = part.start - part.document_start, part.stop - part.document_start
        shift = part.local - start
        points = [start, stop]
        if borders:
            first = bisect_right(borders, start + shift)
            last = bisect_left(borders, stop + shift)
            points[1:1] = [border - shift for border in borders[first:last]]
        for low, high in pairwise(points):
            bits = alike
            for branch, each in mixed.items():
                bits |= each.holds(low + shift) << branch
            if bits:
                document = part.document_stop - part.document_start
                yield OwnRange(start, stop, shift, document, low, high, bits)


class _Intervals:
    """Which local rows are chosen.

    Args:
        runs: of rows, one behind the other.
        flags: of each run, whether its rows are chosen.

    Attributes:
        any: whether some run is.
        all: whether every run is.
        borders: rows at which that changes.
    """

    def __init__(self, runs: Sequence[OwnRun], flags: Sequence[bool]) -> None:
        self.any, self.all = any(flags), all(flags)
        self.borders: list[int] = []
        self._first = bool(flags) and flags[0]
        last = self._first
        for run, flag in zip(runs, flags, strict=True):
            if flag is not last:
                self.borders.append(run.local)
                last = flag

    def holds(self, row: int) -> bool:
        """Whether a row is chosen."""
        return self._first ^ bool(bisect_right(self.borders, row) % 2)

    def holds_all(self, part: Part) -> bool:
        """Whether all rows of a part are chosen."""
        first, last = part.local, part.local + part.stop - part.start - 1
        same = bisect_right(self.borders, first) == bisect_right(self.borders, last)
        return same and self.holds(first)


def _zero_keys_left(
    tiling: Tiling, parts: Sequence[Part], chosen: Mapping[int, _Intervals]
) -> tuple[TileGroup, ...]:
    """The zero keys of what is not computed row by row, where that counts its own."""
    if not tiling.pattern.zero_keys or tiling.is_causal:
        return ()
    found = []
    for branch, each in chosen.items():
        own = (part for part in parts if not each.holds_all(part))
        left = tuple(x for part in own for x in zero_key_tiles(tiling, branch, part, each.holds))
        found.extend([TileGroup(left)] if left else [])
    return tuple(found)
