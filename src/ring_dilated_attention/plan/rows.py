"""The elements of a plan: rows, tiles, messages, parts of documents that share segments.

Integers only. Progressions of rows are Python `range` objects, with steps >= 1.

Two different parts share at most one segment of a branch: between them lies at least one border,
and only one segment can span it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, pairwise
from math import gcd
from typing import NamedTuple

from ..pattern import Length, Window, pairs_of


def dilated_rows(
    segment_start: int, segment_stop: int, offset: int, rate: int, start: int, stop: int
) -> range:
    """The positions of a cell within ``range(start, stop)``.

    A cell holds ``range(segment_start + offset, segment_stop, rate)``, with 0 <= offset < rate.
    """
    low = max(start, segment_start)
    return range(low + (segment_start + offset - low) % rate, min(stop, segment_stop), rate)


def intersect(a: range, b: range) -> range:
    """The numbers in both progressions, as a progression."""
    divisor = gcd(a.step, b.step)
    quotient, remainder = divmod(b.start - a.start, divisor)
    if remainder:
        return range(0)
    # Solve a.start + a.step * i = b.start (mod b.step): the Chinese remainder theorem.
    modulus = b.step // divisor
    i = quotient * pow(a.step // divisor, -1, modulus) % modulus
    common, step = a.start + a.step * i, a.step * modulus
    low = max(a.start, b.start)
    return range(low + (common - low) % step, min(a.stop, b.stop), step)


def union_size(progressions: Iterable[range]) -> int:
    """Size of the union of progressions.

    Each progression adds its own size less the rows that larger ones share with it. Those of nested
    ones are the same, and a set drops them: the recursion stays shallow.
    """
    total = 0
    larger: list[range] = []
    for progression in sorted({*progressions}, key=len, reverse=True):
        shared = [s for p in larger if (s := intersect(progression, p))]
        total += len(progression) - (union_size(shared) if shared else 0)
        larger.append(progression)
    return total


class Rows(NamedTuple):
    """Places of the rows of a tile.

    Row i of head number j in segment s: ``start + s * segment_stride + j * head_stride +
    i * stride``.
    """

    start: int
    length: int
    stride: int
    head_stride: int
    segment_stride: int = 0


class Tile(NamedTuple):
    """One batched block of attention: for every segment and head, all queries to all keys.

    `queries` are local rows. `keys` are local rows too, or slots of a received message. A causal
    tile is a diagonal one: row i sees keys 0 to i. Of a window, row i sees the keys j with
    ``band[0] <= j - i <= band[1]``, and every row and every key is in such a pair.
    """

    branch: int
    heads: range  # KV heads
    segments: int
    is_causal: bool
    queries: Rows
    keys: Rows
    band: tuple[int, int] | None = None

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs computed, per query head of a KV head and batch entry."""
        of_head = pairs_of(self.queries.length, self.keys.length, self.is_causal, self.band)
        return self.segments * len(self.heads) * of_head


class PackedTiles(NamedTuple):
    """Tiles of a single segment, alike but for start and length; their queries are their keys.

    Packed documents make thousands of tiles, which are written down and handled as two columns.

    Attributes:
        branch, heads, is_causal: as of a `Tile`.
        stride, head_stride: as of the `Rows` of each.
        starts: of each tile, the first local row of its first head.
        lengths: of each tile, the rows of a head.
    """

    branch: int
    heads: range
    is_causal: bool
    stride: int
    head_stride: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def tiles(self) -> Iterator[Tile]:
        """Each tile on its own."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            rows = Rows(start, length, self.stride, self.head_stride)
            yield Tile(self.branch, self.heads, 1, self.is_causal, rows, rows)

    def split(self, longest: float) -> tuple[PackedTiles, PackedTiles]:
        """The tiles of at most `longest` rows a head, and the others."""
        short = [length <= longest for length in self.lengths]
        long = [not is_short for is_short in short]
        parts = [
            self._replace(
                starts=tuple(compress(self.starts, chosen)),
                lengths=tuple(compress(self.lengths, chosen)),
            )
            for chosen in (short, long)
        ]
        return parts[0], parts[1]


@dataclass(frozen=True, eq=False)
class TileGroup:
    """Tiles no two of which share a query row of a head, or a key row of a head.

    They may be computed in any order, or at once. Equal only to itself, so that what is worked out
    for a group can be kept by it without hashing its tiles.
    """

    single: tuple[Tile, ...]  # tiles written down one by one
    packed: tuple[PackedTiles, ...] = ()  # further tiles, written down together

    @property
    def branch(self) -> int:
        """The branch of the first tile."""
        return (self.single or self.packed)[0].branch

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles, one by one."""
        return (*self.single, *chain.from_iterable(many.tiles() for many in self.packed))


class Run(NamedTuple):
    """Rows of a message: row i of head number j goes to slot ``slot + j * rows.length + i``."""

    heads: range
    rows: Rows  # local rows of the sender
    slot: int


