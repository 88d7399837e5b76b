"""How attention of a few queries is cut into programs and launched: what calls of a shape share."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .blocks import stride_unit, strides_in
from .device_profile import DecodeTuning, profile_of
from .launch import KernelLaunch
from .tuning import MOST_NEW_ROWS, decode_config, padded_head_dim, power_of_two

_UNEVEN_SPLITS = 8
"""Programs, at least, that share the rows of a block where some KV heads see more than others: a
head is a member of a branch at some positions only."""
SHAPES_KEPT = 1024
"""Shapes of calls of which each cache keeps how they are launched."""
_MERGED = 128
"""Splits that are merged at a time, at most."""


class DecodeLaunches(NamedTuple):
    """How a call is launched, whatever its tensors hold.

    Attributes:
        parts: float32 numbers that the first launch writes, and the second one reads: out (B * K,
            S, m * H / K, D), then lse (B * K, S, m * H / K), in powers of two.
        split: the first launch.
        merge: the second.
    """

    parts: int
    split: KernelLaunch
    merge: KernelLaunch


@lru_cache(maxsize=SHAPES_KEPT)
def decode_launches(
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], ...],
    table_strides: tuple[int, int],
    counts: tuple[int, int],
    most_rows: int,
    scale: float,
    like: tuple[torch.dtype, torch.device],
    new: tuple[bool, bool],
    tuning: DecodeTuning,
) -> DecodeLaunches:
    """Of calls of one shape: see `decode.begin_strips`.

    Args:
        shapes: of q and k.
        strides: of q, k, v, and of new keys and values.
        table_strides: of batch rows and KV heads in the table of strips.
        counts: of a KV head's strips, and of the branches of a cache.
        most_rows: of a KV head in a row of the batch: about how many there may be.
        scale: factor on the scores.
        like: dtype and device of q.
        new: whether there are new rows, and whether this rank computes what is seen of them.
        tuning: how a call is cut into programs.
    """
    (batch, count, heads, head_dim), (_, length, kv_heads, _) = shapes
    assert count <= MOST_NEW_ROWS
    rows, pairs = count * (heads // kv_heads), batch * kv_heads
    dtype, device = like
    config = decode_config(head_dim, dtype, queries=rows, keys=most_rows, device=device)
    blocks = pairs * -(-rows // config.block_m)
    splits = _splits(
        blocks,
        tuning.programs * profile_of(device).multiprocessors,
        _UNEVEN_SPLITS if counts[1] > 1 else 1,
        -(-most_rows // config.block_n),
        tuning.rounds,
    )
    of_all = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        **launching(device, tuning),
    }
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
    return DecodeLaunches(lse_at + lse_at // head_dim, split, merge)


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
def launching(device: torch.device, tuning: DecodeTuning) -> dict[str, Any]:
    """Constants and options of every launch: whether it may begin while the one before it ends."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if tuning.overlaps and is_nvidia and profile_of(device).capability >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}
