"""How attention of a few queries is launched: what all calls of one shape share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .blocks import stride_unit, strides_in
from .decode_shape import SHAPES_KEPT, decode_shape
from .device_profile import DecodeTuning
from .launch import KernelLaunch
from .tuning import MOST_NEW_ROWS


class DecodeLaunches(NamedTuple):
    """How a call is launched, whatever its tensors hold.

    Attributes:
        parts: float32 numbers that the first launch writes, and the second one reads.
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
    shape = decode_shape(shapes[0], kv_heads, most_rows, counts[1], *like, tuning)
    unit, has_new = stride_unit(*strides), new[0]
    _, k_strides, v_strides, new_k_strides, new_v_strides = strides
    sizes = count, heads // kv_heads, kv_heads, *counts, shape.splits, shape.lse_at
    split_constants = {
        "UNIT": unit,
        "WITH_NEW": new[1],
        # Of a cache rows of a block are neighbours; else they lie within the tensor.
        "WIDE": not has_new and length * max(k_strides[1], v_strides[1]) >= 2**31,
        **shape.split_options,
    }
    split = KernelLaunch(
        (shape.blocks, shape.splits),
        (*strides_in(unit, *strides), *table_strides, scale, *sizes),
        split_constants,
        {},
    )
    of_rows = *k_strides[:2], *new_k_strides[:3], *new_v_strides[:3]
    merge = KernelLaunch(
        (batch * kv_heads, shape.rows),
        (*of_rows, *table_strides, *sizes),
        {"WITH_NEW": has_new, **shape.merge_options},
        {},
    )
    return DecodeLaunches(shape.lse_at + shape.lse_at // head_dim, split, merge)
