"""How a group of tiles is computed: block by block, or in one launch of table-driven kernels."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..caches import keep_few
from ..plan import PackedTiles, Tile, TileGroup
from .blocks import Block, families
from .device_tables import TABLES


class Launch(NamedTuple):
    """A launch of the table-driven kernels."""

    cells: Any
    config: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tables on the device."""
        cells = self.cells
        return cells.table, cells.query_programs, cells.key_programs


@dataclass(frozen=True, eq=False)
class Schedule:
    """How the tiles of a group are computed: block by block, or all in one launch.

    Attributes:
        blocks: a kernel call each, sorted by their number of pairs, fewest first.
        table: tiles of the launch.
        packed: more of them.
        flops: operations of forward of `table`.
        parts: the kernel calls of the blocks, for each of the last few layouts: see `parts`.
    """

    blocks: tuple[Block, ...]
    table: tuple[Tile, ...]
    packed: tuple[PackedTiles, ...] = ()
    flops: int = 0
    parts: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def shares_launch(self) -> bool:
        """Whether any tile is computed by the table-driven kernel."""
        return bool(self.table or self.packed)

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and keys of a cell of the launch."""
        many = [max(tiles.lengths) for tiles in self.packed]
        return (
            max([tile.queries.length for tile in self.table] + many),
            max([tile.keys.length for tile in self.table] + many),
        )


SCHEDULES: WeakKeyDictionary[TileGroup, dict[Hashable, Schedule]] = WeakKeyDictionary()
"""Kept as long as the plan of their group lives. A schedule takes about as many bytes as its
tiles."""
_SCHEDULES_KEPT = 8


def schedule_of(
    group: TileGroup, batch: int, heads_per_kv: int, head_dim: int, table_flops: float
) -> Schedule:
    """How a group is computed; kept for the next call.

    Args:
        group: the tiles.
        batch: sequences in the batch.
        heads_per_kv: query heads of a KV head.
        head_dim: elements of a row of a head.
        table_flops: blocks of at most this number of operations share a launch.
    """
    key = batch, heads_per_kv, head_dim, table_flops
    kept = SCHEDULES.setdefault(group, {})
    return kept.get(key) or keep_few(
        kept, key, partial(_make_schedule, group, *key), _SCHEDULES_KEPT
    )


def _make_schedule(
    group: TileGroup, batch: int, heads_per_kv: int, head_dim: int, table_flops: float
) -> Schedule:
    blocks: list[Block] = []
    table: list[Tile] = []
    packed: list[PackedTiles] = []
    single, launch_flops = list(group.single), 0
    for many in group.packed:
        # A block would be a tile of all rows of the batch: (4, or causal 2) * its pairs operations.
        flops = (2 if many.is_causal else 4) * head_dim * batch * len(many.heads)
        short, long = many.split(math.sqrt(table_flops / flops))
        packed.extend([short] if short.starts else [])
        single.extend(long.tiles())
    for family in families(single):
        cut = list(family.blocks(batch, heads_per_kv))
        flops_of_cut = 4 * head_dim * sum(block.pairs for block in cut)
        if flops_of_cut <= table_flops * len(cut):
            table.extend(family.tiles)
            launch_flops += flops_of_cut
        else:
            blocks.extend(cut)
    blocks.sort(key=attrgetter("pairs"))  # the small ones first, to run beside the others
    return Schedule(tuple(blocks), tuple(table), tuple(packed), launch_flops)


def launch_of(work: Schedule, *key: Any) -> Launch:
    """The tables of a launch, on the device, and its configuration; kept for the next call.

    Args:
        work: of which the launch is.
        key: ``"forward"`` or ``"backward"``, batch, query heads of a KV head, head_dim, dtype and
            device.
    """
    device = key[-1]
    return TABLES.get(work, key, device, partial(_make_launch, work, *key))


def _make_launch(
    work: Schedule,
    direction: str,
    batch: int,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The tables of a launch, on the device, and its configuration."""
    from ..kernels import BackwardConfig, Kernel, LaunchConfig, build_cells, default_config

    queries, keys = work.longest

    def config(kernel: Kernel) -> LaunchConfig:
        return default_config(kernel, head_dim, dtype, queries=queries, keys=keys, device=device)

    chosen: LaunchConfig | BackwardConfig
    if direction == "forward":
        chosen = config("forward")
        block_m, block_n = chosen.block_m, chosen.block_n
    else:
        chosen = BackwardConfig(config("dq"), config("dkdv"))
        block_m, block_n = chosen.dq.block_m, chosen.dkdv.block_n
    cells = build_cells(
        work.table,
        work.packed,
        batch=batch,
        heads_per_kv=heads_per_kv,
        block_m=block_m,
        block_n=block_n,
        device=device,
    )
    return Launch(cells, chosen)
