"""Which back end computes which tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from ..kernels import profile_of
from ..pattern import check_choice
from .backend import TileBackend, for_any_scale, reads_any_rows, wants_same_bits
from .eager import EAGER
from .fa4 import FA4
from .limits import Limits, limits_on
from .sdpa import CPU_FLASH, CUDNN, EFFICIENT, FLASH
from .table import TABLE_NAME, table_refusal

_SDPA = tuple(map(for_any_scale, (CPU_FLASH, CUDNN, FLASH, EFFICIENT)))
AUTO = (
    for_any_scale(FA4),
    *_SDPA,
)  # by falling speed, forward and backward, on what each can compute
_NAMED = {backend.name: backend for backend in (*AUTO, EAGER)}

Backend: TypeAlias = Literal[
    "auto", "sdpa", "fa4", "cpu_flash", "cudnn", "flash", "efficient", "eager", "triton"
]
BACKENDS = ("auto", "sdpa", *_NAMED, TABLE_NAME)
"""Valid values of `backend`: ``auto`` takes what is fastest and can compute the tiles; ``sdpa`` the
same among the kernels inside torch; a kernel's name takes that kernel or raises."""


@dataclass(frozen=True)
class Selection:
    """What computes the tiles of a call.

    Attributes:
        backend: the back end; None: the table-driven kernel computes them all.
        limits: up to which sizes tiles share launches, for calls of rising operations.
    """

    backend: TileBackend | None
    limits: tuple[Limits, ...] = (Limits(),)

    def limits_of(self, flops: float) -> Limits:
        """The limits that count in a call.

        Args:
            flops: operations of forward on the rows that a rank holds.
        """
        return [x for x in self.limits if x.least <= flops][-1]

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether tiles are computed from views of a tensor as it is; else from those of a copy."""
        # The table-driven kernel reads through strides that are plain numbers to it.
        return (reads_any_rows if self.backend is None else self.backend.reads)(tensor)

    @property
    def wants_one_layout(self) -> bool:
        """Whether backward copies tiles of query, out and dout where their strides differ."""
        return self.backend is not None and self.backend.wants_one_layout


def backend_named(name: str) -> TileBackend:
    """The back end that is called `name`, whether or not it can run here."""
    return _NAMED[name]


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
        return Selection(None, (Limits(*[math.inf] * 3),))
    groups = {"auto": AUTO, "sdpa": _SDPA}
    candidates = groups[name] if name in groups else (backend_named(name),)
    reasons = {}
    for backend in candidates:
        reason = backend.refusal(device, dtype, head_dim)
        if reason is None and not backend.repeats and wants_same_bits():
            reason = "its gradients may differ from run to run, and deterministic algorithms are on"
        if reason is None:
            shares = name == "auto" and device.type == "cuda"
            shares = shares and table_refusal(device, dtype, head_dim) is None
            if not shares:
                return Selection(backend)
            keeps = backend.keeps_calls
            limits = limits_on(profile_of(device), dtype.itemsize, head_dim, keeps_calls=keeps)
            return Selection(backend, limits)
        reasons[backend.name] = reason
    if name == "auto" and (device.type != "cuda" or dtype == torch.float64):
        return Selection(EAGER)  # no fused kernel exists there
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise ValueError(f"backend={name!r} cannot compute this attention ({why})")
