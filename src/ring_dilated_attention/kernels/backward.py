"""Triton kernels: gradients of many tiles, or of several branches, in two launches.

As in `forward`; p and ds are rounded to the inputs' dtype before they are multiplied. One kernel
goes through the keys of its queries for dq, one through the queries of its keys for dk and dv: so
each row is written by one program, and nothing is added by atomics. Gradients of tiles are added to
the totals where they end; of several branches (`ranges_backward`), each row is written once.

Shape legend: B batch, n queries, m keys, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    LOG2_E,
    add_block,
    add_product,
    attention_launch,
    blocks_of_rows,
    element_offsets,
    halves_of_rows,
    load_block,
    products_of_all_rows,
    products_of_rows,
    row_offsets,
    scaled_block,
    zero_block,
)
from .device_profile import BackwardConfig, copies_of
from .forward import (
    keys_of_block,
    keys_of_rows,
    program_of_ranges,
    range_of,
    read_cell,
    rows_of_cell,
    segments_of,
    takes_part,
    zeros_of_cell,
)
from .launch import kernel
from .own_programs import Cells, Programs


@triton.jit
def dq_of_keys(
    dq, q, dout, lse, delta, k, v, k_offsets, v_offsets, k_step, v_step,
    limits, length, first, stop, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Add ds k of key blocks `first` to `stop` - 1 to `dq`; the factor `scale` comes later.

    Row i sees the keys before ``limits[i] <= length``; where MASKED is false, all of these blocks.
    """
    for block in tl.range(first, stop, num_stages=STAGES):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_block = load_block(k + block * k_step, k_offsets, keys < length, MASKED, HEAD_DIM)
        v_block = load_block(v + block * v_step, v_offsets, keys < length, MASKED, HEAD_DIM)
        scores = products_of_all_rows(q, k_block, PRECISION)
        p = tl.exp2(scores * scale - lse[:, None])
        if MASKED:
            p = tl.where(keys[None, :] < limits[:, None], p, 0.0)
        dp = products_of_all_rows(dout, v_block, PRECISION)
        ds = (p * (dp - delta[:, None])).to(k_block[0].dtype)
        dq = add_product(dq, ds, k_block, PRECISION)
    return dq


