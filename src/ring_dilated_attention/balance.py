"""Deal packed documents to ranks, so that all have as much work, and about as many positions.

Documents are dealt out from the longest to the shortest, each to the rank that has the least so
far. Then the ranks have about as many positions, too: documents that follow one another have about
as much work a position. A long document is cut into parts of equal work before. With ever smaller
parts, the first deal that is even enough cuts the fewest documents, and so sends the fewest rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise, product
from math import lcm
from typing import NamedTuple

from .pattern import DilatedPattern, Window, band_pairs

MOST_WORK, MOST_POSITIONS = 1.05, 1.10
"""Of a rank, over the mean of all ranks."""
SLACK = 0.5
"""By how much of the mean a rank may be ahead of the next one to get more parts of one document."""
_DEALS = 12
ALIGNED = 64
"""Parts begin at multiples of all dilation rates if these have a common multiple of at most this:
heads of all offsets then have equally many rows, which takes fewer kernel calls."""


class _Document(NamedTuple):
    work: float  # over the mean work of a rank
    positions: float  # over the mean positions of a rank
    start: int
    stop: int


def balanced_ranges(
    documents: Sequence[int], world_size: int, pattern: DilatedPattern, *, is_causal: bool
) -> list[list[tuple[int, int]]]:
    """The ranges of positions of each rank; see `SequenceLayout.balanced`.

    Args:
        documents: cumulative lengths, ``[0, ..., n]``.
        world_size: number of ranks.
        pattern: which keys a position sees.
        is_causal: whether it sees only those before it.
    """
    lengths = [stop - start for start, stop in pairwise(documents)]
    works = [_pairs_before(pattern, x, x, is_causal) if x else 0.0 for x in lengths]
    if not any(lengths):
        return [[]] * world_size
    all_work, all_positions = sum(works) / world_size, sum(lengths) / world_size
    given = sorted(
        (
            _Document(work / all_work, (stop - start) / all_positions, start, stop)
            for work, (start, stop) in zip(works, pairwise(documents), strict=True)
            if stop > start
        ),
        reverse=True,
    )
    best = float("inf")
    found: list[list[tuple[int, int]]] = []
    for deal, slack in product(range(_DEALS), (SLACK, 0.0)):
        unevenness, ranges = _deal(given, world_size, pattern, 2.0 ** (-deal / 2), slack, is_causal)
        if unevenness < best:
            best, found = unevenness, ranges
        if best <= 1.0:
            break
    return [sorted(ranges) for ranges in found]


def _deal(
    documents: Sequence[_Document],
    world_size: int,
    pattern: DilatedPattern,
    largest: float,
    slack: float,
    is_causal: bool,
) -> tuple[float, list[list[tuple[int, int]]]]:
    """Deal documents in parts of at most `largest`; how uneven that is, and the ranges of ranks."""
    longest = documents[0].stop - documents[0].start
    scale = documents[0].work / _pairs_before(pattern, longest, longest, is_causal)
    ranks = [(0.0, 0.0, 0.0, rank) for rank in range(world_size)]
    ranges: list[list[tuple[int, int]]] = [[] for _ in ranks]
    unit = lcm(*pattern.dilation_rates)
    unit = unit if unit <= ALIGNED else 1
    for document in documents:
        length = document.stop - document.start
        parts = min(-int(-max(document[:2]) // largest), max(length // (2 * unit), 1))
        # Chunks from both ends, or of a mask that is not causal, are alike but for segments.
        is_even = all(
            w is None or (not isinstance(w, Window) and w >= length)
            for w in pattern.segment_lengths
        )
        first = 0
        while first < parts:
            _, work, positions, rank = heapq.heappop(ranks)
            following = ranks[0][0] if ranks else float("inf")
            limit = min(1.0, following + slack)
            while first < parts:
                own = _ranges(length, parts, first, unit, is_causal)
                ranges[rank] += [(document.start + low, document.start + high) for low, high in own]
                if is_even:
                    work += document.work / parts
                else:
                    work += scale * sum(
                        _pairs_before(pattern, high, length, is_causal)
                        - _pairs_before(pattern, low, length, is_causal)
                        for low, high in own
                    )
                positions += document.positions / parts
                first += 1
                if max(work, positions) + max(document[:2]) / parts > limit:
                    break
            heapq.heappush(ranks, (max(work, positions), work, positions, rank))
    unevenness = max(
        max(work / MOST_WORK, positions / MOST_POSITIONS) for _, work, positions, _ in ranks
    )
    return unevenness, ranges


def _ranges(
    length: int, parts: int, part: int, unit: int, is_causal: bool
) -> list[tuple[int, int]]:
    """The positions of a part of a document: where causal, one range from each end of it."""
    chunks, found = parts * (1 + is_causal), []
    for chunk in {part, chunks - 1 - part} if is_causal else {part}:
        bounds = (length * i // chunks for i in (chunk, chunk + 1))
        start, stop = (x if x == length else x - x % unit for x in bounds)
        if start < stop:
            found.append((start, stop))
    return found


def _pairs_before(pattern: DilatedPattern, position: int, length: int, is_causal: bool) -> float:
    """About how many (query, key) pairs a head has before a position of a document."""
    pairs = 0.0
    for segment, rate in pattern.branches:
        if isinstance(segment, Window):
            left, right = segment.seen(is_causal)
            pairs += band_pairs(position, length, -left, right) / rate
            continue
        w = min(segment or length, length)
        full, rest = divmod(position, w)
        for count, rows, of in ((full, w, w), (1, rest, min(w, length - full * w))):
            q, k = rows / rate, of / rate
            pairs += count * q * ((q + 1) / 2 if is_causal else k)
    return pairs