class _Referable:
    """Base of classes with slots to which weak references can be made."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)  # there are hundreds of thousands
class Message(_Referable):
    """A message of one rank to another: K and V of `rows` distinct (row, head) pairs.

    The runs list `slots` pairs; where branches share some, `slots` exceeds `rows` and each shared
    pair is sent once.
    """

    sender: int
    receiver: int
    runs: tuple[Run, ...]
    slots: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class TensorSize:
    """The sizes that turn rows into bytes.

    Attributes:
        batch: sequences in the batch.
        head_dim: elements of a row of one head.
        element_size: bytes of an element of query, key and value (8, 4 or 2).
    """

    batch: int
    head_dim: int
    element_size: int

    @property
    def accumulate_size(self) -> int:
        """Bytes of an element of lse: float32, or float64."""
        return max(self.element_size, 4)

    def key_value_bytes(self, rows: int, element_size: int | None = None) -> int:
        """Bytes of K and V of `rows` (row, head) pairs."""
        size = self.element_size if element_size is None else element_size
        return 2 * self.batch * rows * self.head_dim * size


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
        """The part's positions in ``range(start, stop)``; empty where start >= stop."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return self._replace(start=start, stop=stop, local=self.local_row(start))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its document."""
        return self.start == self.document_start and self.stop == self.document_stop


class Link(NamedTuple):
    """Queries of one part that see keys of another (or the same): a segment that both hold.

    Of a window: positions that are a multiple of the rate away from each other, of parts that end
    where no position is seen any more. The segment starts at such a position, before both.
    """

    branch: int
    keys: Part
    queries: Part
    start: int  # of the segment
    stop: int
    window: Window | None = None
    parts: tuple[int, int] | None = None  # of a window: where the parts of keys and queries start

    @property
    def is_own(self) -> bool:
        """Whether queries and keys are the same positions: a causal tile is then a diagonal one."""
        return self.queries[:2] == self.keys[:2]

    @property
    def message_entry(self) -> tuple[int, ...]:
        """Key by which the rows of this link are found in a message."""
        return self.branch, self.keys.start, self.keys.stop, self.start


def cut(ranges: Sequence[tuple[int, int]], documents: Sequence[int], rank: int) -> list[Part]:
    """Ranges of positions that a rank holds one behind the other, cut at document borders.

    `documents` are cumulative lengths; positions behind the last are in none.
    """
    parts: list[Part] = []
    local = 0
    for start, stop in ranges:
        first = bisect_right(documents, start) - 1
        last = bisect_left(documents, stop)
        behind = local - start
        for low, high in pairwise(documents[first : last + 1]):
            begin, end = max(low, start), min(high, stop)
            parts.append(Part(begin, end, rank, begin + behind, low, high))
        local += stop - start
    return parts


class Span(NamedTuple):
    """A segment of a branch that `part` shares with other parts, and where these lie."""

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


def spans(branch: int, part: Part, length: Length) -> Iterator[Span]:
    """The spans of a part in a branch with segments of `length`: none, one or two.

    Of a window, which is then the segment of a span: where keys are that the part sees.
    """
    if isinstance(length, Window):
        low = max(part.start - length.left, part.document_start)
        high = min(part.stop + length.right, part.document_stop)
        if low < part.start:
            yield Span(branch, part, True, low, part.start, low, part.start)
        if part.stop < high:
            yield Span(branch, part, False, part.stop, high, part.stop, high)
        return
    w = part.segment_length(length)
    start = part.start - (part.start - part.document_start) % w
    if start < part.start:
        stop = min(start + w, part.document_stop)
        yield Span(branch, part, True, start, part.start, start, stop)
    start = part.stop - 1 - (part.stop - 1 - part.document_start) % w
    stop = min(start + w, part.document_stop)
    if part.stop < stop:
        yield Span(branch, part, False, part.stop, stop, start, stop)


def window_links(
    branch: int, keys: Part, queries: Part, window: Window, rate: int
) -> Iterator[Link]:
    """The links of a window between two parts: one for each remainder modulo its rate."""
    for position in range(queries.start, min(queries.start + rate, queries.stop)):
        rows = range(position, queries.stop, rate)
        first = keys.start + (position - keys.start) % rate
        seen = _between(
            range(first, keys.stop, rate), rows[0] - window.left, rows[-1] + window.right
        )
        if seen:
            rows = _between(rows, seen[0] - window.right, seen[-1] + window.left)
            start, stop = min(seen[0], rows[0]), max(seen[-1], rows[-1]) + 1
            of_keys = keys.within(seen[0], seen[-1] + 1)
            of_queries, parts = queries.within(rows[0], rows[-1] + 1), (keys.start, queries.start)
            yield Link(branch, of_keys, of_queries, start, stop, window, parts)


