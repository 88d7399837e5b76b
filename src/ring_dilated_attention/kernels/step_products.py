"""Triton kernels of a step of generation: products with all that comes before and after them.

A step has a few rows: launching one of its operations takes a CPU longer than computing it takes
the GPU. Each of these kernels stands for several operations. Of wide weights, or many rows, a
product takes longer than a launch, and the libraries that torch calls are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from .device_profile import profile_of
from .launch import KernelLaunch, Launcher

Linear: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Weight, (columns, width), and bias, (columns,)."""

Norm: TypeAlias = tuple[torch.Tensor, torch.Tensor, float]
"""Weight and bias, (width,), and what is added to variances."""

_MOST_ROWS = 16
"""Rows of a program, the fewest that tensor cores multiply. With 32, products of weights that are
2048 wide took an H100 a quarter longer than cuBLAS."""

_MOST_WIDTH = 1024
"""Of rows. At 1536 and 2048 products took an H100 3 and 6% longer than cuBLAS with the operations
around them, at 768 and 1024 24 and 10% less."""

_COLUMNS = 16
"""Columns, or pairs of them, of a program: so few that all multiprocessors read weights."""

_BLOCK_BYTES = 512
"""Of a row, or of a row of a weight, that a program reads at a time."""

_STAGES = 3
_SHARED_BYTES = _STAGES * _BLOCK_BYTES * (_MOST_ROWS + 2 * _COLUMNS)
_OPTIONS = {"num_warps": 4, "num_stages": _STAGES}


@triton.jit
def _moments(rows, at, in_rows, eps, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Means of some rows, and one over their standard deviations."""
    total = tl.zeros(in_rows.shape, tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask = in_rows[:, None] & (k < WIDTH)[None, :]
        total += tl.sum(tl.load(rows + at[:, None] + k[None, :], mask, 0.0).to(tl.float32), 1)
    mean = total / WIDTH
    squares = tl.zeros(in_rows.shape, tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask = in_rows[:, None] & (k < WIDTH)[None, :]
        x = tl.load(rows + at[:, None] + k[None, :], mask, 0.0).to(tl.float32)
        centred = tl.where(mask, x - mean[:, None], 0.0)
        squares += tl.sum(centred * centred, 1)
    return mean, 1.0 / tl.sqrt(squares / WIDTH + eps)


@triton.jit
def _some(rows, at, in_rows, k, gain, shift, mean, scale, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Some columns of some rows, or of their layer norm."""
    in_width = k < WIDTH
    x = tl.load(rows + at[:, None] + k[None, :], in_rows[:, None] & in_width[None, :], 0.0)
    if NORM:
        by = tl.load(gain + k, in_width, 0.0).to(tl.float32)
        to = tl.load(shift + k, in_width, 0.0).to(tl.float32)
        y = (x.to(tl.float32) - mean[:, None]) * scale[:, None] * by[None, :] + to[None, :]
        x = y.to(x.dtype)
    return x


@triton.jit
def _columns_of(weight, column, in_columns, k, WIDTH: tl.constexpr):
    """Some columns of some rows of a weight, transposed."""
    at = column[None, :].to(tl.int64) * WIDTH + k[:, None]
    return tl.load(weight + at, in_columns[None, :] & (k < WIDTH)[:, None], 0.0)


@triton.jit(do_not_specialize=["count", "eps"])
def _product_kernel(
    rows, gain, shift, weight, bias, addition, out, count, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    ADDITION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_columns, in_rows = column < COLUMNS, row < count
    at = row.to(tl.int64) * WIDTH
    mean, scale = tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R], tl.float32)
    if NORM:
        mean, scale = _moments(rows, at, in_rows, eps, WIDTH, BLOCK_K)
    acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = _some(rows, at, in_rows, k, gain, shift, mean, scale, WIDTH, NORM)
        w = _columns_of(weight, column, in_columns, k, WIDTH)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, in_columns, 0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    result = acc.to(dtype).to(tl.float32)  # rounded where torch rounds
    if GELU:
        result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476))
    mask = in_rows[:, None] & in_columns[None, :]
    to = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    if ADDITION:
        result += tl.load(addition + to, mask, 0.0).to(tl.float32)
    tl.store(out + to, result.to(dtype), mask)


