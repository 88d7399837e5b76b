"""Which back end computes which tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..pattern import check_choice
from .backend import TileBackend
from .eager import EAGER
from .fa4 import FA4
from .sdpa import CPU_FLASH, CUDNN, EFFICIENT, FLASH
from .table import TABLE_NAME, table_refusal

_SDPA = (CPU_FLASH, CUDNN, FLASH, EFFICIENT)
_AUTO = (FA4, *_SDPA)
_NAMED = {backend.name: backend for backend in (*_AUTO, EAGER)}

BACKENDS = ("auto", "sdpa", *_NAMED, TABLE_NAME)
"""Valid values of `backend`: ``auto`` takes what is fastest and can compute the tiles; ``sdpa`` the
same among the kernels inside torch; a kernel's name takes that kernel or raises."""

SMALL_FLOPS = 6e9
"""A kernel call of fewer operations takes less time than its launch: such tiles share one launch of
the table-driven kernel (H200: 15 us at 400 TFLOP/s)."""


@dataclass(frozen=True)
class Selection:
    """The back ends that may compute the tiles of a call.

    Attributes:
        head_dim: of the call.
        backends: by falling preference, where nothing more is known.
        table_flops: kernel calls of at most so many operations go to the table-driven kernel.
    """

    head_dim: int
    backends: tuple[TileBackend, ...]
    table_flops: float = 0.0

    def forward(self, rows: int, stride: int, is_causal: bool, store: bool) -> TileBackend:
        """The back end for the forward of tiles.

        Args:
            rows: key rows of a tile.
            stride: local rows from one row of a tile to the next.
            is_causal: whether the tiles are causal.
            store: whether results need not be merged with others.
        """
        # H200, 2026-11: cuDNN leads where rows are few, and causal or far apart, unless another can
        # write its results to where they belong; see benchmarks/results. Its kernels fit head_dim
        # 64 and 128, and pad others.
        leads = self.head_dim in (64, 128) and rows < 8192 and (is_causal or stride >= 4)
        leads = leads and not (store and self.backends[0].forward_into)
        return CUDNN if leads and CUDNN in self.backends else self.backends[0]

    @cached_property
    def backward(self) -> TileBackend:
        """The back end for the backward of tiles."""
        fits = (b for b in self.backends if b.backward_refusal(self.head_dim) is None)
        return next(fits)


def select_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Selection:
    """The back ends that `name` stands for, for tiles of this device, dtype and head_dim.

    Raises:
        ValueError: `name` is unknown, or what it names cannot compute such tiles.
    """
    check_choice("backend", name, BACKENDS)
    if name == TABLE_NAME:
        reason = table_refusal(device, dtype, head_dim)
        if reason is not None:
            raise ValueError(f"backend={name!r} cannot compute this attention ({reason})")
        return Selection(head_dim, (), math.inf)
    groups = {"auto": _AUTO, "sdpa": _SDPA}
    candidates = groups[name] if name in groups else (_NAMED[name],)
    reasons = {backend: backend.refusal(device, dtype, head_dim) for backend in candidates}
    able = tuple(backend for backend, reason in reasons.items() if reason is None)
    if len(able) == 1:  # none to fall back to
        reasons[able[0]] = able[0].backward_refusal(head_dim)
        able = able if reasons[able[0]] is None else ()
    if able:
        table = (
            name == "auto" and device.type == "cuda" and not table_refusal(device, dtype, head_dim)
        )
        return Selection(head_dim, able, SMALL_FLOPS if table else 0.0)
    if name == "auto" and (device.type != "cuda" or dtype == torch.float64):
        return Selection(head_dim, (EAGER,))  # no fused kernel exists there
    why = "; ".join(f"{backend.name}: {reason}" for backend, reason in reasons.items())
    raise ValueError(f"backend={name!r} cannot compute this attention ({why})")
