"""What the attention kernels share: blocks of rows, and how a launch is put together.

Integers that change from call to call are not specialised on, so that new lengths compile nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from .cells import Cells
from .tuning import Kernel, LaunchConfig, default_config, padded_head_dim

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_block(base, offsets, rows, length, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A (rows, padded D) block; zero where `rows` reach past `length` and where D is padding."""
    columns = tl.arange(0, offsets.shape[1])[None, :]
    if MASKED and offsets.shape[1] != HEAD_DIM:
        block = tl.load(
            base + offsets, mask=(rows[:, None] < length) & (columns < HEAD_DIM), other=0.0
        )
    elif MASKED:
        block = tl.load(base + offsets, mask=rows[:, None] < length, other=0.0)
    elif offsets.shape[1] != HEAD_DIM:
        block = tl.load(base + offsets, mask=columns < HEAD_DIM, other=0.0)
    else:
        block = tl.load(base + offsets)
    return block


@triton.jit
def row_offsets(stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a block's rows from its first; WIDE where they may exceed 32 bits."""
    if not WIDE:
        stride = stride.to(tl.int32)
    return tl.arange(0, BLOCK) * stride


@triton.jit
def add_block(base, offsets, rows, length, block, STORE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write a (rows, padded D) block, or add it in float32 to what is there."""
    mask = (rows[:, None] < length) & (tl.arange(0, offsets.shape[1])[None, :] < HEAD_DIM)
    if not STORE:
        block += tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(base + offsets, block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def write_block(base, offsets, in_rows, block, HEAD_DIM: tl.constexpr):
    """Write a (rows, padded D) block where `in_rows` says so."""
    mask = in_rows[:, None] & (tl.arange(0, offsets.shape[1])[None, :] < HEAD_DIM)
    tl.store(base + offsets, block.to(base.dtype.element_ty), mask=mask)


def stride_unit(*strides: Sequence[int]) -> int:
    """Strides are counted in this many elements, so that the compiler knows rows are aligned.

    Args:
        strides: those of each tensor.
    """
    return math.gcd(8, *(stride for each in strides for stride in each[:3]))


def is_wide(cells: Cells, *tensors: torch.Tensor) -> bool:
    """Whether rows of one block can be 2^31 elements apart; blocks have at most 256."""
    return 256 * cells.max_stride * max(tensor.stride(1) for tensor in tensors) >= 2**31


def strides_in(unit: int, *strides: Sequence[int]) -> list[int]:
    """The first three strides of each tensor, in units."""
    return [stride // unit for each in strides for stride in each[:3]]


def default_launch(kernel: Kernel, q: torch.Tensor, cells: Cells) -> LaunchConfig:
    """The default, with the blocks that `cells` was built for."""
    config = default_config(
        kernel,
        q.shape[-1],
        q.dtype,
        queries=cells.max_queries,
        keys=cells.max_keys,
        device=q.device,
    )
    if kernel == "dkdv":
        return replace(config, block_n=cells.block_n)
    return replace(config, block_m=cells.block_m)


def constants(
    q: torch.Tensor,
    unit: int,
    wide: bool,
    cells: Cells,
    store: bool,
    config: LaunchConfig,
) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {
        "UNIT": unit,
        "IS_CAUSAL": cells.is_causal,
        "STORE": store,
        "HEAD_DIM": q.shape[-1],
        "BLOCK_D": padded_head_dim(q.shape[-1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        # No tf32 for float32; nothing to choose for the others.
        "PRECISION": "ieee",
        "WIDE": wide,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
