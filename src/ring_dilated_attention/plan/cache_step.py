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
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    tiles: tuple[StepTile, ...]

    def places(self, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
        """For each KV head, where its tiles are: heads have different numbers of them.

        Args:
            num_kv_heads: of the cache.

        Returns:
            Which of the heads of all tiles, these numbered through.
        """
        found: list[list[int]] = [[] for _ in range(num_kv_heads)]
        numbered = 0
        for tile in self.tiles:
            for head in range(num_kv_heads)[tile.kv_heads]:
                found[head].append(numbered)
                numbered += 1
        return tuple(map(tuple, found))


def plan_step(plan: CachePlan, length: int, shard: int) -> CacheStep:
    """One new position behind `length`.

    It is worked out in every step of generation: a few operations for each branch.

    Args:
        plan: of the cache.
        length: positions so far.
        shard: of the rows, which the rank has; 0 where it has them all.
    """
    sources: list[int] = []
    targets: list[int] = []
    tiles: list[StepTile] = []
    for branch in plan.branches:
        found = branch.shown_at(length)
        if found is None:
            continue
        (kv_heads, numbers, first_row, stride), members = found
        slots, heads = branch.slots, len(numbers)
        number, owner = divmod(members[-1], plan.shards)
        if owner == shard:
            sources += numbers
            slot = first_row + number % slots
            targets += range(slot, slot + heads * stride, stride)
        for run in _runs(plan.own_members(members, shard), slots):
            tiles.append(StepTile(kv_heads, heads, first_row + run.start, stride, len(run)))
    return CacheStep(tuple(sources), tuple(targets), tuple(tiles))


def _runs(members: range, slots: int) -> list[range]:
    """The slots of consecutive members, at most as many as slots: at most two runs."""
    first, count = members.start % slots, len(members)
    if first + count <= slots:
        return [range(first, first + count)] if count else []
    return [range(first, slots), range(first + count - slots)]
