"""Triton kernels that add a tile's results into strided views of the whole: one pass each.

Views are (outer, inner, rows, head_dim), head_dim contiguous, as `views.Block` makes them. A
program takes `BLOCK_ROWS` rows of one (outer, inner) pair. Offsets are computed in int64: tensors
may exceed 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _place(inner, row_blocks, BLOCK_ROWS: tl.constexpr):
    """The (outer, inner) pair of this program, and its rows."""
    program = tl.program_id(0)
    pair = program // row_blocks
    row = (program % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return (pair // inner).to(tl.int64), (pair % inner).to(tl.int64), row.to(tl.int64)


@triton.jit
def _sigmoid(x):
    # The exponential of a number that is never positive cannot overflow.
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit(do_not_specialize=["inner", "rows"])
def _merge_kernel(
    out, lse, tile_out, tile_lse, inner, rows, row_blocks,
    out_outer, out_inner, out_row, lse_outer, lse_inner, lse_row,
    tile_outer, tile_inner, tile_row, tile_lse_outer, tile_lse_inner, tile_lse_row,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    valid = row < rows
    where = valid[:, None] & (dim < HEAD_DIM)[None, :]
    lse_at = lse + a * lse_outer + b * lse_inner + row * lse_row
    out_at = out + a * out_outer + b * out_inner + row[:, None] * out_row + dim[None, :]
    tile_lse_at = tile_lse + a * tile_lse_outer + b * tile_lse_inner + row * tile_lse_row
    tile_at = tile_out + a * tile_outer + b * tile_inner + row[:, None] * tile_row + dim[None, :]
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


@triton.jit(do_not_specialize=["inner", "rows"])
def _add_kernel(
    total, part, inner, rows, row_blocks,
    total_outer, total_inner, total_row, part_outer, part_inner, part_row,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    where = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    at = total + a * total_outer + b * total_inner + row[:, None] * total_row + dim[None, :]
    part_at = part + a * part_outer + b * part_inner + row[:, None] * part_row + dim[None, :]
    new = tl.load(part_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        new += tl.load(at, mask=where, other=0.0).to(tl.float32)
    tl.store(at, new.to(total.dtype.element_ty), mask=where)


@triton.jit(do_not_specialize=["inner", "rows"])
def _delta_kernel(
    dout, out, delta, inner, rows, row_blocks,
    dout_outer, dout_inner, dout_row, out_outer, out_inner, out_row,
    delta_outer, delta_inner, delta_row,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    where = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    dout_at = dout + a * dout_outer + b * dout_inner + row[:, None] * dout_row + dim[None, :]
    out_at = out + a * out_outer + b * out_inner + row[:, None] * out_row + dim[None, :]
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
    """Merge a tile's result into `out` and `lse`, in place: `merge.merge_` in one kernel.

    Args:
        out: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        lse: (outer, inner, rows) view, float32, natural log; -inf where nothing has been seen yet.
        tile_out: (outer, inner, rows, head_dim), head_dim contiguous.
        tile_lse: (outer, inner, rows), float32.
        store: whether to write the tile's result instead, without reading `out` and `lse`.
    """
    grid, sizes, constants = _launch(out)
    strides = [s for x in (out, lse, tile_out, tile_lse) for s in x.stride()[:3]]
    _merge_kernel[grid](out, lse, tile_out, tile_lse, *sizes, *strides, **constants, STORE=store)


def add_rows(total: torch.Tensor, part: torch.Tensor, *, store: bool) -> None:
    """Add `part` to `total` in float32, in place.

    Args:
        total: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        part: likewise.
        store: whether to write `part` instead, without reading `total`.
    """
    grid, sizes, constants = _launch(total)
    strides = total.stride()[:3] + part.stride()[:3]
    _add_kernel[grid](total, part, *sizes, *strides, **constants, STORE=store)


def row_sums(dout: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> None:
    """Write ``delta = rowsum(dout * out)``, computed in float32.

    Args:
        dout: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        out: likewise.
        delta: (outer, inner, rows) view, float32.
    """
    grid, sizes, constants = _launch(dout)
    strides = dout.stride()[:3] + out.stride()[:3] + delta.stride()[:3]
    _delta_kernel[grid](dout, out, delta, *sizes, *strides, **constants)


def _launch(
    view: torch.Tensor,
) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Grid, sizes and constants of a kernel that goes over all rows of a view."""
    outer, inner, rows, head_dim = view.shape
    block_dim = triton.next_power_of_2(head_dim)
    # 4,096 elements a program: 32 a thread at four warps.
    block_rows = max(1, min(4096 // block_dim, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    constants = {"HEAD_DIM": head_dim, "BLOCK_ROWS": block_rows, "BLOCK_DIM": block_dim}
    return (outer * inner * row_blocks,), (inner, rows, row_blocks), constants
