"""Triton kernels: attention of a few queries to strips of rows, split over the keys.

All branches of all KV heads are one launch: a program takes a share of the rows that a KV head's
queries see, of whichever strips they are, and all query heads of that KV head share each load. A
second launch merges the programs' results, and writes new rows into the cache. Rows are read where
they are, by their strides. Scores and sums are float32; p is rounded to the inputs' dtype before it
is multiplied.

Another kernel tells which rows of a KV cache new positions see, and where their own rows go
(`strips_of_cache`). Positions are read on the device, so that a step which is captured in a CUDA
graph can be replayed while the cache grows. `plan.cache` says in integers what is computed here.

Shape legend: B batch, m queries, H query heads, K KV heads, S splits, E branches, D head_dim.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..plan.cache import NO_END
from .blocks import LN_2, LOG2_E, row_offsets, stride_unit, strides_in
from .device_profile import MOST_NEW_ROWS, decode_config, power_of_two, profile_of
from .forward import attend
from .launch import KernelLaunch, kernel

PROGRAMS, ROUNDS = 2, 4
"""Programs of a multiprocessor at a time, as many as its shared memory takes; and about how many
times that many share a call at most. Each program writes sums, which have to be merged; more of
them fill the last round better. Tuned on an H200."""
_UNEVEN_SPLITS = 8
"""Programs, at least, that share the rows of a block where some KV heads see more than others: a
head is a member of a branch at some positions only."""
_SHAPES_KEPT = 1024
"""Shapes of calls of which each of both caches keeps how they are launched."""
_MERGED = 128
"""Splits that are merged at a time, at most."""


def _splits(blocks: int, at_a_time: int, least: int, most: int, most_rounds: int) -> int:
    """Programs that share the rows of a block: the fewest that keep the device busy to the end.

    Args:
        blocks: of queries.
        at_a_time: programs that the device runs.
        least: that there are to be.
        most: a program has a block of rows at least; it comes before `least`.
        most_rounds: of `at_a_time` programs, about.
    """

    def share_used(splits: int) -> float:
        rounds = blocks * splits / at_a_time
        return round(rounds / math.ceil(rounds), 2)

    few = max(least, -(-most_rounds * at_a_time // blocks))
    least, most = max(1, min(least, most)), max(1, min(few, most))
    return max(range(least, most + 1), key=lambda splits: (share_used(splits), -splits))


@lru_cache(maxsize=64)
def _overlap(device: torch.device) -> dict[str, Any]:
    """Constants and options of every launch: whether it may begin while the one before it ends."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and profile_of(device).capability >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}  # programmatic dependent launch
    return {"OVERLAPS": False}


_NARROW = tl.constexpr(1 << 30)
"""If no cache has more positions, 32 bits are enough for all that is computed of them."""


class Strips(NamedTuple):
    """Which rows queries see, by batch row and KV head, and what becomes of new rows.

    A strip is evenly spaced rows: the first one, the step, how many, and before which of them each
    query sees all, 0 or more. Of a cache the strips of a KV head are followed by labels, (E, m):
    new positions of a branch with the same label, 0 or more, see each other; by targets, (E, m):
    the row of the cache that a new row is written to, or -1; and by m numbers that are 0 where a
    position is behind the longest that there is room for.

    Attributes:
        table: (1 or B, K, ...) int64, contiguous behind K.
        num_strips: of a KV head.
        num_branches: E of a cache; 0 of strips alone.
    """

    table: torch.Tensor
    num_strips: int
    num_branches: int


@triton.jit
def _narrow(number):
    """In 32 bits; what is larger than any position stays so."""
    return tl.minimum(number, _NARROW).to(tl.int32)


@triton.jit
def members_before(position, length, rate, offset):
    """How many members of a branch lie before a position."""
    per_segment = (length - offset + rate - 1) // rate
    segment = position // length
    return segment * per_segment + (position - segment * length - offset + rate - 1) // rate


