"""Sine-cosine embedding of coordinates (Vaswani et al. 2017, section 3.5, an axis at a time)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sincos_positions(coordinates: Tensor, embed_dim: int) -> Tensor:
    """Embed coordinates as sines and cosines, as encoders of images do.

    Each of the d axes has its own ``embed_dim / d`` features: first the sines, then the cosines, of
    ``x * 10000 ** (-i / m)`` for i in 0 .. m-1, with ``m = embed_dim / (2 d)``. Angles are computed
    in float64, up to whole turns: errors stay below 2e-7 for coordinates up to 2^20, and below
    5e-7 up to 2^30.

    Args:
        coordinates: (..., d), integer or floating, in units in which neighbours are about 1 apart.
        embed_dim: a multiple of 2 d.

    Returns:
        float32 (..., embed_dim).

    Raises:
        ValueError: `embed_dim` is not a multiple of 2 d.
    """
    axes = coordinates.shape[-1]
    if embed_dim < 1 or embed_dim % (2 * axes):
        raise ValueError(f"embed_dim must be a multiple of {2 * axes}; got {embed_dim}")
    count = embed_dim // (2 * axes)
    steps = torch.arange(count, dtype=torch.float64, device=coordinates.device)
    # Turns, of which whole ones are left out. All of it costs little, since a compiled model
    # computes it again in the kernel of each row that needs it: exp2, and no sine of a float64.
    frequencies = torch.exp2(steps * (-math.log2(10_000.0) / count) - math.log2(2 * math.pi))
    turns = coordinates.to(torch.float64).unsqueeze(-1) * frequencies
    angles = turns.sub_(turns.round()).mul_(2 * math.pi).float()
    return torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)
