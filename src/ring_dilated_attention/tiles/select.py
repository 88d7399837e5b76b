"""Which back end computes which tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from ..kernels import profile_of
from ..pattern import check_choice
from .backend import TileBackend, for_any_scale, reads_any_rows
from .eager import EAGER
from .fa4 import FA4
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

SMALL_FLOPS = {2: 1.5e10, 4: 1.5e9}
"""Kernel calls of fewer operations leave the GPU idle, at their ends and between their launches:
such tiles share one launch of the table-driven kernel. By bytes of an element: measured on an H200
for 2 (benchmarks/results/attention_speed.md), and a tenth of that, as the rate is, for 4."""
OWN_FORWARD_FLOPS = {2: 3e10, 4: 3e9}
OWN_BACKWARD_FLOPS = {2: 2e10, 4: 3e9}
"""Kernel calls of fewer operations, counted as those of forward, on rows that one rank holds join a
launch that goes through several branches row by row. Measured on an H200: row by row the GPU is as
fast in forward and up to a tenth slower in backward, and the CPU has half the work."""
CPU_FLOPS = {2: 8e10, 4: 8e9}
"""In calls of fewer operations of forward the CPU takes longer than the GPU: backward then goes by
the limit of forward. On an H200: 0.8 ms of backward."""
NARROW_HEAD_DIM = 64
"""Up to this head_dim the table-driven kernel is about as fast in forward as the others are on
tiles of twice as many operations, and costs the CPU less."""


@dataclass(frozen=True)
class Selection:
    """What computes the tiles of a call.

    Attributes:
        backend: the back end; None: the table-driven kernel computes them all.
        forward_table_flops: forward kernel calls of at most this number of operations go to the
            table-driven kernel.
        backward_table_flops: backward kernel calls of at most this number of operations, counted as
            those of forward, go to the table-driven kernel.
        own_forward_flops: forward kernel calls of at most this number of operations join a launch
            that goes through several branches row by row.
        own_backward_flops: backward kernel calls of at most this number of operations, counted as
            those of forward, join such a launch, in calls of at least `cpu_flops` operations of
            forward.
        cpu_flops: in calls of fewer operations of forward, backward kernel calls join such a launch
            by the limit of forward, `own_forward_flops`.
    """

    backend: TileBackend | None
    forward_table_flops: float = 0.0
    backward_table_flops: float = 0.0
    own_forward_flops: float = 0.0
    own_backward_flops: float = 0.0
    cpu_flops: float = 0.0

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
        return Selection(None, *[math.inf] * 4)
    groups = {"auto": AUTO, "sdpa": _SDPA}
    candidates = groups[name] if name in groups else (backend_named(name),)
    reasons = {}
    for backend in candidates:
        reason = backend.refusal(device, dtype, head_dim)
        if reason is None:
            shares = name == "auto" and device.type == "cuda"
            shares = shares and table_refusal(device, dtype, head_dim) is None
            if not shares:
                return Selection(backend)
            size, flops = dtype.itemsize, profile_of(device).flops
            small = flops(SMALL_FLOPS[size])
            forward = small * (2 if head_dim <= NARROW_HEAD_DIM else 1)
            own = map(flops, (OWN_FORWARD_FLOPS[size], OWN_BACKWARD_FLOPS[size], CPU_FLOPS[size]))
            return Selection(backend, forward, small, *own)
        reasons[backend.name] = reason
    if name == "auto" and (device.type != "cuda" or dtype == torch.float64):
        return Selection(EAGER)  # no fused kernel exists there
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise ValueError(f"backend={name!r} cannot compute this attention ({why})")
