"""Tables that tell one kernel launch where the rows of many tiles are.

A cell is (tile, segment, KV head, batch entry): rows that attend to each other and to nothing
else. Query row i of the m-th of the `heads_per_kv` query heads that share a KV head is row
``q_row + i * q_stride`` of head ``kv_head * heads_per_kv + m``; key row i is row
``k_row + i * k_stride`` of head `kv_head`. Rows count in the sequence dimension, so that a table
fits tensors of any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..plan import PackedTiles, Tile

CELL_FIELDS = ("batch", "kv_head", "q_row", "q_stride", "q_len", "k_row", "k_stride", "k_len")

_ALIGNMENT = 16
"""Bytes at which a table starts: Triton compiles a kernel anew for a pointer that is not so."""


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
    kinds = {tile.is_causal for tile in tiles} | {many.is_causal for many in packed}
    if len(kinds) > 1:
        raise ValueError("the tiles of a launch must be all causal or none")
    is_causal = kinds == {True}
    table = torch.cat([_table(tiles, batch), *(_packed_table(many, batch) for many in packed)])
    q_len, k_len = table[:, 4], table[:, 7]
    assert not len(table) or table[:, [4, 7]].min() > 0

    cell, block = _blocks(q_len, block_m)
    # Rows of work: a causal block of queries sees no key behind it.
    work = torch.minimum((block + 1) * block_m, q_len[cell]) if is_causal else k_len[cell]
    cell, block = _longest_first(work, cell, block)
    query_programs = torch.empty(len(cell), heads_per_kv, 3, dtype=torch.int32)
    query_programs[..., 0] = cell[:, None]
    query_programs[..., 1] = torch.arange(heads_per_kv)
    query_programs[..., 2] = block[:, None]

    cell, block = _blocks(k_len, block_n)
    work = q_len[cell] - block * block_n if is_causal else q_len[cell]
    key_programs = torch.stack(_longest_first(work, cell, block), 1)

    on_device = _moved(device, table, query_programs.flatten(0, 1), key_programs.int())
    return Cells(
        table=on_device[0],
        query_programs=on_device[1],
        key_programs=on_device[2],
        block_m=block_m,
        block_n=block_n,
        heads_per_kv=heads_per_kv,
        is_causal=is_causal,
        max_queries=_largest(q_len),
        max_keys=_largest(k_len),
        max_stride=_largest(table[:, [3, 6]]),
    )


def _moved(device: torch.device | str, *tables: torch.Tensor) -> list[torch.Tensor]:
    """Tables of a few rows are many: they go to the device together, in one allocation."""
    sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tables]
    together = torch.zeros(sum(sizes), dtype=torch.uint8)
    for table, place in zip(tables, together.split(sizes), strict=True):
        place[: table.nbytes] = table.flatten().view(torch.uint8)
    places = together.to(device).split(sizes)
    return [
        place[: x.nbytes].view(x.dtype).view(x.shape)
        for x, place in zip(tables, places, strict=True)
    ]


def _largest(numbers: torch.Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else 0


def _table(tiles: Sequence[Tile], batch: int) -> torch.Tensor:
    """int64 (cells, 8): per tile the batch entries, of each the segments, of each the heads."""
    fields = torch.tensor(
        [
            (t.heads.start, t.heads.step, len(t.heads), t.segments, *t.queries, *t.keys)
            for t in tiles
        ],
        dtype=torch.int64,
    ).reshape(-1, 14)
    counts = batch * fields[:, 2] * fields[:, 3]
    tile = torch.arange(len(tiles)).repeat_interleave(counts)
    number = torch.arange(len(tile)) - (counts.cumsum(0) - counts)[tile]
    # Columns, each with one value per cell.
    head, head_step, heads, segments, *rows = (column[tile] for column in fields.T.contiguous())
    segment, j = number // heads, number % heads
    entry, segment = segment // segments, segment % segments
    columns = [entry, head + j * head_step]
    for start, length, stride, head_stride, segment_stride in (rows[:5], rows[5:]):
        columns += [start + segment * segment_stride + j * head_stride, stride, length]
    return torch.stack(columns, 1)


def _packed_table(many: PackedTiles, batch: int) -> torch.Tensor:
    """int64 (cells, 8): per batch entry the tiles, of each the heads."""
    heads = len(many.heads)
    table = torch.empty(batch, len(many.starts), heads, len(CELL_FIELDS), dtype=torch.int64)
    starts, lengths = (torch.tensor(x).unsqueeze(1) for x in (many.starts, many.lengths))
    number = torch.arange(heads)
    table[..., 0] = torch.arange(batch)[:, None, None]
    table[..., 1] = many.heads.start + number * many.heads.step
    for rows in (table[..., 2:5], table[..., 5:]):
        rows[..., 0] = starts + number * many.head_stride
        rows[..., 1] = many.stride
        rows[..., 2] = lengths
    return table.flatten(0, 2)


def _blocks(lengths: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut rows into blocks: the cell of each, and its number within the cell."""
    counts = (lengths + block - 1) // block
    cell = torch.arange(len(lengths)).repeat_interleave(counts)
    return cell, torch.arange(len(cell)) - (counts.cumsum(0) - counts)[cell]


def _longest_first(work: torch.Tensor, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if len(work) < 2 or work.min() == work.max():
        return columns
    order = torch.argsort(work.int(), descending=True, stable=True)
    return tuple(column[order] for column in columns)
