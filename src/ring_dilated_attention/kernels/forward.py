"""Triton kernel: attention of many tiles in one launch, merged into the result where it ends.

Tensors are read and written in place, by their strides, through the tables of `cells`; nothing is
gathered. Scores, sums and merges are float32; p is rounded to the inputs' dtype before it is
multiplied.

Shape legend: B batch, n queries, m keys, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    LN_2,
    LOG2_E,
    add_product,
    cells_launch,
    default_launch,
    element_offsets,
    load_block,
    negated_block,
    products_of_all_rows,
    row_offsets,
    scaled_block,
    write_block,
    zero_block,
)
from .cells import Cells
from .launch import Launcher
from .tuning import LaunchConfig


@triton.jit
def attend(
    acc,
    row_max,
    row_sum,
    q,
    k,
    v,
    k_offsets,
    v_offsets,
    k_step,
    v_step,
    limits,
    length,
    first,
    stop,
    scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """Online softmax over key blocks `first` to `stop` - 1, in powers of two.

    Row i sees the keys before ``limits[i] <= length``; where MASKED is false, all of these blocks.
    """
    for block in tl.range(first, stop, num_stages=STAGES):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_block = load_block(k + block * k_step, k_offsets, keys < length, MASKED, HEAD_DIM)
        scores = products_of_all_rows(q, k_block, PRECISION)
        if MASKED:
            scores = tl.where(keys[None, :] < limits[:, None], scores * scale, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # Of a row that has seen no key: (-inf) - (-inf) would be NaN.
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(scores - finite_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            finite_max = new_max
            p = tl.exp2(scores * scale - new_max[:, None])
        shrink = tl.exp2(row_max - finite_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = scaled_block(acc, shrink[:, None])
        v_block = load_block(v + block * v_step, v_offsets, keys < length, MASKED, HEAD_DIM)
        acc = add_product(acc, p.to(v_block[0].dtype), v_block, PRECISION)
    return acc, row_max, row_sum


@triton.jit
def merge_block(out, lse, out_offsets, lse_offsets, in_rows, acc, new_lse, HEAD_DIM: tl.constexpr):
    """A block of rows and their lse, merged with what `out` and `lse` hold of them."""
    old_lse = tl.load(lse + lse_offsets, mask=in_rows, other=0.0)
    unseen = old_lse == float("-inf")
    old = load_block(out, out_offsets, in_rows, True, HEAD_DIM)
    weight = tl.sigmoid(new_lse - old_lse)[:, None]
    merged = ()
    for part in tl.static_range(len(acc)):
        was = old[part].to(tl.float32)
        both = was + weight * (acc[part] - was)
        merged += (tl.where(unseen[:, None], acc[part], both),)  # type: ignore[assignment]
    # logaddexp, from the larger of the two
    new_lse = tl.maximum(old_lse, new_lse) + tl.log(1 + tl.exp(-tl.abs(old_lse - new_lse)))
    # Several warps may load the lse of one row, one stores it: all loads come first.
    tl.debug_barrier()
    return merged, new_lse


@triton.jit(
    do_not_specialize=[
        "q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "out_b", "out_n", "out_h",
        "lse_b", "lse_h", "lse_n", "scale", "heads_per_kv",
    ]
)  # fmt: skip
def _forward_kernel(
    q, k, v, out, lse, cells, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h, lse_b, lse_h, lse_n,
    scale,
    heads_per_kv,
    UNIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    STORE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head of one cell, all its keys."""
    program = programs + tl.program_id(0) * 3
    cell = cells + tl.load(program).to(tl.int64) * 8
    member, block_m = tl.load(program + 1), tl.load(program + 2)
    batch, kv_head = tl.load(cell), tl.load(cell + 1)
    q_row, q_stride, q_len = tl.load(cell + 2), tl.load(cell + 3), tl.load(cell + 4).to(tl.int32)
    k_row, k_stride, k_len = tl.load(cell + 5), tl.load(cell + 6), tl.load(cell + 7).to(tl.int32)
    head = kv_head * heads_per_kv + member

    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_row += block_m * BLOCK_M * q_stride
    q += (batch * q_b + q_row * q_n + head * q_h) * UNIT
    q_offsets = element_offsets(q_stride * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    q_block = load_block(q, q_offsets, rows < q_len, True, HEAD_DIM)
    # The maximum of scaled scores is the scaled maximum for scale >= 0: move its sign into q.
    q_block = negated_block(q_block, scale < 0)
    scale_log2 = tl.abs(scale) * LOG2_E

    k += (batch * k_b + k_row * k_n + kv_head * k_h) * UNIT
    v += (batch * v_b + k_row * v_n + kv_head * v_h) * UNIT
    k_step, v_step = k_stride * k_n * UNIT, k_stride * v_n * UNIT
    k_offsets = element_offsets(k_step, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets = element_offsets(v_step, BLOCK_N, WIDE, BLOCK_D, TAIL)
    k_step *= BLOCK_N
    v_step *= BLOCK_N

    acc = zero_block(BLOCK_M, BLOCK_D, TAIL)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if IS_CAUSAL:  # before the diagonal: no mask
        full = block_m * BLOCK_M // BLOCK_N
        stop = tl.cdiv(tl.minimum((block_m + 1) * BLOCK_M, k_len), BLOCK_N)
    else:
        full = k_len // BLOCK_N
        stop = tl.cdiv(k_len, BLOCK_N)
    limits = tl.minimum(rows + 1, k_len) if IS_CAUSAL else tl.zeros_like(rows) + k_len
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_block, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, k_len, 0, full, scale_log2, False, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_block, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, k_len, full, stop, scale_log2, True, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc = scaled_block(acc, 1.0 / row_sum[:, None])
    new_lse = (row_max + tl.log2(row_sum)) * LN_2

    out += (batch * out_b + q_row * out_n + head * out_h) * UNIT
    out_offsets = element_offsets(q_stride * out_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    lse += batch * lse_b + q_row * lse_n + head * lse_h
    lse_offsets = row_offsets(q_stride * lse_n, BLOCK_M, WIDE)
    in_rows = rows < q_len
    if not STORE:
        acc, new_lse = merge_block(
            out, lse, out_offsets, lse_offsets, in_rows, acc, new_lse, HEAD_DIM
        )  # fmt: skip
    write_block(out, out_offsets, in_rows, acc, HEAD_DIM)
    tl.store(lse + lse_offsets, new_lse, mask=in_rows)


_launch = Launcher(_forward_kernel)


def tiles_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cells: Cells,
    *,
    is_causal: bool,
    scale: float,
    store: bool,
    config: LaunchConfig | None = None,
) -> None:
    """Attention of all cells, written to `out` and `lse` or merged into them.

    Any strides, but a last stride of 1 where there is a D.

    Args:
        q: (B, n, H, D), float16, bfloat16 or float32; D a multiple of 8 up to 256.
        k: (B, m, K, D), same dtype; head stride 0 where rows are slots of a message.
        v: (B, m, K, D), same dtype; head stride 0 where rows are slots of a message.
        out: (B, n, H, D), any floating dtype; changed in place at the queries of the cells.
        lse: (B, H, n) float32, natural log; changed in place at the queries of the cells.
            -inf: nothing seen yet.
        cells: built for the block_m of `config`.
        is_causal: as the tiles of `cells`.
        scale: factor on the scores.
        store: write; else merge: ``lse' = logaddexp(lse, lse_cell)`` and
            ``out' = out + sigmoid(lse_cell - lse) * (out_cell - out)``, in float32.
        config: how to launch; None: `default_config`.
    """
    assert is_causal == cells.is_causal
    if config is None:
        config = default_launch("forward", q, cells)
    assert config.block_m == cells.block_m
    if not len(cells.query_programs):
        return
    launch = cells_launch(
        cells, cells.query_programs, (q, k, v, out), (lse,), (), config, scale=scale, STORE=store
    )
    tensors = q, k, v, out, lse, cells.table, cells.query_programs
    _launch(launch.grid, tensors, *launch[1:])
