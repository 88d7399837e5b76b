"""Triton kernels of a step of generation: sums with their layer norms, and rotations in place.

A step has a few rows: launching one of its operations takes a CPU longer than computing it takes
the GPU. Each of these kernels stands for several operations.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .launch import KernelLaunch, Launcher


@triton.jit(do_not_specialize=["eps"])
def _norm_kernel(
    rows, addition, weight, bias, total, normed, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WITH_ADDITION: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    scale = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    x = tl.load(rows + at, mask=valid, other=0.0).to(tl.float32)
    if WITH_ADDITION:
        x += tl.load(addition + at, mask=valid, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=valid)
        x = rounded.to(tl.float32)
    centred = tl.where(valid, x - tl.sum(x, 0) / WIDTH, 0.0)
    variance = tl.sum(centred * centred, 0) / WIDTH
    y = centred / tl.sqrt(variance + eps) * scale + shift
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["q_row", "k_row", "heads", "table_rows"])
def _turn_kernel(
    q, k, cos, sin, q_row, k_row, heads, table_rows,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < heads:
        at = q + row * q_row + head * HEAD_DIM
    else:
        at = k + row * k_row + (head - heads) * HEAD_DIM
    column = tl.arange(0, BLOCK)
    valid = column < HEAD_DIM // 2
    angle = row % table_rows * HEAD_DIM + column
    c = tl.load(cos + angle, mask=valid, other=0.0)
    s = tl.load(sin + HEAD_DIM // 2 + angle, mask=valid, other=0.0)
    first = tl.load(at + column, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(at + HEAD_DIM // 2 + column, mask=valid, other=0.0).to(tl.float32)
    # In place: all threads that share an element load it before one stores it.
    tl.debug_barrier()
    dtype = q.dtype.element_ty
    tl.store(at + column, (first * c - second * s).to(dtype), mask=valid)
    tl.store(at + HEAD_DIM // 2 + column, (second * c + first * s).to(dtype), mask=valid)


_launch_norm, _launch_turn = map(Launcher, (_norm_kernel, _turn_kernel))


def norm_of_sum(
    rows: torch.Tensor,
    addition: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream, and apply layer norm to the sum, computed in float32.

    Args:
        rows: (..., width), contiguous, any floating dtype but float64; width at most `MOST_WIDTH`.
        addition: as many elements, contiguous, in the dtype of `rows`; None: nothing is added.
        weight: (width,), contiguous, any floating dtype but float64, on the device of `rows`.
        bias: like `weight`.
        eps: added to variances.

    Returns:
        (total, normed), in the dtype of `rows`: the sum, rounded to it, of the shape of `rows`, and
        `rows` itself where nothing is added; and its layer norm, shape (number of rows, width).
    """
    width = rows.shape[-1]
    count = rows.numel() // width
    total = rows if addition is None else torch.empty_like(rows)
    normed = rows.new_empty(count, width)
    launch = _norm_launch(count, width, float(eps), addition is not None)
    tensors = rows, rows if addition is None else addition, weight, bias, total, normed
    _launch_norm(launch.grid, tensors, *launch[1:])
    return total, normed


def turn_heads_(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate query and key in place, in float32: pairs (x[i], x[i + head_dim // 2]) of each head.

    Args:
        query: (rows, heads * head_dim), its last stride 1, any floating dtype but float64.
        key: (rows, kv_heads * head_dim), its last stride 1, in the dtype of `query`.
        cos: (n, 1, head_dim) or (batch, n, 1, head_dim), float32, contiguous, every cosine twice:
            ``[c, c]``. Row i of `query` has that of row i modulo the rows of this table.
        sin: the shape of `cos`: ``[-s, s]``.
    """
    head_dim = cos.shape[-1]
    launch = _turn_launch(
        len(query),
        (query.shape[1] // head_dim, key.shape[1] // head_dim),
        (query.stride(0), key.stride(0)),
        cos.numel() // head_dim,
        head_dim,
    )
    _launch_turn(launch.grid, (query, key, cos, sin), *launch[1:])


@lru_cache(maxsize=256)
def _norm_launch(count: int, width: int, eps: float, with_addition: bool) -> KernelLaunch:
    block = triton.next_power_of_2(width)
    constants = {
        "WIDTH": width,
        "BLOCK": block,
        "WITH_ADDITION": with_addition,
        "num_warps": min(16, max(1, block // 256)),  # 8 elements a thread, where they suffice
    }
    return KernelLaunch((count, 1), (eps,), constants, {})


@lru_cache(maxsize=256)
def _turn_launch(
    rows: int, heads: tuple[int, int], strides: tuple[int, int], table_rows: int, head_dim: int
) -> KernelLaunch:
    block = triton.next_power_of_2(head_dim // 2)
    constants = {"HEAD_DIM": head_dim, "BLOCK": block, "num_warps": 1}
    return KernelLaunch((rows, sum(heads)), (*strides, heads[0], table_rows), constants, {})
