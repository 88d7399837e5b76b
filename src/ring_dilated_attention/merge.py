"""Combine partial softmax results, each an (out, lse) pair, in float32 (or float64)."""

from __future__ import annotations

import torch


def merge_(
    out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor
) -> None:
    """Merge one tile's result into `out` and `lse`, in place.

    Two softmaxes over disjoint keys combine to one over their union:
    ``lse' = logaddexp(lse, tile_lse)`` and
    ``out' = out * exp(lse - lse') + tile_out * exp(tile_lse - lse')``.

    Args:
        out: (..., rows, head_dim), float32 or float64; may be a strided view.
        lse: (..., rows), natural log, same dtype; -inf where nothing has been seen yet.
        tile_out: (..., rows, head_dim), any floating dtype.
        tile_lse: (..., rows), natural log; -inf where the tile shows nothing.
    """
    merged = torch.logaddexp(lse, tile_lse)
    # Where neither side has seen a key, merged is -inf and (-inf) - (-inf) would be NaN.
    seen = merged.masked_fill(merged == -torch.inf, 0)
    out.mul_(torch.exp(lse - seen).unsqueeze(-1))
    out.addcmul_(tile_out.to(out.dtype), torch.exp(tile_lse - seen).unsqueeze(-1))
    lse.copy_(merged)