@triton.jit(do_not_specialize=["count", "heads", "kv_heads", "table_rows", "eps"])
def _heads_kernel(
    rows, gain, shift, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, cos, sin, q, k, v,
    count, heads, kv_heads, table_rows, eps,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = HEAD_DIM // 2
    blocks: tl.constexpr = (half + BLOCK_C - 1) // BLOCK_C
    head = tl.program_id(0) // blocks
    pair = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    turns = head < heads + kv_heads
    if head < heads:
        weight, bias, out, own = q_weight, q_bias, q, heads
    elif turns:
        weight, bias, out, own = k_weight, k_bias, k, kv_heads
        head -= heads
    else:
        weight, bias, out, own = v_weight, v_bias, v, kv_heads
        head -= heads + kv_heads
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_pairs, in_rows = pair < half, row < count
    column = head * HEAD_DIM + pair
    at = row.to(tl.int64) * WIDTH
    mean, scale = _moments(rows, at, in_rows, eps, WIDTH, BLOCK_K)
    first_acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    second_acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        some = start + tl.arange(0, BLOCK_K)
        x = _some(rows, at, in_rows, some, gain, shift, mean, scale, WIDTH, True)
        w = _columns_of(weight, column, in_pairs, some, WIDTH)
        first_acc = tl.dot(x, w, first_acc, input_precision="ieee")
        w = _columns_of(weight, column + half, in_pairs, some, WIDTH)
        second_acc = tl.dot(x, w, second_acc, input_precision="ieee")
    if BIAS:
        first_acc += tl.load(bias + column, in_pairs, 0.0).to(tl.float32)[None, :]
        second_acc += tl.load(bias + column + half, in_pairs, 0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    first = first_acc.to(dtype).to(tl.float32)  # rounded where torch rounds
    second = second_acc.to(dtype).to(tl.float32)
    mask = in_rows[:, None] & in_pairs[None, :]
    if turns:
        angle = (row % table_rows)[:, None] * HEAD_DIM + pair[None, :]
        c, s = tl.load(cos + angle, mask, 0.0), tl.load(sin + half + angle, mask, 0.0)
        first, second = first * c - second * s, second * c + first * s
    to = row[:, None].to(tl.int64) * (own * HEAD_DIM) + column[None, :]
    tl.store(out + to, first.to(dtype), mask)
    tl.store(out + to + half, second.to(dtype), mask)


_launch_product, _launch_heads = map(Launcher, (_product_kernel, _heads_kernel))


def computes_products(rows: torch.Tensor) -> bool:
    """Whether `product` and `product_of_heads` take less time than operations one by one.

    Args:
        rows: (..., width), of a floating dtype but float64.
    """
    width = rows.shape[-1]
    few = width <= _MOST_WIDTH and rows.numel() <= _MOST_ROWS * width
    return few and profile_of(rows.device).shared_bytes > _SHARED_BYTES


def product(
    rows: torch.Tensor,
    linear: Linear,
    *,
    norm: Norm | None = None,
    gelu: bool = False,
    addition: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a linear layer to a few rows, or to their layer norm; then GELU or an addition.

    It computes in float32, and rounds where torch's operations one by one would. All tensors are
    contiguous, of one dtype, which is floating but not float64, and on one device.

    Args:
        rows: (..., width).
        linear: of this width.
        norm: of the rows; None: there is none.
        gelu: whether the GELU of the result is taken.
        addition: (..., columns), is added to the result; None: nothing is.

    Returns:
        (..., columns), in the dtype of `rows`.
    """
    weight, bias = linear
    columns, width = weight.shape
    out = rows.new_empty(*rows.shape[:-1], columns)
    flags = norm is not None, bias is not None, gelu, addition is not None
    gain, shift, eps = norm or (rows, rows, 0.0)
    sizes = rows.numel() // width, width, columns
    launch = _product_launch(sizes, rows.element_size(), float(eps), flags)
    tensors = (
        *(rows, gain, shift, weight),
        weight if bias is None else bias,
        rows if addition is None else addition,
        out,
    )
    _launch_product(launch.grid, tensors, *launch[1:])
    return out


def product_of_heads(
    rows: torch.Tensor, norm: Norm, layers: Sequence[Linear], cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of the layer norm of a few rows; query and key are rotated.

    As `product` computes; the rotation is computed in float32, of pairs (x[i], x[i + head_dim / 2])
    of each head.

    Args:
        rows: (..., width).
        norm: of the rows.
        layers: of query, key and value; all or none with a bias.
        cos: (n, 1, head_dim) or (batch, n, 1, head_dim), float32, contiguous, every cosine twice:
            ``[c, c]``. Row i of `rows` has that of row i modulo the rows of this table.
        sin: the shape of `cos`: ``[-s, s]``.

    Returns:
        Each (..., its heads, head_dim), in the dtype of `rows`.
    """
    head_dim, width = cos.shape[-1], rows.shape[-1]
    weights, biases = zip(*layers, strict=True)
    heads, kv_heads = (len(weight) // head_dim for weight in weights[:2])
    q, k, v = (rows.new_empty(*rows.shape[:-1], n, head_dim) for n in (heads, kv_heads, kv_heads))
    weight, bias, eps = norm
    launch = _heads_launch(
        (rows.numel() // width, width),
        (heads, kv_heads, head_dim),
        cos.numel() // head_dim,
        rows.element_size(),
        float(eps),
        biases[0] is not None,
    )
    tensors = rows, weight, bias, *weights, *(biases if biases[0] is not None else weights)
    _launch_heads(launch.grid, (*tensors, cos, sin, q, k, v), *launch[1:])
    return q, k, v


@lru_cache(maxsize=256)
def _product_launch(
    sizes: tuple[int, int, int], itemsize: int, eps: float, flags: tuple[bool, bool, bool, bool]
) -> KernelLaunch:
    count, width, columns = sizes
    names = "NORM", "BIAS", "GELU", "ADDITION"
    constants = {
        "WIDTH": width,
        "COLUMNS": columns,
        **_blocks(width, itemsize),
        **dict(zip(names, flags, strict=True)),
        **_OPTIONS,
    }
    grid = triton.cdiv(columns, _COLUMNS), triton.cdiv(count, _MOST_ROWS)
    return KernelLaunch(grid, (count, eps), constants, {})


@lru_cache(maxsize=256)
def _heads_launch(
    of_rows: tuple[int, int],
    heads: tuple[int, int, int],
    table_rows: int,
    itemsize: int,
    eps: float,
    has_bias: bool,
) -> KernelLaunch:
    (count, width), (own, kv_heads, head_dim) = of_rows, heads
    constants = {
        "WIDTH": width,
        "HEAD_DIM": head_dim,
        **_blocks(width, itemsize),
        "BIAS": has_bias,
        **_OPTIONS,
    }
    programs = (own + 2 * kv_heads) * triton.cdiv(head_dim // 2, _COLUMNS)
    grid = programs, triton.cdiv(count, _MOST_ROWS)
    return KernelLaunch(grid, (count, own, kv_heads, table_rows, eps), constants, {})


def _blocks(width: int, itemsize: int) -> dict[str, Any]:
    block = min(_BLOCK_BYTES // itemsize, max(16, triton.next_power_of_2(width)))
    return {"BLOCK_R": _MOST_ROWS, "BLOCK_C": _COLUMNS, "BLOCK_K": block}
