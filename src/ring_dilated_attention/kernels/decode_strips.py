"""Triton kernel: which rows of a KV cache new positions see, and where their own rows go.

Positions are read on the device, so that a step which is captured in a CUDA graph can be replayed
while the cache grows. `plan.cache` says in integers what is computed here.

Shape legend: B batch, K KV heads, E branches, m new positions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .decode_launches import SHAPES_KEPT, launching
from .device_profile import profile_of
from .launch import KernelLaunch, Launcher
from .tuning import NO_END, power_of_two

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


@triton.jit(
    do_not_specialize=[
        "count", "kv_heads", "num_branches", "shard", "shards", "max_length",
    ]
)  # fmt: skip
def _strips_kernel(
    lengths, branches, table,
    count,
    kv_heads,
    num_branches,
    shard,
    shards,
    max_length,
    BLOCK_NEW: tl.constexpr,
    NARROW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: one branch of one KV head of one row of the batch."""
    pair, branch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, kv_head = pair // kv_heads, pair % kv_heads
    own = branches + branch * (3 + 2 * kv_heads)
    length, rate, slots = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    offset, base = tl.load(own + 3 + kv_head), tl.load(own + 3 + kv_heads + kv_head)
    runs = offset >= 0
    offset = tl.maximum(offset, 0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # for what the launch before this one writes: the lengths
        tl.extra.cuda.gdc_launch_dependents()  # attention, which waits for all of this
    position = tl.load(lengths + batch)
    if NARROW:  # a division of 64 bits takes several times as long
        length, rate = _narrow(length), _narrow(rate)
        slots, offset, position = _narrow(slots), _narrow(offset), position.to(tl.int32)

    per_segment = (length - offset + rate - 1) // rate
    next_member = members_before(position, length, rate, offset)
    segment = next_member // per_segment
    # Of this rank, in its own numbers: the members of that segment that came before.
    low = (segment * per_segment - shard + shards - 1) // shards
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


_launch = Launcher(_strips_kernel)


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
        branches: (E, 3 + 2 K) int64: segment length (`NO_END`: it has none), rate and slots of each
            branch; of each KV head the offset, -1 where it has no rows, and its first row.
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
    _launch(launch.grid, (lengths, branches, table), *launch[1:])
    return Strips(table, 2 * num_branches, num_branches)


@lru_cache(maxsize=SHAPES_KEPT)
def _launch_of(batch: int, numbers: tuple[int, ...], device: torch.device) -> KernelLaunch:
    """Of calls of one shape; `numbers` are those that the kernel takes."""
    count, kv_heads, num_branches, *_, room = numbers
    constants = {
        "BLOCK_NEW": power_of_two(count),
        "NARROW": room + count <= _NARROW.value,
        "num_warps": 1,
        **launching(device, profile_of(device).decode),
    }
    return KernelLaunch((batch * kv_heads, num_branches), numbers, constants, {})
