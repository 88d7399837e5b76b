"""In which pieces a rank fetches the rows that it needs of another one.

All as long, on every rank: who computed longer at a step than others would keep them waiting for
the rows of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Pieces(NamedTuple):
    """What one rank fetches of another, in local rows of that one.

    Attributes:
        needed: of each of its ranges of which any are needed, from the first to the last. Which
            rows of a segment a head needs, with dilation, is another matter.
        borders: where pieces begin and end.
    """

    needed: tuple[range, ...]
    borders: tuple[int, ...]

    def rows(self, number: int) -> range:
        """Where the rows of a piece are."""
        return range(*self.borders[number : number + 2])

    @property
    def ranges(self) -> int:
        """How many ranges are fetched, those counted twice that two pieces share."""
        return sum(
            rows.start < stop and start < rows.stop
            for rows in self.needed
            for start, stop in pairwise(self.borders)
        )


def cut_into_pieces(needed: Iterable[tuple[int, int]], ends: Sequence[int], count: int) -> Pieces:
    """Cut needed rows into `count` pieces of nearly as many.

    A piece ends where a range does if one ends close to there: tiles of a few rows take long.

    Args:
        needed: start and stop of rows that are needed, each within a range.
        ends: where the ranges of the rank that holds them end.
        count: of pieces.
    """
    seen = list(needed)
    hulls = []
    for first, last in pairwise([0, *ends]):
        inside = [rows for rows in seen if first <= rows[0] < last]
        if inside:
            hulls.append(range(min(start for start, _ in inside), max(stop for _, stop in inside)))
    before = list(accumulate(map(len, hulls)))  # needed rows up to the end of each
    total = before[-1] if before else 0
    borders = [0]
    for i in range(1, count):
        even = total * i // count
        nearest = min(before, key=lambda rows: abs(rows - even), default=0)
        rows = nearest if abs(nearest - even) * 8 * count <= total else even
        found = [hull.stop - (end - rows) for hull, end in zip(hulls, before, strict=True)
                 if rows <= end]  # fmt: skip
        borders.append(found[0] if found else 0)
    return Pieces(tuple(hulls), (*borders, ends[-1] if ends else 0))
