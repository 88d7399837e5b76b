"""Tiles: attention of one block of queries to one block of keys, on local tensors.

A tile knows nothing of ranks, patterns or positions. `select_backend` picks who computes it.
"""

from __future__ import annotations

import torch

from ..pattern import check_choice
from .backend import TileBackend, TileGradients, TileInputs
from .eager import EAGER, accumulate_dtype
from .sdpa import FUSED

__all__ = [
    "BACKENDS",
    "TileBackend",
    "TileGradients",
    "TileInputs",
    "accumulate_dtype",
    "select_backend",
]

_NAMED = {backend.name: backend for backend in (*FUSED, EAGER)}

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
    check_choice("backend", name, BACKENDS)
    candidates = (_NAMED[name],) if name in _NAMED else FUSED
    reasons = []
    for backend in candidates:
        reason = backend.refusal(device, dtype, head_dim)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    if name == "auto":
        return EAGER
    raise ValueError(f"backend={name!r} cannot compute this attention ({'; '.join(reasons)})")
