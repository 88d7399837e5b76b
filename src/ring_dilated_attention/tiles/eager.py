"""One tile of attention in readable torch code: any dtype, any device, O(rows^2) memory.

Everything is computed and returned in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch

from .backend import TileBackend, TileGradients, TileInputs, reads_any_rows


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are summed: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(t: TileInputs) -> torch.Tensor:
    dtype = accumulate_dtype(t.q.dtype)
    scores = t.scale * (t.q.to(dtype) @ t.k.to(dtype).transpose(-1, -2))
    if t.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(t)
    return scores.softmax(-1) @ t.v.to(scores.dtype), torch.logsumexp(scores, -1)


def _backward(t: TileInputs, g: TileGradients) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = torch.exp(_scores(t) - g.lse[..., None])
    q, k, v, dout = (x.to(p.dtype) for x in (t.q, t.k, t.v, g.dout))
    ds = t.scale * p * (dout @ v.transpose(-1, -2) - g.delta()[..., None])
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


EAGER = TileBackend(
    name="eager",
    forward=_forward,
    backward=_backward,
    refusal=lambda on, dtype, head_dim: None,
    reads=reads_any_rows,
)
