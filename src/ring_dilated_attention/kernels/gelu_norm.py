"""Triton kernels of the layer norm of a GELU, forward and backward: a row is read once.

Between the projections of an MLP are its widest rows, so what is done to them there takes as long
as they take to be read and written. What comes in is read, and what goes out is written, once;
means and variances are float32, of two passes over a row that stays in registers. Nothing is added
by atomics: sums of gradients over rows go by a fixed order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .device_profile import profile_of
from .launch import KernelLaunch, kernel

_ELEMENTS_OF_THREAD = 32
_WARPS = 8
"""Of the backward kernel, on a multiprocessor: each of its programs adds up gradients of its rows.
Both measured on an H100, rows of 3,072 elements."""


@triton.jit
def _normal(x):
    """The normal cdf, to 7.5e-8, and density (Abramowitz, Stegun, 26.2.17); erf takes longer."""
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
    root = tl.rsqrt(1.0 + 0.2316419 * tl.abs(x))
    t = root * root
    tail = ((1.330274429 * t - 1.821255978) * t + 1.781477937) * t - 0.356563782
    tail = (tail * t + 0.319381530) * t * density
    return tl.where(x < 0, tail, 1.0 - tail), density


@kernel(5)
def _gelu_norm_kernel(
    rows, weight, bias, normed, statistics, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    x = tl.load(rows + row * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    cdf, _ = _normal(x)
    y = x * cdf
    mean = tl.sum(y, 0) / WIDTH
    centred = tl.where(valid, y - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    out = centred * rstd * scale + shift
    tl.store(normed + row * WIDTH + column, out.to(normed.dtype.element_ty), mask=valid)
    tl.store(statistics + 2 * row, mean)
    tl.store(statistics + 2 * row + 1, rstd)


@kernel(6)
def _gelu_norm_backward_kernel(
    dnormed, rows, weight, statistics, drows, sums, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    scale = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    dscale = tl.zeros([BLOCK], tl.float32)
    dshift = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(program, count, programs, num_stages=3):  # rows on their way meanwhile
        row = tl.cast(number, tl.int64)
        at = row * WIDTH + column
        x = tl.load(rows + at, mask=valid, other=0.0).to(tl.float32)
        dout = tl.load(dnormed + at, mask=valid, other=0.0).to(tl.float32)
        mean = tl.load(statistics + 2 * row)
        rstd = tl.load(statistics + 2 * row + 1)
        cdf, density = _normal(x)
        normal = tl.where(valid, (x * cdf - mean) * rstd, 0.0)
        dscale += dout * normal
        dshift += dout
        dnormal = dout * scale
        along = tl.sum(dnormal * normal, 0) / WIDTH
        level = tl.sum(dnormal, 0) / WIDTH
        dgelu = (dnormal - normal * along - level) * rstd
        dx = dgelu * (cdf + x * density)
        tl.store(drows + at, dx.to(drows.dtype.element_ty), mask=valid)
    at = sums + program * WIDTH + column
    tl.store(at, dscale, mask=valid)
    tl.store(at + programs * WIDTH, dshift, mask=valid)


def gelu_norm_forward(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer norm of the GELU (by the error function) of rows, computed in float32.

    Args:
        rows: (..., width), contiguous, any floating dtype but float64; width at most
            `MOST_WIDTH`.
        weight: (width,), contiguous, any floating dtype but float64, on the device of `rows`.
        bias: like `weight`.
        eps: added to variances.

    Returns:
        (normed, statistics): normed as `rows`; statistics float32, (number of rows, 2): the mean of
        each GELU, and one over its standard deviation.
    """
    width = rows.shape[-1]
    count = rows.numel() // width
    normed = torch.empty_like(rows)
    statistics = rows.new_empty((count, 2), dtype=torch.float32)
    if count:
        launch = _forward_launch(count, width, float(eps))
        _gelu_norm_kernel(launch, (rows, weight, bias, normed, statistics))
    return normed, statistics


def gelu_norm_backward(
    dnormed: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, statistics: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `gelu_norm_forward`.

    Args:
        dnormed: the gradient of its first result: the shape and dtype of `rows`, contiguous.
        rows: as they were given.
        weight: as it was given.
        statistics: as they were returned.

    Returns:
        (drows, dweight, dbias): drows as `rows`, the others float32, (width,), added up in float32.
    """
    width = rows.shape[-1]
    count = rows.numel() // width
    drows = torch.empty_like(rows)
    launch = _backward_launch(count, width, rows.device)
    sums = rows.new_empty((2, launch.grid[0], width), dtype=torch.float32)
    _gelu_norm_backward_kernel(launch, (dnormed, rows, weight, statistics, drows, sums))
    dweight, dbias = sums.sum(1).unbind(0)
    return drows, dweight, dbias


@lru_cache(maxsize=256)
def _forward_launch(count: int, width: int, eps: float) -> KernelLaunch:
    return KernelLaunch((count, 1), (eps,), _constants(width), {})


@lru_cache(maxsize=256)
def _backward_launch(count: int, width: int, device: torch.device) -> KernelLaunch:
    constants = _constants(width)
    most = max(1, _WARPS // constants["num_warps"]) * profile_of(device).multiprocessors
    return KernelLaunch((min(max(1, count), most), 1), (count,), constants, {})


def _constants(width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    warps = max(1, block // (32 * _ELEMENTS_OF_THREAD))
    return {"WIDTH": width, "BLOCK": block, "num_warps": warps}
