"""What the attention kernels share: blocks of rows, and how a launch is put together.

Blocks have a power of two of columns. What a head_dim has beyond the largest one is padded, or it
is a second part of the block: 48 columns are 32 and 16. So a block is a tuple of one part or two,
and so are the offsets of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .device_profile import LaunchConfig, head_dim_constants
from .launch import KernelLaunch, keep_few
from .own_programs import Tables

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_offsets(stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a block's rows from its first; WIDE where they may exceed 32 bits."""
    if not WIDE:
        stride = stride.to(tl.int32)
    return tl.arange(0, BLOCK) * stride


@triton.jit
def element_offsets(
    stride, BLOCK: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr
):
    """Offsets of a block's elements from its first: a tuple, of each part of its columns."""
    rows = row_offsets(stride, BLOCK, WIDE)[:, None]
    offsets = (rows + tl.arange(0, BLOCK_D)[None, :],)
    if TAIL:
        offsets += (rows + (BLOCK_D + tl.arange(0, TAIL))[None, :],)  # type: ignore[assignment]
    return offsets


@triton.jit
def blocks_of_rows(
    stride, BLOCK: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr
):
    """Of blocks one after the other: offsets of a block's elements, and from block to block."""
    return element_offsets(stride, BLOCK, WIDE, BLOCK_D, TAIL), stride * BLOCK


