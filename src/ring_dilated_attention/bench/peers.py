"""What a benchmark times: this library, and what a user would otherwise run.

Each is a `Contender`. ``sdpa`` is torch's dense attention over the whole sequence; ``torchscale``
gathers, attends, scatters and mixes as torchscale does; ``flash4`` is flash-attn-4 for the dense
pattern; ``kernel`` is torch's attention on tensors of the shapes of the pattern's segments that
are contiguous already: the speed of the kernel alone, with nothing dilated, merged or summed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..checks import reference_attention
from ..functional import dilated_attention
from ..pattern import DilatedPattern, check_choice
from .case import Case
from .torchscale import KERNELS, torchscale_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""query, key, value -> out."""

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of query (and out), and of key and value."""

OURS = "ours"
_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS = (
    "sdpa",
    *(f"sdpa:{name}" for name in _SDPA),
    "torchscale",
    *(f"torchscale:{name}" for name in KERNELS),
    "kernel",
    *(f"kernel:{name}" for name in _SDPA),
    "flash4",
)
"""Names of peers; what follows the colon forces the kernel inside."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that computes a case.

    Attributes:
        attend: what is timed, once for each of `shapes`.
        shapes: of its inputs.
        flops: useful operations of one forward call.
        kernel: which kernel computes, given the inputs of one of `shapes`.
        expected: what it should compute, differentiable, on float64 inputs; None: nothing to
            compare with, its inputs are not the case's.
    """

    attend: Attend
    shapes: tuple[Shapes, ...]
    flops: int
    kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], str]
    expected: Attend | None


def contender(name: str, case: Case, device: torch.device) -> Contender:
    """What `name` (`OURS`, or one of `PEERS`) runs for a case.

    Raises:
        ValueError: the name is unknown, or it cannot compute such a case; says why.
    """
    if name == OURS:
        return _ours(case)
    check_choice("peer", name, PEERS)
    kind, _, kernel = name.partition(":")
    if kernel in ("cudnn", "efficient") and device.type != "cuda":
        raise ValueError(f"{name} runs on cuda, the inputs are on {device.type}")
    if kind == "sdpa":
        return _sdpa(case, kernel)
    if kind == "kernel":
        return _kernel(case, kernel)
    if kind == "torchscale":
        return _torchscale(case, kernel or ("flash" if device.type == "cuda" else "cpu_flash"))
    return _flash4(case)


def _ours(case: Case) -> Contender:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dilated_attention(
            query, key, value, case.pattern, is_causal=case.is_causal, backend=case.backend
        )

    return Contender(
        attend=attend,
        shapes=((case.query_shape, case.key_shape),),
        flops=case.flops(),
        kernel=lambda *_: case.backend,
        expected=_expected(case, case.pattern),
    )


def _sdpa(case: Case, kernel: str) -> Contender:
    attend, chosen = _scaled_dot_product(case, kernel)

    def transposed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    return Contender(
        attend=transposed,
        shapes=((case.query_shape, case.key_shape),),
        flops=case.flops(DilatedPattern.dense()),
        kernel=lambda *inputs: chosen(*(x.transpose(1, 2) for x in inputs)),
        expected=_expected(case, DilatedPattern.dense()),
    )


def _kernel(case: Case, kernel: str) -> Contender:
    """One call per branch, on as many rows as its full segments have at offset 0.

    A segment longer than the sequence counts as one of the sequence's length.
    """
    attend, chosen = _scaled_dot_product(case, kernel)
    shapes, pairs = [], 0
    for index, (segment_length, rate) in enumerate(case.pattern.branches):
        kv_heads = len(case.pattern.heads(index, case.num_kv_heads))
        if not kv_heads:
            continue
        w = case.length if segment_length is None else min(segment_length, case.length)
        segments, rows = case.batch * (case.length // w), -(-w // rate)
        heads = kv_heads * (case.heads // case.num_kv_heads)
        query = (segments, heads, rows, case.head_dim)
        shapes.append((query, (segments, kv_heads, *query[2:])))
        pairs += segments * heads * (rows * (rows + 1) // 2 if case.is_causal else rows * rows)
    return Contender(
        attend=attend,
        shapes=tuple(shapes),
        flops=4 * case.head_dim * pairs,
        kernel=chosen,
        expected=None,
    )


def _torchscale(case: Case, kernel: str) -> Contender:
    pattern = case.pattern
    if pattern.head_branches != "all":
        raise ValueError(
            f"torchscale runs every branch on every head; got head_branches "
            f"{pattern.head_branches!r}"
        )
    if case.num_kv_heads != case.heads:
        raise ValueError(
            f"torchscale has no grouped queries; got {case.heads} heads and "
            f"{case.num_kv_heads} KV heads"
        )
    attend = partial(torchscale_attention, pattern=pattern, is_causal=case.is_causal)
    blocked = DilatedPattern(
        pattern.segment_lengths, pattern.dilation_rates, head_offsets="blocked"
    )
    return Contender(
        attend=partial(attend, kernel=KERNELS[kernel]),
        shapes=((case.query_shape, case.key_shape),),
        flops=case.flops(blocked),
        kernel=lambda *_: kernel,
        expected=partial(attend, kernel=KERNELS["math"]),
    )


def _flash4(case: Case) -> Contender:
    dense = DilatedPattern.dense()
    if case.pattern != dense:
        raise ValueError(f"flash4 computes the dense pattern {dense}; got {case.pattern}")
    if case.dtype not in ("float16", "bfloat16"):
        raise ValueError(f"flash4 takes float16, bfloat16; got {case.dtype}")
    try:
        flash = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    except ImportError as error:
        raise ValueError(f"flash4 needs the package flash-attn-4 ({error})") from None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = flash(query, key, value, causal=case.is_causal)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Contender(
        attend=attend,
        shapes=((case.query_shape, case.key_shape),),
        flops=case.flops(dense),
        kernel=lambda *_: "flash4",
        expected=_expected(case, dense),
    )


def _expected(case: Case, pattern: DilatedPattern) -> Attend:
    def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return reference_attention(query, key, value, pattern, is_causal=case.is_causal)[0]

    return expected


def _scaled_dot_product(
    case: Case, kernel: str
) -> tuple[Attend, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], str]]:
    """Torch's dense attention on (batch, heads, rows, head_dim), and which kernel it takes."""
    groups = case.num_kv_heads != case.heads

    def forced() -> AbstractContextManager[None]:
        return sdpa_kernel(_SDPA[kernel]) if kernel else nullcontext()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with forced():
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=case.is_causal, enable_gqa=groups
            )

    def chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
        with forced():
            number = torch._fused_sdp_choice(
                query, key, value, None, 0.0, case.is_causal, enable_gqa=groups
            )
        backend = SDPBackend(number)
        return next((name for name, known in _SDPA.items() if known == backend), backend.name)

    return attend, chosen
