"""Parts of documents that ranks hold, and which parts share a segment of a branch.

Two different parts share at most one segment of a branch: between them lies at least one border,
and only one segment can span it.

A rank may fetch in pieces what it needs of another (`Pieces`), all as long on every rank: one that
computed longer at a step than others would keep them waiting for the rows of the next one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
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

    def within(self, start: int, stop: int) -> Part:
        """What lies of the part in ``range(start, stop)``; nothing where start >= stop."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return self._replace(start=start, stop=stop, local=self.local_row(start))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its document."""
        return self.start == self.document_start and self.stop == self.document_stop


class Link(NamedTuple):
    """Queries of one part that see keys of another (or the same): a segment that both hold."""

    branch: int
    keys: Part
    queries: Part
    start: int  # of the segment
    stop: int

    @property
    def is_own(self) -> bool:
        """Whether queries and keys are the same positions: a causal tile is then a diagonal one."""
        return self.queries[:2] == self.keys[:2]

    @property
    def message_entry(self) -> tuple[int, int, int]:
        """What tells the rows that the link needs from the other rows of a message."""
        return self.branch, self.keys.start, self.start


def parts_of(layout: SequenceLayout, documents: Sequence[int], rank: int) -> list[Part]:
    """The ranges that a rank holds, in local order, cut at document borders.

    Args:
        layout: which rank holds which positions.
        documents: cumulative lengths of the documents; positions behind the last are in none.
        rank: whose ranges.
    """
    return cut(layout.ranges[rank], documents, rank)


def cut(ranges: Sequence[tuple[int, int]], documents: Sequence[int], rank: int) -> list[Part]:
    """Like `parts_of`, for any ranges of positions that are held one behind the other."""
    parts: list[Part] = []
    local = 0
    for start, stop in ranges:
        first = bisect_right(documents, start) - 1
        last = bisect_left(documents, stop)
        behind = local - start
        inside = pairwise(documents[first : last + 1])
        own = [Part(low, high, rank, low + behind, low, high) for low, high in inside]
        for place in (0, -1) if own else ():  # where the range may begin and end within a document
            *_, low, high = own[place]
            begin, end = max(low, start), min(high, stop)
            own[place] = Part(begin, end, rank, begin + behind, low, high)
        parts += own
        local += stop - start
    return parts


def within_rows(parts: Sequence[Part], rows: range | None) -> Sequence[Part]:
    """What lies of a rank's parts in these local rows; None: all of them."""
    if rows is None:
        return parts
    found = []
    for part in parts:
        behind = part.start - part.local
        piece = part.within(rows.start + behind, rows.stop + behind)
        if piece.start < piece.stop:
            found.append(piece)
    return found


class Span(NamedTuple):
    """Where the other parts lie that share a segment of a branch with `part`."""

    branch: int
    part: Part
    is_before: bool  # whether they lie before the part, or behind it
    low: int  # they hold positions in range(low, high)
    high: int
    start: int  # of the segment
    stop: int

    def reaches(self, other: Part) -> bool:
        """Whether `other` is one of them."""
        return other.start < self.high and self.low < other.stop


def spans(branch: int, part: Part, length: int | None) -> Iterator[Span]:
    """The spans of a part in a branch with segments of `length`: none, one or two."""
    w = part.segment_length(length)
    start = part.start - (part.start - part.document_start) % w
    if start < part.start:
        stop = min(start + w, part.document_stop)
        yield Span(branch, part, True, start, part.start, start, stop)
    start = part.stop - 1 - (part.stop - 1 - part.document_start) % w
    stop = min(start + w, part.document_stop)
    if part.stop < stop:
        yield Span(branch, part, False, part.stop, stop, start, stop)


class OwnRun(NamedTuple):
    """Equal runs of positions, one behind the other in local rows, each within one segment."""

    size: int  # positions of a run
    phase: int  # by how many the first of them lies behind the start of its segment
    local: int  # the local row of the first position of the first run
    copies: int  # how many runs


class OwnRuns(tuple[OwnRun, ...]):
    """All that a rank holds of the segments of a length, in local order."""

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """The fewest and the most positions of a run; 0 where there are none."""
        sizes = [run[0] for run in self]
        return min(sizes, default=0), max(sizes, default=0)

    @cached_property
    def most_copies(self) -> int:
        """The most equal ones of an entry."""
        return max([run[3] for run in self], default=0)

    @cached_property
    def rows(self) -> int:
        """The positions of every run, added up."""
        return sum([size * copies for size, _, _, copies in self])

    def shorter_than(self, size: int) -> int:
        """How many have fewer positions."""
        return sum([run.copies for run in self if run.size < size])

    @cached_property
    def squares(self) -> int:
        """The squares of the positions of every run, added up."""
        return sum([size * size * copies for size, _, _, copies in self])


def own_runs(parts: Sequence[Part], length: int | None) -> OwnRuns:
    """What parts hold of the segments of `length`: neighbours that are equal are one entry.

    Those of several documents too: documents of one length, held one behind the other, cost no more
    than one.
    """
    found: list[OwnRun] = []
    last = 0, 0, 0, 0
    for part in parts:
        start, stop, _, local, document_start, document_stop = part
        size = stop - start
        if start != document_start or stop != document_stop:
            own = [
                (
                    min(high, stop) - max(low, start),
                    max(low, start) - low,
                    local + max(low, start) - start,
                    count,
                )
                for low, high, count in own_segments(part, length)
            ]
        elif length is None or size <= length:
            own = [(size, 0, local, 1)]
        else:
            full, rest = divmod(size, length)
            own = [(length, 0, local, full)]
            if rest:
                own.append((rest, 0, local + size - rest, 1))
        for run in own:
            size, phase, row, copies = last
            if size == run[0] and phase == run[1] and row + size * copies == run[2]:
                last = size, phase, row, copies + run[3]
                continue
            found.append(OwnRun(*last))
            last = run
    return OwnRuns((*found[1:], OwnRun(*last)) if parts else ())


def join_runs(
    runs: Sequence[OwnRun], links: Sequence[Link], rate: int
) -> tuple[list[OwnRun], list[Link]]:
    """Make one run of neighbours that lie in one segment, though other positions lie between them.

    With zigzag a rank holds one range near the start of the sequence and one near its end. Where a
    segment holds both, the local rows of both are one tile, also a causal one: rows are in the
    order of their positions. The rows of every head must go on at the dilation rate, so the number
    of positions between must be a multiple of it.

    Args:
        runs: of a branch, in local order.
        links: of the branch, between two parts that this rank holds.
        rate: dilation rate of the branch.

    Returns:
        The runs, and the links that they do not contain.
    """
    borders = {
        link.queries.local
        for link in links
        if link.keys.stop <= link.queries.start
        and link.keys.local_row(link.keys.stop) == link.queries.local
        and (link.queries.start - link.keys.stop) % rate == 0
    }
    found: list[OwnRun] = []
    joined: list[range] = []  # local rows
    for run in runs:
        last = found[-1] if found else OwnRun(0, 0, 0, 0)
        goes_on = run.local in borders and last.local + last.size == run.local
        if not goes_on or run.copies > 1:
            found.append(run)
            continue
        found[-1] = last._replace(size=last.size + run.size)
        rows = range(last.local, run.local + run.size)
        joined = [*(x for x in joined if x.start != rows.start), rows]

    def is_joined(link: Link) -> bool:
        first = [part.local_row(max(part.start, link.start)) for part in (link.queries, link.keys)]
        return any(all(row in rows for row in first) for rows in joined)

    return found, [link for link in links if not is_joined(link)]


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
