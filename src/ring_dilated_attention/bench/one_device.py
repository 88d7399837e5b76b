"""Baselines on one device, written as users would run them.

``sdpa`` is torch's dense attention over the whole sequence; ``torchscale`` gathers, attends,
scatters and mixes as torchscale does; ``flash4`` is flash-attn-4 for the dense pattern; ``kernel``
is torch's attention on tensors of the shapes of the pattern's segments that are contiguous already:
the speed of the kernel alone, with nothing dilated, merged or summed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..pattern import DilatedPattern
from .contender import (
    Attend,
    Contender,
    Site,
    by_reference,
    even_layout,
    local_shapes,
    refuse_grouped_queries,
    refuse_other_dtypes,
    refuse_other_patterns,
)
from .torchscale import KERNELS, torchscale_attention
from .workload import Workload

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
NAMES = (
    "sdpa",
    *(f"sdpa:{name}" for name in _SDPA),
    "torchscale",
    *(f"torchscale:{name}" for name in KERNELS),
    "kernel",
    *(f"kernel:{name}" for name in _SDPA),
    "flash4",
)
"""What follows the colon forces the kernel inside."""


def baseline(name: str, workload: Workload, site: Site) -> Contender:
    """What one of `NAMES` runs for a workload.

    Raises:
        ValueError: it cannot compute such a workload; says why.
    """
    site.refuse_several(name)
    kind, _, kernel = name.partition(":")
    if kernel in ("cudnn", "efficient"):
        site.refuse_cpu(name)
    if kind == "sdpa":
        return _sdpa(workload, kernel)
    if kind == "kernel":
        return _kernel(workload, kernel)
    if kind == "torchscale":
        default = "flash" if site.device.type == "cuda" else "cpu_flash"
        return _torchscale(workload, kernel or default)
    return _flash4(workload)


def _whole(
    workload: Workload,
    pattern: DilatedPattern,
    attend: Attend,
    kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], str],
    expected: Attend | None = None,
) -> Contender:
    """A contender that computes a pattern on the workload's own inputs."""
    layout = even_layout(workload, 1)
    return Contender(
        attend=attend,
        shapes=local_shapes(workload, layout, 0),
        flops=workload.flops(pattern),
        layout=layout,
        expected=expected or by_reference(workload, pattern),
        kernel=kernel,
    )


def _sdpa(workload: Workload, kernel: str) -> Contender:
    attend, chosen = _scaled_dot_product(workload, kernel)

    def transposed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
        return chosen(*(x.transpose(1, 2) for x in (query, key, value)))

    return _whole(workload, DilatedPattern.dense(), transposed, kernel_of)


def _kernel(workload: Workload, kernel: str) -> Contender:
    """One call per branch, on as many rows as its full segments have at offset 0.

    A segment longer than the sequence counts as one of the sequence's length.
    """
    attend, chosen = _scaled_dot_product(workload, kernel)
    shapes, pairs = [], 0
    for index, (segment_length, rate) in enumerate(workload.pattern.branches):
        kv_heads = len(workload.pattern.heads(index, workload.kv_heads))
        if not kv_heads:
            continue
        w = workload.seq_len if segment_length is None else min(segment_length, workload.seq_len)
        segments, rows = workload.batch_size * (workload.seq_len // w), -(-w // rate)
        heads = kv_heads * (workload.num_heads // workload.kv_heads)
        query = (segments, heads, rows, workload.head_dim)
        shapes.append((query, (segments, kv_heads, *query[2:])))
        pairs += segments * heads * (rows * (rows + 1) // 2 if workload.is_causal else rows * rows)
    return Contender(
        attend=attend,
        shapes=tuple(shapes),
        flops=4 * workload.head_dim * pairs,
        layout=even_layout(workload, 1),
        expected=None,
        kernel=chosen,
    )


def _torchscale(workload: Workload, kernel: str) -> Contender:
    pattern = workload.pattern
    if pattern.head_branches != "all":
        raise ValueError(
            f"torchscale runs every branch on every head; got head_branches "
            f"{pattern.head_branches!r}"
        )
    refuse_grouped_queries("torchscale", workload)
    attend = partial(torchscale_attention, pattern=pattern, is_causal=workload.is_causal)
    blocked = DilatedPattern(
        pattern.segment_lengths, pattern.dilation_rates, head_offsets="blocked"
    )
    return _whole(
        workload,
        blocked,
        partial(attend, kernel=KERNELS[kernel]),
        lambda *_: kernel,
        expected=partial(attend, kernel=KERNELS["math"]),
    )


def _flash4(workload: Workload) -> Contender:
    refuse_other_patterns("flash4", workload)
    refuse_other_dtypes("flash4", workload)
    try:
        flash = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    except ImportError as error:
        raise ValueError(f"flash4 needs the package flash-attn-4 ({error})") from None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = flash(query, key, value, causal=workload.is_causal)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return _whole(workload, DilatedPattern.dense(), attend, lambda *_: "flash4")


def _scaled_dot_product(
    workload: Workload, kernel: str
) -> tuple[Attend, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], str]]:
    """Torch's dense attention on (batch, heads, rows, head_dim), and which kernel it takes."""
    groups = workload.kv_heads != workload.num_heads

    def forced() -> AbstractContextManager[None]:
        return sdpa_kernel(_SDPA[kernel]) if kernel else nullcontext()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with forced():
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=workload.is_causal, enable_gqa=groups
            )

    def chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
        with forced():
            number = torch._fused_sdp_choice(
                query, key, value, None, 0.0, workload.is_causal, enable_gqa=groups
            )
        backend = SDPBackend(number)
        return next((name for name, known in _SDPA.items() if known == backend), backend.name)

    return attend, chosen
