"""What a benchmark times: this library, and the baselines of `BASELINES`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..functional import dilated_attention
from ..pattern import DilatedPattern, Window
from .result import OURS, Workload

BASELINES = ("kernel", "torchscale", "sdpa", "context_parallel")
"""Names of the baselines; docs/how-to/measuring.md says what they compute."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device of this rank, the number of ranks, and this one's number."""

    device: torch.device
    ranks: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Contender:
    """Something that computes a workload, or one rank's share of it.

    Attributes:
        attend: query, key, value -> out; called once for each of `shapes`.
        shapes: of query and out, and of key and value, on this rank.
        flops: useful FLOPs of a forward call of all ranks.
        kernel: which kernel attends; empty: the contender's name says it.
        inside: the context in which it computes.
    """

    attend: Callable[..., torch.Tensor]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    flops: int
    kernel: str = ""
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def make_contender(name: str, workload: Workload, place: Place) -> Contender:
    """What `OURS` or one of `BASELINES` runs for a workload.

    Raises:
        ValueError: the baseline cannot compute this workload here.
    """
    if name == OURS:
        return _ours(workload, place)
    if workload.documents:
        raise ValueError(f"{name} takes no documents")
    if (name == "context_parallel") != (place.ranks > 1):
        needs = "several ranks" if place.ranks == 1 else "one rank"
        raise ValueError(f"{name} runs on {needs}; got {place.ranks}")
    if workload.pattern.has_windows and name != "sdpa":
        raise ValueError(f"{name} takes no windows; got {workload.pattern}")
    if name == "kernel":
        return _kernel(workload, place)
    if name == "context_parallel":
        return _context_parallel(workload, place)
    shapes = (workload.shapes(workload.seq_len),)
    if name == "sdpa":
        attend = partial(dense_attention, is_causal=workload.is_causal)
        dense = replace(workload, pattern=DilatedPattern.dense())
        return Contender(attend, shapes, dense.flops())
    if workload.pattern.head_branches != "all" or workload.kv_heads != workload.num_heads:
        raise ValueError(f"torchscale takes no split branches or grouped queries; got {workload}")
    pattern = replace(workload.pattern, head_offsets="blocked", zero_keys=False)
    attend = partial(torchscale_attention, pattern=pattern, is_causal=workload.is_causal)
    return Contender(attend, shapes, replace(workload, pattern=pattern).flops())


def _ours(workload: Workload, place: Place) -> Contender:
    layout = workload.layout(place.ranks)
    attend = partial(
        dilated_attention,
        pattern=workload.pattern,
        is_causal=workload.is_causal,
        group=dist.group.WORLD if place.ranks > 1 else None,
        layout=layout,
        documents=workload.documents,
    )
    shapes = (workload.shapes(layout.local_length(place.rank)),)
    return Contender(attend, shapes, workload.flops())


