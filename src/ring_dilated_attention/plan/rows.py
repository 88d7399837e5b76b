"""The rows that tiles compute with and messages carry: what a plan is made of. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import NamedTuple


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


def keys_read(group: TileGroup) -> int:
    """How many (row, head) pairs the tiles of a group have as keys."""
    return sum(len(t.heads) * t.segments * t.keys.length for t in group.tiles)


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
