"""Triton kernels that add a tile's results into strided views of the whole: one pass each.

Views are (outer, inner, rows, head_dim), head_dim contiguous, as the engine makes them. A
program takes `BLOCK_ROWS` rows of one (outer, inner) pair. Offsets are computed in int64: tensors
may exceed 2^31 elements. Strides are counted in units of `UNIT` elements: the compiler then knows
that rows are aligned, and is not to be asked again for every other stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl

from .blocks import row_launch
from .launch import KernelLaunch, Launcher


@triton.jit
def _place(inner, row_blocks, BLOCK_ROWS: tl.constexpr):
    """The (outer, inner) pair of this program, and its rows."""
    program = tl.program_id(0)
    pair = program // row_blocks
    row = (program % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return (pair // inner).to(tl.int64), (pair % inner).to(tl.int64), row.to(tl.int64)


@triton.jit
def _rows_at(base, a, b, row, dim, outer, inner, stride, UNIT: tl.constexpr):
    """Pointers to rows of a pair: strides are in units."""
    return base + (a * outer + b * inner + row[:, None] * stride) * UNIT + dim[None, :]


@triton.jit
def _sigmoid(x):
    # The exponential of a number that is never positive cannot overflow.
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit(
    do_not_specialize=[
        "inner", "rows", "row_blocks", "out_outer", "out_inner", "out_row",
        "tile_outer", "tile_inner", "tile_row", "lse_outer", "lse_inner", "lse_row",
        "tile_lse_outer", "tile_lse_inner", "tile_lse_row",
    ]
)  # fmt: skip
def _merge_kernel(
    out, lse, tile_out, tile_lse, inner, rows, row_blocks,
    out_outer, out_inner, out_row, tile_outer, tile_inner, tile_row,
    lse_outer, lse_inner, lse_row, tile_lse_outer, tile_lse_inner, tile_lse_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    valid = row < rows
    where = valid[:, None] & (dim < HEAD_DIM)[None, :]
    lse_at = lse + a * lse_outer + b * lse_inner + row * lse_row
    out_at = _rows_at(out, a, b, row, dim, out_outer, out_inner, out_row, UNIT)
    tile_lse_at = tile_lse + a * tile_lse_outer + b * tile_lse_inner + row * tile_lse_row
    tile_at = _rows_at(tile_out, a, b, row, dim, tile_outer, tile_inner, tile_row, UNIT)
    new_lse = tl.load(tile_lse_at, mask=valid, other=-float("inf"))
    new = tl.load(tile_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        old_lse = tl.load(lse_at, mask=valid, other=-float("inf"))
        old = tl.load(out_at, mask=where, other=0.0).to(tl.float32)
        # Where one side has seen no key the other stands as it is; (-inf) - (-inf) never happens.
        nothing_new = new_lse == -float("inf")
        nothing_old = old_lse == -float("inf")
        difference = tl.where(nothing_new, 0.0, new_lse) - tl.where(nothing_old, 0.0, old_lse)
        weight = tl.where(nothing_new, 0.0, _sigmoid(difference))
        larger = tl.maximum(new_lse, old_lse)
        both = larger + tl.log(1.0 + tl.exp(-tl.abs(difference)))
        new_lse = tl.where(nothing_new | nothing_old, larger, both)
        merged = old + weight[:, None] * (new - old)
        new = tl.where(nothing_old[:, None], tl.where(nothing_new[:, None], old, new), merged)
        # Several warps may load the lse of one row, one stores it: all loads come first.
        tl.debug_barrier()
    tl.store(out_at, new.to(out.dtype.element_ty), mask=where)
    tl.store(lse_at, new_lse, mask=valid)


@triton.jit(
    do_not_specialize=[
        "inner", "rows", "row_blocks", "total_outer", "total_inner", "total_row",
        "part_outer", "part_inner", "part_row",
    ]
)  # fmt: skip
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
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    where = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    at = _rows_at(total, a, b, row, dim, total_outer, total_inner, total_row, UNIT)
    part_at = _rows_at(part, a, b, row, dim, part_outer, part_inner, part_row, UNIT)
    new = tl.load(part_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        new += tl.load(at, mask=where, other=0.0).to(tl.float32)
    tl.store(at, new.to(total.dtype.element_ty), mask=where)


@triton.jit(
    do_not_specialize=[
        "inner", "rows", "row_blocks", "dout_outer", "dout_inner", "dout_row",
        "out_outer", "out_inner", "out_row", "delta_outer", "delta_inner", "delta_row",
    ]
)  # fmt: skip
def _delta_kernel(
    dout, out, delta, inner, rows, row_blocks,
    dout_outer, dout_inner, dout_row, out_outer, out_inner, out_row,
    delta_outer, delta_inner, delta_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    where = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    dout_at = _rows_at(dout, a, b, row, dim, dout_outer, dout_inner, dout_row, UNIT)
    out_at = _rows_at(out, a, b, row, dim, out_outer, out_inner, out_row, UNIT)
    x = tl.load(dout_at, mask=where, other=0.0).to(tl.float32)
    y = tl.load(out_at, mask=where, other=0.0).to(tl.float32)
    delta_at = delta + a * delta_outer + b * delta_inner + row * delta_row
    tl.store(delta_at, tl.sum(x * y, 1), mask=row < rows)


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
    of_rows = out.stride(), tile_out.stride()
    launch = _launch_of(out.shape, of_rows, (lse.stride(), tile_lse.stride()), STORE=store)
    _launch_merge(launch.grid, (out, lse, tile_out, tile_lse), *launch[1:])


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
    for (shape, *strides, _, _), pairs in alike.items():
        launch = _launch_of(shape, tuple(strides), STORE=store)
        for start in range(0, len(pairs), 6):
            few = pairs[start : start + 6]
            grid = launch.grid[0], len(few) // 2
            few += few[:2] * (3 - grid[1])  # not touched: there is no program for them
            _launch_add(grid, few, *launch[1:])


def row_sums(dout: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> None:
    """Write ``delta = rowsum(dout * out)``, computed in float32.

    Args:
        dout: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        out: view of the same shape, any floating dtype but float64.
        delta: (outer, inner, rows) view, float32.
    """
    launch = _launch_of(out.shape, (dout.stride(), out.stride()), (delta.stride(),))
    _launch_delta(launch.grid, (dout, out, delta), *launch[1:])


_launch_merge, _launch_add, _launch_delta = map(
    Launcher, (_merge_kernel, _add_kernel, _delta_kernel)
)


@lru_cache(maxsize=4096)  # of about 2 KiB: 8 MiB in all
def _launch_of(
    shape: torch.Size,
    of_rows: tuple[tuple[int, ...], ...],
    of_sums: tuple[tuple[int, ...], ...] = (),
    **options: bool,
) -> KernelLaunch:
    """How to launch a kernel that goes over all rows of views of this shape.

    Worked out once for a layout: launches are short, and many in a call.

    Args:
        shape: (outer, inner, rows, head_dim).
        of_rows: strides of such views.
        of_sums: strides of views without head_dim.
        options: what else the kernel is compiled for.
    """
    outer, inner, rows, head_dim = shape
    launch = row_launch((outer * inner, 1), (inner,), rows, head_dim, of_rows, **options)
    return launch._replace(numbers=(*launch.numbers, *chain.from_iterable(of_sums)))
