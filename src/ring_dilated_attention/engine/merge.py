"""Combine partial softmax results, each an (out, lse) pair, in float32 (or float64)."""

from __future__ import annotations

import torch


def merge_(
    out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor
) -> None:
    """Merge one tile's result into `out` and `lse`, in place.

    Two softmaxes over disjoint keys combine to one over their union:
    ``lse' = logaddexp(lse, tile_lse)`` and ``out' = out + w * (tile_out - out)`` with
    ``w = exp(tile_lse - lse')``, computed as ``sigmoid(tile_lse - lse)``: the two weights then add
    up to 1 however large the lse and its rounding are.

    Args:
        out: (..., rows, head_dim), any floating dtype; may be a strided view.
        lse: (..., rows), natural log, float32 or float64; -inf where nothing has been seen yet.
        tile_out: (..., rows, head_dim), any floating dtype.
        tile_lse: (..., rows), natural log; -inf where the tile shows nothing.
    """
    weight = torch.sigmoid(tile_lse - lse)
    # Where neither side has seen a key, (-inf) - (-inf) is NaN; what is there stays.
    weight.masked_fill_(torch.isneginf(tile_lse), 0)
    if out.dtype == weight.dtype:
        out.lerp_(tile_out.to(out.dtype), weight.unsqueeze(-1))
    else:
        out.copy_(torch.lerp(out.to(weight.dtype), tile_out.to(weight.dtype), weight.unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, tile_lse))