def _kernel(workload: Workload, place: Place) -> Contender:
    """One dense call per branch, on as many rows as its full segments have at offset 0."""
    kernel = ""
    if place.device.type == "cuda":
        has_flash4 = find_spec("flash_attn") and find_spec("flash_attn.cute")
        kernel = "flash4" if has_flash4 else "cudnn"
    shapes, pairs = [], 0
    for index, (segment_length, rate) in enumerate(workload.pattern.branches):
        kv_heads = len(workload.pattern.heads(index, workload.kv_heads))
        if not kv_heads or isinstance(segment_length, Window):  # these are refused
            continue
        w = workload.seq_len if segment_length is None else min(segment_length, workload.seq_len)
        segments, rows = workload.batch_size * (workload.seq_len // w), -(-w // rate)
        heads = kv_heads * workload.num_heads // workload.kv_heads
        pairs += segments * heads * (rows * (rows + 1) // 2 if workload.is_causal else rows * rows)
        shapes.append(tuple((segments, rows, h, workload.head_dim) for h in (heads, kv_heads)))
    attend = partial(dense_attention, kernel=kernel, is_causal=workload.is_causal)
    return Contender(attend, tuple(shapes), 4 * workload.head_dim * pairs, kernel)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, kernel: str = ""
) -> torch.Tensor:
    """Dense attention of (batch, rows, heads, head_dim); kernel "": the one that torch chooses."""
    if kernel == "flash4":
        flash = importlib.import_module("flash_attn.cute.interface")
        found = flash.flash_attn_func(q, k, v, causal=is_causal)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if kernel == "cudnn" else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _context_parallel(workload: Workload, place: Place) -> Contender:
    if place.device.type == "cpu":
        raise ValueError("context_parallel runs on GPUs; the device is cpu")
    dense = replace(workload, pattern=DilatedPattern.dense(), is_causal=True)
    is_grouped = workload.kv_heads != workload.num_heads
    if workload != dense or is_grouped or workload.seq_len % (2 * place.ranks):
        raise ValueError(
            "context_parallel needs the dense pattern, causal, no grouped queries, and a length "
            f"that is a multiple of {2 * place.ranks}; got {workload}"
        )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # SDPA returns the lse, which merging needs, only where gradients are enabled.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def inside() -> AbstractContextManager[None]:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = DeviceMesh.from_group(dist.group.WORLD, place.device.type)  # type: ignore[arg-type]
        positions = torch.arange(workload.seq_len, device=place.device)[None]
        # Query, key and value are shards already; it wants a buffer to shard.
        return context_parallel(
            mesh, buffers=[positions], buffer_seq_dims=[1], no_restore_buffers={positions}
        )

    (batch, length, heads, dim), _ = workload.shapes(workload.seq_len // place.ranks)
    shape = (batch, heads, length, dim)
    return Contender(attend, ((shape, shape),), workload.flops(), inside=inside)


def torchscale_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Torchscale's definition of dilated attention: gather, attend, scatter and mix the branches.

    Shapes: B batch, n positions, H heads, D head_dim, S segments, w positions of a segment, r
    dilation rate, m = ceil(w / r) rows of a segment; query and the result are (B, n, H, D). Per
    branch the sequence is padded with zeros to whole segments, and these to multiples of r; padded
    keys are attended to. The weights of branches, a softmax of their lse, have no gradient.
    """
    aten = torch.ops.aten
    attend = aten._scaled_dot_product_flash_attention
    if query.device.type == "cpu":
        attend = aten._scaled_dot_product_flash_attention_for_cpu
    length, outs, lses = query.shape[1], [], []
    for segment_length, rate in pattern.branches:
        assert not isinstance(segment_length, Window)
        w = length if segment_length is None else min(segment_length, length)
        q, k, v = (_gather(x, w, rate).transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = attend(q, k, v, 0.0, is_causal)
        outs.append(_scatter(out.transpose(1, 2), length, w, rate))
        with torch.no_grad():
            rows = lse.transpose(1, 2).unsqueeze(-1)
            lse = _scatter(rows, length, w, rate)
            lses.append(lse.masked_fill(lse == 0, -1e8))  # no row there; no NaN from -inf
    weights = torch.softmax(torch.stack(lses), 0).to(query.dtype)
    mixed = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        mixed = mixed + out * weight
    return mixed


def _gather(x: torch.Tensor, w: int, rate: int) -> torch.Tensor:
    """The rows that each head attends with: (B, n, H, D) -> (B * S, m, H, D), contiguous."""
    _, length, heads, dim = x.shape
    x = _pad(x, 1, -length % w).reshape(-1, w, heads, dim)
    if rate == 1:
        return x
    x = _pad(_pad(x, 1, -w % rate), 2, -heads % rate)
    x = x.view(x.shape[0], -1, rate, rate, x.shape[2] // rate, dim)  # position, group of heads
    x = x.diagonal(dim1=2, dim2=3).movedim(-1, 2)  # group g attends with positions g (mod r)
    return x.reshape(*x.shape[:2], -1, dim)[:, :, :heads].contiguous()


def _scatter(rows: torch.Tensor, length: int, w: int, rate: int) -> torch.Tensor:
    """The way back, with 0 where there is no row: (B * S, m, H, D) -> (B, n, H, D)."""
    segments, count, heads, dim = rows.shape
    if rate > 1:
        rows = _pad(rows, 2, -heads % rate).view(segments, count, rate, -1, dim).movedim(2, -1)
        dense = torch.diag_embed(rows, dim1=2, dim2=3)
        rows = dense.view(segments, count * rate, -1, dim)[:, :w, :heads]
    return rows.reshape(segments // -(-length // w), -1, heads, dim)[:, :length]


def _pad(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """`x` with `count` zeros appended along `dim`."""
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, count)) if count else x
