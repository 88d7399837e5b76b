"""What one new position writes to a KV cache and reads of it. Integers only."""

from __future__ import annotations

from typing import NamedTuple

from .cache import CachePlan


class StepTile(NamedTuple):
    """Rows of a cache that some heads are shown, side by side in memory for each of them.

    Attributes:
        kv_heads: which heads.
        heads: how many they are.
        first_row: of the first head, among the rows of a batch row.
        head_stride: from the rows of one head to those of the next.
        rows: of each head.
    """

    kv_heads: slice
    heads: int
    first_row: int
    head_stride: int
    rows: int


class CacheStep(NamedTuple):
    """One new position, on one rank.

    Attributes:
        sources: KV heads whose new row is kept, one for each place.
        targets: where: rows of a batch row.
        tiles: what the heads are shown, once the new rows are there.
        places: for each KV head, where its tiles are: which of the heads of all tiles, these
            numbered through. Heads have different numbers of them.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    tiles: tuple[StepTile, ...]
    places: tuple[tuple[int, ...], ...]


def plan_step(plan: CachePlan, length: int, shard: int) -> CacheStep:
    """One new position behind `length`.

    Args:
        plan: of the cache.
        length: positions so far.
        shard: of the rows, which the rank has; 0 where it has them all.
    """
    sources: list[int] = []
    targets: list[int] = []
    for kept in plan.appended(length, 1, shard):
        slots = kept.branch.slots
        slot = kept.members.start % slots
        places = range(len(kept.branch.heads))[kept.heads]
        sources += range(plan.num_kv_heads)[kept.kv_heads]
        targets += [kept.branch.first_row + place * slots + slot for place in places]
    tiles: list[StepTile] = []
    found: list[list[int]] = [[] for _ in range(plan.num_kv_heads)]
    numbered = 0
    for tile in plan.new_tiles(length, 1):
        shown = range(tile.kept.start, tile.kept.stop + 1)  # the new row too
        own, slots = plan.own_members(shown, shard), tile.branch.slots
        places = range(len(tile.branch.heads))[tile.heads]
        first = tile.branch.first_row + places.start * slots
        for run in _runs(own, slots):
            tiles.append(
                StepTile(
                    tile.kv_heads, len(places), first + run.start, places.step * slots, len(run)
                )
            )
            for head in range(plan.num_kv_heads)[tile.kv_heads]:
                found[head].append(numbered)
                numbered += 1
    return CacheStep(tuple(sources), tuple(targets), tuple(tiles), tuple(map(tuple, found)))


def _runs(members: range, slots: int) -> list[range]:
    """The slots of consecutive members, at most as many as slots: at most two runs."""
    if not members:
        return []
    first = members.start % slots
    before_end = min(len(members), slots - first)
    runs = [range(first, first + before_end), range(len(members) - before_end)]
    return [run for run in runs if run]
