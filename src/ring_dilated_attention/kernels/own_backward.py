"""Triton kernels: gradients of several branches in two launches, each row of them written once.

As in `own_forward`. dq goes through the keys of its rows' cells, dk and dv through the queries of
theirs: the rows of a cell are its queries and its keys.

Shape legend: B batch, n rows, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .backward import dkdv_of_queries, dq_of_keys
from .blocks import (
    LOG2_E,
    element_offsets,
    load_block,
    products_of_all_rows,
    products_of_rows,
    row_offsets,
    scaled_block,
    sum_of_blocks,
    write_block,
    zero_block,
)
from .device_profile import BackwardConfig, copies_of
from .forward import (
    keys_of_rows,
    range_of,
    ranges_launch,
    rows_of_cell,
    rows_of_program,
    segments_of,
    takes_part,
    zeros_of_cell,
)
from .launch import Launcher
from .own_programs import Programs


@triton.jit
def _weigh_keys(
    weighed,
    weights,
    q,
    dout,
    lse,
    k,
    v,
    k_offsets,
    v_offsets,
    k_step,
    v_step,
    limits,
    length,
    stop,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum p (dout v^T) and p over the keys that rows see."""
    for block in range(0, stop):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_block = load_block(k + block * k_step, k_offsets, keys < length, True, HEAD_DIM)
        v_block = load_block(v + block * v_step, v_offsets, keys < length, True, HEAD_DIM)
        scores = products_of_all_rows(q, k_block, PRECISION)
        p = tl.exp2(scores * scale - lse[:, None])
        p = tl.where(keys[None, :] < limits[:, None], p, 0.0)
        dp = products_of_all_rows(dout, v_block, PRECISION)
        weighed += tl.sum(p * dp, 1)
        weights += tl.sum(p, 1)
    return weighed, weights