@kernel(3)
def _strips_kernel(
    lengths, branches, table, count, kv_heads, num_branches, shard, shards, max_length,
    BLOCK_NEW: tl.constexpr, NARROW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: one branch of one KV head of one row of the batch."""
    pair, branch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, kv_head = pair // kv_heads, pair % kv_heads
    own = branches + branch * (4 + 2 * kv_heads)
    length, rate = tl.load(own), tl.load(own + 1)
    window, slots = tl.load(own + 2), tl.load(own + 3)
    offset, base = tl.load(own + 4 + kv_head), tl.load(own + 4 + kv_heads + kv_head)
    runs = offset >= 0
    offset = tl.maximum(offset, 0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # for what the launch before this one writes: the lengths
        tl.extra.cuda.gdc_launch_dependents()  # attention, which waits for all of this
    position = tl.load(lengths + batch)
    if NARROW:  # a division of 64 bits takes several times as long
        length, rate, window = _narrow(length), _narrow(rate), _narrow(window)
        slots, offset, position = _narrow(slots), _narrow(offset), position.to(tl.int32)

    per_segment = (length - offset + rate - 1) // rate
    next_member = members_before(position, length, rate, offset)
    segment = next_member // per_segment
    # Of this rank, in its own numbers: the members of that segment, or window, that came before.
    low = tl.maximum(segment * per_segment, next_member - window)
    low = (low - shard + shards - 1) // shards
    high = (next_member - shard + shards - 1) // shards

    new = tl.arange(0, BLOCK_NEW)
    in_new = new < count
    at = position + new
    own_segment = at // length
    within = at - own_segment * length
    is_member = runs & in_new & (within >= offset)
    is_member = is_member & (tl.maximum(within - offset, 0) % rate == 0)
    label = tl.where(is_member, own_segment - segment, -1)
    sees = tl.max((label == 0).to(tl.int32), 0)
    rows = tl.where(sees > 0, high - low, 0)
    slot = low % slots
    before_end = tl.minimum(rows, slots - slot)
    behind = rows - before_end

    fields = 3 + count
    strip = table + pair * (2 * num_branches * (fields + count) + count)
    places = strip + 2 * num_branches * fields
    strip += branch * 2 * fields
    tl.store(strip, base + slot)
    tl.store(strip + 1, 1)
    tl.store(strip + 2, before_end)
    tl.store(strip + 3 + new, tl.where(label == 0, before_end, 0), mask=in_new)
    strip += fields
    tl.store(strip, base)
    tl.store(strip + 1, 1)
    tl.store(strip + 2, behind)
    tl.store(strip + 3 + new, tl.where(label == 0, behind, 0), mask=in_new)

    # Of new rows that would go to one slot, the last one does.
    member = own_segment * per_segment + tl.maximum(within - offset, 0) // rate
    stop = members_before(position + count, length, rate, offset)
    stays = is_member & (member % shards == shard) & (member >= stop - slots * shards)
    target = tl.where(stays, base + (member // shards) % slots, -1)
    entry = places + branch * count + new
    tl.store(entry, label, mask=in_new)
    tl.store(entry + num_branches * count, target, mask=in_new)
    if branch == 0:
        room = places + 2 * num_branches * count + new
        tl.store(room, (at < max_length).to(tl.int64), mask=in_new)


def strips_of_cache(
    lengths: torch.Tensor,
    branches: torch.Tensor,
    kv_heads: int,
    count: int,
    *,
    shard: int,
    shards: int,
    max_length: int | None,
) -> Strips:
    """What `count` new positions see of a KV cache, and where their own rows go.

    Args:
        lengths: (B,) int64: positions so far.
        branches: (E, 4 + 2 K) int64: segment length (`NO_END`: it has none), rate, window (the
            most members before itself that a position sees; not `NO_END`: `count` is 1) and slots
            of each branch; of each KV head the offset, -1 where it has no rows, and its first row.
        kv_heads: K.
        count: m.
        shard: this rank's share of the rows.
        shards: how many ranks share them.
        max_length: the most positions that there is room for; None: any number.

    Returns:
        Two strips of each branch, and the places of the new rows.
    """
    batch, num_branches, device = lengths.shape[0], branches.shape[0], lengths.device
    width = 2 * num_branches * (3 + 2 * count) + count
    table = lengths.new_empty(batch, kv_heads, width)
    room = NO_END if max_length is None else max_length
    launch = _launch_of(batch, (count, kv_heads, num_branches, shard, shards, room), device)
    _strips_kernel(launch, (lengths, branches, table))
    return Strips(table, 2 * num_branches, num_branches)


@lru_cache(maxsize=_SHAPES_KEPT)
def _launch_of(batch: int, numbers: tuple[int, ...], device: torch.device) -> KernelLaunch:
    """Of calls of one shape; `numbers` are those that the kernel takes."""
    count, kv_heads, num_branches, *_, room = numbers
    constants = {
        "BLOCK_NEW": power_of_two(count),
        "NARROW": room + count <= _NARROW.value,
        "num_warps": 1,
        **_overlap(device),
    }
    return KernelLaunch((batch * kv_heads, num_branches), numbers, constants, {})


class NewRows(NamedTuple):
    """Keys and values of the queries' own positions, which the cache does not have yet.

    Attributes:
        key: (B, m, K, D), any strides but a last one of 1.
        value: like `key`.
        lengths: (B,) int64: positions so far; m more when they are written.
        are_seen_here: whether this rank computes what the queries see of them.
    """

    key: torch.Tensor
    value: torch.Tensor
    lengths: torch.Tensor
    are_seen_here: bool


@kernel(7)
def _split_kernel(
    q, k, v, new_k, new_v, table, parts,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    new_k_b, new_k_n, new_k_h, new_v_b, new_v_n, new_v_h,
    table_b, table_h, scale,
    count, heads_per_kv, kv_heads, num_strips, num_branches, splits, lse_at,
    UNIT: tl.constexpr, WITH_NEW: tl.constexpr, WIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_NEW: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: a block of the queries of a KV head, a share of the rows that they see."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # for what the launches before this one have written
    number, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_blocks = tl.cdiv(count * heads_per_kv, BLOCK_M)
    pair = number // row_blocks
    batch, kv_head = pair // kv_heads, pair % kv_heads
    columns = tl.arange(0, BLOCK_D)
    rows = (number % row_blocks).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < count * heads_per_kv
    new = tl.where(in_rows, rows // heads_per_kv, 0)
    head = kv_head * heads_per_kv + rows % heads_per_kv
    mask = in_rows[:, None] & (columns < HEAD_DIM)[None, :]
    q_rows = (batch * q_b + new * q_n + head * q_h) * UNIT
    q_block = tl.load(q + q_rows[:, None] + columns[None, :], mask=mask, other=0.0)
    scale_log2 = scale * LOG2_E
    k += (batch * k_b + kv_head * k_h) * UNIT
    v += (batch * v_b + kv_head * v_h) * UNIT
    fields = 3 + count
    own = table + batch * table_b + kv_head * table_h

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if WITH_NEW:  # noqa: SIM102 - it is known when the kernel is compiled
        if split == splits - 1:  # its share is the smallest
            near = tl.arange(0, BLOCK_NEW)
            near_mask = (near < count)[:, None] & (columns < HEAD_DIM)[None, :]
            at_k = new_k + (batch * new_k_b + kv_head * new_k_h) * UNIT
            at_v = new_v + (batch * new_v_b + kv_head * new_v_h) * UNIT
            to_k = (near.to(tl.int64) * new_k_n * UNIT)[:, None] + columns[None, :]
            to_v = (near.to(tl.int64) * new_v_n * UNIT)[:, None] + columns[None, :]
            k_block = tl.load(at_k + to_k, mask=near_mask, other=0.0)
            scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION) * scale_log2
            shown = tl.zeros([BLOCK_M, BLOCK_NEW], tl.float32)  # by how many branches
            for branch in range(num_branches):
                label = own + num_strips * fields + branch * count
                of_rows = tl.load(label + new, mask=in_rows, other=-1)
                of_near = tl.load(label + near, mask=near < count, other=-2)
                same = (of_rows[:, None] == of_near[None, :]) & (of_rows >= 0)[:, None]
                shown += (same & (near[None, :] <= new[:, None])).to(tl.float32)
            scores = tl.where(shown > 0, scores + tl.log2(tl.maximum(shown, 1.0)), float("-inf"))
            row_max = tl.max(scores, 1)
            # Of a row that has seen no key: (-inf) - (-inf) would be NaN.
            finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
            p = tl.exp2(scores - finite_max[:, None])
            row_sum = tl.sum(p, 1)
            v_block = tl.load(at_v + to_v, mask=near_mask, other=0.0)
            acc = tl.dot(p.to(v_block.dtype), v_block, acc, input_precision=PRECISION)

    blocks = 0
    for index in range(num_strips):
        blocks += tl.cdiv(tl.load(own + index * fields + 2).to(tl.int32), BLOCK_N)
    share = tl.cdiv(blocks, splits)
    low, high = split * share, tl.minimum((split + 1) * share, blocks)
    begin = 0
    for index in tl.range(0, num_strips, disable_licm=True):
        strip = own + index * fields
        length = tl.load(strip + 2).to(tl.int32)
        blocks = tl.cdiv(length, BLOCK_N)
        first, stop = tl.maximum(low - begin, 0), tl.minimum(high - begin, blocks)
        if first < stop:
            row, step = tl.load(strip), tl.load(strip + 1)
            limits = tl.load(strip + 3 + new, mask=in_rows, other=0)
            k_step, v_step = step * k_n * UNIT, step * v_n * UNIT
            k_offsets = row_offsets(k_step, BLOCK_N, WIDE)[:, None] + columns[None, :]
            v_offsets = row_offsets(v_step, BLOCK_N, WIDE)[:, None] + columns[None, :]
            found, row_max, row_sum = attend(
                (acc,), row_max, row_sum, (q_block,), k + row * k_n * UNIT, v + row * v_n * UNIT,
                (k_offsets,), (v_offsets,), k_step * BLOCK_N, v_step * BLOCK_N, limits, length,
                first, stop, scale_log2, True, HEAD_DIM, BLOCK_N, PRECISION,
            )  # fmt: skip
            acc = found[0]
        begin += blocks

    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()  # the merge, which waits for all of this
    total = tl.where(row_sum > 0, row_sum, 1.0)
    acc = acc / total[:, None]
    part = (pair * splits + split) * (count * heads_per_kv) + rows
    tl.store(parts + part[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
    tl.store(parts + lse_at + part, row_max + tl.log2(total), mask=in_rows)


@kernel(9)
def _merge_kernel(
    parts, out, lse, new_k, new_v, keys, values, table, lengths,
    k_b, k_n, new_k_b, new_k_n, new_k_h, new_v_b, new_v_n, new_v_h,
    table_b, table_h,
    count, heads_per_kv, kv_heads, num_strips, num_branches, splits, lse_at,
    WITH_NEW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: one query of one head; the first head of a KV head writes its new row."""
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, kv_head = pair // kv_heads, pair % kv_heads
    new, member = row // heads_per_kv, row % heads_per_kv
    columns = tl.arange(0, BLOCK_D)
    in_columns = columns < HEAD_DIM
    rows = count * heads_per_kv
    if WITH_NEW:  # all of it was written before the launch of the parts
        branch = tl.arange(0, BLOCK_E)
        # Behind the strips: labels, targets, and whether there is room.
        targets = table + batch * table_b + kv_head * table_h + num_strips * (3 + count)
        targets += num_branches * count + new
        room = tl.load(targets + num_branches * count)
        target = tl.load(targets + branch * count, mask=branch < num_branches, other=-1)
        from_k = new_k + batch * new_k_b + new * new_k_n + kv_head * new_k_h
        from_v = new_v + batch * new_v_b + new * new_v_n + kv_head * new_v_h
        k_row = tl.load(from_k + columns, mask=in_columns, other=0.0)
        v_row = tl.load(from_v + columns, mask=in_columns, other=0.0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # for the parts
        tl.extra.cuda.gdc_launch_dependents()  # the next call's first launch, which waits for this

    acc = tl.zeros([BLOCK_D], tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        part = (pair * splits + split) * rows + row
        some = tl.load(parts + lse_at + part, mask=split < splits, other=float("-inf"))
        new_max = tl.maximum(largest, tl.max(some, 0))
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(some - finite)
        mask = (split < splits)[:, None] & in_columns[None, :]
        block = tl.load(parts + part[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
        shrink = tl.exp2(largest - finite)
        acc = acc * shrink + tl.sum(block * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = new_max
    seen = tl.where(total > 0, total, 1.0)
    result = acc / seen
    result_lse = (largest + tl.log2(seen)) * LN_2
    if WITH_NEW:
        result = tl.where(room > 0, result, float("nan"))
        result_lse = tl.where(room > 0, result_lse, float("nan"))
    place = (batch * count + new) * (kv_heads * heads_per_kv) + kv_head * heads_per_kv + member
    tl.store(out + place * HEAD_DIM + columns, result.to(out.dtype.element_ty), mask=in_columns)
    tl.store(lse + place, result_lse)

    if WITH_NEW:
        if member == 0:
            to = (batch * k_b + target * k_n)[:, None] + columns[None, :]
            mask = (target >= 0)[:, None] & in_columns[None, :]
            tl.store(keys + to, tl.broadcast_to(k_row[None, :], [BLOCK_E, BLOCK_D]), mask=mask)
            tl.store(values + to, tl.broadcast_to(v_row[None, :], [BLOCK_E, BLOCK_D]), mask=mask)
        if (kv_head == 0) & (row == 0):
            tl.store(lengths + batch, tl.load(lengths + batch) + count)


def attend_to_strips(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    strips: Strips,
    most_rows: int,
    scale: float,
    *,
    dtype: torch.dtype,
    new: NewRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries to strips of rows, and among each other; `new` rows are written.

    Any strides, but a last stride of 1.

    Args:
        q: (B, m, H, D), float16, bfloat16 or float32; D a multiple of 8 up to 256, m at
            most `MOST_NEW_ROWS`.
        k: (B, n, K, D), same dtype; head stride 0 where a head's rows are those of its strips.
        v: (B, n, K, D), same dtype; with `new`, of the strides of `k`.
        strips: which rows the queries see; with `new`, those of `strips_of_cache`.
        most_rows: of a KV head in a row of the batch: about how many there may be.
        scale: factor on the scores.
        dtype: of out.
        new: the queries' own rows, for a cache; its lengths are counted up.

    Returns:
        out (B, m, H, D), and lse (B, m, H), float32, natural log. NaN at a position that the cache
        has no room for.
    """
    table = strips.table
    new_k, new_v, lengths = (q, q, table) if new is None else new[:3]  # None: not read
    numbers, split, merge = launches_of(
        (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), new_k.stride(), new_v.stride()),
        (table.stride(0) if table.shape[0] > 1 else 0, table.stride(1)),
        (strips.num_strips, strips.num_branches),
        most_rows,
        float(scale),
        (q.dtype, q.device),
        (new is not None, new is not None and new.are_seen_here),
    )
    parts = q.new_empty(numbers, dtype=torch.float32)
    _split_kernel(split, (q, k, v, new_k, new_v, table, parts))
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _merge_kernel(merge, (parts, out, lse, new_k, new_v, k, v, table, lengths))
    return out, lse


@lru_cache(maxsize=_SHAPES_KEPT)
def launches_of(
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], ...],
    table_strides: tuple[int, int],
    counts: tuple[int, int],
    most_rows: int,
    scale: float,
    like: tuple[torch.dtype, torch.device],
    new: tuple[bool, bool],
) -> tuple[int, KernelLaunch, KernelLaunch]:
    """How calls of one shape are launched, whatever their tensors hold: see `attend_to_strips`.

    Args:
        shapes: of q and k.
        strides: of q, k, v, and of new keys and values.
        table_strides: of batch rows and KV heads in the table of strips.
        counts: of a KV head's strips, and of the branches of a cache.
        most_rows: of a KV head in a row of the batch: about how many there may be.
        scale: factor on the scores.
        like: dtype and device of q.
        new: whether there are new rows, and whether this rank computes what is seen of them.

    Returns:
        Float32 numbers that the first launch writes and the second one reads: out (B * K, S,
        m * H / K, D), then lse (B * K, S, m * H / K), in powers of two. Both launches.
    """
    (batch, count, heads, head_dim), (_, length, kv_heads, _) = shapes
    assert count <= MOST_NEW_ROWS
    rows, pairs = count * (heads // kv_heads), batch * kv_heads
    dtype, device = like
    config = decode_config(head_dim, dtype, queries=rows, keys=most_rows, device=device)
    blocks = pairs * -(-rows // config.block_m)
    splits = _splits(
        blocks,
        PROGRAMS * profile_of(device).multiprocessors,
        _UNEVEN_SPLITS if counts[1] > 1 else 1,
        -(-most_rows // config.block_n),
        ROUNDS,
    )
    of_all = {"HEAD_DIM": head_dim, "BLOCK_D": power_of_two(head_dim), **_overlap(device)}
    unit, has_new = stride_unit(*strides), new[0]
    _, k_strides, v_strides, new_k_strides, new_v_strides = strides
    lse_at = pairs * splits * rows * head_dim
    sizes = count, heads // kv_heads, kv_heads, *counts, splits, lse_at
    split = KernelLaunch(
        (blocks, splits),
        (*strides_in(unit, *strides), *table_strides, scale, *sizes),
        {
            "UNIT": unit,
            "WITH_NEW": new[1],
            # Of a cache rows of a block are neighbours; else they lie within the tensor.
            "WIDE": not has_new and length * max(k_strides[1], v_strides[1]) >= 2**31,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_NEW": power_of_two(count),
            "PRECISION": "ieee",
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **of_all,
        },
        {},
    )
    of_rows = *k_strides[:2], *new_k_strides[:3], *new_v_strides[:3]
    merge = KernelLaunch(
        (pairs, rows),
        (*of_rows, *table_strides, *sizes),
        {
            "WITH_NEW": has_new,
            "BLOCK_S": min(_MERGED, power_of_two(splits)),
            "BLOCK_E": power_of_two(counts[1]),
            "num_warps": 4,
            **of_all,
        },
        {},
    )
    return lse_at + lse_at // head_dim, split, merge
