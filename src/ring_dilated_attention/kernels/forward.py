"""Triton kernels: attention of many tiles, or of several branches, in one launch.

Of many tiles, results are merged into the whole where each tile ends; of several branches
(`ranges_forward`), each row of the result is written once. Tensors are read and written in place,
by their strides, through the tables of `own_programs`; nothing is gathered. Scores, sums and merges
are float32; p is rounded to the inputs' dtype before it is multiplied.

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
    attention_launch,
    blocks_of_rows,
    element_offsets,
    load_block,
    products_of_all_rows,
    row_offsets,
    scaled_block,
    write_block,
    zero_block,
)
from .device_profile import LaunchConfig
from .launch import kernel
from .own_programs import Cells, Programs


@triton.jit
def attend(
    acc, row_max, row_sum, q, k, v, k_offsets, v_offsets, k_step, v_step,
    limits, length, first, stop, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
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
            # The scale is multiplied into the exponent's subtraction: one operation for both.
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
def attend_to_cell(
    acc, row_max, row_sum, q, k, v, k_offsets, v_offsets, k_step, v_step,
    limits, length, full, stop, scale,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Online softmax over the keys of a cell: key blocks before `full` take no mask."""
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, length, 0, full, scale, False, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    return attend(
        acc, row_max, row_sum, q, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, length, full, stop, scale, True, HEAD_DIM, BLOCK_N, PRECISION, STAGES,
    )  # fmt: skip


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


@triton.jit
def read_cell(cells, program):
    """The cell of a program: batch entry, KV head; row, stride and length of queries and keys."""
    cell = cells + tl.load(program).to(tl.int64) * 8
    q_row, q_stride, q_len = tl.load(cell + 2), tl.load(cell + 3), tl.load(cell + 4).to(tl.int32)
    k_row, k_stride, k_len = tl.load(cell + 5), tl.load(cell + 6), tl.load(cell + 7).to(tl.int32)
    return tl.load(cell), tl.load(cell + 1), q_row, q_stride, q_len, k_row, k_stride, k_len


