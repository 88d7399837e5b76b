"""Triton kernels: a LayerNorm, and all its gradients, in one pass over the rows each.

torch takes two passes for the gradients, and up to 65,536 rows the one for the weight and the bias
keeps few multiprocessors busy: it has a program for each 32 columns. Here a program takes blocks of
rows in turn and keeps sums of its own, which are added up at the end, so that results do not depend
on timing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .device_profile import profile_of
from .launch import Launcher
from .tuning import MOST_NORM_COLUMNS, power_of_two

_BLOCK_ELEMENTS = MOST_NORM_COLUMNS
_NUM_WARPS = 8
_PROGRAMS = 4
"""Of backward on a multiprocessor: as many as its registers take."""


@triton.jit
def _column(values, columns, in_width, dtype):
    """A parameter in float32, rounded to the dtype of the rows."""
    found = tl.load(values + columns, mask=in_width, other=0.0)
    return found.to(dtype).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["count", "eps"])
def _norm_kernel(
    rows, weight, bias, out, numbers,
    count, eps,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows; numbers are (2, count): means, then rstds."""
    columns = tl.arange(0, BLOCK_WIDTH)
    in_width = columns < WIDTH
    dtype = out.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = row < count
    mask = in_rows[:, None] & in_width[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    values = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
    row_mean = tl.sum(values, 1) / WIDTH
    centred = tl.where(mask, values - row_mean[:, None], 0.0)
    row_rstd = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    factor = _column(weight, columns, in_width, dtype)
    found = centred * row_rstd[:, None] * factor + _column(bias, columns, in_width, dtype)
    tl.store(out + at, found.to(dtype), mask=mask)
    tl.store(numbers + row, row_mean, mask=in_rows)
    tl.store(numbers + count + row, row_rstd, mask=in_rows)


@triton.jit(do_not_specialize=["count"])
def _norm_gradients_kernel(
    dout, rows, numbers, weight, drows, sums,
    count,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: every so many blocks of rows; sums are (programs, 2, WIDTH)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_WIDTH)
    in_width = columns < WIDTH
    factor = _column(weight, columns, in_width, drows.dtype.element_ty)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for first in range(program * BLOCK_ROWS, count, programs * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        in_rows = row < count
        mask = in_rows[:, None] & in_width[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        given = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
        row_mean = tl.load(numbers + row, mask=in_rows, other=0.0)[:, None]
        row_rstd = tl.load(numbers + count + row, mask=in_rows, other=0.0)[:, None]
        # Outside of the rows 0 is given, so that nothing is added there.
        normal = (tl.load(rows + at, mask=mask, other=0.0).to(tl.float32) - row_mean) * row_rstd
        scaled = given * factor
        along = tl.sum(scaled * normal, 1)[:, None] / WIDTH
        drow = (scaled - normal * along - tl.sum(scaled, 1)[:, None] / WIDTH) * row_rstd
        tl.store(drows + at, drow.to(drows.dtype.element_ty), mask=mask)
        dweight += given * normal
        dbias += given
    own = sums + program * 2 * WIDTH + columns
    tl.store(own, tl.sum(dweight, 0), mask=in_width)
    tl.store(own + WIDTH, tl.sum(dbias, 0), mask=in_width)


_forward, _gradients = Launcher(_norm_kernel), Launcher(_norm_gradients_kernel)


def norm_rows(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A LayerNorm over the last dimension.

    Args:
        rows: (..., width), contiguous, width up to `MOST_NORM_COLUMNS`; float16, bfloat16 or
            float32.
        weight: (width,), contiguous, any floating dtype; rounded to that of `rows`.
        bias: like `weight`.
        eps: added to the variance.

    Returns:
        The result, like `rows`, and (2, n) float32: the mean of each row, and one over its standard
        deviation.
    """
    width = rows.shape[-1]
    count = rows.numel() // width
    out, numbers = torch.empty_like(rows), rows.new_empty(2, count, dtype=torch.float32)
    block_rows, constants = _blocks(width)
    tensors = rows, weight, bias, out, numbers
    _forward((max(1, -(-count // block_rows)), 1), tensors, (count, eps), constants)
    return out, numbers


def norm_gradients(
    dout: torch.Tensor, rows: torch.Tensor, numbers: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `norm_rows`.

    Args:
        dout: of its result; like `rows`, contiguous.
        rows: what was normalised; see `norm_rows`.
        numbers: of each row, as `norm_rows` returned them.
        weight: (width,), contiguous, as it was given to `norm_rows`.

    Returns:
        Gradients of `rows`, in its dtype, and of the weight and the bias: (width,), float32.
    """
    width, count = rows.shape[-1], numbers.shape[1]
    block_rows, constants = _blocks(width)
    most = _PROGRAMS * profile_of(rows.device).multiprocessors
    programs = max(1, min(most, -(-count // block_rows)))
    drows = torch.empty_like(rows)
    sums = rows.new_empty(programs, 2, width, dtype=torch.float32)
    _gradients((programs, 1), (dout, rows, numbers, weight, drows, sums), (count,), constants)
    dweight, dbias = sums.sum(0).unbind()
    return drows, dweight, dbias


@lru_cache(maxsize=64)
def _blocks(width: int) -> tuple[int, dict[str, int]]:
    """How many rows a block has, and the constants of a launch."""
    block_width = power_of_two(width)
    block_rows = max(1, _BLOCK_ELEMENTS // block_width)
    constants = {"WIDTH": width, "BLOCK_ROWS": block_rows, "BLOCK_WIDTH": block_width}
    return block_rows, {**constants, "num_warps": _NUM_WARPS}