@triton.jit(
    do_not_specialize=[
        "q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "dout_b", "dout_n", "dout_h",
        "out_b", "out_n", "out_h", "dq_b", "dq_n", "dq_h", "lse_b", "lse_h", "lse_n",
        "delta_branch", "scale", "heads_per_kv", "kv_heads", "num_branches",
        "num_programs",
    ]
)  # fmt: skip
def _dq_kernel(
    q, k, v, dout, out, dq, lse, delta, ranges, branches, order, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h, out_b, out_n, out_h,
    dq_b, dq_n, dq_h, lse_b, lse_h, lse_n,
    delta_branch,
    scale,
    heads_per_kv,
    kv_heads,
    num_branches,
    num_programs,
    UNIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    ZERO_KEYS: tl.constexpr,
    DETACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head, the keys of all branches that they see.

    Writes delta, which has the strides of lse, for the kernel of dk and dv: of the merged out, or
    where DETACHED of each branch's own.
    """
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
    dout += (batch * dout_b + row * dout_n + wide_head * dout_h) * UNIT
    dout_offsets = element_offsets(wide_step * dout_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    dout_block = load_block(dout, dout_offsets, rows < count, True, HEAD_DIM)
    of_lse = batch * lse_b + row * lse_n + wide_head * lse_h
    lse_offsets = row_offsets(wide_step * lse_n, BLOCK_M, WIDE)
    row_lse = tl.load(lse + of_lse + lse_offsets, mask=rows < count, other=float("inf")) * LOG2_E
    delta += of_lse
    row_delta = tl.zeros([BLOCK_M], tl.float32)
    if not DETACHED:
        out += (batch * out_b + row * out_n + wide_head * out_h) * UNIT
        out_offsets = element_offsets(wide_step * out_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
        out_block = load_block(out, out_offsets, rows < count, True, HEAD_DIM)
        row_delta = products_of_rows(dout_block, out_block)
        tl.store(delta + lse_offsets, row_delta, mask=rows < count)
    k += (batch * k_b + kv_head.to(tl.int64) * k_h) * UNIT
    v += (batch * v_b + kv_head.to(tl.int64) * v_h) * UNIT

    acc = zero_block(BLOCK_M, BLOCK_D, TAIL)
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
                if DETACHED:  # the branch's own delta, before it is needed
                    weighed = tl.zeros([BLOCK_M], tl.float32)
                    weights = tl.zeros([BLOCK_M], tl.float32)
                    weighed, weights = _weigh_keys(
                        weighed, weights, q_block, dout_block, row_lse, k_at, v_at,
                        k_offsets, v_offsets, k_step, v_step, limits, k_len, stop,
                        scale * LOG2_E, HEAD_DIM, BLOCK_N, PRECISION,
                    )  # fmt: skip
                    if ZERO_KEYS:
                        zeros = zeros_of_cell(start, length, rate, offset, document)
                        weights += zeros.to(tl.float32) * tl.exp2(-row_lse)
                    row_delta = weighed / tl.where(weights > 0, weights, 1.0)
                    here = delta + branch * delta_branch.to(tl.int64) + lse_offsets
                    tl.store(here, row_delta, mask=(rows < count) & within)
                acc = dq_of_keys(
                    acc, q_block, dout_block, row_lse, row_delta, k_at, v_at,
                    k_offsets, v_offsets, k_step, v_step, limits, k_len, 0, full,
                    scale * LOG2_E, False, HEAD_DIM, BLOCK_N, PRECISION,
                )  # fmt: skip
                acc = dq_of_keys(
                    acc, q_block, dout_block, row_lse, row_delta, k_at, v_at,
                    k_offsets, v_offsets, k_step, v_step, limits, k_len, full, stop,
                    scale * LOG2_E, True, HEAD_DIM, BLOCK_N, PRECISION, 1,
                )  # fmt: skip
    dq += (batch * dq_b + row * dq_n + wide_head * dq_h) * UNIT
    dq_offsets = element_offsets(wide_step * dq_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    acc = scaled_block(acc, scale)
    if tl.load(own + 7) == 0:
        acc = sum_of_blocks(acc, load_block(dq, dq_offsets, rows < count, True, HEAD_DIM))
    write_block(dq, dq_offsets, rows < count, acc, HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        "q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "dout_b", "dout_n", "dout_h",
        "dk_b", "dk_n", "dk_h", "dv_b", "dv_n", "dv_h", "lse_b", "lse_h", "lse_n",
        "delta_branch", "scale", "heads_per_kv", "kv_heads", "num_branches",
        "num_programs",
    ]
)  # fmt: skip
def _dkdv_kernel(
    q, k, v, dout, dk, dv, lse, delta, ranges, branches, order, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h,
    dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, lse_b, lse_h, lse_n,
    delta_branch,
    scale,
    heads_per_kv,
    kv_heads,
    num_branches,
    num_programs,
    UNIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    DETACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of keys of one KV head, all queries of all branches that see them."""
    kv_head, number = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    batch = (number // num_programs).to(tl.int64)
    own, first, step, count = rows_of_program(
        programs + number % num_programs * 5, ranges, order, kv_head, BLOCK_N
    )  # fmt: skip
    part_start, part_stop, shift, document, chosen = range_of(own)
    last = first + (count - 1) * step
    if not takes_part(
        branches, chosen, kv_head, kv_heads, document, first, last, step, count, num_branches
    ):
        return

    keys = tl.arange(0, BLOCK_N)
    wide_step = step.to(tl.int64)
    row = (first + shift).to(tl.int64)
    wide_head = kv_head.to(tl.int64)
    k += (batch * k_b + row * k_n + wide_head * k_h) * UNIT
    v += (batch * v_b + row * v_n + wide_head * v_h) * UNIT
    k_offsets = element_offsets(wide_step * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets = element_offsets(wide_step * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    k_block = load_block(k, k_offsets, keys < count, True, HEAD_DIM)
    v_block = load_block(v, v_offsets, keys < count, True, HEAD_DIM)

    dk_block = zero_block(BLOCK_N, BLOCK_D, TAIL)
    dv_block = zero_block(BLOCK_N, BLOCK_D, TAIL)
    for branch in tl.range(0, num_branches, disable_licm=True):
        length, rate, offset, segment, segment_stop = segments_of(
            branches, chosen, branch, kv_head, kv_heads, document, first, last
        )
        wide_rate = rate.to(tl.int64)
        q_step, dout_step = wide_rate * q_n * UNIT, wide_rate * dout_n * UNIT
        lse_step = wide_rate * lse_n
        q_offsets = element_offsets(q_step, BLOCK_M, WIDE, BLOCK_D, TAIL)
        dout_offsets = element_offsets(dout_step, BLOCK_M, WIDE, BLOCK_D, TAIL)
        lse_offsets = row_offsets(lse_step, BLOCK_M, WIDE)
        q_step *= BLOCK_M
        dout_step *= BLOCK_M
        lse_step *= BLOCK_M
        for index in tl.range(segment, segment_stop, disable_licm=True):
            start = index * length
            if (first - start - offset) % tl.minimum(rate, step) == 0:
                query, q_len = rows_of_cell(start, length, rate, offset, part_start, part_stop)
                inside = (start <= first) & (last < start + length) & (rate <= step)
                ahead = first - start + keys * step
                within = (ahead >= 0) & (ahead < length) & ((ahead - offset) % rate == 0)
                # Query blocks: masked `begin` to `full` - 1 and `tail` to `stop` - 1.
                stop = tl.cdiv(q_len, BLOCK_M)
                begin = 0
                full = 0
                lows = tl.zeros_like(keys)
                if IS_CAUSAL:
                    to_query = ahead - (query - start) + rate - 1
                    lows = tl.maximum(to_query, 0) // rate
                    earliest = tl.maximum(tl.maximum(first, start) - query, 0) // rate
                    latest = (tl.maximum(last - query, 0) + rate - 1) // rate
                    begin = earliest // BLOCK_M
                    full = tl.minimum(tl.cdiv(latest + 1, BLOCK_M), stop)
                full = tl.where(inside, full, stop)
                tail = tl.maximum(q_len // BLOCK_M, full)
                lows = tl.where(within, lows, q_len)
                q_row = (query + shift).to(tl.int64)
                head = wide_head * heads_per_kv
                q_at = q + (batch * q_b + q_row * q_n + head * q_h) * UNIT
                dout_at = dout + (batch * dout_b + q_row * dout_n + head * dout_h) * UNIT
                of_lse = batch * lse_b + head * lse_h + q_row * lse_n
                lse_at, delta_at = lse + of_lse, delta + of_lse
                if DETACHED:
                    delta_at += branch * delta_branch.to(tl.int64)
                for _ in range(heads_per_kv):
                    dk_block, dv_block = dkdv_of_queries(
                        dk_block, dv_block, k_block, v_block, q_at, dout_at, lse_at, delta_at,
                        q_offsets, dout_offsets, lse_offsets, lse_offsets,
                        q_step, dout_step, lse_step, lse_step,
                        lows, q_len, begin, full, tail, stop,
                        scale * LOG2_E, True, True, HEAD_DIM, BLOCK_M, COPIES, PRECISION, 1,
                    )  # fmt: skip
                    dk_block, dv_block = dkdv_of_queries(
                        dk_block, dv_block, k_block, v_block, q_at, dout_at, lse_at, delta_at,
                        q_offsets, dout_offsets, lse_offsets, lse_offsets,
                        q_step, dout_step, lse_step, lse_step,
                        lows, q_len, full, tail, tail, tail,
                        scale * LOG2_E, False, False, HEAD_DIM, BLOCK_M, COPIES, PRECISION,
                    )  # fmt: skip
                    q_at += q_h.to(tl.int64) * UNIT
                    dout_at += dout_h.to(tl.int64) * UNIT
                    lse_at += lse_h
                    delta_at += lse_h

    dk += (batch * dk_b + row * dk_n + wide_head * dk_h) * UNIT
    dv += (batch * dv_b + row * dv_n + wide_head * dv_h) * UNIT
    dk_offsets = element_offsets(wide_step * dk_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    dv_offsets = element_offsets(wide_step * dv_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    dk_block = scaled_block(dk_block, scale)
    if tl.load(own + 7) == 0:
        in_keys = keys < count
        dk_block = sum_of_blocks(dk_block, load_block(dk, dk_offsets, in_keys, True, HEAD_DIM))
        dv_block = sum_of_blocks(dv_block, load_block(dv, dv_offsets, in_keys, True, HEAD_DIM))
    write_block(dk, dk_offsets, keys < count, dk_block, HEAD_DIM)
    write_block(dv, dv_offsets, keys < count, dv_block, HEAD_DIM)


_launch_dq, _launch_dkdv = Launcher(_dq_kernel), Launcher(_dkdv_kernel)


def ranges_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    queries: Programs,
    keys: Programs,
    *,
    is_causal: bool,
    zero_keys: bool,
    detached: bool,
    scale: float,
    config: BackwardConfig,
) -> None:
    """Gradients of ranges over all their branches, written to dq, dk, dv or added to them.

    As `tiles_backward`, with delta worked out here: ``rowsum(dout * out)``.

    Args:
        dout: (B, n, H, D), the dtype of q.
        q: as in forward, like k and v.
        k: (B, n, K, D).
        v: (B, n, K, D).
        out: (B, n, H, D), of the merged result.
        lse: (B, H, n) float32, of the merged result, finite at the rows that see a key.
        dq: (B, n, H, D), any floating dtype; changed in place at the rows that see a key.
        dk: (B, n, K, D), any floating dtype; changed in place at the rows that are seen.
        dv: (B, n, K, D), any floating dtype; changed in place at the rows that are seen.
        queries: built for the block_m of ``config.dq``.
        keys: built for the block_n of ``config.dkdv``.
        is_causal: as in forward.
        zero_keys: as in forward.
        detached: take delta of each branch's own out, which is worked out again, in place of the
            merged one: the gradient with branch weights that are constants.
        scale: factor on the scores.
        config: how to launch.
    """
    assert (config.dq.block_m, config.dkdv.block_n) == (queries.block, keys.block)
    deltas = queries.num_branches if detached else 1
    delta = torch.empty_strided(
        (deltas, *lse.shape), (lse.numel(), *lse.stride()), dtype=lse.dtype, device=lse.device
    )
    inputs, of_rows, numbers = (q, k, v, dout), (lse, delta), (delta.stride(0), scale)
    options = {"IS_CAUSAL": is_causal, "DETACHED": detached}
    zeros = zero_keys and not is_causal
    launch, tensors = ranges_launch(
        queries, config.dq, (*inputs, out, dq), of_rows, numbers,
        rows_of=q, ZERO_KEYS=zeros, **options,
    )  # fmt: skip
    _launch_dq(launch.grid, tensors, *launch[1:])
    launch, tensors = ranges_launch(
        keys, config.dkdv, (*inputs, dk, dv), of_rows, numbers,
        rows_of=k, **options, **copies_of(config.dkdv),
    )  # fmt: skip
    _launch_dkdv(launch.grid, tensors, *launch[1:])
