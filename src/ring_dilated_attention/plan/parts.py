"""Parts of documents that ranks hold, and which parts share a segment of a branch.

Two different parts share at most one segment of a branch: between them lies at least one border,
and only one segment can span it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ..layout import SequenceLayout


class Part(NamedTuple):
    """The positions ``range(start, stop)`` of one document, in consecutive local rows of a rank."""

    start: int
    stop: int
    rank: int
    local: int
    document_start: int
    document_stop: int

    def local_row(self, position: int) -> int:
        """The local row at which `rank` holds `position`."""
        return self.local + position - self.start

    def segment_length(self, length: int | None) -> int:
        """The length of a branch's segments in this part's document; None: the whole of it."""
        whole = self.document_stop - self.document_start
        return whole if length is None else min(length, whole)


class Link(NamedTuple):
    """Queries of one part that see keys of another (or the same): a segment that both hold."""

    branch: int
    keys: Part
    queries: Part
    start: int  # of the segment
    stop: int

    @property
    def message_entry(self) -> tuple[int, int, int]:
        """What tells the rows that the link needs from the other rows of a message."""
        return self.branch, self.keys.start, self.start


class Parts:
    """Every rank's pieces cut at document borders.

    Args:
        layout: which rank holds which positions.
        documents: cumulative lengths ``(0, ..., layout.length)`` of the documents.
    """

    def __init__(self, layout: SequenceLayout, documents: Sequence[int]) -> None:
        self.sorted: list[Part] = []
        for piece in layout.pieces:
            first = bisect_right(documents, piece.start) - 1
            last = bisect_left(documents, piece.stop)
            for low, high in pairwise(documents[first : last + 1]):
                start = max(low, piece.start)
                local = piece.local + start - piece.start
                part = Part(start, min(high, piece.stop), piece.rank, local, low, high)
                self.sorted.append(part)
        self._starts = [part.start for part in self.sorted]

    @cached_property
    def _by_rank(self) -> dict[int, list[Part]]:
        by_rank: dict[int, list[Part]] = {}
        for part in self.sorted:
            by_rank.setdefault(part.rank, []).append(part)
        return by_rank

    def of_rank(self, rank: int) -> Sequence[Part]:
        """The parts that `rank` holds, by position."""
        return self._by_rank.get(rank, ())

    def between(self, start: int, stop: int) -> Sequence[Part]:
        """The parts that hold a position in ``range(start, stop)``, by position."""
        if start >= stop:
            return ()
        return self.sorted[bisect_right(self._starts, start) - 1 : bisect_left(self._starts, stop)]

    def neighbours(self, part: Part, length: int | None) -> Iterator[tuple[Part, int, int]]:
        """The other parts that share a segment with `part`, each with the segment's bounds."""
        w = part.segment_length(length)
        start = part.start - (part.start - part.document_start) % w
        for other in self.between(start, part.start):
            yield other, start, min(start + w, part.document_stop)
        start = part.stop - 1 - (part.stop - 1 - part.document_start) % w
        stop = min(start + w, part.document_stop)
        for other in self.between(part.stop, stop):
            yield other, start, stop


def own_segments(part: Part, length: int | None) -> Iterator[tuple[int, int, int]]:
    """The segments of a part as (start, stop, count): a run of `count` equal ones is one entry.

    At most three: one cut by the part's start, the full ones, one cut by its stop.
    """
    w = part.segment_length(length)
    origin = part.document_start
    first = -(-(part.start - origin) // w)  # the first segment that starts in the part
    last = (part.stop - origin) // w  # the first that does not end in it at full length
    runs = [(first - 1, 1)] if origin + first * w > part.start else []
    if last > first:
        runs.append((first, last - first))
    if first <= last and origin + last * w < part.stop:
        runs.append((last, 1))
    for segment, count in runs:
        start = origin + segment * w
        yield start, min(start + w, part.document_stop), count
