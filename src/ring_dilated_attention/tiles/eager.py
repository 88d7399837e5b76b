"""One tile of attention in readable torch code: any dtype, any device, O(rows^2) memory.

Everything is computed and returned in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch

from .backend import TileBackend


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are summed: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q: torch.Tensor, k: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    dtype = accumulate_dtype(q.dtype)
    scores = scale * (q.to(dtype) @ k.to(dtype).transpose(-1, -2))
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out = softmax(scale q k^T) v`` and its lse; shapes as in `TileBackend`."""
    scores = _scores(q, k, is_causal, scale)
    return scores.softmax(-1) @ v.to(scores.dtype), torch.logsumexp(scores, -1)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this tile's share, from the merged out, lse and delta of its queries."""
    weights = torch.exp(_scores(q, k, is_causal, scale) - lse[..., None])
    dtype = weights.dtype
    dweights = dout.to(dtype) @ v.to(dtype).transpose(-1, -2)
    dscores = weights * (dweights - delta[..., None]) * scale
    dq = dscores @ k.to(dtype)
    dk = dscores.transpose(-1, -2) @ q.to(dtype)
    dv = weights.transpose(-1, -2) @ dout.to(dtype)
    return dq, dk, dv


EAGER = TileBackend(
    name="eager", forward=forward, backward=backward, refusal=lambda on, dtype, head_dim: None
)
