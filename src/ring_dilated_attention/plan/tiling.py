"""From links and runs to tiles and messages: rows as evenly spaced local rows, heads batched.

`own_ranges` are the rows that a rank computes row by row, in place of tiles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import xor
from typing import NamedTuple

from ..pattern import DilatedPattern, HeadOffset, Window
from .rows import (
    Link,
    Message,
    OwnRun,
    PackedTiles,
    Part,
    Rows,
    Run,
    Tile,
    TileGroup,
    dilated_rows,
    own_segments,
    union_size,
)

_MANY = 8
"""Tiles that differ in start and length alone are kept together if there are at least this many."""


class _HeadRows(NamedTuple):
    """Rows of one head in a tile."""

    head: int
    query: int
    query_count: int
    key: int
    key_count: int


@lru_cache(maxsize=64)
def tiling_of(pattern: DilatedPattern, num_kv_heads: int, is_causal: bool, among: range) -> Tiling:
    """The `Tiling` of these, which plans of other lengths and documents share."""
    return Tiling(pattern, num_kv_heads, is_causal, among)


@dataclass(frozen=True)
class Tiling:
    """The rows with which each KV head takes part in each branch of a pattern."""

    pattern: DilatedPattern
    num_kv_heads: int
    is_causal: bool
    among: range  # of the KV heads, those to tile

    @cached_property
    def heads(self) -> tuple[tuple[HeadOffset, ...], ...]:
        """Per branch, the KV heads that run it, each with its offset."""
        return tuple(
            tuple(x for x in self.pattern.heads(branch, self.num_kv_heads) if x.head in self.among)
            for branch in range(len(self.pattern.branches))
        )

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Per branch, the offset of each KV head; -1: it does not run the branch."""
        of_branches = [dict(own) for own in self.heads]
        heads = range(self.num_kv_heads)
        return tuple(tuple(own.get(head, -1) for head in heads) for own in of_branches)

    @property
    def has_zero_keys(self) -> bool:
        """Whether queries see any: not causal ones, since zero keys come last in their cell."""
        return self.pattern.zero_keys and not self.is_causal

    def window(self, branch: int) -> Window | None:
        """The window of a branch, as far as the mask lets queries see it; None: it has segments."""
        length = self.pattern.segment_lengths[branch]
        return length.seen(self.is_causal) if isinstance(length, Window) else None

    def _rows(self, link: Link, part: Part, offset: int) -> range:
        """The positions of `part` in the link's segment at `offset`."""
        rate = self.pattern.dilation_rates[link.branch]
        return dilated_rows(link.start, link.stop, offset, rate, part.start, part.stop)

    def tiles(
        self, link: Link, *, slots: Mapping[int, int] | None = None, segments: int = 1
    ) -> Iterator[Tile]:
        """The tiles of a link: heads whose rows step evenly from head to head share one.

        Args:
            link: which queries see which keys.
            slots: the first slot of each head in a message; None: the keys are local rows.
            segments: how many equal segments, of which the link's is the first.
        """
        rate = self.pattern.dilation_rates[link.branch]
        heads: list[tuple[int, _HeadRows]] = []
        for head, offset in self.heads[link.branch]:
            queries = self._rows(link, link.queries, offset)
            keys = queries if link.is_own else self._rows(link, link.keys, offset)
            if queries and keys:
                query = link.queries.local_row(queries[0])
                key = link.keys.local_row(keys[0]) if slots is None else slots[head]
                heads.append((offset, _HeadRows(head, query, len(queries), key, len(keys))))
        band = None
        if heads and link.window is not None:  # of keys[j] and queries[i], the first ones and on
            away = keys[0] - queries[0]
            band = -((away + link.window.left) // rate), (link.window.right - away) // rate
        by_offset = [rows for _, rows in sorted(heads)]
        w = link.stop - link.start if segments > 1 else 0
        for run in _fewest_runs([rows for _, rows in heads], by_offset):
            first, step = run[0], _step(run)
            yield Tile(
                link.branch,
                _heads(run),
                segments,
                self.is_causal and link.is_own,
                Rows(first.query, first.query_count, rate, step.query, w),
                Rows(first.key, first.key_count, rate if slots is None else 1, step.key, w),
                band,
            )

    def own_windows(self, branch: int, runs: Iterable[OwnRun]) -> TileGroup | None:
        """The tiles of a window whose queries are its keys; None if there are none.

        Runs that are no longer than the window have no band: they are dense, or causal.
        """
        rate, own = self.pattern.dilation_rates[branch], [head for head, _ in self.heads[branch]]
        window = self.window(branch)
        assert window is not None
        if not own:
            return None
        heads = range(own[0], own[-1] + 1)
        low, high = (side // rate for side in window)
        tiles: list[Tile] = []
        starts, lengths = [], []
        for size, _, local, copies in runs:
            for first in range(min(rate, size)):
                count = -(-(size - first) // rate)
                is_banded = count - 1 > min(low, high or low)
                if rate == copies == 1 and not is_banded:
                    starts.append(local)
                    lengths.append(size)
                    continue
                rows = Rows(local + first, count, rate, 0, size if copies > 1 else 0)
                is_causal, band = not (high or is_banded), (-low, high) if is_banded else None
                tiles.append(Tile(branch, heads, copies, is_causal, rows, rows, band))
        packed = PackedTiles(branch, heads, not high, 1, 0, tuple(starts), tuple(lengths))
        if len(starts) < _MANY:
            return TileGroup((*tiles, *packed.tiles()))
        return TileGroup(tuple(tiles), (packed,))

    def own_group(self, branch: int, runs: Iterable[OwnRun]) -> TileGroup | None:
        """The tiles of positions that are queries and keys alike; None if there are none.

        Where segments start and stop does not matter, only how rows fall on offsets: tiles that are
        alike in that differ in their starts and lengths alone. They are worked out once, and those
        of many runs are kept together. `runs`: all that a rank holds of the branch's segments.
        """
        rate = self.pattern.dilation_rates[branch]
        tiles: list[Tile] = []
        # By phase and size of the smallest run with the same tiles, but for their lengths: with a
        # whole rate less, all offsets have a row less. No function call for each of many documents.
        alike: dict[tuple[int, int], list[OwnRun]] = defaultdict(list)
        for run in runs:
            size, phase, _, _ = run
            alike[phase % rate, size if size < rate else rate + size % rate].append(run)
        packed: dict[tuple[range, int], tuple[list[int], list[int]]] = {}
        for kind, own in alike.items():
            single = [run for run in own if run.copies == 1]
            longer = [(run.size - kind[1]) // rate for run in single]
            for tile in _twins(self, branch, *kind):
                first, length, _, step, _ = tile.queries
                starts, lengths = packed.setdefault((tile.heads, step), ([], []))
                starts.extend([run.local + first for run in single])
                lengths.extend([length + x for x in longer])
                for size, _, local, copies in own:
                    if copies > 1:
                        more = (size - kind[1]) // rate
                        rows = Rows(local + first, length + more, rate, step, size)
                        tiles.append(tile._replace(segments=copies, queries=rows, keys=rows))
        many: list[PackedTiles] = []
        for (heads, step), (starts, lengths) in packed.items():
            found = PackedTiles(
                branch, heads, self.is_causal, rate, step, tuple(starts), tuple(lengths)
            )
            if len(starts) >= _MANY:
                many.append(found)
            else:
                tiles.extend(found.tiles())
        return TileGroup(tuple(tiles), tuple(many)) if tiles or many else None

    def message(
        self, sender: int, receiver: int, links: Iterable[Link]
    ) -> tuple[Message | None, dict[tuple[int, ...], dict[int, int]]]:
        """The message of these links, and the first slot of each entry and head in it."""
        runs: list[Run] = []
        slots = 0
        first_slots: dict[tuple[int, ...], dict[int, int]] = {}
        by_head: dict[int, list[range]] = defaultdict(list)  # local rows of the sender
        entries: dict[tuple[int, ...], list[Link]] = defaultdict(list)
        for link in links:
            entries[link.message_entry].append(link)
        for entry, alike in sorted(entries.items()):
            keys, rate = alike[0].keys, self.pattern.dilation_rates[entry[0]]
            heads = [
                _HeadRows(head, 0, 0, keys.local_row(found[0]), len(found))
                for head, offset in self.heads[entry[0]]
                if (found := self._rows(alike[0], keys, offset))
                and any(self._rows(link, link.queries, offset) for link in alike)
            ]
            starts = first_slots[entry] = {}
            for run in _fewest_runs(heads, sorted(heads, key=lambda rows: rows.key)):
                rows = Rows(run[0].key, run[0].key_count, rate, _step(run).key)
                runs.append(Run(_heads(run), rows, slots))
                for head, _, _, key, count in run:
                    by_head[head].append(range(key, key + count * rate, rate))
                    starts[head] = slots
                    slots += count
        if not runs:
            return None, first_slots
        # Only entries of different branches can share rows, or those of a window.
        shares = len({each[0] for each in entries}) > 1 or any(
            x[0].window for x in entries.values()
        )
        distinct = sum(map(union_size, by_head.values())) if shares else slots
        return Message(sender, receiver, tuple(runs), slots, distinct), first_slots

    def groups(
        self, links: Sequence[Link], slots: Mapping[tuple[int, ...], Mapping[int, int]] | None
    ) -> tuple[TileGroup, ...]:
        """The tiles of links between different parts, in few groups.

        Tiles of a group share no row, so where m parts see m parts it takes m groups, not m * m:
        the i-th sees the j-th in group j - i mod m. Evenly spaced parts then make evenly spaced
        tiles. `slots`: of a message, see `message`; None: the keys are local rows.
        """
        starts = [link.parts or (link.keys.start, link.queries.start) for link in links]
        keys, queries = (
            {start: number for number, start in enumerate(dict.fromkeys(x[side] for x in starts))}
            for side in (0, 1)
        )
        most = max(len(queries), len(keys))
        found: dict[tuple[int, int], list[Tile]] = {}
        for link, (key, query) in zip(links, starts, strict=True):
            of_heads = None if slots is None else slots.get(link.message_entry, {})
            if tiles := [*self.tiles(link, slots=of_heads)]:
                place = keys[key] - queries[query]
                found.setdefault((link.branch, place % most), []).extend(tiles)
        return tuple(TileGroup(tuple(tiles)) for tiles in found.values())


@lru_cache(maxsize=4096)
def _twins(tiling: Tiling, branch: int, phase: int, count: int) -> tuple[Tile, ...]:
    """The tiles of `count` local rows, `phase` positions behind the start of their segment."""
    part = Part(phase, phase + count, 0, 0, 0, phase + count)
    return tuple(tiling.tiles(Link(branch, part, part, 0, phase + count)))


def _fewest_runs(*orders: Sequence[_HeadRows]) -> list[list[_HeadRows]]:
    """The even runs of heads, in the order in which they are fewest."""
    return min(map(_even_runs, orders), key=len)


def _even_runs(heads: Sequence[_HeadRows]) -> list[list[_HeadRows]]:
    """Cut a list of heads into runs that step evenly in head, query and key, at equal counts."""
    runs: list[list[_HeadRows]] = []
    step: tuple[int, ...] | None = None
    for rows in heads:
        if runs:
            # Dozens of heads a tile, and thousands of tiles: no object for a difference.
            head, query, query_count, key, key_count = runs[-1][-1]
            delta = rows.head - head, rows.query - query, rows.key - key
            alike = query_count == rows.query_count and key_count == rows.key_count
            # Strides of a view cannot be negative, so no step may go back.
            if alike and min(delta) >= 0 and step in (None, delta):
                runs[-1].append(rows)
                step = delta
                continue
        runs.append([rows])
        step = None
    return runs


def _step(run: Sequence[_HeadRows]) -> _HeadRows:
    """Difference of two consecutive heads of a run; it is the same for all of them."""
    return _HeadRows(*(b - a for a, b in zip(run[0], run[min(1, len(run) - 1)], strict=True)))


def _heads(run: Sequence[_HeadRows]) -> range:
    return range(run[0].head, run[-1].head + 1, max(_step(run).head, 1))


class OwnRange(NamedTuple):
    """Consecutive rows of a part, and the branches that are computed there row by row.

    Positions count from the start of their document.
    """

    start: int  # the first position of the part
    stop: int  # the position behind its last
    shift: int  # position p is local row ``p + shift``
    document: int  # positions of the document
    low: int  # the first position of the range
    high: int  # the position behind its last
    branches: int  # bit b says whether branch b is among them


class OwnWork(NamedTuple):
    """Work on a rank's own positions, split into row by row and branch by branch.

    A branch by itself is tiles, as large as a kernel likes them. Where they are too small for a
    kernel call each, one launch goes through all rows instead, and for each row through its
    branches.
    """

    ranges: tuple[OwnRange, ...]  # what is computed row by row
    groups: tuple[TileGroup, ...]  # what is left, one group of tiles for each branch that has any
    crossing: tuple[TileGroup, ...]  # further tiles, whose queries and keys are in different parts
    # which queries see how many zero keys, but for those of `ranges`, where the kernel
    # counts them; see `zero_key_groups`
    zero_keys: tuple[TileGroup, ...]


def own_ranges(parts: Sequence[Part], chosen: Mapping[int, FlaggedRows]) -> Iterator[OwnRange]:
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


class FlaggedRows:
    """The local rows that are computed row by row: the rows of the runs that are flagged.

    Attributes:
        first: whether the first run is.
        borders: rows at which that changes.
    """

    def __init__(self, runs: Sequence[OwnRun], flags: Sequence[bool]) -> None:
        self.first = bool(flags) and flags[0]
        self.borders = [
            run.local
            for run, last, flag in zip(runs[1:], flags[:-1], flags[1:], strict=True)
            if flag is not last
        ]

    def has(self, row: int) -> bool:
        """Whether a row is."""
        return self.first ^ bool(bisect_right(self.borders, row) % 2)


def zero_key_groups(
    tiling: Tiling, parts: Sequence[Part], chosen: Mapping[int, FlaggedRows] | None = None
) -> tuple[TileGroup, ...]:
    """The queries of `parts` that see zero keys, and how many.

    A cell has ceil(w / r) rows, w being the segment length clamped to its document. Those that the
    document does not hold have key and value 0: a score of 0 in the softmax, and nothing else. They
    are the same for every query of the cell, so they need no rows, no rank holds them and none
    travels. Every such query sees its own key too, so its lse is finite without them. Causal
    queries see none: zero keys come last in their cell.

    Args:
        tiling: of the pattern.
        parts: positions that a rank holds in consecutive local rows.
        chosen: by branch, rows that are left out; None: none are.

    Returns:
        One group per branch that has any. The queries of a tile are local rows; its keys are rows
        of nothing, and their `length` is how many zero keys each of the queries sees.
    """
    if not tiling.has_zero_keys:
        return ()
    groups = (
        tuple(
            _zero_key_tiles(tiling, branch, parts, None if chosen is None else chosen.get(branch))
        )
        for branch in range(len(tiling.heads))
    )
    return tuple(TileGroup(tiles) for tiles in groups if tiles)


def _zero_key_tiles(
    tiling: Tiling, branch: int, parts: Sequence[Part], left_out: FlaggedRows | None
) -> Iterator[Tile]:
    length, rate = tiling.pattern.branches[branch]
    if isinstance(length, Window):
        return
    by_offset: dict[int, list[int]] = defaultdict(list)  # evenly spaced heads
    for head, offset in tiling.heads[branch]:
        by_offset[offset].append(head)
    for part in parts:
        full = -(-part.segment_length(length) // rate)
        for start, stop, count in own_segments(part, length):
            size, first_row = stop - start, part.local_row(max(start, part.start))
            if full * rate == size or (left_out is not None and left_out.has(first_row)):
                continue  # as all full segments of a length that the rate divides
            for offset, heads in by_offset.items():
                missing = full - len(range(offset, size, rate))
                rows = dilated_rows(start, stop, offset, rate, part.start, part.stop)
                if missing and rows:
                    step = heads[1] - heads[0] if len(heads) > 1 else 1
                    queries = Rows(part.local_row(rows[0]), len(rows), rate, 0, size)
                    of_heads = range(heads[0], heads[-1] + 1, step)
                    yield Tile(branch, of_heads, count, False, queries, Rows(0, missing, 0, 0))
