"""Sine-cosine embedding of coordinates (Vaswani et al. 2017, section 3.5, an axis at a time)."""

from __future__ import annotations

import torch
from torch import Tensor


def sincos_positions(coordinates: Tensor, embed_dim: int) -> Tensor:
    """Embed coordinates as sines and cosines, as encoders of images do.

    Each of the d axes has its own ``embed_dim / d`` features: first the sines, then the cosines, of
    ``x * 10000 ** (-i / m)`` for i in 0 .. m-1, with ``m = embed_dim / (2 d)``. Angles are computed
    in float64, so that no coordinate is too large.

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
    frequencies = torch.pow(10_000.0, steps / -count)
    angles = coordinates.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.cat((angles.sin().float(), angles.cos().float()), -1).flatten(-2)
