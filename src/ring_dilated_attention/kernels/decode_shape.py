"""How attention of a few queries is cut into programs: see `decode`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .device_profile import DecodeTuning, profile_of
from .tuning import decode_config, padded_head_dim, power_of_two

_UNEVEN_SPLITS = 8
"""Programs, at least, that share the rows of a block where some KV heads see more than others: a
head is a member of a branch at some positions only."""
SHAPES_KEPT = 1024
"""Shapes of calls of which each cache keeps how they are launched."""
_MERGED = 128
"""Splits that are merged at a time, at most."""


@dataclass(frozen=True)
class DecodeShape:
    """How a call is cut into programs.

    Attributes:
        blocks: of queries, of all KV heads and rows of the batch.
        splits: programs that share the rows of a block.
        rows: queries of a KV head.
        lse_at: where the lse lies in what the programs write: out (B * K, S, m * H / K, D), then
            lse (B * K, S, m * H / K), in powers of two; both float32.
        split_options: constants of the first launch that depend on the shape alone.
        merge_options: of the second.
    """

    blocks: int
    splits: int
    rows: int
    lse_at: int
    split_options: dict[str, Any]
    merge_options: dict[str, Any]


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


def decode_shape(
    shape: tuple[int, ...],
    kv_heads: int,
    most_rows: int,
    num_branches: int,
    dtype: torch.dtype,
    device: torch.device,
    tuning: DecodeTuning,
) -> DecodeShape:
    """Of a query of this shape, dtype and device: see `decode.begin_strips`."""
    batch, count, heads, head_dim = shape
    rows, pairs = count * (heads // kv_heads), batch * kv_heads
    config = decode_config(head_dim, dtype, queries=rows, keys=most_rows, device=device)
    blocks = pairs * -(-rows // config.block_m)
    at_a_time = tuning.programs * profile_of(device).multiprocessors
    least = _UNEVEN_SPLITS if num_branches > 1 else 1
    most = -(-most_rows // config.block_n)
    splits = _splits(blocks, at_a_time, least, most, tuning.rounds)
    width = {"HEAD_DIM": head_dim, "BLOCK_D": padded_head_dim(head_dim)}
    blocking = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_NEW": power_of_two(count),
        "PRECISION": "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    merging = {
        "BLOCK_S": min(_MERGED, power_of_two(splits)),
        "BLOCK_E": power_of_two(num_branches),
        "num_warps": 4,
    }
    launches = launching(device, tuning)
    split_options, merge_options = (width | each | launches for each in (blocking, merging))
    lse_at = pairs * splits * rows * head_dim
    return DecodeShape(blocks, splits, rows, lse_at, split_options, merge_options)


@lru_cache(maxsize=64)
def launching(device: torch.device, tuning: DecodeTuning) -> dict[str, Any]:
    """Constants and options of every launch: whether it may begin while the one before it ends."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if tuning.overlaps and is_nvidia and profile_of(device).capability >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}
