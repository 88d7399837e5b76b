"""Tiles: attention of one block of queries to one block of keys, on local tensors.

A tile knows nothing of ranks, patterns or positions. `select_backend` picks who computes it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from . import eager, sdpa
from .eager import accumulate_dtype

__all__ = ["BACKENDS", "TileBackend", "accumulate_dtype", "select_backend"]


class TileBackend(Protocol):
    """What computes a tile.

    Shapes: q, out, dout (batch, heads, queries, head_dim); k, v (batch, heads, keys, head_dim);
    lse, delta (batch, heads, queries) in float32, or float64 for float64 inputs. q, k, v, out and
    dout may be strided views that overlap, with the last dimension contiguous. With `is_causal`,
    queries and keys are equally many and row i sees keys 0 to i. Outputs and gradients come in the
    dtype of the inputs or wider.
    """

    name: str

    def refusal(self, on: torch.device, dtype: torch.dtype, head_dim: int, /) -> str | None:
        """Why this back end cannot compute such a tile; None if it can."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``softmax(scale q k^T) v`` and its lse (natural log)."""

    def backward(
        self,
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
        """This tile's share of dq, dk, dv, given the MERGED out, lse and delta of its queries.

        ``p = exp(scale q k^T - lse)``, ``ds = scale p (dout v^T - delta)``, ``dq = ds k``,
        ``dk = ds^T q``, ``dv = p^T dout``, where delta = rowsum(dout * out).
        """


class _Eager:
    name = "eager"
    forward = staticmethod(eager.forward)
    backward = staticmethod(eager.backward)

    @staticmethod
    def refusal(on: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None


_FUSED: tuple[TileBackend, ...] = (
    sdpa.CpuFlash(),
    sdpa.CudaCudnn(),
    sdpa.CudaFlash(),
    sdpa.CudaEfficient(),
)
_NAMED: dict[str, TileBackend] = {b.name: b for b in (*_FUSED, _Eager())}

BACKENDS = ("auto", "sdpa", *_NAMED)
"""Valid values of `backend`: ``auto`` takes the first fused kernel of torch that can compute the
tile, else ``eager``; ``sdpa`` takes the first fused kernel or raises; a kernel's name takes that
kernel or raises."""


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> TileBackend:
    """The back end that `name` stands for, for tiles of this device, dtype and head_dim.

    Raises:
        ValueError: `name` is unknown, or the back end it names cannot compute such tiles.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}; got {name!r}")
    candidates = (_NAMED[name],) if name in _NAMED else _FUSED
    reasons = []
    for backend in candidates:
        reason = backend.refusal(device, dtype, head_dim)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    if name == "auto":
        return _NAMED["eager"]
    raise ValueError(f"backend={name!r} cannot compute this attention ({'; '.join(reasons)})")
