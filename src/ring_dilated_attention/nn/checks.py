"""Validation that modules and options share."""

from __future__ import annotations

import math

from ..pattern import check_positive_int


def check_head_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int | None
) -> tuple[int, int, int, int]:
    """Validate head counts.

    Returns:
        (embed_dim, num_heads, num_kv_heads, head_dim), with None for `num_kv_heads` resolved.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below 1 or does not divide what it must.
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


def check_positive_float(name: str, value: float) -> float:
    """Return `value` as a float > 0; a `TypeError` or `ValueError` names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and above 0; got {value!r}")
    return float(value)