@triton.jit
def zero_block(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """A block of zeros, float32."""
    block = (tl.zeros([BLOCK, BLOCK_D], tl.float32),)
    if TAIL:
        block += (tl.zeros([BLOCK, TAIL], tl.float32),)  # type: ignore[assignment]
    return block


@triton.jit
def columns_of(offsets, part: tl.constexpr):
    """The columns of a part of a block; the parts before are one, of the width of the first."""
    return part * offsets[0].shape[1] + tl.arange(0, offsets[part].shape[1])[None, :]


@triton.jit
def load_part(
    base, offsets, columns, in_rows, MASKED: tl.constexpr, PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """A part of a block of rows, as `load_block` takes it; PADDED: it has columns beyond D."""
    # Written out: a mask that is always true would still be computed, and loads be predicated.
    if MASKED and PADDED:
        part = tl.load(base + offsets, mask=in_rows[:, None] & (columns < HEAD_DIM), other=0.0)
    elif MASKED:
        part = tl.load(base + offsets, mask=in_rows[:, None], other=0.0)
    elif PADDED:
        part = tl.load(base + offsets, mask=columns < HEAD_DIM, other=0.0)
    else:
        part = tl.load(base + offsets)
    return part


@triton.jit
def load_block(base, offsets, in_rows, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A block of rows; zero where D is padding and, if MASKED, where `in_rows` does not say so."""
    block = ()
    for part in tl.static_range(len(offsets)):
        columns = columns_of(offsets, part)
        block += (  # type: ignore[assignment]
            load_part(
                base, offsets[part], columns, in_rows, MASKED,
                part * offsets[0].shape[1] + offsets[part].shape[1] > HEAD_DIM, HEAD_DIM,
            ),
        )  # fmt: skip
    return block


@triton.jit
def write_block(base, offsets, in_rows, block, HEAD_DIM: tl.constexpr):
    """Write a block of rows where `in_rows` says so."""
    for part in tl.static_range(len(offsets)):
        mask = in_rows[:, None] & (columns_of(offsets, part) < HEAD_DIM)
        tl.store(base + offsets[part], block[part].to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_block(base, offsets, in_rows, block, stores, HEAD_DIM: tl.constexpr):
    """Write a block of rows, or where not `stores` add it in float32 to what is there."""
    if not stores:
        block = sum_of_blocks(block, load_block(base, offsets, in_rows, True, HEAD_DIM))
    write_block(base, offsets, in_rows, block, HEAD_DIM)


@triton.jit
def sum_of_blocks(block, other):
    """The sum of two blocks, in float32."""
    total = ()
    for part in tl.static_range(len(block)):
        total += (block[part].to(tl.float32) + other[part].to(tl.float32),)  # type: ignore[assignment]
    return total


@triton.jit
def scaled_block(block, factors):
    """A block times a factor, or times one for each row: (rows, 1)."""
    scaled = ()
    for part in tl.static_range(len(block)):
        scaled += (block[part] * factors,)  # type: ignore[assignment]
    return scaled


@triton.jit
def products_of_rows(a, b):
    """Of each row of a block with the same row of another, float32."""
    products = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for part in tl.static_range(1, len(a)):
        products += tl.sum(a[part].to(tl.float32) * b[part].to(tl.float32), 1)
    return products


@triton.jit
def products_of_all_rows(a, b, PRECISION: tl.constexpr):
    """Products of all rows of a block with all rows of another, float32."""
    products = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for part in tl.static_range(1, len(a)):
        products = tl.dot(a[part], tl.trans(b[part]), products, input_precision=PRECISION)
    return products


@triton.jit
def add_product(total, weights, block, PRECISION: tl.constexpr):
    """Add the rows of a block to `total`, each weighted as a column of `weights` says."""
    added = ()
    for part in tl.static_range(len(block)):
        added += (tl.dot(weights, block[part], total[part], input_precision=PRECISION),)  # type: ignore[assignment]
    return added


@triton.jit
def halves_of_rows(found, COPIES: tl.constexpr):
    """The first number of each row, and the one that `COPIES` columns of the first are before."""
    if COPIES > 1:
        rows: tl.constexpr = found.shape[0]
        halves = tl.permute(tl.reshape(found, [rows, 2, COPIES]), (0, 2, 1))
        first, second = tl.split(halves)
        first, second = first_of_rows(first, COPIES), first_of_rows(second, COPIES)
    else:
        first, second = tl.split(found)
    return first, second


@triton.jit
def first_of_rows(found, COLUMNS: tl.constexpr):
    """The number that all columns of a row hold."""
    if COLUMNS > 2:
        rows: tl.constexpr = found.shape[0]
        found, _ = tl.split(tl.reshape(found, [rows, COLUMNS // 2, 2]))
        found = first_of_rows(found, COLUMNS // 2)
    else:
        found, _ = tl.split(found)
    return found


def stride_unit(*strides: Sequence[int]) -> int:
    """Strides are counted in this many elements, so that the compiler knows rows are aligned."""
    return math.gcd(8, *(stride for each in strides for stride in each[:3]))


def strides_in(unit: int, *strides: Sequence[int]) -> list[int]:
    """The first three strides of each tensor, in units."""
    return [stride // unit for each in strides for stride in each[:3]]


LAUNCHES_KEPT = 8
"""Of tables: how kernels are launched on them, by layout of the tensors."""


def attention_launch(
    tables: Tables,
    programs: int,
    config: LaunchConfig,
    tensors: Sequence[torch.Tensor],
    of_rows: Sequence[torch.Tensor],
    numbers: tuple[float, ...],
    **options: int,
) -> KernelLaunch:
    """How to launch an attention kernel; kept for the next tensors of the same layout.

    Args:
        tables: which rows it reads and writes.
        programs: how many.
        config: how to launch.
        tensors: (B, n, heads, D), the first of any kernel's arguments: its numbers begin with their
            strides.
        of_rows: (B, H, n): the strides that come next.
        numbers: what comes then.
        options: what else the kernel is compiled for.
    """
    strides, strides_of_rows = [x.stride() for x in tensors], [x.stride() for x in of_rows]
    head_dim = tensors[0].shape[3]

    def make() -> KernelLaunch:
        unit = stride_unit(*strides)
        # From a row to the next; an offset within a block may take more than 32 bits.
        longest = max(*[x[1] for x in strides], *[x[2] for x in strides_of_rows])
        constants = {
            "UNIT": unit,
            **head_dim_constants(head_dim, config.tail),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PRECISION": "ieee",  # no tf32 for float32; nothing to choose for the others
            "WIDE": tables.reach * longest >= 2**31,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **options,
        }
        if config.max_registers is not None:  # not every back end of Triton knows it
            constants["maxnreg"] = config.max_registers
        given = *strides_in(unit, *strides), *strides_in(1, *strides_of_rows), *numbers
        return KernelLaunch((programs, 1), given, constants, {})

    layout = *strides, *strides_of_rows
    key = programs, config, head_dim, numbers, *options.items(), *layout
    return keep_few(tables.launches, key, make, LAUNCHES_KEPT)
