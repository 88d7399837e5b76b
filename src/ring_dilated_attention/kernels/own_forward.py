"""Triton kernel: attention of several branches in one launch, each row of the result written once.

The tables of `own_programs` tell which rows and keys there are; tensors are read and written in
place, by their strides. Scores and sums are float32; p is rounded to the inputs' dtype before it is
multiplied.

Shape legend: B batch, n rows, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..caches import keep_few
from .blocks import (
    LN_2,
    LOG2_E,
    element_offsets,
    load_block,
    negated_block,
    row_offsets,
    scaled_block,
    stride_unit,
    strides_in,
    write_block,
    zero_block,
)
from .forward import attend, merge_block
from .launch import LAUNCHES_KEPT, KernelLaunch, Launcher
from .own_programs import Programs
from .tuning import LaunchConfig, head_dim_constants


@triton.jit
def rows_of_program(program, ranges, order, kv_head, BLOCK: tl.constexpr):
    """Range, first position, step and number of the rows of a program, which may be 0."""
    own = ranges + tl.load(program) * 8
    low, high = tl.load(program + 1), tl.load(program + 2)
    step = tl.load(own + 5)
    residue = tl.load(order + tl.load(own + 6) + kv_head * step + tl.load(program + 3))
    first = low + (residue + step - low % step) % step
    rows = (tl.maximum(high - first, 0) + step - 1) // step
    blocks = (rows + BLOCK - 1) // BLOCK
    block = tl.load(program + 4)
    # As even as they can be: the first ones have a row more. Rows times blocks may exceed 32 bits.
    least = rows // tl.maximum(blocks, 1)
    more = rows - least * blocks
    count = tl.where(block < more, least + 1, least)
    begin = block * least + tl.minimum(block, more)
    return own, first + begin * step, step, tl.where(block < blocks, count, 0)


@triton.jit
def range_of(own):
    """Of a range: start and stop of its part, shift, positions of the document, branches."""
    start, stop, shift = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    return start, stop, shift, tl.load(own + 3), tl.load(own + 4)


@triton.jit
def branch_of(branches, branch, kv_head, kv_heads, document):
    """Segment length, rate and offset of a branch for a KV head; offset -1: it is not run."""
    fields = branches + branch * (2 + kv_heads)
    segment_length = tl.minimum(tl.load(fields), document)
    return segment_length, tl.load(fields + 1), tl.load(fields + 2 + kv_head)


@triton.jit
def rows_of_cell(start, length, rate, offset, part_start, part_stop):
    """The first position of a cell in a part, and how many there are."""
    begin = start + offset
    behind = tl.maximum(tl.maximum(start, part_start) - begin, 0)
    first = begin + (behind + rate - 1) // rate * rate
    stop = tl.minimum(start + length, part_stop)
    return first, (tl.maximum(stop - first, 0) + rate - 1) // rate


@triton.jit
def keys_of_rows(
    first, last, step, count, start, length, rate, offset, key, k_len,
    IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which of the keys of a cell a block of rows sees: what `attend` and `dq_of_keys` ask for.

    Returns:
        Which rows are in the cell (as a rule, all); before which key each sees all
        of them; the first block of keys that takes a mask, and the block behind the last.
    """
    rows = tl.arange(0, BLOCK_M)
    inside = (start <= first) & (last < start + length) & (rate <= step)
    ahead = first - start + rows * step
    within = (ahead >= 0) & (ahead < length) & ((ahead - offset) % rate == 0)
    full = k_len // BLOCK_N
    stop = tl.cdiv(k_len, BLOCK_N)
    limits = tl.where(within, k_len, 0)
    if IS_CAUSAL:
        to_key = ahead - (key - start)
        seen = tl.maximum(to_key + rate, 0) // rate
        limits = tl.minimum(limits, seen)
        full = tl.maximum(first - key + rate, 0) // rate // BLOCK_N
        full = tl.minimum(full, k_len // BLOCK_N)
        stop = tl.cdiv(tl.max(tl.where(rows < count, limits, 0), 0), BLOCK_N)
    return within, limits, tl.where(inside, full, 0), stop


@triton.jit
def zeros_of_cell(start, length, rate, offset, document):
    """How many zero keys a cell shows."""
    rows = tl.minimum(start + length, document) - start - offset
    return (length + rate - 1) // rate - (tl.maximum(rows, 0) + rate - 1) // rate


@triton.jit
def segments_of(branches, chosen, branch, kv_head, kv_heads, document, first, last):
    """A branch for a KV head, and the segments that positions lie in: none if it is not run."""
    length, rate, offset = branch_of(branches, branch, kv_head, kv_heads, document)
    runs = (((chosen >> branch) & 1) != 0) & (offset >= 0)
    segment = first // length
    return length, rate, offset, segment, tl.where(runs, last // length + 1, segment)


@triton.jit
def takes_part(
    branches, chosen, kv_head, kv_heads, document, first, last, step, count, num_branches
):
    """Whether any of `count` positions from `first` to `last` may be in a cell of any branch."""
    found = first < 0
    for branch in range(num_branches):
        length, rate, offset, segment, segment_stop = segments_of(
            branches, chosen, branch, kv_head, kv_heads, document, first, last
        )
        for index in range(segment, segment_stop):
            found = found | ((first - index * length - offset) % tl.minimum(rate, step) == 0)
    return found & (count > 0)


@triton.jit(
    do_not_specialize=[
        "q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "out_b", "out_n", "out_h",
        "lse_b", "lse_h", "lse_n", "scale", "heads_per_kv", "kv_heads", "num_branches",
        "num_programs",
    ]
)  # fmt: skip
def _forward_kernel(
    q, k, v, out, lse, ranges, branches, order, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h, lse_b, lse_h, lse_n,
    scale,
    heads_per_kv,
    kv_heads,
    num_branches,
    num_programs,
    UNIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    ZERO_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head, the keys of all branches that they see."""
    heads = kv_heads * heads_per_kv
    head, number = tl.program_id(0) % heads, tl.program_id(0) // heads
    batch = (number // num_programs).to(tl.int64)
    kv_head = head // heads_per_kv
    own, first, step, count = rows_of_program(
        programs + number % num_programs * 5, ranges, order, kv_head, BLOCK_M
    )  # fmt: skip
    part_start, part_stop, shift, document, chosen = range_of(own)
    last = first + (count - 1) * step
    if not takes_part(
        branches, chosen, kv_head, kv_heads, document, first, last, step, count, num_branches
    ):
        return

    rows = tl.arange(0, BLOCK_M)
    wide_step = step.to(tl.int64)
    row = (first + shift).to(tl.int64)
    wide_head = head.to(tl.int64)
    q += (batch * q_b + row * q_n + wide_head * q_h) * UNIT
    q_offsets = element_offsets(wide_step * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    q_block = load_block(q, q_offsets, rows < count, True, HEAD_DIM)
    # The maximum of scaled scores is the scaled maximum for scale >= 0: move its sign into q.
    q_block = negated_block(q_block, scale < 0)
    scale_log2 = tl.abs(scale) * LOG2_E
    k += (batch * k_b + kv_head.to(tl.int64) * k_h) * UNIT
    v += (batch * v_b + kv_head.to(tl.int64) * v_h) * UNIT

    acc = zero_block(BLOCK_M, BLOCK_D, TAIL)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for branch in tl.range(0, num_branches, disable_licm=True):
        length, rate, offset, segment, segment_stop = segments_of(
            branches, chosen, branch, kv_head, kv_heads, document, first, last
        )
        k_step = rate.to(tl.int64) * k_n * UNIT
        v_step = rate.to(tl.int64) * v_n * UNIT
        k_offsets = element_offsets(k_step, BLOCK_N, WIDE, BLOCK_D, TAIL)
        v_offsets = element_offsets(v_step, BLOCK_N, WIDE, BLOCK_D, TAIL)
        k_step *= BLOCK_N
        v_step *= BLOCK_N
        for index in tl.range(segment, segment_stop, disable_licm=True):
            start = index * length
            if (first - start - offset) % tl.minimum(rate, step) == 0:
                key, k_len = rows_of_cell(start, length, rate, offset, part_start, part_stop)
                within, limits, full, stop = keys_of_rows(
                    first, last, step, count, start, length, rate, offset, key, k_len,
                    IS_CAUSAL, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                k_row = (key + shift).to(tl.int64)
                k_at, v_at = k + k_row * k_n * UNIT, v + k_row * v_n * UNIT
                acc, row_max, row_sum = attend(
                    acc, row_max, row_sum, q_block, k_at, v_at, k_offsets, v_offsets,
                    k_step, v_step, limits, k_len, 0, full,
                    scale_log2, False, HEAD_DIM, BLOCK_N, PRECISION,
                )  # fmt: skip
                acc, row_max, row_sum = attend(
                    acc, row_max, row_sum, q_block, k_at, v_at, k_offsets, v_offsets,
                    k_step, v_step, limits, k_len, full, stop,
                    scale_log2, True, HEAD_DIM, BLOCK_N, PRECISION, 1,
                )  # fmt: skip
                if ZERO_KEYS:
                    zeros = zeros_of_cell(start, length, rate, offset, document)
                    if zeros > 0:  # keys whose score and value are 0
                        new_max = tl.where(within, tl.maximum(row_max, 0.0), row_max)
                        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                        shrink = tl.exp2(row_max - finite_max)
                        added = tl.where(within, zeros.to(tl.float32) * tl.exp2(-finite_max), 0.0)
                        row_max = new_max
                        row_sum = row_sum * shrink + added
                        acc = scaled_block(acc, shrink[:, None])
    seen_rows = (rows < count) & (row_sum > 0)
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    new_lse = (row_max + tl.log2(row_sum)) * LN_2
    acc = scaled_block(acc, 1.0 / row_sum[:, None])

    out += (batch * out_b + row * out_n + wide_head * out_h) * UNIT
    out_offsets = element_offsets(wide_step * out_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    lse += batch * lse_b + row * lse_n + wide_head * lse_h
    lse_offsets = row_offsets(wide_step * lse_n, BLOCK_M, WIDE)
    if tl.load(own + 7) == 0:
        acc, new_lse = merge_block(
            out, lse, out_offsets, lse_offsets, seen_rows, acc, new_lse, HEAD_DIM
        )  # fmt: skip
    write_block(out, out_offsets, seen_rows, acc, HEAD_DIM)
    tl.store(lse + lse_offsets, new_lse, mask=seen_rows)


_launch = Launcher(_forward_kernel)


def ranges_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    programs: Programs,
    *,
    is_causal: bool,
    zero_keys: bool,
    scale: float,
    config: LaunchConfig,
) -> None:
    """Attention of ranges over all their branches, written to `out` and `lse` or merged.

    Any strides, but a last stride of 1 where there is a D.

    Args:
        q: (B, n, H, D), float16, bfloat16 or float32; D a multiple of 8 up to 256.
        k: (B, n, K, D), same dtype.
        v: (B, n, K, D), same dtype.
        out: (B, n, H, D), any floating dtype; changed in place at the rows that see a key.
        lse: (B, H, n) float32, natural log; changed in place there. -inf: nothing seen yet.
        programs: built for the block_m of `config`.
        is_causal: whether a query sees only keys at its own position and before.
        zero_keys: whether cells show the zero keys that they are short of.
        scale: factor on the scores.
        config: how to launch.
    """
    assert config.block_m == programs.block
    launch, tensors = ranges_launch(
        programs,
        config,
        (q, k, v, out),
        (lse,),
        (scale,),
        rows_of=q,
        IS_CAUSAL=is_causal,
        ZERO_KEYS=zero_keys and not is_causal,
    )
    _launch(launch.grid, tensors, *launch[1:])


def ranges_launch(
    programs: Programs,
    config: LaunchConfig,
    tensors: Sequence[torch.Tensor],
    of_rows: Sequence[torch.Tensor],
    numbers: tuple[float, ...],
    *,
    rows_of: torch.Tensor,
    **options: int,
) -> tuple[KernelLaunch, tuple[torch.Tensor, ...]]:
    """How to launch a kernel of ranges, kept for the next tensors of the same layout; on which.

    Args:
        programs: what to compute.
        config: how to launch.
        tensors: (B, n, heads, D), the first arguments: q, k and others.
        of_rows: (B, H, n) float32, of the strides of the first: the next arguments.
        numbers: what follows the strides.
        rows_of: the tensor whose heads have programs: q, or k where they are keys.
        options: what else the kernel is compiled for.
    """
    shape, kv_heads, programs_heads = tensors[0].shape, tensors[1].shape[2], rows_of.shape[2]
    strides, of_lse = [x.stride() for x in tensors], of_rows[0].stride()

    def make() -> KernelLaunch:
        batch, _, heads, head_dim = shape
        unit = stride_unit(*strides)
        longest = max(of_lse[2], *(x[1] for x in strides))  # way from a row to the next
        sizes = programs.sizes(heads, kv_heads)
        return KernelLaunch(
            (batch * programs.count * programs_heads, 1),
            (*strides_in(unit, *strides), *of_lse, *numbers, *sizes),
            {**_constants(programs, unit, longest, config, head_dim), **options},
            {},
        )

    layout = shape, kv_heads, programs_heads, of_lse, *strides
    key = config, numbers, *options.values(), *layout
    launch = keep_few(programs.launches, key, make, LAUNCHES_KEPT)
    return launch, (*tensors, *of_rows, *programs.tensors)


def _constants(
    programs: Programs, unit: int, longest: int, config: LaunchConfig, head_dim: int
) -> dict[str, Any]:
    """What a kernel of ranges is compiled for, but for its options."""
    return {
        "UNIT": unit,
        **head_dim_constants(head_dim, config.tail),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee",  # no tf32 for float32; nothing to choose for the others
        "WIDE": programs.reach * longest >= 2**31,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.max_registers,
    }