@triton.jit
def keys_of_block(
    block, rows, k_len, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Which keys of its cell a block of queries sees: `limits`, `full` and `stop`."""
    if IS_CAUSAL:  # before the diagonal: no mask
        full = block * BLOCK_M // BLOCK_N
        stop = tl.cdiv(tl.minimum((block + 1) * BLOCK_M, k_len), BLOCK_N)
    else:
        full = k_len // BLOCK_N
        stop = tl.cdiv(k_len, BLOCK_N)
    limits = tl.minimum(rows + 1, k_len) if IS_CAUSAL else tl.zeros_like(rows) + k_len
    return limits, full, stop


@kernel(7)
def _forward_kernel(
    q, k, v, out, lse, cells, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h, lse_b, lse_h, lse_n,
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

    k += (batch * k_b + k_row * k_n + kv_head * k_h) * UNIT
    v += (batch * v_b + k_row * v_n + kv_head * v_h) * UNIT
    k_offsets, k_step = blocks_of_rows(k_stride * k_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    v_offsets, v_step = blocks_of_rows(k_stride * v_n * UNIT, BLOCK_N, WIDE, BLOCK_D, TAIL)
    limits, full, stop = keys_of_block(block_m, rows, k_len, IS_CAUSAL, BLOCK_M, BLOCK_N)
    acc, row_max, row_sum = attend_to_cell(
        zero_block(BLOCK_M, BLOCK_D, TAIL), tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32), q_block, k, v, k_offsets, v_offsets, k_step, v_step,
        limits, k_len, full, stop, scale * LOG2_E, HEAD_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc = scaled_block(acc, 1.0 / row_sum[:, None])
    new_lse = (row_max + tl.log2(row_sum)) * LN_2

    out += (batch * out_b + q_row * out_n + head * out_h) * UNIT
    out_offsets = element_offsets(q_stride * out_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    lse += batch * lse_b + q_row * lse_n + head * lse_h
    lse_offsets = row_offsets(q_stride * lse_n, BLOCK_M, WIDE)
    if not STORE:
        acc, new_lse = merge_block(
            out, lse, out_offsets, lse_offsets, in_rows, acc, new_lse, HEAD_DIM
        )  # fmt: skip
    write_block(out, out_offsets, in_rows, acc, HEAD_DIM)
    tl.store(lse + lse_offsets, new_lse, mask=in_rows)


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
    config: LaunchConfig,
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
        config: how to launch.
    """
    assert (is_causal, config.block_m) == (cells.is_causal, cells.block_m)
    programs = cells.query_programs
    if not len(programs):
        return
    launch = attention_launch(
        cells, len(programs), config, (q, k, v, out), (lse,), (scale, cells.heads_per_kv),
        IS_CAUSAL=is_causal, STORE=store,
    )  # fmt: skip
    _forward_kernel(launch, (q, k, v, out, lse, cells.table, programs))


@triton.jit
def program_of_ranges(
    programs, ranges, order, heads, heads_per_head, num_programs, BLOCK: tl.constexpr
):
    """Batch entry, head and KV head of this program; its range; its rows, see `rows_of_program`."""
    head, number = tl.program_id(0) % heads, tl.program_id(0) // heads
    kv_head = head // heads_per_head
    own, first, step, count = rows_of_program(
        programs + number % num_programs * 5, ranges, order, kv_head, BLOCK
    )  # fmt: skip
    return (number // num_programs).to(tl.int64), head, kv_head, own, first, step, count


@triton.jit
def range_of(own):
    """Of a range: start and stop of its part, shift, positions of the document, branches."""
    start, stop, shift = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    return start, stop, shift, tl.load(own + 3), tl.load(own + 4)


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
    """Which of the keys of a cell a block of rows sees.

    Returns:
        Which rows are in the cell (as a rule, all); before which key each sees all of them; the
        first block of keys that takes a mask, and the block behind the last.
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
def attend_to_zeros(acc, row_max, row_sum, zeros, within):
    """Online softmax over keys whose score and value are 0, of the rows in `within`."""
    new_max = tl.where(within, tl.maximum(row_max, 0.0), row_max)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(row_max - finite_max)
    added = tl.where(within, zeros.to(tl.float32) * tl.exp2(-finite_max), 0.0)
    return scaled_block(acc, shrink[:, None]), new_max, row_sum * shrink + added


@triton.jit
def segments_of(branches, chosen, branch, kv_head, kv_heads, document, first, last):
    """A branch for a KV head, and the segments that positions lie in: none if it is not run.

    Returns:
        Segment length, rate and offset; the first segment, and the one behind the last.
    """
    fields = branches + branch * (2 + kv_heads)
    length = tl.minimum(tl.load(fields), document)
    rate, offset = tl.load(fields + 1), tl.load(fields + 2 + kv_head)
    # An offset of -1: this head does not run the branch.
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


@kernel(9)
def _own_forward_kernel(
    q, k, v, out, lse, ranges, branches, order, programs,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h, lse_b, lse_h, lse_n,
    scale, heads_per_kv, kv_heads, num_branches, num_programs,
    UNIT: tl.constexpr, IS_CAUSAL: tl.constexpr, ZERO_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head, the keys of all branches that they see."""
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
    scale_log2 = scale * LOG2_E
    k += (batch * k_b + kv_head.to(tl.int64) * k_h) * UNIT
    v += (batch * v_b + kv_head.to(tl.int64) * v_h) * UNIT

    acc = zero_block(BLOCK_M, BLOCK_D, TAIL)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # LICM would move what segments share in front of these loops, into registers: dq would spill
    # twice as much.
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
                acc, row_max, row_sum = attend_to_cell(
                    acc, row_max, row_sum, q_block, k + k_row * k_n * UNIT, v + k_row * v_n * UNIT,
                    k_offsets, v_offsets, k_step, v_step, limits, k_len, full, stop,
                    scale_log2, HEAD_DIM, BLOCK_N, PRECISION, 1,
                )  # fmt: skip
                if ZERO_KEYS:
                    zeros = zeros_of_cell(start, length, rate, offset, document)
                    if zeros > 0:
                        acc, row_max, row_sum = attend_to_zeros(
                            acc, row_max, row_sum, zeros, within
                        )  # fmt: skip
    seen_rows = in_rows & (row_sum > 0)
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    new_lse = (row_max + tl.log2(row_sum)) * LN_2
    acc = scaled_block(acc, 1.0 / row_sum[:, None])

    out += (batch * out_b + row * out_n + wide_head * out_h) * UNIT
    out_offsets = element_offsets(wide_step * out_n * UNIT, BLOCK_M, WIDE, BLOCK_D, TAIL)
    lse += batch * lse_b + row * lse_n + wide_head * lse_h
    lse_offsets = row_offsets(wide_step * lse_n, BLOCK_M, WIDE)
    if tl.load(own + 7) == 0:  # the rows hold results already
        acc, new_lse = merge_block(
            out, lse, out_offsets, lse_offsets, seen_rows, acc, new_lse, HEAD_DIM
        )  # fmt: skip
    write_block(out, out_offsets, seen_rows, acc, HEAD_DIM)
    tl.store(lse + lse_offsets, new_lse, mask=seen_rows)


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
    count, sizes = programs.sizes(q, k)
    launch = attention_launch(
        programs, count * q.shape[2], config, (q, k, v, out), (lse,), (scale, *sizes),
        IS_CAUSAL=is_causal, ZERO_KEYS=zero_keys and not is_causal,
    )  # fmt: skip
    _own_forward_kernel(launch, (q, k, v, out, lse, *programs.tensors))
