"""Tables that tell one kernel launch where the rows of many tiles are.

A cell is (tile, segment, KV head, batch entry): rows that attend to each other and to nothing
else. Query row i of the m-th of the `heads_per_kv` query heads that share a KV head is row
``q_row + i * q_stride`` of head ``kv_head * heads_per_kv + m``; key row i is row
``k_row + i * k_stride`` of head `kv_head`. Rows count in the sequence dimension, so that a table
fits tensors of any strides.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ..plan import PackedTiles, Tile
from .launch import KernelLaunch
from .tables import moved_together, spread

if TYPE_CHECKING:
    from .tables import Table

CELL_FIELDS = ("batch", "kv_head", "q_row", "q_stride", "q_len", "k_row", "k_stride", "k_len")


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells of some tiles, and the programs that compute them, longest first.

    Attributes:
        table: int64 (cells, 8): `CELL_FIELDS`.
        query_programs: int32 (programs, 3): cell, member, block of queries. For forward and dq.
        key_programs: int32 (programs, 2): cell, block of keys. For dk and dv.
        block_m: queries per block.
        block_n: keys per block, in `key_programs`.
        heads_per_kv: query heads per KV head.
        is_causal: whether row i sees keys 0 to i only.
        max_queries: most queries in a cell.
        max_keys: most keys in a cell.
        max_stride: largest step from row to row.
        launches: how kernels are launched on them, for each of the last few layouts.
    """

    table: torch.Tensor
    query_programs: torch.Tensor
    key_programs: torch.Tensor
    block_m: int
    block_n: int
    heads_per_kv: int
    is_causal: bool
    max_queries: int
    max_keys: int
    max_stride: int
    launches: dict[Hashable, KernelLaunch] = field(default_factory=dict, repr=False, compare=False)


def build_cells(
    tiles: Sequence[Tile],
    packed: Sequence[PackedTiles] = (),
    *,
    batch: int,
    heads_per_kv: int,
    block_m: int,
    block_n: int,
    device: torch.device | str,
) -> Cells:
    """Lay out tiles for one launch.

    Args:
        tiles: all causal or none; no two share a (query row, head) or a (key row, head).
        packed: further such tiles.
        batch: batch entries.
        heads_per_kv: query heads per KV head.
        block_m: queries per block.
        block_n: keys per block of the dk, dv kernel.
        device: where the kernels run.
    """
    import numpy as np

    kinds = {tile.is_causal for tile in tiles} | {many.is_causal for many in packed}
    if len(kinds) > 1:
        raise ValueError("the tiles of a launch must be all causal or none")
    is_causal = kinds == {True}
    parts = [_table(tiles, batch), *(_packed_table(many, batch) for many in packed)]
    table = np.concatenate(parts)
    q_len, k_len = table[:, 4], table[:, 7]
    assert not len(table) or table[:, [4, 7]].min() > 0

    cell, block = _blocks(q_len, block_m)
    # Rows of work: a causal block of queries sees no key behind it.
    work = np.minimum((block + 1) * block_m, q_len[cell]) if is_causal else k_len[cell]
    cell, block = _longest_first(work, cell, block)
    query_programs = np.empty((len(cell), heads_per_kv, 3), dtype=np.int32)
    query_programs[..., 0] = cell[:, None]
    query_programs[..., 1] = np.arange(heads_per_kv)
    query_programs[..., 2] = block[:, None]

    cell, block = _blocks(k_len, block_n)
    work = q_len[cell] - block * block_n if is_causal else q_len[cell]
    key_programs = np.stack(_longest_first(work, cell, block), 1).astype(np.int32)

    on_device = moved_together(device, table, query_programs.reshape(-1, 3), key_programs)
    return Cells(
        table=on_device[0],
        query_programs=on_device[1],
        key_programs=on_device[2],
        block_m=block_m,
        block_n=block_n,
        heads_per_kv=heads_per_kv,
        is_causal=is_causal,
        max_queries=int(q_len.max(initial=0)),
        max_keys=int(k_len.max(initial=0)),
        max_stride=int(table[:, [3, 6]].max(initial=0)),
    )


def _table(tiles: Sequence[Tile], batch: int) -> Table:
    """int64 (cells, 8): per tile the batch entries, of each the segments, of each the heads."""
    import numpy as np

    values = (
        (heads.start, heads.step, len(heads), segments, *queries, *keys)
        for _, heads, segments, _, queries, keys in tiles
    )
    fields = np.fromiter(chain.from_iterable(values), np.int64).reshape(-1, 14)
    tile, number = spread(batch * fields[:, 2] * fields[:, 3])
    # Columns, each with one value per cell.
    head, head_step, heads, segments, *rows = fields[tile].T
    segment, j = number // heads, number % heads
    entry, segment = segment // segments, segment % segments
    columns = [entry, head + j * head_step]
    for start, length, stride, head_stride, segment_stride in (rows[:5], rows[5:]):
        columns += [start + segment * segment_stride + j * head_stride, stride, length]
    return np.stack(columns, 1)


def _packed_table(many: PackedTiles, batch: int) -> Table:
    """int64 (cells, 8): per batch entry the tiles, of each the heads."""
    import numpy as np

    heads = len(many.heads)
    table = np.empty((batch, len(many.starts), heads, len(CELL_FIELDS)), dtype=np.int64)
    starts, lengths = (np.array(x)[:, None] for x in (many.starts, many.lengths))
    number = np.arange(heads)
    table[..., 0] = np.arange(batch)[:, None, None]
    table[..., 1] = many.heads.start + number * many.heads.step
    for rows in (table[..., 2:5], table[..., 5:]):
        rows[..., 0] = starts + number * many.head_stride
        rows[..., 1] = many.stride
        rows[..., 2] = lengths
    return table.reshape(-1, len(CELL_FIELDS))


def _blocks(lengths: Table, block: int) -> tuple[Table, Table]:
    """Cut rows into blocks: the cell of each, and its number within the cell."""
    return spread((lengths + block - 1) // block)


def _longest_first(work: Table, *columns: Table) -> tuple[Table, ...]:
    if len(work) < 2 or work.min() == work.max():
        return columns
    order = (-work).argsort(kind="stable")
    return tuple(column[order] for column in columns)
