"""Zero keys: how many of them the cells of a pattern with ``zero_keys=True`` show. Integers only.

Such a cell has ceil(w / r) rows, w being the segment length clamped to its document. Those that the
document does not hold have key and value 0: a score of 0 in the softmax, and nothing else. They are
the same for every query of the cell, so they need no rows, no rank holds them and none travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from .parts import Link, OwnRun, Part, own_segments
from .rows import Rows, Tile, TileGroup
from .tiling import Tiling


def zero_key_groups(tiling: Tiling, parts: Iterable[Part]) -> tuple[TileGroup, ...]:
    """The queries of `parts` that see zero keys, and how many.

    Every such query sees its own key too, so its lse is finite without them. Causal queries see
    none: zero keys come last in their cell.

    Args:
        tiling: of the pattern.
        parts: positions that a rank holds in consecutive local rows.

    Returns:
        One group per branch that has any. The queries of a tile are local rows; its keys are rows
        of nothing, and their `length` is how many zero keys each of the queries sees.
    """
    if not tiling.pattern.zero_keys or tiling.is_causal:
        return ()
    parts = tuple(parts)
    groups = (
        tuple(tile for part in parts for tile in zero_key_tiles(tiling, branch, part))
        for branch in range(len(tiling.heads))
    )
    return tuple(TileGroup(tiles) for tiles in groups if tiles)


def zero_key_tiles(
    tiling: Tiling, branch: int, part: Part, skips: Callable[[int], bool] = lambda row: False
) -> Iterator[Tile]:
    """The tiles of `zero_key_groups` of one branch and one part.

    Args:
        tiling: of the pattern.
        branch: which branch.
        part: positions that a rank holds in consecutive local rows.
        skips: whether the segments of the branch that a local row is in are left out.
    """
    length, rate = tiling.pattern.branches[branch]
    w = part.segment_length(length)
    full = -(-w // rate)
    offsets = dict(tiling.heads[branch])
    for start, stop, count in own_segments(part, length):
        size, first_row = stop - start, part.local_row(max(start, part.start))
        if full * rate == size or skips(first_row):
            continue  # as all full segments of a length that the rate divides
        if part.start <= start and stop <= part.stop:
            for tile in tiling.run_tiles(branch, OwnRun(size, 0, first_row, count)):
                if zeros := full - tile.queries.length:
                    yield tile._replace(keys=Rows(0, zeros, 0, 0))
            continue
        missing = {head: full - len(range(own, size, rate)) for head, own in offsets.items()}
        for tile in tiling.tiles(Link(branch, part, part, start, stop), segments=count):
            # Heads of a tile have as many rows in the part, but not always in the segment.
            first = 0
            for zeros, alike in groupby([missing[head] for head in tile.heads]):
                heads = len(list(alike))
                if zeros:
                    rows = tile.queries
                    yield tile._replace(
                        heads=tile.heads[first : first + heads],
                        queries=rows._replace(start=rows.start + first * rows.head_stride),
                        keys=Rows(0, zeros, 0, 0),
                    )
                first += heads
