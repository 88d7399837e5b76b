"""What a benchmark times: this library, and the baselines that `BASELINES` describes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..functional import dilated_attention
from ..pattern import DilatedPattern, check_choice
from .torchscale import torchscale_attention
from .workload import Workload

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""query, key, value -> out."""
Shape = tuple[int, ...]

OURS = "ours"
BASELINES = {
    "kernel": "the attention kernel alone, on contiguous segments: as many FLOPs, and nothing is "
    "gathered, merged or exchanged; on GPUs flash-attn-4, without it cuDNN; one rank",
    "kernel:cudnn": "the same by cuDNN; one rank",
    "torchscale": "gather and scatter around FlashAttention-2; one rank",
    "sdpa": "torch's dense attention over the whole sequence; one rank",
    "context_parallel": "torch's context_parallel (all-gather, cuDNN); dense, several GPUs",
}
"""Names of the baselines, and what they compute."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a contender computes: the device of this rank, and its number among the ranks."""

    device: torch.device
    ranks: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that computes a workload, or one rank's share of it.

    Attributes:
        attend: what is timed, called once for each of `shapes`.
        shapes: of query and out, and of key and value, on this rank.
        flops: useful FLOPs of a forward call of all ranks.
        kernel: which kernel attends; empty: the contender's name says it.
        inside: the context in which it computes.
    """

    attend: Attend
    shapes: tuple[tuple[Shape, Shape], ...]
    flops: int
    kernel: str = ""
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def make_contender(name: str, workload: Workload, place: Place) -> Contender:
    """What `OURS` or a baseline runs for a workload.

    Raises:
        ValueError: the name is unknown, or the baseline cannot compute this workload here.
    """
    if name == OURS:
        return _ours(workload, place)
    check_choice("baseline", name, tuple(BASELINES))
    kind, _, kernel = name.partition(":")
    if (kind == "context_parallel") != (place.ranks > 1):
        needs = "several ranks" if place.ranks == 1 else "one rank"
        raise ValueError(f"{name} runs on {needs}; got {place.ranks}")
    if place.device.type == "cpu" and (kernel or kind == "context_parallel"):
        raise ValueError(f"{name} runs on GPUs; the device is cpu")
    if kind in ("torchscale", "context_parallel") and workload.kv_heads != workload.num_heads:
        raise ValueError(
            f"{name} has no grouped queries; got {workload.num_heads} heads and "
            f"{workload.kv_heads} KV heads"
        )
    if kind == "kernel":
        return _kernel(workload, place, kernel == "cudnn")
    if kind == "context_parallel":
        return _context_parallel(workload, place)
    return _torchscale(workload) if kind == "torchscale" else _sdpa(workload)


def _ours(workload: Workload, place: Place) -> Contender:
    layout = workload.layout(place.ranks)
    several = place.ranks > 1
    attend = partial(
        dilated_attention,
        pattern=workload.pattern,
        is_causal=workload.is_causal,
        group=dist.group.WORLD if several else None,
        layout=layout if several else None,
        backend=workload.backend,
    )
    shapes = (workload.shapes(layout.local_length(place.rank)),)
    return Contender(attend=attend, shapes=shapes, flops=workload.flops())


def _torchscale(workload: Workload) -> Contender:
    pattern = workload.pattern
    if pattern.head_branches != "all":
        raise ValueError(f"torchscale runs all branches on each head; got {pattern.head_branches}")
    attend = partial(torchscale_attention, pattern=pattern, is_causal=workload.is_causal)
    blocked = DilatedPattern(
        pattern.segment_lengths, pattern.dilation_rates, head_offsets="blocked"
    )
    shapes = (workload.shapes(workload.seq_len),)
    return Contender(attend=attend, shapes=shapes, flops=workload.flops(blocked))


def _sdpa(workload: Workload) -> Contender:
    dense = _dense(workload, "")

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dense(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    flops = workload.flops(DilatedPattern.dense())
    return Contender(attend=attend, shapes=(workload.shapes(workload.seq_len),), flops=flops)


def _kernel(workload: Workload, place: Place, by_cudnn: bool) -> Contender:
    """One dense call per branch, on as many rows as its full segments have at offset 0."""
    kernel = ""
    if place.device.type == "cuda":
        has_flash4 = find_spec("flash_attn") and find_spec("flash_attn.cute")
        kernel = "flash4" if has_flash4 and not by_cudnn else "cudnn"
    shapes, pairs = [], 0
    for index, (segment_length, rate) in enumerate(workload.pattern.branches):
        kv_heads = len(workload.pattern.heads(index, workload.kv_heads))
        if not kv_heads:
            continue
        w = workload.seq_len if segment_length is None else min(segment_length, workload.seq_len)
        segments, rows = workload.batch_size * (workload.seq_len // w), -(-w // rate)
        heads = kv_heads * workload.num_heads // workload.kv_heads
        pairs += segments * heads * (rows * (rows + 1) // 2 if workload.is_causal else rows * rows)
        query, key = (
            (segments, *((rows, h) if kernel == "flash4" else (h, rows)), workload.head_dim)
            for h in (heads, kv_heads)
        )
        shapes.append((query, key))
    return Contender(
        attend=_dense(workload, kernel),
        shapes=tuple(shapes),
        flops=4 * workload.head_dim * pairs,
        kernel=kernel,
    )


def _dense(workload: Workload, kernel: str) -> Attend:
    """Dense attention of flash-attn-4 (rows before heads), or of torch (heads before rows)."""
    causal = workload.is_causal
    if kernel == "flash4":
        flash = importlib.import_module("flash_attn.cute.interface").flash_attn_func

        def by_flash4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = flash(q, k, v, causal=causal)
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out

        return by_flash4

    def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if kernel == "cudnn" else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return by_torch


def _context_parallel(workload: Workload, place: Place) -> Contender:
    if workload.pattern != DilatedPattern.dense():
        raise ValueError(f"context_parallel is dense; got the pattern {workload.pattern}")
    chunks = place.ranks * (2 if workload.is_causal else 1)
    if workload.seq_len % chunks:
        raise ValueError(
            f"context_parallel on {place.ranks} ranks needs a length that is a multiple of "
            f"{chunks}; got {workload.seq_len}"
        )
    attend = _dense(workload, "cudnn")

    def with_lse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # only then SDPA returns the lse, which merging needs
            return attend(query, key, value)

    (batch, length, heads, dim), _ = workload.shapes(workload.seq_len // place.ranks)
    shape = (batch, heads, length, dim)
    inside = partial(_in_context_parallel, workload, place.device)
    return Contender(
        attend=with_lse, shapes=((shape, shape),), flops=workload.flops(), inside=inside
    )


@contextmanager
def _in_context_parallel(workload: Workload, device: torch.device) -> Iterator[None]:
    """Inside, torch's SDPA attends over all ranks, each of which has its shard already."""
    module: Any = importlib.import_module("torch.distributed.tensor.experimental._attention")
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)  # type: ignore[arg-type]
    positions = torch.arange(workload.seq_len, device=device)[None]  # it wants something to shard
    options = module._cp_options
    balanced, options.enable_load_balance = options.enable_load_balance, workload.is_causal
    try:
        with module.context_parallel(
            mesh, buffers=[positions], buffer_seq_dims=[1], no_restore_buffers={positions}
        ):
            yield
    finally:
        options.enable_load_balance = balanced
