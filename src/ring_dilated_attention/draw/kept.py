"""What a KV cache keeps of a head, on the cells of a picture, and how that grows with the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..pattern import DilatedPattern
from ..plan import CachedBranch, costs, plan_cache
from .mask import Bools, Grid

_LEAST_AHEAD = 8
"""At least this many positions are drawn behind the text; otherwise a quarter of the text."""
_GROWTH_BEYOND = 8
"""The longest text that rows are counted for is this many times the text or the longest segment,
whichever is longer."""
_GROWTH_RANGE, _GROWTH_BELOW = 12, 6
"""The shortest is `_GROWTH_RANGE` powers of two below the longest, or `_GROWTH_BELOW` below the
text or the longest segment, whichever is shorter."""
MOST_LENGTH = 1 << 48
"""The longest text, in positions, whose rows are counted."""


class KeptCells(NamedTuple):
    """Which cells hold rows that are dropped, kept or to come: bool (branches, cells) each.

    Attributes:
        dropped: the cell has a row that no later position can be shown.
        kept: it has one that a later position can still be shown.
        ahead: it has a later position that can be shown the kept rows, or that is kept with them.
    """

    dropped: Bools
    kept: Bools
    ahead: Bools


class Growth(NamedTuple):
    """How the cache of a head grows with the text.

    Attributes:
        lengths: of the text, in positions, rising.
        rows: of the head, that a cache has for a text of that length.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]


def cache_end(pattern: DilatedPattern, length: int) -> int:
    """Where a picture of a cache ends: with the segments that go on, or not far behind the text.

    Args:
        pattern: which keys each head sees.
        length: positions so far.
    """
    ends = [length // w * w + w for w in pattern.segment_lengths if w is not None]
    ahead = length + max(length // 4, _LEAST_AHEAD)
    return min(max(ends), ahead) if len(ends) == len(pattern.branches) else ahead


def kept_cells(
    pattern: DilatedPattern, num_kv_heads: int, kv_head: int, length: int, grid: Grid
) -> KeptCells:
    """What becomes of the rows of a head after `length` positions.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads.
        kv_head: which of them.
        length: positions so far.
        grid: which positions, some behind the text.
    """
    plan = costs.plan_any_length(pattern, num_kv_heads, max(grid.end, length))
    found = KeptCells(
        *(np.zeros((len(pattern.branches), grid.count), dtype=np.bool_) for _ in range(3))
    )
    for branch in plan.branches:
        for head, offset in branch.heads:
            if head == kv_head:
                _mark(found, branch, offset, length, grid)
    return found


def _mark(found: KeptCells, branch: CachedBranch, offset: int, length: int, grid: Grid) -> None:
    """Of one branch, in which the head has an offset."""
    kept = branch.kept(offset, length)
    per_segment, segment = branch.per_segment(offset), branch.segment_length
    following = kept.stop + grid.end  # a segment without an end
    if per_segment is not None and segment is not None:
        following = (length // segment + 1) * per_segment
    spans = range(kept.start), kept, range(kept.stop, following)
    for cell in range(grid.count):
        first = grid.start + cell * grid.size
        low, high = (
            branch.members_before(offset, position) for position in (first, first + grid.size)
        )
        for cells, span in zip(found, spans, strict=True):
            cells[branch.index, cell] = max(low, span.start) < min(high, span.stop)


def growth(
    pattern: DilatedPattern, num_kv_heads: int, kv_head: int, lengths: Sequence[int]
) -> Growth:
    """Rows that a cache has of a head, by the length of the text.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads.
        kv_head: which of them.
        lengths: of the text, in positions, rising.
    """
    rows = tuple(rows_of(pattern, num_kv_heads, kv_head, length) for length in lengths)
    return Growth(tuple(lengths), rows)


def lengths_around(pattern: DilatedPattern, length: int) -> list[int]:
    """Powers of two from well below to well above a length and the longest segment."""
    longest = longest_segment(pattern)
    last = (min(_GROWTH_BEYOND * max(length, longest), MOST_LENGTH) - 1).bit_length()
    first = min(last - _GROWTH_RANGE, min(length, longest).bit_length() - _GROWTH_BELOW)
    return [1 << power for power in range(max(first, 0), last + 1)]


def longest_segment(pattern: DilatedPattern) -> int:
    """Positions of the longest segment that ends; 1 if there is none."""
    return max((w for w in pattern.segment_lengths if w is not None), default=1)


def rows_of(pattern: DilatedPattern, num_kv_heads: int, kv_head: int, length: int) -> int:
    """Rows that a cache for a text of `length` positions has of a head."""
    plan = plan_cache(pattern, num_kv_heads, length)
    return sum(b.slots for b in plan.branches for head, _ in b.heads if head == kv_head)


def kept_rows(pattern: DilatedPattern, num_kv_heads: int, kv_head: int, length: int) -> int:
    """Rows of a head that a later position can still be shown, after `length` positions."""
    return costs.plan_any_length(pattern, num_kv_heads, length).kept_rows(length)[kv_head]
