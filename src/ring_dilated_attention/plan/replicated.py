"""Queries that every rank holds, against the keys of one rank: which tiles. Integers only.

Per branch, and per range of keys that the rank holds:

- the positions that are queries and keys alike are cut into segments as any shard is: the run of
  full segments is ONE batched tile, a diagonal one where causal;
- queries before or behind them, and keys before or behind them, are disjoint ranges, so any two of
  them share at most one segment: one tile, which is plain. Causal: only keys before the queries.

Queries within one segment that see all its keys need no such cuts: one tile a range of keys. That
is a single position (decoding), causal or not, since keys behind it are left out from the start.
"""

from __future__ import annotations

from collections.abc import Iterator

from .own import zero_key_groups
from .parts import Link, Part, cut, own_segments, spans
from .rows import Tile, TileGroup
from .spec import PlanSpec
from .tiling import tiling_of


def replicated_groups(plan: PlanSpec, positions: range, rank: int) -> tuple[TileGroup, ...]:
    """What `rank` computes for queries that every rank holds.

    Args:
        plan: the pattern, and which rank holds which keys.
        positions: of the queries: consecutive, not empty, within [0, plan.layout.length).
        rank: whose keys.

    Returns:
        Groups of tiles; row i of their queries is ``positions[i]``, their keys are local rows.
    """
    assert positions.step == 1
    assert 0 <= positions.start < positions.stop <= plan.layout.length
    queries = cut([(positions.start, positions.stop)], plan.documents, rank)
    keys = plan.parts_of(rank)
    if plan.is_causal:
        keys = [k.within(0, positions.stop) for k in keys if k.start < positions.stop]
    is_causal = plan.is_causal and len(positions) > 1
    tiling = tiling_of(plan.pattern, plan.num_kv_heads, is_causal, plan.kv_heads)
    pairs = [(q, k) for q in queries for k in keys if q.document_start == k.document_start]
    groups: list[TileGroup] = []
    for branch, (length, _) in enumerate(plan.pattern.branches):
        own: list[Tile] = []  # of disjoint positions, so they share no row
        for link, segments in (
            x for pair in pairs for x in _links(branch, length, *pair, is_causal)
        ):
            tiles = tuple(tiling.tiles(link, segments=segments))
            if link.is_own:
                own.extend(tiles)
            elif tiles:
                groups.append(TileGroup(tiles))
        if own:
            groups.append(TileGroup(tuple(own)))
    return tuple(groups)


def replicated_zero_keys(plan: PlanSpec, positions: range) -> tuple[TileGroup, ...]:
    """The zero keys that these queries see: see `zero_key_groups`; no rank holds them.

    Args:
        plan: the pattern, and the documents.
        positions: as for `replicated_groups`; row i of the queries is ``positions[i]``.
    """
    queries = cut([(positions.start, positions.stop)], plan.documents, 0)
    return zero_key_groups(plan.tiling, queries)


def _links(
    branch: int, length: int | None, queries: Part, keys: Part, is_causal: bool
) -> Iterator[tuple[Link, int]]:
    """The segments that two parts of a document share, as (link, number of such segments)."""
    w = queries.segment_length(length)
    start = queries.start - (queries.start - queries.document_start) % w
    stop = min(start + w, queries.document_stop)
    if not is_causal and queries.stop <= stop:
        if keys.start < stop and start < keys.stop:
            yield Link(branch, keys, queries, start, stop), 1
        return
    low, high = max(queries.start, keys.start), min(queries.stop, keys.stop)
    for q in _pieces(queries, low, high):
        for k in _pieces(keys, low, high):
            if q[:2] == k[:2]:
                for start, stop, count in own_segments(q, length):
                    yield Link(branch, k, q, start, stop), count
                continue
            for span in spans(branch, q, length):
                if span.reaches(k) and (span.is_before or not is_causal):
                    yield Link(branch, k, q, span.start, span.stop), 1


def _pieces(part: Part, low: int, high: int) -> list[Part]:
    """A part cut into what lies before, in and behind ``range(low, high)``."""
    if low >= high:
        return [part]
    cuts = (part.within(0, low), part.within(low, high), part.within(high, part.stop))
    return [piece for piece in cuts if piece.start < piece.stop]


def replicated_strips(plan: PlanSpec, positions: range, rank: int) -> list[list[tuple[int, ...]]]:
    """The keys of `rank` that queries which every rank holds see, head by head.

    Args:
        plan: the pattern, and which rank holds which keys.
        positions: as for `replicated_groups`.
        rank: whose keys.

    Returns:
        For each KV head, equally many strips of evenly spaced keys: the first local row, the step
        from one to the next, how many there are, and of each query before which of them it sees
        all: 0 or more. No query sees a key twice, but for each branch that shows it.
    """
    queries = cut([(positions.start, positions.stop)], plan.documents, rank)
    keys = plan.parts_of(rank)
    if plan.is_causal:
        keys = [k.within(0, positions.stop) for k in keys if k.start < positions.stop]
    pairs = [(q, k) for q in queries for k in keys if q.document_start == k.document_start]
    strips: list[list[tuple[int, ...]]] = [[] for _ in range(plan.num_kv_heads)]
    for branch, (length, rate) in enumerate(plan.pattern.branches):
        heads = plan.pattern.heads(branch, plan.num_kv_heads)
        for q, k in pairs:
            for start, stop in _segments(q, k, length):
                found = {
                    offset: _strip(plan, positions, q, k, (start + offset, stop, rate))
                    for offset in {head.offset for head in heads}
                }
                for own in strips:
                    own.append((0, 1, 0, *[0] * len(positions)))
                for head, offset in heads:
                    strips[head][-1] = found[offset]
    return strips


def _segments(queries: Part, keys: Part, length: int | None) -> Iterator[tuple[int, int]]:
    """The segments that two parts of a document share: (start, stop)."""
    w = queries.segment_length(length)
    both = (queries, keys)
    first = max((part.start - part.document_start) // w for part in both)
    last = min((part.stop - 1 - part.document_start) // w for part in both)
    for segment in range(first, last + 1):
        start = queries.document_start + segment * w
        yield start, min(start + w, queries.document_stop)


def _strip(
    plan: PlanSpec,
    positions: range,
    queries: Part,
    keys: Part,
    members: tuple[int, int, int],
) -> tuple[int, ...]:
    """The keys of one part that are members of a progression, and how many each query sees."""
    begin, stop, rate = members
    rows = range(
        begin + max(0, -(-(keys.start - begin) // rate)) * rate, min(stop, keys.stop), rate
    )
    limits = []
    for position in positions:
        is_member = position in range(begin, stop, rate)
        sees = is_member and queries.start <= position < queries.stop
        until = range(rows.start, min(position + 1, rows.stop), rate) if plan.is_causal else rows
        limits.append(len(until) if sees else 0)
    return keys.local_row(rows.start), rate, len(rows) if any(limits) else 0, *limits