@triton.jit
def dq_of_cell(
    dq, q, dout, lse, delta, k, v, k_offsets, v_offsets, k_step, v_step,
    limits, length, full, stop, scale,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Add ds k of the keys of a cell to `dq`: key blocks before `full` take no mask."""
    dq = dq_of_keys(
        dq, q, dout, lse, delta, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, length, 0, full, scale, False, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    return dq_of_keys(
        dq, q, dout, lse, delta, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, length, full, stop, scale, True, HEAD_DIM, BLOCK_N, PRECISION, STAGES,
    )  # fmt: skip


@kernel(9)
def _dq_kernel(
    q, k, v, dout, dq, lse, delta, cells, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h, dq_b, dq_n, dq_h,
    lse_b, lse_h, lse_n, delta_b, delta_h, delta_n,
    scale, heads_per_kv,
    UNIT: tl.constexpr, IS_CAUSAL: tl.constexpr, STORE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head of one cell, all its keys."""
    program = programs + tl.program_id(0) * 3
    member, block_m = tl.load(program + 1), tl.load(program + 2)
    batch, kv_head, q_row, q_stride, q_len, k_row, k_stride, k_len = read_cell(cells, program)
    head = kv_head * heads_per_kv + member

    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    q_row += block_m * BLOCK_M * q_stride
    q += (batch * q_b + q_row * q_n + head * q_h) * UNIT
    q_offsets = element_offsets(q_stride * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    q_block = load_block(q, q_offsets, in_rows, True, HEAD_DIM)
    dout += (batch * dout_b + q_row * dout_n + head * dout_h) * UNIT
    dout_offsets = element_offsets(q_stride * dout_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    dout_block = load_block(dout, dout_offsets, in_rows, True, HEAD_DIM)
    lse += batch * lse_b + q_row * lse_n + head * lse_h
    lse_offsets = row_offsets(q_stride * lse_n, BLOCK_M, WIDE)
    # An lse of inf: p is 0 in rows that there are not.
    row_lse = tl.load(lse + lse_offsets, mask=in_rows, other=float("inf")) * LOG2_E
    delta += batch * delta_b + q_row * delta_n + head * delta_h
    delta_offsets = row_offsets(q_stride * delta_n, BLOCK_M, WIDE)
    row_delta = tl.load(delta + delta_offsets, mask=in_rows, other=0.0)

    k += (batch * k_b + k_row * k_n + kv_head * k_h) * UNIT
    v += (batch * v_b + k_row * v_n + kv_head * v_h) * UNIT
    k_offsets, k_step = blocks_of_rows(k_stride * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets, v_step = blocks_of_rows(k_stride * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    limits, full, stop = keys_of_block(block_m, rows, k_len, IS_CAUSAL, BLOCK_M, BLOCK_N)
    acc = dq_of_cell(
        zero_block(BLOCK_M, BLOCK_D, TAIL), q_block, dout_block, row_lse, row_delta,
        k, v, k_offsets, v_offsets, k_step, v_step, limits, k_len, full, stop,
        scale * LOG2_E, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip

    dq += (batch * dq_b + q_row * dq_n + head * dq_h) * UNIT
    dq_offsets = element_offsets(q_stride * dq_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    add_block(dq, dq_offsets, in_rows, scaled_block(acc, scale), STORE, HEAD_DIM)


@triton.jit
def dkdv_of_queries(
    dk, dv, k, v, q, dout, lse, delta, q_offsets, dout_offsets, lse_offsets, delta_offsets,
    q_step, dout_step, lse_step, delta_step, lows, length, first, gap, resume, stop, scale,
    MASKED: tl.constexpr, HIDES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Add ds^T q and p^T dout of query blocks `first` to `gap` - 1 and `resume` to `stop` - 1.

    Where HIDES and MASKED, query i sees the keys j with ``lows[j] <= i``; else all of them.
    """
    for number in tl.range(first, stop - (resume - gap), num_stages=STAGES):
        block = tl.where(number < gap, number, number + (resume - gap))
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        q_block = load_block(q + block * q_step, q_offsets, rows < length, MASKED, HEAD_DIM)
        dout_block = load_block(
            dout + block * dout_step, dout_offsets, rows < length, MASKED, HEAD_DIM
        )
        # As many elements as there are threads: with fewer Triton would have each thread load all
        # of those that it needs, one by one.
        pairs = tl.arange(0, 2 * COPIES)[None, :]
        of_rows = tl.where(
            pairs < COPIES,
            (lse + block * lse_step + lse_offsets)[:, None],
            (delta + block * delta_step + delta_offsets)[:, None],
        )
        if MASKED:
            beyond = tl.where(pairs < COPIES, float("inf"), 0.0)
            found = tl.load(of_rows, mask=(rows < length)[:, None], other=beyond)
        else:
            found = tl.load(of_rows)
        row_lse, row_delta = halves_of_rows(found, COPIES)
        # Keys by queries: p and ds are the left sides of products as they are, in registers.
        scores = products_of_all_rows(k, q_block, PRECISION)
        p = tl.exp2(scores * scale - (row_lse * LOG2_E)[None, :])
        if MASKED and HIDES:
            p = tl.where(lows[:, None] <= rows[None, :], p, 0.0)
        dv = add_product(dv, p.to(dout_block[0].dtype), dout_block, PRECISION)
        dp = products_of_all_rows(v, dout_block, PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(q_block[0].dtype)
        dk = add_product(dk, ds, q_block, PRECISION)
    return dk, dv


@triton.jit
def dkdv_of_cell(
    dk, dv, k, v, q, dout, lse, delta, q_offsets, dout_offsets, lse_offsets, delta_offsets,
    q_step, dout_step, lse_step, delta_step, lows, length, first, full, stop, scale,
    heads, q_h, dout_h, lse_h, delta_h,
    HIDES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, COPIES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Add ds^T q and p^T dout of the queries of a cell, of all `heads` heads.

    Query blocks `first` to `full` - 1 (the diagonal) and `tail` to `stop` - 1 (the ragged last one,
    unless it is on the diagonal) take a mask, `full` to `tail` - 1 none.
    """
    tail = tl.maximum(length // BLOCK_M, full)
    for _ in range(heads):
        dk, dv = dkdv_of_queries(
            dk, dv, k, v, q, dout, lse, delta, q_offsets, dout_offsets, lse_offsets, delta_offsets,
            q_step, dout_step, lse_step, delta_step, lows, length, first, full, tail, stop, scale,
            True, HIDES, HEAD_DIM, BLOCK_M, COPIES, PRECISION, STAGES,
        )  # fmt: skip
        dk, dv = dkdv_of_queries(
            dk, dv, k, v, q, dout, lse, delta, q_offsets, dout_offsets, lse_offsets, delta_offsets,
            q_step, dout_step, lse_step, delta_step, lows, length, full, tail, tail, tail, scale,
            False, False, HEAD_DIM, BLOCK_M, COPIES, PRECISION,
        )  # fmt: skip
        q += q_h
        dout += dout_h
        lse += lse_h
        delta += delta_h
    return dk, dv


@kernel(10)
def _dkdv_kernel(
    q, k, v, dout, dk, dv, lse, delta, cells, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h,
    dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, lse_b, lse_h, lse_n, delta_b, delta_h, delta_n,
    scale, heads_per_kv,
    UNIT: tl.constexpr, IS_CAUSAL: tl.constexpr, STORE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    COPIES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of keys of one cell, all queries of query heads of its KV head."""
    program = programs + tl.program_id(0) * 2
    block_n = tl.load(program + 1)
    batch, kv_head, q_row, q_stride, q_len, k_row, k_stride, k_len = read_cell(cells, program)

    keys = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_keys = keys < k_len
    k_row += block_n * BLOCK_N * k_stride
    k += (batch * k_b + k_row * k_n + kv_head * k_h) * UNIT
    v += (batch * v_b + k_row * v_n + kv_head * v_h) * UNIT
    k_offsets = element_offsets(k_stride * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets = element_offsets(k_stride * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    k_block = load_block(k, k_offsets, in_keys, True, HEAD_DIM)
    v_block = load_block(v, v_offsets, in_keys, True, HEAD_DIM)

    head = kv_head * heads_per_kv
    q += (batch * q_b + q_row * q_n + head * q_h) * UNIT
    dout += (batch * dout_b + q_row * dout_n + head * dout_h) * UNIT
    lse += batch * lse_b + head * lse_h + q_row * lse_n
    delta += batch * delta_b + head * delta_h + q_row * delta_n
    q_offsets, q_step = blocks_of_rows(q_stride * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    dout_offsets, dout_step = blocks_of_rows(q_stride * dout_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    lse_offsets = row_offsets(q_stride * lse_n, BLOCK_M, WIDE)
    delta_offsets = row_offsets(q_stride * delta_n, BLOCK_M, WIDE)

    stop = tl.cdiv(q_len, BLOCK_M)
    first = 0
    full = 0
    if IS_CAUSAL:
        first = block_n * BLOCK_N // BLOCK_M
        full = tl.minimum(tl.cdiv((block_n + 1) * BLOCK_N, BLOCK_M), stop)
    dk_block, dv_block = dkdv_of_cell(
        zero_block(BLOCK_N, BLOCK_D, TAIL), zero_block(BLOCK_N, BLOCK_D, TAIL),
        k_block, v_block, q, dout, lse, delta, q_offsets, dout_offsets, lse_offsets, delta_offsets,
        q_step, dout_step, q_stride * lse_n * BLOCK_M, q_stride * delta_n * BLOCK_M,
        keys, q_len, first, full, stop, scale * LOG2_E,
        heads_per_kv, q_h.to(tl.int64) * UNIT, dout_h.to(tl.int64) * UNIT, lse_h, delta_h,
        IS_CAUSAL, HEAD_DIM, BLOCK_M, COPIES, PRECISION,
    )  # fmt: skip

    dk += (batch * dk_b + k_row * dk_n + kv_head * dk_h) * UNIT
    dv += (batch * dv_b + k_row * dv_n + kv_head * dv_h) * UNIT
    dk_offsets = element_offsets(k_stride * dk_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    dv_offsets = element_offsets(k_stride * dv_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    add_block(dk, dk_offsets, in_keys, scaled_block(dk_block, scale), STORE, HEAD_DIM)
    add_block(dv, dv_offsets, in_keys, dv_block, STORE, HEAD_DIM)


def tiles_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cells: Cells,
    *,
    is_causal: bool,
    scale: float,
    store: bool,
    store_keys: bool,
    config: BackwardConfig,
) -> None:
    """Gradients of all cells, written to dq, dk, dv or added to them.

    ``p = exp(scale q k^T - lse)``, ``ds = scale p (dout v^T - delta)``: dq = ds k, dk = ds^T q,
    dv = p^T dout. Any strides, but a last stride of 1 where there is a D.

    Args:
        dout: (B, n, H, D), the dtype of q.
        q: as in forward, like k and v.
        k: (B, m, K, D).
        v: (B, m, K, D).
        lse: (B, H, n) float32: of the MERGED result, finite at the queries of the cells.
        delta: (B, H, n) float32: rowsum(dout * merged out).
        dq: (B, n, H, D), any floating dtype; changed in place at the queries of the cells.
        dk: (B, m, K, D), any floating dtype; changed in place at the keys of the cells.
        dv: (B, m, K, D), any floating dtype; changed in place at the keys of the cells.
        cells: built for the block_m of ``config.dq`` and the block_n of ``config.dkdv``.
        is_causal: as the tiles of `cells`.
        scale: factor on the scores.
        store: write dq; else add, in float32.
        store_keys: write dk and dv; else add, in float32.
        config: how to launch.
    """
    assert is_causal == cells.is_causal
    assert (config.dq.block_m, config.dkdv.block_n) == (cells.block_m, cells.block_n)
    if not len(cells.query_programs):
        return
    inputs, of_rows, numbers = (q, k, v, dout), (lse, delta), (scale, cells.heads_per_kv)
    launch = attention_launch(
        cells, len(cells.query_programs), config.dq, (*inputs, dq), of_rows, numbers,
        IS_CAUSAL=is_causal, STORE=store,
    )  # fmt: skip
    _dq_kernel(launch, (*inputs, dq, *of_rows, cells.table, cells.query_programs))
    launch = attention_launch(
        cells, len(cells.key_programs), config.dkdv, (*inputs, dk, dv), of_rows, numbers,
        IS_CAUSAL=is_causal, STORE=store_keys, **copies_of(config.dkdv),
    )  # fmt: skip
    _dkdv_kernel(launch, (*inputs, dk, dv, *of_rows, cells.table, cells.key_programs))


@triton.jit
def _weigh_keys(
    q, dout, lse, k, v, k_offsets, v_offsets, k_step, v_step,
    limits, length, stop, scale,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum p (dout v^T) and p over the keys that rows see."""
    weighed, weights = tl.zeros_like(lse), tl.zeros_like(lse)
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


@kernel(12)
def _own_dq_kernel(
    q, k, v, dout, out, dq, lse, delta, ranges, branches, order, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h, out_b, out_n, out_h,
    dq_b, dq_n, dq_h, lse_b, lse_h, lse_n,
    delta_branch, scale, heads_per_kv, kv_heads, num_branches, num_programs,
    UNIT: tl.constexpr, IS_CAUSAL: tl.constexpr, ZERO_KEYS: tl.constexpr, DETACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head, the keys of all branches that they see.

    Writes delta, which has the strides of lse, for the kernel of dk and dv: of the merged out, or
    where DETACHED of each branch's own.
    """
    batch, head, kv_head, own, first, step, count = program_of_ranges(
        programs, ranges, order, kv_heads * heads_per_kv, heads_per_kv, num_programs, BLOCK_M
    )  # fmt: skip
    part_start, part_stop, shift, document, chosen = range_of(own)
    last = first + (count - 1) * step
    if not takes_part(
        branches, chosen, kv_head, kv_heads, document, first, last, step, count, num_branches
    ):
        return

    in_rows = tl.arange(0, BLOCK_M) < count
    wide_step = step.to(tl.int64)
    row = (first + shift).to(tl.int64)
    wide_head = head.to(tl.int64)
    q += (batch * q_b + row * q_n + wide_head * q_h) * UNIT
    q_offsets = element_offsets(wide_step * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    q_block = load_block(q, q_offsets, in_rows, True, HEAD_DIM)
    dout += (batch * dout_b + row * dout_n + wide_head * dout_h) * UNIT
    dout_offsets = element_offsets(wide_step * dout_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    dout_block = load_block(dout, dout_offsets, in_rows, True, HEAD_DIM)
    of_lse = batch * lse_b + row * lse_n + wide_head * lse_h
    lse_offsets = row_offsets(wide_step * lse_n, BLOCK_M, WIDE)
    row_lse = tl.load(lse + of_lse + lse_offsets, mask=in_rows, other=float("inf")) * LOG2_E
    delta += of_lse
    row_delta = tl.zeros([BLOCK_M], tl.float32)
    if not DETACHED:
        out += (batch * out_b + row * out_n + wide_head * out_h) * UNIT
        out_offsets = element_offsets(wide_step * out_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
        out_block = load_block(out, out_offsets, in_rows, True, HEAD_DIM)
        row_delta = products_of_rows(dout_block, out_block)
        tl.store(delta + lse_offsets, row_delta, mask=in_rows)
    k += (batch * k_b + kv_head.to(tl.int64) * k_h) * UNIT
    v += (batch * v_b + kv_head.to(tl.int64) * v_h) * UNIT

    acc = zero_block(BLOCK_M, BLOCK_D, TAIL)
    for branch in tl.range(0, num_branches, disable_licm=True):
        length, rate, offset, segment, segment_stop = segments_of(
            branches, chosen, branch, kv_head, kv_heads, document, first, last
        )
        wide_rate = rate.to(tl.int64)
        k_offsets, k_step = blocks_of_rows(wide_rate * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
        v_offsets, v_step = blocks_of_rows(wide_rate * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
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
                    weighed, weights = _weigh_keys(
                        q_block, dout_block, row_lse, k_at, v_at, k_offsets, v_offsets,
                        k_step, v_step, limits, k_len, stop,
                        scale * LOG2_E, HEAD_DIM, BLOCK_N, PRECISION,
                    )  # fmt: skip
                    if ZERO_KEYS:
                        zeros = zeros_of_cell(start, length, rate, offset, document)
                        weights += zeros.to(tl.float32) * tl.exp2(-row_lse)
                    row_delta = weighed / tl.where(weights > 0, weights, 1.0)
                    here = delta + branch * delta_branch.to(tl.int64) + lse_offsets
                    tl.store(here, row_delta, mask=in_rows & within)
                acc = dq_of_cell(
                    acc, q_block, dout_block, row_lse, row_delta, k_at, v_at,
                    k_offsets, v_offsets, k_step, v_step, limits, k_len, full, stop,
                    scale * LOG2_E, HEAD_DIM, BLOCK_N, PRECISION, 1,
                )  # fmt: skip
    dq += (batch * dq_b + row * dq_n + wide_head * dq_h) * UNIT
    dq_offsets = element_offsets(wide_step * dq_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    add_block(dq, dq_offsets, in_rows, scaled_block(acc, scale), tl.load(own + 7) != 0, HEAD_DIM)


@kernel(12)
def _own_dkdv_kernel(
    q, k, v, dout, dk, dv, lse, delta, ranges, branches, order, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h,
    dk_b, dk_n, dk_h, dv_b, dv_n, dv_h, lse_b, lse_h, lse_n,
    delta_branch, scale, heads_per_kv, kv_heads, num_branches, num_programs,
    UNIT: tl.constexpr, IS_CAUSAL: tl.constexpr, DETACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    COPIES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of keys of one KV head, all queries of all branches that see them."""
    batch, kv_head, _, own, first, step, count = program_of_ranges(
        programs, ranges, order, kv_heads, 1, num_programs, BLOCK_N
    )  # fmt: skip
    part_start, part_stop, shift, document, chosen = range_of(own)
    last = first + (count - 1) * step
    if not takes_part(
        branches, chosen, kv_head, kv_heads, document, first, last, step, count, num_branches
    ):
        return

    keys = tl.arange(0, BLOCK_N)
    in_keys = keys < count
    wide_step = step.to(tl.int64)
    row = (first + shift).to(tl.int64)
    wide_head = kv_head.to(tl.int64)
    k += (batch * k_b + row * k_n + wide_head * k_h) * UNIT
    v += (batch * v_b + row * v_n + wide_head * v_h) * UNIT
    k_offsets = element_offsets(wide_step * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets = element_offsets(wide_step * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    k_block = load_block(k, k_offsets, in_keys, True, HEAD_DIM)
    v_block = load_block(v, v_offsets, in_keys, True, HEAD_DIM)

    dk_block = zero_block(BLOCK_N, BLOCK_D, TAIL)
    dv_block = zero_block(BLOCK_N, BLOCK_D, TAIL)
    for branch in tl.range(0, num_branches, disable_licm=True):
        length, rate, offset, segment, segment_stop = segments_of(
            branches, chosen, branch, kv_head, kv_heads, document, first, last
        )
        q_stride = rate.to(tl.int64)
        q_offsets, q_step = blocks_of_rows(q_stride * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
        dout_offsets, dout_step = blocks_of_rows(
            q_stride * dout_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL
        )  # fmt: skip
        lse_offsets = row_offsets(q_stride * lse_n, BLOCK_M, WIDE)
        lse_step = q_stride * lse_n * BLOCK_M
        for index in tl.range(segment, segment_stop, disable_licm=True):
            start = index * length
            if (first - start - offset) % tl.minimum(rate, step) == 0:
                query, q_len = rows_of_cell(start, length, rate, offset, part_start, part_stop)
                inside = (start <= first) & (last < start + length) & (rate <= step)
                ahead = first - start + keys * step
                within = (ahead >= 0) & (ahead < length) & ((ahead - offset) % rate == 0)
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
                lows = tl.where(within, lows, q_len)
                q_row = (query + shift).to(tl.int64)
                head = wide_head * heads_per_kv
                of_lse = batch * lse_b + head * lse_h + q_row * lse_n
                delta_at = delta + of_lse
                if DETACHED:
                    delta_at += branch * delta_branch.to(tl.int64)
                dk_block, dv_block = dkdv_of_cell(
                    dk_block, dv_block, k_block, v_block,
                    q + (batch * q_b + q_row * q_n + head * q_h) * UNIT,
                    dout + (batch * dout_b + q_row * dout_n + head * dout_h) * UNIT,
                    lse + of_lse, delta_at, q_offsets, dout_offsets, lse_offsets, lse_offsets,
                    q_step, dout_step, lse_step, lse_step, lows, q_len, begin, full, stop,
                    scale * LOG2_E, heads_per_kv,
                    q_h.to(tl.int64) * UNIT, dout_h.to(tl.int64) * UNIT, lse_h, lse_h,
                    True, HEAD_DIM, BLOCK_M, COPIES, PRECISION, 1,
                )  # fmt: skip

    dk += (batch * dk_b + row * dk_n + wide_head * dk_h) * UNIT
    dv += (batch * dv_b + row * dv_n + wide_head * dv_h) * UNIT
    dk_offsets = element_offsets(wide_step * dk_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    dv_offsets = element_offsets(wide_step * dv_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    stores = tl.load(own + 7) != 0
    add_block(dk, dk_offsets, in_keys, scaled_block(dk_block, scale), stores, HEAD_DIM)
    add_block(dv, dv_offsets, in_keys, dv_block, stores, HEAD_DIM)


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
    deltas = len(queries.branches) if detached else 1
    delta = torch.empty_strided(
        (deltas, *lse.shape), (lse.numel(), *lse.stride()), dtype=lse.dtype, device=lse.device
    )
    inputs, options = (q, k, v, dout), {"IS_CAUSAL": is_causal, "DETACHED": detached}
    count, sizes = queries.sizes(q, k)
    launch = attention_launch(
        queries, count * q.shape[2], config.dq, (*inputs, out, dq), (lse,),
        (delta.stride(0), scale, *sizes), ZERO_KEYS=zero_keys and not is_causal, **options,
    )  # fmt: skip
    _own_dq_kernel(launch, (*inputs, out, dq, lse, delta, *queries.tensors))
    count, sizes = keys.sizes(q, k)
    launch = attention_launch(
        keys, count * k.shape[2], config.dkdv, (*inputs, dk, dv), (lse,),
        (delta.stride(0), scale, *sizes), **options, **copies_of(config.dkdv),
    )  # fmt: skip
    _own_dkdv_kernel(launch, (*inputs, dk, dv, lse, delta, *keys.tensors))