def _between(rows: range, low: int, high: int) -> range:
    """The numbers of a progression from `low` to `high`."""
    first = max(rows.start, low + (rows.start - low) % rows.step)
    return range(first, min(rows.stop, high + 1), rows.step)


class OwnRun(NamedTuple):
    """Equal runs of positions, one behind the other in local rows, each within one segment."""

    size: int  # positions of a run
    phase: int  # by how many the first of them lies behind the start of its segment
    local: int  # the local row of the first position of the first run
    copies: int  # how many runs


class OwnRuns(tuple[OwnRun, ...]):
    """The runs of segments of a length that a rank holds, in local order."""

    @cached_property
    def rows(self) -> int:
        """The positions of every run, added up."""
        return sum([size * copies for size, _, _, copies in self])

    def shorter_than(self, size: int) -> int:
        """Number of runs with fewer positions."""
        return sum([run.copies for run in self if run.size < size])

    @cached_property
    def squares(self) -> int:
        """The squares of the positions of every run, added up."""
        return sum([size * size * copies for size, _, _, copies in self])


def own_runs(parts: Sequence[Part], length: int | None) -> OwnRuns:
    """Runs of the segments of `length` that parts hold: equal neighbours are one entry.

    Those of several documents too: documents of one length, held one behind the other, cost no more
    than one.
    """
    found: list[OwnRun] = []
    for part in parts:
        for low, high, count in own_segments(part, length):
            begin = max(low, part.start)
            run = OwnRun(min(high, part.stop) - begin, begin - low, part.local_row(begin), count)
            last = found[-1] if found else OwnRun(0, 0, 0, 0)
            if last[:2] == run[:2] and last.local + last.size * last.copies == run.local:
                found[-1] = last._replace(copies=last.copies + count)
            else:
                found.append(run)
    return OwnRuns(found)


def join_runs(
    runs: Sequence[OwnRun], links: Sequence[Link], rate: int
) -> tuple[list[OwnRun], list[Link]]:
    """Make one run of neighbours that lie in one segment, though other positions lie between them.

    `runs` and `links` (between two parts of this rank) are of one branch, whose dilation is `rate`.
    With zigzag a rank holds one range near the start of the sequence and one near its end. Where a
    segment holds both, the local rows of both are one tile, also a causal one: rows are in the
    order of their positions. The rows of every head must go on at the dilation rate, so the number
    of positions between must be a multiple of it.

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
    whole: dict[int, int] = {}  # from the first row of a run to that of the run it is joined to
    for run in runs:
        last = found[-1] if found else OwnRun(0, 0, 0, 0)
        if run.local in borders and run.copies == 1 and last.local + last.size == run.local:
            whole[run.local] = last.local
            found[-1] = last._replace(size=last.size + run.size)
        else:
            found.append(run)

    def run_of(link: Link, part: Part) -> int:
        first = part.local_row(max(part.start, link.start))
        return whole.get(first, first)

    return found, [x for x in links if run_of(x, x.queries) != run_of(x, x.keys)]


def join_links(links: Iterable[Link], rates: Sequence[int]) -> list[Link]:
    """Make one part of parts that are seen by the same queries, or see the same keys.

    Within a segment all queries of a link see all its keys, so parts whose local rows go on at the
    dilation rate are one, whatever lies between. Fewer and larger tiles, and runs of messages:
    fewer results to merge, gradients to add and kernels to start.
    """
    segments: dict[tuple[int, int], list[Link]] = defaultdict(list)
    found: list[Link] = []
    for link in links:
        if link.window is None:
            segments[link.branch, link.start].append(link)
        else:
            found.append(link)
    for (branch, _), alike in segments.items():
        of_keys: dict[Part, set[Part]] = defaultdict(set)
        of_queries: dict[Part, set[Part]] = defaultdict(set)
        for link in alike:
            of_keys[link.keys].add(link.queries)
            of_queries[link.queries].add(link.keys)
        keys, queries = (_joined(x, rates[branch], alike[0].stop) for x in (of_keys, of_queries))
        pairs = dict.fromkeys((keys[link.keys], queries[link.queries]) for link in alike)
        found += [alike[0]._replace(keys=k, queries=q) for k, q in pairs]
    return found


def _joined(linked: Mapping[Part, set[Part]], rate: int, segment_stop: int) -> dict[Part, Part]:
    """Parts of a segment and the part each is joined into, numbered as if nothing lay between."""
    found: dict[Part, Part] = {}
    run: list[Part] = []
    for part in sorted(linked):
        if run and not (
            linked[run[-1]] == linked[part]
            and run[-1].local_row(run[-1].stop) == part.local
            and (part.start - run[-1].stop) % rate == 0
        ):
            run = []
        run.append(part)
        stop = run[0].start + sum(min(x.stop, segment_stop) - x.start for x in run)
        found.update(dict.fromkeys(run, run[0]._replace(stop=stop)))
    return found


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
