"""Triton kernels: gradients of many tiles in two launches, added to the totals where they end.

As in `forward`; p and ds are rounded to the inputs' dtype before they are multiplied.

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
    cells_launch,
    default_launch,
    element_offsets,
    halves_of_rows,
    load_block,
    products_of_all_rows,
    row_offsets,
    scaled_block,
    zero_block,
)
from .device_profile import BackwardConfig, copies_of
from .launch import Launcher
from .own_programs import Cells


@triton.jit
def dq_of_keys(
    dq,
    q,
    dout,
    lse,
    delta,
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


@triton.jit(
    do_not_specialize=[
        "q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "dout_b", "dout_n", "dout_h",
        "lse_b", "lse_h", "lse_n", "delta_b", "delta_h", "delta_n", "dq_b", "dq_n", "dq_h",
        "scale", "heads_per_kv",
    ]
)  # fmt: skip
def _dq_kernel(
    q, k, v, dout, lse, delta, dq, cells, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h,
    lse_b, lse_h, lse_n, delta_b, delta_h, delta_n, dq_b, dq_n, dq_h,
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
    in_rows = rows < q_len
    q_row += block_m * BLOCK_M * q_stride
    q += (batch * q_b + q_row * q_n + head * q_h) * UNIT
    q_offsets = element_offsets(q_stride * q_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    q_block = load_block(q, q_offsets, rows < q_len, True, HEAD_DIM)
    dout += (batch * dout_b + q_row * dout_n + head * dout_h) * UNIT
    dout_offsets = element_offsets(q_stride * dout_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    dout_block = load_block(dout, dout_offsets, rows < q_len, True, HEAD_DIM)
    lse += batch * lse_b + q_row * lse_n + head * lse_h
    lse_offsets = row_offsets(q_stride * lse_n, BLOCK_M, WIDE)
    row_lse = tl.load(lse + lse_offsets, mask=in_rows, other=float("inf")) * LOG2_E
    delta += batch * delta_b + q_row * delta_n + head * delta_h
    delta_offsets = row_offsets(q_stride * delta_n, BLOCK_M, WIDE)
    row_delta = tl.load(delta + delta_offsets, mask=in_rows, other=0.0)

    k += (batch * k_b + k_row * k_n + kv_head * k_h) * UNIT
    v += (batch * v_b + k_row * v_n + kv_head * v_h) * UNIT
    k_step, v_step = k_stride * k_n * UNIT, k_stride * v_n * UNIT
    k_offsets = element_offsets(k_step, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets = element_offsets(v_step, BLOCK_N, WIDE, BLOCK_D, TAIL)
    k_step *= BLOCK_N
    v_step *= BLOCK_N

    if IS_CAUSAL:  # before the diagonal: no mask
        full = block_m * BLOCK_M // BLOCK_N
        stop = tl.cdiv(tl.minimum((block_m + 1) * BLOCK_M, k_len), BLOCK_N)
    else:
        full = k_len // BLOCK_N
        stop = tl.cdiv(k_len, BLOCK_N)
    limits = tl.minimum(rows + 1, k_len) if IS_CAUSAL else tl.zeros_like(rows) + k_len
    acc = zero_block(BLOCK_M, BLOCK_D, TAIL)
    acc = dq_of_keys(
        acc, q_block, dout_block, row_lse, row_delta, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, k_len, 0, full, scale * LOG2_E, False, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc = dq_of_keys(
        acc, q_block, dout_block, row_lse, row_delta, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, k_len, full, stop, scale * LOG2_E, True, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip

    dq += (batch * dq_b + q_row * dq_n + head * dq_h) * UNIT
    dq_offsets = element_offsets(q_stride * dq_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    add_block(dq, dq_offsets, in_rows, scaled_block(acc, scale), STORE, HEAD_DIM)


@triton.jit
def dkdv_of_queries(
    dk,
    dv,
    k,
    v,
    q,
    dout,
    lse,
    delta,
    q_offsets,
    dout_offsets,
    lse_offsets,
    delta_offsets,
    q_step,
    dout_step,
    lse_step,
    delta_step,
    lows,
    length,
    first,
    gap,
    resume,
    stop,
    scale,
    MASKED: tl.constexpr,
    HIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):
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


@triton.jit(
    do_not_specialize=[
        "q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "dout_b", "dout_n", "dout_h",
        "lse_b", "lse_h", "lse_n", "delta_b", "delta_h", "delta_n", "dk_b", "dk_n", "dk_h",
        "dv_b", "dv_n", "dv_h", "scale", "heads_per_kv",
    ]
)  # fmt: skip
def _dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, cells, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, dout_b, dout_n, dout_h,
    lse_b, lse_h, lse_n, delta_b, delta_h, delta_n, dk_b, dk_n, dk_h, dv_b, dv_n, dv_h,
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
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of keys of one cell, all queries of query heads of its KV head."""
    program = programs + tl.program_id(0) * 2
    cell = cells + tl.load(program).to(tl.int64) * 8
    block_n = tl.load(program + 1)
    batch, kv_head = tl.load(cell), tl.load(cell + 1)
    q_row, q_stride, q_len = tl.load(cell + 2), tl.load(cell + 3), tl.load(cell + 4).to(tl.int32)
    k_row, k_stride, k_len = tl.load(cell + 5), tl.load(cell + 6), tl.load(cell + 7).to(tl.int32)

    keys = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_row += block_n * BLOCK_N * k_stride
    k += (batch * k_b + k_row * k_n + kv_head * k_h) * UNIT
    v += (batch * v_b + k_row * v_n + kv_head * v_h) * UNIT
    k_offsets = element_offsets(k_stride * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets = element_offsets(k_stride * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    k_block = load_block(k, k_offsets, keys < k_len, True, HEAD_DIM)
    v_block = load_block(v, v_offsets, keys < k_len, True, HEAD_DIM)

    head = kv_head * heads_per_kv
    q += (batch * q_b + q_row * q_n + head * q_h) * UNIT
    dout += (batch * dout_b + q_row * dout_n + head * dout_h) * UNIT
    lse += batch * lse_b + head * lse_h + q_row * lse_n
    delta += batch * delta_b + head * delta_h + q_row * delta_n
    q_step, dout_step = q_stride * q_n * UNIT, q_stride * dout_n * UNIT
    lse_step, delta_step = q_stride * lse_n, q_stride * delta_n
    q_offsets = element_offsets(q_step, BLOCK_M, WIDE, BLOCK_D, TAIL)
    dout_offsets = element_offsets(dout_step, BLOCK_M, WIDE, BLOCK_D, TAIL)
    lse_offsets = row_offsets(lse_step, BLOCK_M, WIDE)
    delta_offsets = row_offsets(delta_step, BLOCK_M, WIDE)
    q_step *= BLOCK_M
    dout_step *= BLOCK_M
    lse_step *= BLOCK_M
    delta_step *= BLOCK_M

    # Query blocks: masked first .. full - 1 (the diagonal) and tail .. stop - 1 (the ragged last
    # one, unless it is on the diagonal), unmasked full .. tail - 1.
    stop = tl.cdiv(q_len, BLOCK_M)
    first = 0
    full = 0
    if IS_CAUSAL:
        first = block_n * BLOCK_N // BLOCK_M
        full = tl.minimum(tl.cdiv((block_n + 1) * BLOCK_N, BLOCK_M), stop)
    tail = tl.maximum(q_len // BLOCK_M, full)
    dk_block = zero_block(BLOCK_N, BLOCK_D, TAIL)
    dv_block = zero_block(BLOCK_N, BLOCK_D, TAIL)
    for _ in range(heads_per_kv):
        dk_block, dv_block = dkdv_of_queries(
            dk_block, dv_block, k_block, v_block, q, dout, lse, delta,
            q_offsets, dout_offsets, lse_offsets, delta_offsets,
            q_step, dout_step, lse_step, delta_step,
            keys, q_len, first, full, tail, stop,
            scale * LOG2_E, True, IS_CAUSAL, HEAD_DIM, BLOCK_M, COPIES, PRECISION,
        )  # fmt: skip
        dk_block, dv_block = dkdv_of_queries(
            dk_block, dv_block, k_block, v_block, q, dout, lse, delta,
            q_offsets, dout_offsets, lse_offsets, delta_offsets,
            q_step, dout_step, lse_step, delta_step,
            keys, q_len, full, tail, tail, tail,
            scale * LOG2_E, False, IS_CAUSAL, HEAD_DIM, BLOCK_M, COPIES, PRECISION,
        )  # fmt: skip
        q += q_h.to(tl.int64) * UNIT
        dout += dout_h.to(tl.int64) * UNIT
        lse += lse_h
        delta += delta_h

    dk += (batch * dk_b + k_row * dk_n + kv_head * dk_h) * UNIT
    dv += (batch * dv_b + k_row * dv_n + kv_head * dv_h) * UNIT
    dk_offsets = element_offsets(k_stride * dk_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    dv_offsets = element_offsets(k_stride * dv_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    add_block(dk, dk_offsets, keys < k_len, scaled_block(dk_block, scale), STORE, HEAD_DIM)
    add_block(dv, dv_offsets, keys < k_len, dv_block, STORE, HEAD_DIM)


_launch_dq, _launch_dkdv = Launcher(_dq_kernel), Launcher(_dkdv_kernel)


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
    config: BackwardConfig | None = None,
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
        config: how to launch; None: `default_config`.
    """
    assert is_causal == cells.is_causal
    if config is None:
        config = BackwardConfig(default_launch("dq", q, cells), default_launch("dkdv", q, cells))
    assert (config.dq.block_m, config.dkdv.block_n) == (cells.block_m, cells.block_n)
    if not len(cells.query_programs):
        return
    inputs, of_rows = (q, k, v, dout), (lse, delta)
    launch = cells_launch(
        cells, cells.query_programs, inputs, of_rows, (dq,), config.dq, scale=scale, STORE=store
    )
    tensors = *inputs, *of_rows, dq, cells.table, cells.query_programs
    _launch_dq(launch.grid, tensors, *launch[1:])
    launch = cells_launch(
        cells,
        cells.key_programs,
        inputs,
        of_rows,
        (dk, dv),
        config.dkdv,
        scale=scale,
        STORE=store_keys,
        **copies_of(config.dkdv),
    )
    tensors_of_keys = *inputs, *of_rows, dk, dv, cells.table, cells.key_programs
    _launch_dkdv(launch.grid, tensors_of_keys, *launch[1:])
