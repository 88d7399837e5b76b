"""Validation that modules and options share."""

from __future__ import annotations

from typing import Any

import torch

from ..pattern import check_positive_int, in_brief, shape_in_brief


def check_head_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int | None
) -> tuple[int, int, int, int]:
    """Validate head counts.

    Returns:
        (embed_dim, num_heads, num_kv_heads, head_dim), with None for `num_kv_heads` resolved.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below 1, num_heads does not divide embed_dim, or num_kv_heads
            does not divide num_heads.
    """
    embed_dim = check_positive_int("embed_dim", embed_dim)
    num_heads = check_positive_int("num_heads", num_heads)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    num_kv_heads = check_positive_int("num_kv_heads", num_kv_heads)
    if embed_dim % num_heads:
        raise ValueError(f"num_heads must divide embed_dim {embed_dim}; got {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads {num_heads}; got {num_kv_heads}")
    return embed_dim, num_heads, num_kv_heads, embed_dim // num_heads


def check_rows(name: str, tensor: Any, width: int, shape: str) -> None:
    """Raise a `TypeError` or `ValueError` unless it is a tensor of 3 dimensions, the last `width`.

    Args:
        name: of the argument, for the message.
        tensor: the argument.
        width: of its last dimension.
        shape: the dimensions before it, in words.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not a sparse or nested one")
    if tensor.dim() != 3 or tensor.shape[2] != width:
        raise ValueError(f"{name} must have shape {shape}{width}); got {shape_in_brief(tensor)}")
