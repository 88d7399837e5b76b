"""Which back end computes which tiles, and up to which size tiles share a launch.

A kernel call of few operations leaves the GPU idle, at its ends and between it and the next, and
takes the CPU as long as one of many. In short calls of attention the CPU decides, in longer ones
the GPU. The table-driven Triton kernels take a whole `TileGroup` instead of one tile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..kernels import has_triton, profile_of
from ..pattern import check_choice
from .backend import TileBackend, reads_any_rows, refuse_all_but, wants_same_bits
from .fa4 import FA4
from .sdpa import CPU_FLASH, CUDNN, EAGER, EFFICIENT, FLASH


class Limits(NamedTuple):
    """The most floating-point operations of a kernel call whose tiles share a launch instead.

    Operations are counted as those of forward, in backward too.

    Attributes:
        own: of tiles whose queries and keys one rank holds. They are computed in the launch that
            goes through several branches row by row, forward and backward.
        forward: of all other tiles, in forward. They are computed in a launch of the table-driven
            kernel.
        backward: the same in backward.
        least: operations of a whole call, in forward and on the rows that a rank holds, from which
            these limits count.
    """

    own: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    least: float = 0.0


_SHORT = Limits(3e10, 1.5e10, 1.5e10)
_LIMITS = {
    (2, False): (_SHORT, Limits(2e10, 1.5e10, 1.5e10, least=8e10)),
    (2, True): (
        _SHORT,
        Limits(1.5e10, 1.5e10, 1.5e10, least=5e10),
        Limits(1.2e10, 1.2e10, 1.2e10, least=1.5e11),
    ),
    (4, False): (Limits(3e9, 1.5e9, 1.5e9),),
}
"""By bytes of an element and `TileBackend.keeps_calls`. Measured for 2 bytes on an H200
(benchmarks/results/attention_speed.md), and with flash-attn-4, which keeps its calls, on an H100,
heads of 48 and 64 (of 128: no slower). For 4 a tenth of that, as the rate is."""
NARROW_HEAD_DIM = 64
"""Up to this head_dim the table-driven kernel is about as fast in forward as the others are on
tiles of twice as many operations, and costs the CPU less; but it takes none that are too large for
being computed row by row."""


def limits_on(
    device: torch.device, element_size: int, head_dim: int, *, keeps_calls: bool
) -> tuple[Limits, ...]:
    """The limits of calls of rising operations.

    Args:
        device: that computes.
        element_size: bytes of an element of the inputs: 2 or 4.
        head_dim: elements of a row of a head.
        keeps_calls: see `TileBackend`; for elements of 2 bytes.
    """
    found = _LIMITS[element_size, keeps_calls]
    if head_dim <= NARROW_HEAD_DIM:
        found = tuple(x._replace(forward=min(2 * x.forward, x.own)) for x in found)
    return tuple(Limits._make(map(profile_of(device).flops, x)) for x in found)


TABLE_NAME = "triton"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def table_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot take (device, dtype, head_dim); None if they can."""
    if not has_triton():
        return f"{TABLE_NAME}: it is not installed"
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    # The interpreter keeps bfloat16 as integers, and multiplies those.
    dtypes = _DTYPES[:2] if interpreted else _DTYPES
    where = "cpu" if interpreted else "cuda"
    # Before Ampere shared memory is short, too.
    refused = refuse_all_but(where, dtypes, multiple=8, largest=256, from_ampere_on=dtypes)
    reason = refused(device, dtype, head_dim)
    return reason and f"{TABLE_NAME}: {reason}"


_SDPA = (CPU_FLASH, CUDNN, FLASH, EFFICIENT)
AUTO = (FA4, *_SDPA)  # by falling speed, on what each can compute
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

    @cached_property
    def reads(self) -> Callable[[torch.Tensor], bool]:
        """Whether tiles are computed from views of a tensor as it is; else from those of a copy."""
        # The table-driven kernel reads through strides that are plain numbers to it.
        return reads_any_rows if self.backend is None else self.backend.reads


def _lacks(backend: TileBackend | None, bands: bool, softcap: bool) -> str | None:
    """What a back end (None: the table-driven kernel) does not compute of what is asked for."""
    if bands and not (backend and backend.takes_bands):
        return "it does not compute sliding windows"
    if softcap and not (backend and backend.takes_softcap):
        return "it does not compute a softcap: 'fa4', 'eager' and 'auto' do"
    return None


def backend_named(name: str) -> TileBackend:
    """The back end that is called `name`, whether or not it can run here."""
    return _NAMED[name]


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    bands: bool = False,
    softcap: bool = False,
) -> Selection:
    """The back ends that `name` stands for, for tiles of this device, dtype and head_dim.

    `bands`: whether there are tiles of windows among them; `softcap`: whether scores have one.

    Raises:
        ValueError: `name` is unknown, or what it names cannot compute such tiles.
    """
    check_choice("backend", name, BACKENDS)
    if name == TABLE_NAME:
        reason = table_refusal(device, dtype, head_dim) or _lacks(None, bands, softcap)
        if reason is not None:
            raise ValueError(f"backend={name!r} cannot compute this attention ({reason})")
        return Selection(None, (Limits(*[math.inf] * 3),))
    candidates = {"auto": AUTO, "sdpa": _SDPA}.get(name) or (backend_named(name),)
    reasons = {}
    for backend in candidates:
        reason = backend.refusal(device, dtype, head_dim) or _lacks(backend, bands, softcap)
        if reason is None and not backend.repeats and wants_same_bits():
            reason = "its gradients may differ from run to run, and deterministic algorithms are on"
        if reason is None:
            shares = name == "auto" and device.type == "cuda" and not softcap
            if not shares or table_refusal(device, dtype, head_dim):
                return Selection(backend)
            keeps = backend.keeps_calls
            limits = limits_on(device, dtype.itemsize, head_dim, keeps_calls=keeps)
            return Selection(backend, limits)
        reasons[backend.name] = reason
    on_any = device.type != "cuda" or dtype == torch.float64 or bands or softcap
    if name == "auto" and on_any:
        return Selection(EAGER)  # no fused kernel exists there
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise ValueError(f"backend={name!r} cannot compute this attention ({why})")
