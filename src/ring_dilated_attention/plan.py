"""From (pattern, layout) to what each rank computes and exchanges. Integers only.

A cell is (branch, segment, offset, heads); its rows are one arithmetic progression of positions.
A part is a run of positions that one rank holds of one document. Two different parts share at most
one segment of a branch, so the work of a rank is

- per part, its own segments: the run of full segments as ONE batched tile, and the clipped ones at
  its two ends (`RankPlan.local`);
- per pair of parts with a common segment, one tile: local where one rank holds both, else part of
  the step at which the keys' owner is the peer (`RankPlan.step`).

Any rank can compute every rank's plan. What crosses between two ranks is a `Message`: the sender's
dilated rows that the receiver's queries need, each (row, head) once however many branches need it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .layout import SequenceLayout
from .pattern import DilatedPattern, check_positive_int
from .progression import dilated_rows, union_size


class Rows(NamedTuple):
    """Where the rows of a tile are: row i of head number j in segment s is at
    ``start + s * segment_stride + j * head_stride + i * stride``.
    """  # noqa: D205

    start: int
    count: int
    stride: int
    head_stride: int
    segment_stride: int = 0


class Tile(NamedTuple):
    """One batched block of attention: for every segment and head, all queries to all keys.

    `queries` are local rows. `keys` are local rows in `RankPlan.local`, and slots of the received
    message in a `Step`. A causal tile is a diagonal one: row i sees keys 0 to i.
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
        q, k = self.queries.count, self.keys.count
        return self.segments * len(self.heads) * (q * (q + 1) // 2 if self.is_causal else q * k)


class Run(NamedTuple):
    """Rows of a message: local row i of head number j at the sender goes to slot
    ``slot + j * rows.count + i``.
    """  # noqa: D205

    heads: range
    rows: Rows
    slot: int


class Message(NamedTuple):
    """What one rank sends another: K and V of `rows` distinct (row, head) pairs.

    The runs list `slots` pairs; where branches share some, `slots` exceeds `rows` and each shared
    pair is sent once.
    """

    sender: int
    receiver: int
    runs: tuple[Run, ...]
    slots: int
    rows: int


class Step(NamedTuple):
    """Step s of a rank: it works with the rows of rank ``(rank - s) mod p``."""

    step: int
    receive: Message | None
    send: Message | None
    tiles: tuple[Tile, ...]


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


class _Link(NamedTuple):
    """Queries of one part that see keys of another: their common segment in a branch."""

    branch: int
    keys: Part
    queries: Part
    start: int  # of the segment
    stop: int

    @property
    def message_entry(self) -> tuple[int, int, int]:
        """What tells the rows that the link needs from the other rows of a message."""
        return self.branch, self.keys.start, self.start


class _HeadRows(NamedTuple):
    """Rows of one head in a tile."""

    head: int
    query: int
    query_count: int
    key: int
    key_count: int


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that `plan_attention` was told; `rank` derives what one rank does."""

    pattern: DilatedPattern
    layout: SequenceLayout
    is_causal: bool
    num_heads: int
    num_kv_heads: int
    documents: tuple[int, ...]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every rank's pieces cut at document borders, sorted by position."""
        parts = []
        for piece in self.layout.pieces:
            first = bisect_right(self.documents, piece.start) - 1
            last = bisect_left(self.documents, piece.stop)
            for low, high in pairwise(self.documents[first : last + 1]):
                start = max(low, piece.start)
                local = piece.local + start - piece.start
                parts.append(Part(start, min(high, piece.stop), piece.rank, local, low, high))
        return tuple(parts)

    @cached_property
    def _part_starts(self) -> list[int]:
        return [part.start for part in self.parts]

    @cached_property
    def _parts_of_rank(self) -> dict[int, list[Part]]:
        by_rank: dict[int, list[Part]] = {}
        for part in self.parts:
            by_rank.setdefault(part.rank, []).append(part)
        return by_rank

    def parts_of(self, rank: int) -> Sequence[Part]:
        """The parts that `rank` holds, sorted by position."""
        return self._parts_of_rank.get(rank, ())

    def parts_between(self, start: int, stop: int) -> Sequence[Part]:
        """The parts that hold a position in ``range(start, stop)``, sorted by position."""
        if start >= stop:
            return ()
        first = bisect_right(self._part_starts, start) - 1
        return self.parts[first : bisect_left(self._part_starts, stop)]

    def segment_length(self, branch: int, part: Part) -> int:
        """Segment length of `branch` in the document of `part`."""
        w = self.pattern.segment_lengths[branch]
        whole = part.document_stop - part.document_start
        return whole if w is None else min(w, whole)

    def offsets(self, branch: int) -> tuple[int, ...]:
        """The offset of each KV head that runs `branch`, in order."""
        return self._offsets[branch]

    @cached_property
    def _offsets(self) -> list[tuple[int, ...]]:
        heads = [self.pattern.heads(b, self.num_kv_heads) for b in range(len(self.pattern.branches))]
        return [tuple(h.offset for h in branch_heads) for branch_heads in heads]

    @cached_property
    def _rank_plans(self) -> dict[int, RankPlan]:
        return {}

    def rank(self, rank: int) -> RankPlan:
        """What `rank` computes and exchanges."""
        if rank not in self._rank_plans:
            if not 0 <= rank < self.layout.world_size:
                raise ValueError(f"rank must lie in [0, {self.layout.world_size}), got {rank}")
            self._rank_plans[rank] = RankPlan(self, rank)
        return self._rank_plans[rank]

    @cached_property
    def gathers(self) -> bool:
        """What ``exchange="auto"`` means here: True for gather, False for ring.

        Gather is chosen when no rank can receive more rows than the largest shard has, so that
        holding all of them at once at most doubles K and V. A bound, not each rank's own count,
        decides, so that every rank decides alike: a piece shares at most two segments of a branch
        with other pieces.
        """
        layout, pattern = self.layout, self.pattern
        pieces = max(map(len, layout.ranges))
        longest = max(b - a for a, b in pairwise(self.documents))
        bound = 0
        for branch, (length, rate) in enumerate(pattern.branches):
            w = longest if length is None else min(length, longest)
            segments = min(2 * pieces, layout.length // w + len(self.documents) - 1)
            bound += segments * -(-w // rate) * len(pattern.heads(branch, self.num_kv_heads))
        return bound <= layout.max_local_length * self.num_kv_heads


    def __str__(self) -> str:
        """A table: what the ranks hold, compute and exchange (the first 16 of them)."""
        layout, shown = self.layout, range(min(self.layout.world_size, 16))
        title = (
            f"{self.pattern} over {layout.length} positions on {layout.world_size} ranks, "
            f"{self.num_heads} heads, {self.num_kv_heads} KV heads, "
            f"{'causal' if self.is_causal else 'not causal'}, "
            f"{len(self.documents) - 1} document(s), {'gather' if self.gathers else 'ring'}"
        )
        rows = [("rank", "positions", "local tiles", "pairs", "rows received", "rows sent")]
        for rank in map(self.rank, shown):
            figures = (
                rank.index,
                layout.local_length(rank.index),
                len(rank.local),
                rank.pairs,
                rank.total_received_rows,
                rank.total_sent_rows,
            )
            rows.append(tuple(map(str, figures)))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        more = [f"and {layout.world_size - len(shown)} more ranks"] * (layout.world_size > len(shown))
        return "\n".join([title, *lines, *more])


class RankPlan:
    """What one rank computes and exchanges; the messages of a step are worked out when asked for.

    Attributes:
        local: tiles whose queries and keys this rank holds.
    """

    def __init__(self, plan: AttentionPlan, rank: int) -> None:
        self.plan = plan
        self.index = rank
        self.world_size = plan.layout.world_size
        self._steps: dict[int, Step] = {}
        self._received: dict[int, list[_Link]] = {}
        self._sent: dict[int, list[_Link]] = {}
        links: list[_Link] = []
        own: list[Tile] = []
        for branch in range(len(plan.pattern.branches)):
            for part in plan.parts_of(rank):
                own.extend(_own_segments(plan, branch, part))
                for other, start, stop in _before(plan, branch, part):
                    link = _Link(branch, other, part, start, stop)
                    if other.rank == rank:
                        links.append(link)
                    else:
                        self._received.setdefault(other.rank, []).append(link)
                        if not plan.is_causal:
                            back = _Link(branch, part, other, start, stop)
                            self._sent.setdefault(other.rank, []).append(back)
                for other, start, stop in _after(plan, branch, part):
                    if not plan.is_causal:
                        link = _Link(branch, other, part, start, stop)
                        if other.rank == rank:
                            links.append(link)
                        else:
                            self._received.setdefault(other.rank, []).append(link)
                    if other.rank != rank:
                        back = _Link(branch, part, other, start, stop)
                        self._sent.setdefault(other.rank, []).append(back)
        own.extend(tile for link in links for tile in _link_tiles(plan, link))
        self.local = tuple(own)

    def received_rows(self, sender: int) -> int:
        """Distinct (row, head) pairs that `sender` sends this rank."""
        return _count_rows(self.plan, self._received.get(sender, ()))

    def sent_rows(self, receiver: int) -> int:
        """Distinct (row, head) pairs that this rank sends `receiver`."""
        return _count_rows(self.plan, self._sent.get(receiver, ()))

    @cached_property
    def total_received_rows(self) -> int:
        """Distinct (row, head) pairs that this rank receives, over all peers."""
        return sum(map(self.received_rows, self._received))

    @cached_property
    def total_sent_rows(self) -> int:
        """Distinct (row, head) pairs that this rank sends, over all peers."""
        return sum(map(self.sent_rows, self._sent))

    def step(self, step: int) -> Step:
        """What this rank exchanges and computes at step 1 <= `step` < world size."""
        if step not in self._steps:
            self._steps[step] = self._make_step(step)
        return self._steps[step]

    def _make_step(self, step: int) -> Step:
        sender = (self.index - step) % self.world_size
        receiver = (self.index + step) % self.world_size
        received = self._received.get(sender, ())
        receive, slots = _message(self.plan, sender, self.index, received)
        send, _ = _message(self.plan, self.index, receiver, self._sent.get(receiver, ()))
        tiles = []
        for link in received:
            tiles.extend(_link_tiles(self.plan, link, slots=slots.get(link.message_entry, {})))
        return Step(step, receive, send, tuple(tiles))

    def steps(self) -> Iterator[Step]:
        """Every step in order; most exchange nothing when segments are shorter than shards."""
        return map(self.step, range(1, self.world_size))

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs this rank computes, over all query heads, per batch entry."""
        tiles = [*self.local, *(tile for step in self.steps() for tile in step.tiles)]
        return sum(t.pairs for t in tiles) * (self.plan.num_heads // self.plan.num_kv_heads)


def plan_attention(
    pattern: DilatedPattern,
    layout: SequenceLayout,
    *,
    is_causal: bool,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    documents: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plan dilated attention of `pattern` over a sequence that `layout` shards.

    Args:
        pattern: the branches.
        layout: which rank holds which positions.
        is_causal: whether a query sees only keys at positions <= its own.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads, a divisor of `num_heads`; None: as many.
        documents: cumulative lengths ``[0, ..., layout.length]`` of documents packed in the
            sequence: each is cut into segments on its own and attention never crosses a border.
            None: one document.

    Returns:
        A hashable plan; ``plan.rank(i)`` is what rank i does.

    Raises:
        TypeError, ValueError: an argument is not of its kind, `num_kv_heads` does not divide
            `num_heads`, or `documents` does not rise from 0 to the layout's length.
    """
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {pattern!r}")
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout, got {layout!r}")
    num_heads = check_positive_int("num_heads", num_heads)
    kv_heads = num_heads if num_kv_heads is None else check_positive_int("num_kv_heads", num_kv_heads)
    if num_heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {num_heads} and {kv_heads}")
    borders = (0, layout.length) if documents is None else tuple(documents)
    if (
        len(borders) < 2
        or borders[0] != 0
        or borders[-1] != layout.length
        or any(a >= b for a, b in pairwise(borders))
    ):
        raise ValueError(
            f"documents must rise from 0 to the sequence length {layout.length}; got {borders}"
        )
    return AttentionPlan(pattern, layout, bool(is_causal), num_heads, kv_heads, borders)


def _own_segments(plan: AttentionPlan, branch: int, part: Part) -> Iterator[Tile]:
    """Tiles of the queries of a part with the keys of the same part."""
    w = plan.segment_length(branch, part)
    origin = part.document_start
    first = -(-(part.start - origin) // w)  # the first segment that starts in the part
    last = (part.stop - origin) // w  # the first that does not end in it at full length
    blocks = []
    if first > last:  # the part lies inside one segment, away from both its ends
        blocks.append((first - 1, 1))
    else:
        if origin + first * w > part.start:
            blocks.append((first - 1, 1))
        if last > first:
            blocks.append((first, last - first))
        if origin + last * w < part.stop:
            blocks.append((last, 1))
    for segment, count in blocks:
        start = origin + segment * w
        link = _Link(branch, part, part, start, min(start + w, part.document_stop))
        yield from _link_tiles(plan, link, segments=count)


def _before(plan: AttentionPlan, branch: int, part: Part) -> Iterator[tuple[Part, int, int]]:
    """Other parts that hold earlier positions of the segment in which `part` starts."""
    w = plan.segment_length(branch, part)
    start = part.start - (part.start - part.document_start) % w
    for other in plan.parts_between(start, part.start):
        yield other, start, min(start + w, part.document_stop)


def _after(plan: AttentionPlan, branch: int, part: Part) -> Iterator[tuple[Part, int, int]]:
    """Other parts that hold later positions of the segment in which `part` ends."""
    w = plan.segment_length(branch, part)
    start = part.stop - 1 - (part.stop - 1 - part.document_start) % w
    stop = min(start + w, part.document_stop)
    for other in plan.parts_between(part.stop, stop):
        yield other, start, stop


def _rows(plan: AttentionPlan, link: _Link, part: Part, offset: int) -> range:
    """The positions of `part` in the link's segment at `offset`."""
    rate = plan.pattern.dilation_rates[link.branch]
    return dilated_rows(link.start, link.stop, offset, rate, part.start, part.stop)


def _link_tiles(
    plan: AttentionPlan,
    link: _Link,
    *,
    slots: dict[int, int] | None = None,
    segments: int = 1,
) -> Iterator[Tile]:
    """The tiles of a link: heads whose rows step evenly from head to head share one.

    `slots` is each head's first slot in a message; None: the keys are local rows. `segments`
    counts equal segments, the link's being the first.
    """
    rate = plan.pattern.dilation_rates[link.branch]
    same = link.queries is link.keys
    by_offset: dict[int, tuple[range, range]] = {}
    heads: list[tuple[int, _HeadRows]] = []
    for head, offset in plan.pattern.heads(link.branch, plan.num_kv_heads):
        if offset not in by_offset:
            queries = _rows(plan, link, link.queries, offset)
            by_offset[offset] = queries, queries if same else _rows(plan, link, link.keys, offset)
        queries, keys = by_offset[offset]
        if queries and keys:
            query = link.queries.local_row(queries[0])
            key = link.keys.local_row(keys[0]) if slots is None else slots[head]
            heads.append((offset, _HeadRows(head, query, len(queries), key, len(keys))))
    in_order = _even_runs([rows for _, rows in heads])
    by_offsets = _even_runs([rows for _, rows in sorted(heads)])
    w = plan.segment_length(link.branch, link.queries) if segments > 1 else 0
    for run in min(in_order, by_offsets, key=len):
        a, b = run[0], run[min(1, len(run) - 1)]
        yield Tile(
            link.branch,
            _heads_of(run),
            segments,
            plan.is_causal and same,
            Rows(a.query, a.query_count, rate, b.query - a.query, w),
            Rows(a.key, a.key_count, rate if slots is None else 1, b.key - a.key, w),
        )


def _even_runs(heads: Sequence[_HeadRows]) -> list[list[_HeadRows]]:
    """Cut a list of heads into runs that step evenly in head, query and key, at equal counts."""
    runs: list[list[_HeadRows]] = []
    step: tuple[int, ...] | None = None
    for rows in heads:
        if runs:
            last = runs[-1][-1]
            delta = tuple(b - a for a, b in zip(last, rows, strict=True))
            # Strides of a view cannot be negative, so no step may go back.
            if min(delta) >= 0 == delta[2] == delta[4] and step in (None, delta):
                runs[-1].append(rows)
                step = delta
                continue
        runs.append([rows])
        step = None
    return runs


def _heads_of(run: Sequence[_HeadRows]) -> range:
    step = run[1].head - run[0].head if len(run) > 1 else 1
    return range(run[0].head, run[-1].head + 1, step)


def _entries(
    plan: AttentionPlan, links: Iterable[_Link]
) -> Iterator[tuple[_Link, list[tuple[int, range]]]]:
    """Per (branch, segment, part of the sender), the (head, positions) that some query needs."""
    shared: dict[tuple[int, int, int], list[_Link]] = {}
    for link in links:
        shared.setdefault(link.message_entry, []).append(link)
    for _, group in sorted(shared.items()):
        needed = []
        for head, offset in plan.pattern.heads(group[0].branch, plan.num_kv_heads):
            keys = _rows(plan, group[0], group[0].keys, offset)
            if keys and any(_rows(plan, link, link.queries, offset) for link in group):
                needed.append((head, keys))
        if needed:
            yield group[0], needed


def _count_rows(plan: AttentionPlan, links: Sequence[_Link]) -> int:
    """Distinct (row, head) pairs in the message of these links."""
    entries: dict[tuple[int, int, int], _Link] = {}
    for link in links:
        entries.setdefault(link.message_entry, link)
    if len({link.keys.start for link in entries.values()}) == len(entries):
        # No two entries can share a row. The usual case by far, so it is made fast.
        counts = [_count_entry(plan, link) for link in entries.values()]
        if None not in counts:
            return sum(filter(None, counts))
    by_head: dict[int, list[range]] = {}
    for _, needed in _entries(plan, links):
        for head, keys in needed:
            by_head.setdefault(head, []).append(keys)
    return sum(map(union_size, by_head.values()))


def _count_entry(plan: AttentionPlan, link: _Link) -> int | None:
    """Rows of one entry over all heads; None where some head may have no queries for it."""
    rate = plan.pattern.dilation_rates[link.branch]
    queries = min(link.queries.stop, link.stop) - max(link.queries.start, link.start)
    if queries < rate:
        return None
    low = max(link.keys.start, link.start)
    phase, last = link.start - low, min(link.keys.stop, link.stop) - low + rate - 1
    offsets = plan.offsets(link.branch)
    return sum([(last - (phase + offset) % rate) // rate for offset in offsets])


def _message(
    plan: AttentionPlan, sender: int, receiver: int, links: Sequence[_Link]
) -> tuple[Message | None, dict[tuple[int, int, int], dict[int, int]]]:
    """The message of these links, and for each entry of it the first slot of each head."""
    runs: list[Run] = []
    first_slots: dict[tuple[int, int, int], dict[int, int]] = {}
    slots = 0
    for link, needed in _entries(plan, links):
        rate = plan.pattern.dilation_rates[link.branch]
        rows = [
            _HeadRows(head, 0, 0, link.keys.local_row(keys[0]), len(keys)) for head, keys in needed
        ]
        starts = first_slots[link.message_entry] = {}
        for run in _even_runs(rows):
            a, b = run[0], run[min(1, len(run) - 1)]
            runs.append(Run(_heads_of(run), Rows(a.key, a.key_count, rate, b.key - a.key), slots))
            for head in runs[-1].heads:
                starts[head] = slots
                slots += a.key_count
    if not runs:
        return None, first_slots
    return Message(sender, receiver, tuple(runs), slots, _count_rows(plan, links)), first_slots
