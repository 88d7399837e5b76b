"""The rows that tiles compute with and messages carry: what a plan is made of. Integers only.

Progressions of rows are Python `range` objects, with steps >= 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from math import gcd
from typing import NamedTuple


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


def union_size(progressions: Sequence[range]) -> int:
    """How many numbers lie in at least one of the progressions.

    Each progression adds its own size less what the earlier ones already hold of it. Segments of a
    pattern that share a border overlap in nested progressions, which are dropped at once, so the
    recursion stays shallow.
    """
    total = 0
    for index, progression in enumerate(progressions):
        if not progression:
            continue
        shared = [s for p in progressions[:index] if (s := intersect(progression, p))]
        total += len(progression) - (union_size(_maximal(shared)) if shared else 0)
    return total


def _maximal(progressions: list[range]) -> list[range]:
    """Drop every progression that another one contains."""
    kept: list[range] = []
    for p in sorted(progressions, key=len, reverse=True):
        if not any(
            p.step % q.step == 0
            and (p[0] - q.start) % q.step == 0
            and q[0] <= p[0] <= p[-1] <= q[-1]
            for q in kept
        ):
            kept.append(p)
    return kept


class Rows(NamedTuple):
    """Where the rows of a tile are.

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
    tile is a diagonal one: row i sees keys 0 to i.
    """

    branch: int
    heads: range  # KV heads
    segments: int
    is_causal: bool
    queries: Rows
    keys: Rows

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs computed, per query head of a KV head and batch entry."""
        q, k = self.queries.length, self.keys.length
        return self.segments * len(self.heads) * (q * (q + 1) // 2 if self.is_causal else q * k)


class PackedTiles(NamedTuple):
    """Tiles of a single segment, alike but for start and length; their queries are their keys.

    What packed documents come to: thousands of tiles, written down and handled as two columns.

    Attributes:
        branch: as of a `Tile`.
        heads: as of a `Tile`.
        is_causal: as of a `Tile`.
        stride: of the rows of each, in local rows.
        head_stride: from one head of each to the next, in local rows.
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
        """Each of them on its own."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            rows = Rows(start, length, self.stride, self.head_stride)
            yield Tile(self.branch, self.heads, 1, self.is_causal, rows, rows)

    def split(self, longest: float) -> tuple[PackedTiles, PackedTiles]:
        """Those of at most `longest` rows a head, and the others."""
        if not self.lengths or max(self.lengths) <= longest:
            return self, self._replace(starts=(), lengths=())
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

    Attributes:
        single: tiles written down one by one.
        packed: further tiles, written down together.
    """

    single: tuple[Tile, ...]
    packed: tuple[PackedTiles, ...] = ()

    @property
    def branch(self) -> int:
        """That of the first tile."""
        return (self.single or self.packed)[0].branch

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """All of them, one by one."""
        return (*self.single, *chain.from_iterable(many.tiles() for many in self.packed))

    @property
    def keys_read(self) -> int:
        """How many (row, head) pairs the tiles have as keys."""
        return sum(len(t.heads) * t.segments * t.keys.length for t in self.tiles)


class Run(NamedTuple):
    """Rows of a message: row i of head number j goes to slot ``slot + j * rows.length + i``."""

    heads: range
    rows: Rows  # local rows of the sender
    slot: int


class _Referable:
    """What can be referred to weakly though it has slots."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)  # there are hundreds of thousands
class Message(_Referable):
    """What one rank sends another: K and V of `rows` distinct (row, head) pairs.

    The runs list `slots` pairs; where branches share some, `slots` exceeds `rows` and each shared
    pair is sent once.
    """

    sender: int
    receiver: int
    runs: tuple[Run, ...]
    slots: int
    rows: int

    def between(self, sender: int, receiver: int) -> Message:
        """The same rows from and to other ranks."""
        return Message(sender, receiver, self.runs, self.slots, self.rows)

    def is_same_for(self, other: Message | None) -> bool:
        """Whether a message of the same sender has the same rows, in the same order."""
        return other is not None and self.runs == other.runs
