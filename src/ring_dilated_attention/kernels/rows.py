"""Triton kernels for rows of strided views and for rows found by index: merged, added, taken.

A tile's results are added into strided views of the whole in one pass each. Views are (outer,
inner, rows, head_dim), head_dim contiguous, as the engine makes them. A program takes `BLOCK_ROWS`
rows of one (outer, inner) pair. Offsets are computed in int64: tensors may exceed 2^31 elements.
Strides are counted in units of `UNIT` elements: the compiler then knows that rows are aligned, and
is not to be asked again for every other stride.

What branches share of a message is sent once, so its rows are no strided views: they are found by
index. Tensors come in pairs, those of K and of V, of which a launch takes both. Nothing is added by
atomics: a row has one program, and sums go by the order of their table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from .blocks import stride_unit, strides_in
from .launch import KernelLaunch, kernel


@triton.jit
def _place(
    rows, row_blocks, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """The group of this program, its rows, which of them there are, and their elements."""
    program = tl.program_id(0)
    row = ((program % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    valid = row < rows
    where = valid[:, None] & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
    return program // row_blocks, row, valid, where


@triton.jit
def _elements(base, offsets, UNIT: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Pointers to the elements of rows, whose offsets are in units."""
    return base + offsets[:, None] * UNIT + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def _rows_of_view(group, inner, row, outer_stride, inner_stride, row_stride):
    """Offsets of rows of a view, whose (outer, inner) pair is a group."""
    outer, inner = (group // inner).to(tl.int64), (group % inner).to(tl.int64)
    return outer * outer_stride + inner * inner_stride + row * row_stride


@kernel(4)
def _merge_kernel(
    out, lse, tile_out, tile_lse, inner, rows, row_blocks,
    out_outer, out_inner, out_row, tile_outer, tile_inner, tile_row,
    lse_outer, lse_inner, lse_row, tile_lse_outer, tile_lse_inner, tile_lse_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    group, row, valid, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    lse_at = lse + _rows_of_view(group, inner, row, lse_outer, lse_inner, lse_row)
    of_out = _rows_of_view(group, inner, row, out_outer, out_inner, out_row)
    out_at = _elements(out, of_out, UNIT, BLOCK_DIM)
    of_tile = _rows_of_view(group, inner, row, tile_outer, tile_inner, tile_row)
    tile_lse += _rows_of_view(group, inner, row, tile_lse_outer, tile_lse_inner, tile_lse_row)
    new_lse = tl.load(tile_lse, mask=valid, other=-float("inf"))
    tile_at = _elements(tile_out, of_tile, UNIT, BLOCK_DIM)
    new = tl.load(tile_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        old_lse = tl.load(lse_at, mask=valid, other=-float("inf"))
        old = tl.load(out_at, mask=where, other=0.0).to(tl.float32)
        # Where one side has seen no key the other stands as it is; (-inf) - (-inf) never happens.
        nothing_new = new_lse == -float("inf")
        nothing_old = old_lse == -float("inf")
        difference = tl.where(nothing_new, 0.0, new_lse) - tl.where(nothing_old, 0.0, old_lse)
        weight = tl.where(nothing_new, 0.0, tl.sigmoid(difference))
        larger = tl.maximum(new_lse, old_lse)
        both = larger + tl.log(1.0 + tl.exp(-tl.abs(difference)))
        new_lse = tl.where(nothing_new | nothing_old, larger, both)
        merged = old + weight[:, None] * (new - old)
        new = tl.where(nothing_old[:, None], tl.where(nothing_new[:, None], old, new), merged)
        # Several warps may load the lse of one row, one stores it: all loads come first.
        tl.debug_barrier()
    tl.store(out_at, new.to(out.dtype.element_ty), mask=where)
    tl.store(lse_at, new_lse, mask=valid)


@kernel(6)
def _add_kernel(
    total, part, second_total, second_part, third_total, third_part, inner, rows, row_blocks,
    total_outer, total_inner, total_row, part_outer, part_inner, part_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 1:
        total, part = second_total, second_part
    if which == 2:
        total, part = third_total, third_part
    group, row, _, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    of_total = _rows_of_view(group, inner, row, total_outer, total_inner, total_row)
    of_part = _rows_of_view(group, inner, row, part_outer, part_inner, part_row)
    at = _elements(total, of_total, UNIT, BLOCK_DIM)
    part_at = _elements(part, of_part, UNIT, BLOCK_DIM)
    new = tl.load(part_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        new += tl.load(at, mask=where, other=0.0).to(tl.float32)
    tl.store(at, new.to(total.dtype.element_ty), mask=where)


@kernel(3)
def _delta_kernel(
    dout, out, delta, inner, rows, row_blocks,
    dout_outer, dout_inner, dout_row, out_outer, out_inner, out_row,
    delta_outer, delta_inner, delta_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    group, row, valid, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    of_dout = _rows_of_view(group, inner, row, dout_outer, dout_inner, dout_row)
    of_out = _rows_of_view(group, inner, row, out_outer, out_inner, out_row)
    dout_at = _elements(dout, of_dout, UNIT, BLOCK_DIM)
    out_at = _elements(out, of_out, UNIT, BLOCK_DIM)
    x = tl.load(dout_at, mask=where, other=0.0).to(tl.float32)
    y = tl.load(out_at, mask=where, other=0.0).to(tl.float32)
    delta += _rows_of_view(group, inner, row, delta_outer, delta_inner, delta_row)
    tl.store(delta, tl.sum(x * y, 1), mask=valid)


def merge_rows(
    out: torch.Tensor,
    lse: torch.Tensor,
    tile_out: torch.Tensor,
    tile_lse: torch.Tensor,
    *,
    store: bool,
) -> None:
    """Merge a tile's result into `out` and `lse`, in place: `engine.merge_` in one kernel.

    Args:
        out: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        lse: (outer, inner, rows) view, float32, natural log; -inf where nothing has been seen yet.
        tile_out: (outer, inner, rows, head_dim), head_dim contiguous.
        tile_lse: (outer, inner, rows), float32.
        store: whether to write the tile's result instead, without reading `out` and `lse`.
    """
    outer, inner, rows, head_dim = out.shape
    launch = _launch_of(
        (outer * inner, 1), (inner,), rows, head_dim, (out.stride(), tile_out.stride()),
        (lse.stride(), tile_lse.stride()), STORE=store,
    )  # fmt: skip
    _merge_kernel(launch, (out, lse, tile_out, tile_lse))


def add_rows(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, store: bool) -> None:
    """Add each part to its total in float32, in place; up to three that are alike share a launch.

    Args:
        totals: (outer, inner, rows, head_dim) views, any floating dtype but float64; disjoint.
        parts: views of the same shapes, any floating dtype but float64.
        store: whether to write the parts instead, without reading the totals.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for total, part in zip(totals, parts, strict=True):
        layout = total.shape, total.stride(), part.stride(), total.dtype, part.dtype
        alike.setdefault(layout, []).extend((total, part))
    for ((outer, inner, rows, head_dim), *strides, _, _), pairs in alike.items():
        launch = _launch_of(
            (outer * inner, 1), (inner,), rows, head_dim, tuple(strides), STORE=store
        )  # fmt: skip
        for start in range(0, len(pairs), 6):
            few = pairs[start : start + 6]
            grid = launch.grid[0], len(few) // 2
            few += few[:2] * (3 - grid[1])  # not touched: there is no program for them
            _add_kernel(launch._replace(grid=grid), few)


def row_sums(dout: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> None:
    """Write ``delta = rowsum(dout * out)``, computed in float32.

    Args:
        dout: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        out: view of the same shape, any floating dtype but float64.
        delta: (outer, inner, rows) view, float32.
    """
    outer, inner, rows, head_dim = out.shape
    strides = dout.stride(), out.stride()
    launch = _launch_of(
        (outer * inner, 1), (inner,), rows, head_dim, strides, (delta.stride(),)
    )  # fmt: skip
    _delta_kernel(launch, (dout, out, delta))


@lru_cache(maxsize=4096)  # of about 2 KiB: 8 MiB in all
def _launch_of(
    groups: tuple[int, int],
    sizes: tuple[int, ...],
    rows: int,
    head_dim: int,
    of_rows: tuple[tuple[int, ...], ...],
    of_sums: tuple[tuple[int, ...], ...] = (),
    **options: bool,
) -> KernelLaunch:
    """How to launch a kernel each of whose programs takes a block of rows.

    Worked out once for a layout: launches are short, and the layers of a model are alike.

    Args:
        groups: how many times `rows` rows there are, in both dimensions of the grid.
        sizes: what the kernel is told in front of `rows`.
        rows: of a group, which a program does not leave.
        head_dim: elements of a row.
        of_rows: strides of the tensors, those of head_dim left out or not.
        of_sums: strides of tensors without head_dim.
        options: what else the kernel is compiled for.
    """
    unit, block_dim = stride_unit(*of_rows), triton.next_power_of_2(head_dim)
    # 4,096 elements a program: 32 a thread at four warps.
    block_rows = max(1, 4096 // block_dim)  # of few rows too: other sizes would be compiled anew
    row_blocks = triton.cdiv(rows, block_rows)
    constants = {
        "UNIT": unit,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": block_rows,
        "BLOCK_DIM": block_dim,
        **options,
    }
    strides = *strides_in(unit, *of_rows), *strides_in(1, *of_sums)
    grid = groups[0] * row_blocks, groups[1]
    return KernelLaunch(grid, (*sizes, rows, row_blocks, *strides), constants, {})


@kernel(5)
def _index_kernel(
    first, second, packed, positions, heads, rows, row_blocks,
    first_batch, first_row, first_head, second_batch, second_row, second_head,
    packed_pair, packed_batch, packed_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BY_HEAD: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    group, row, valid, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    batch = group.to(tl.int64)
    base, of_batch, of_row, of_head = first, first_batch, first_row, first_head
    if tl.program_id(1) == 1:
        base, of_batch, of_row, of_head = second, second_batch, second_row, second_head
    offsets = batch * of_batch + tl.load(positions + row, mask=valid, other=0) * of_row
    if BY_HEAD:
        offsets += tl.load(heads + row, mask=valid, other=0) * of_head
    found = _elements(base, offsets, UNIT, BLOCK_DIM)
    pair = tl.program_id(1).to(tl.int64) * packed_pair
    at = _elements(packed, pair + batch * packed_batch + row * packed_row, UNIT, BLOCK_DIM)
    if ADDS:
        total = tl.load(found, mask=where, other=0.0).to(tl.float32)
        total += tl.load(at, mask=where, other=0.0).to(tl.float32)
        tl.store(found, total.to(first.dtype.element_ty), mask=where)
    else:
        tl.store(at, tl.load(found, mask=where), mask=where)


@triton.jit
def _slot(
    slots, order, from_slots, start, number, count, slots_row, where,
    UNIT: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One slot of each row, float32; 0 for rows that have fewer."""
    more = number < count
    slot = tl.load(order + start + number, mask=more, other=0)
    part = _elements(slots, from_slots + slot * slots_row, UNIT, BLOCK_DIM)
    return tl.load(part, mask=where & more[:, None], other=0.0).to(tl.float32)


@kernel(4)
def _sum_kernel(
    slots, sums, order, starts, rows, row_blocks,
    slots_pair, slots_batch, slots_row, sums_pair, sums_batch, sums_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    group, row, valid, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    batch = group.to(tl.int64)
    pair = tl.program_id(1).to(tl.int64)
    from_slots = pair * slots_pair + batch * slots_batch
    start = tl.load(starts + row, mask=valid, other=0)
    count = tl.load(starts + row + 1, mask=valid, other=0) - start
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for number in tl.static_range(2):  # loaded together: few rows have more slots
        total += _slot(
            slots, order, from_slots, start, number, count, slots_row, where, UNIT, BLOCK_DIM
        )
    for number in range(2, tl.max(count.to(tl.int32))):
        total += _slot(
            slots, order, from_slots, start, number, count, slots_row, where, UNIT, BLOCK_DIM
        )
    at = _elements(sums, pair * sums_pair + batch * sums_batch + row * sums_row, UNIT, BLOCK_DIM)
    tl.store(at, total.to(sums.dtype.element_ty), mask=where)


Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Tensors of one shape and dtype, of K and of V."""


def index_rows(
    pair: Pair,
    packed: torch.Tensor,
    positions: torch.Tensor,
    heads: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> None:
    """Copy rows, ``packed[i, b, j] = pair[i][b, positions[j], heads[j]]``; or add them, in float32.

    Args:
        pair: two views (batch, positions, heads, head_dim), or without `heads` (batch, positions,
            head_dim); head_dim contiguous, of any other strides and any floating dtype.
        packed: (2, batch, rows, head_dim) of the same dtype, head_dim contiguous.
        positions: int64 (rows,), contiguous, as all tables are.
        heads: int64 (rows,); None: the pair has no heads.
        adds: add to the rows of the pair instead, of which no two share memory: its dtype and that
            of `packed` may then be any two but float64.
    """
    by_head = heads is not None
    # Without heads there is one, whose stride does not matter.
    strides = [x.stride() if by_head else (*x.stride()[:2], 0, 1) for x in pair]
    launch = _launch_of(
        (packed.shape[1], packed.shape[0]), (), len(positions), packed.shape[3],
        (*strides, packed.stride()), BY_HEAD=by_head, ADDS=adds,
    )  # fmt: skip
    _index_kernel(launch, (*pair, packed, positions, positions if heads is None else heads))


def sum_slots(
    slots: torch.Tensor, sums: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> None:
    """Sum the slots of each row in float32, one after the other; rounds once.

    ``sums[i, b, j] = sum(slots[i, b, order[starts[j] : starts[j + 1]]])``.

    Args:
        slots: (2, batch, slots, head_dim), head_dim contiguous, any floating dtype but float64.
        sums: (2, batch, rows, head_dim), head_dim contiguous, any floating dtype but float64.
        order: int64 (slots,): the slots of row 0, of row 1, and so on.
        starts: int64 (rows + 1,): where in `order` those of each row begin, and the end.
    """
    pair, batch, rows, head_dim = sums.shape
    strides = slots.stride(), sums.stride()
    launch = _launch_of((batch, pair), (), rows, head_dim, strides)
    _sum_kernel(launch, (slots, sums, order, starts))


@kernel(6)
def _rotate_kernel(
    query, key, query_out, key_out, cos, sin, rows, query_heads, key_heads, query_blocks, blocks,
    query_batch, query_row, query_head, key_batch, key_row, key_head, table_batch, table_row,
    UNIT: tl.constexpr, HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    is_key = block >= query_blocks
    x, out = query, query_out
    if is_key:
        x, out = key, key_out
    heads = tl.where(is_key, key_heads, query_heads)
    # Heads of one row are neighbours, in memory too, and share what is read of the tables.
    first = tl.where(is_key, block - query_blocks, block).to(tl.int64) * BLOCK_ROWS
    behind = (first % heads).to(tl.int32) + tl.arange(0, BLOCK_ROWS)
    row, head = first // heads + behind // heads, behind % heads
    column = tl.arange(0, BLOCK_HALF)[None, :]
    where = (row < rows)[:, None] & (column < HALF)

    offsets = batch * tl.where(is_key, key_batch, query_batch)
    offsets += row * tl.where(is_key, key_row, query_row)
    offsets += head * tl.where(is_key, key_head, query_head).to(tl.int64)
    at = x + offsets[:, None] * UNIT + column
    low = tl.load(at, mask=where, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=where, other=0.0).to(tl.float32)
    table = (batch * table_batch + row * table_row)[:, None] * UNIT + column
    of_low = tl.load(cos + table, mask=where, other=0.0)
    of_high = tl.load(cos + table + HALF, mask=where, other=0.0)
    # What of the high half comes to the low one, and the reverse.
    to_low = tl.load(sin + table + HALF * TRANSPOSED, mask=where, other=0.0)
    to_high = tl.load(sin + table + HALF * (1 - TRANSPOSED), mask=where, other=0.0)
    to = out + (((batch * rows + row) * heads + head) * (2 * HALF))[:, None] + column
    dtype = out.dtype.element_ty
    tl.store(to, (low * of_low + high * to_low).to(dtype), mask=where)
    tl.store(to + HALF, (high * of_high + low * to_high).to(dtype), mask=where)


def rotate_rows(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the pairs (x[i], x[i + head_dim // 2]) of query and key: ``x * cos + swap(x) * sin``.

    swap exchanges the halves of a row. Computed in float32, rounded once.

    Args:
        query: (batch, rows, heads, head_dim), any floating dtype but float64; head_dim even and
            contiguous.
        key: (batch, rows, kv_heads, head_dim), same dtype, head_dim contiguous; kv_heads may be 0.
        cos: (batch, rows, head_dim), float32, head_dim contiguous; a batch stride may be 0.
        sin: like `cos`, of the same strides.
        transposed: whether to apply the transpose, ``x * cos + swap(x * sin)``, as backward does.

    Returns:
        Both rotated, contiguous.
    """
    outs = tuple(x.new_empty(x.shape) for x in (query, key))
    strides = query.stride(), key.stride(), cos.stride()
    launch = _rotate_launch(query.shape, key.shape[2], strides, transposed)
    if launch.grid[0]:
        _rotate_kernel(launch, (query, key, *outs, cos, sin))
    return outs[0], outs[1]


@lru_cache(maxsize=1024)
def _rotate_launch(
    shape: torch.Size, kv_heads: int, strides: tuple[tuple[int, ...], ...], transposed: bool
) -> KernelLaunch:
    """Of a query of this shape; `strides` of query, key and cos."""
    batch, rows, heads, head_dim = shape
    assert head_dim % 2 == 0
    of_heads, of_table = strides[:2], (*strides[2][:2], 0)  # a table has no heads
    unit, block_half = stride_unit(*of_heads, of_table), triton.next_power_of_2(head_dim // 2)
    block_rows = max(1, 1024 // block_half)  # of a half: 8 elements a thread at four warps
    query_blocks, key_blocks = (triton.cdiv(rows * n, block_rows) for n in (heads, kv_heads))
    blocks = query_blocks + key_blocks
    sizes = rows, heads, kv_heads, query_blocks, blocks
    numbers = *sizes, *strides_in(unit, *of_heads), *strides_in(unit, of_table)[:2]
    constants = {
        "UNIT": unit,
        "HALF": head_dim // 2,
        "BLOCK_ROWS": block_rows,
        "BLOCK_HALF": block_half,
        "TRANSPOSED": int(transposed),
    }
    return KernelLaunch((batch * blocks, 1), numbers, constants, {})
