"""What takes part in a benchmark: how it attends, on which inputs, and what it should compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..checks import reference_attention
from ..exchange import Group
from ..layout import SequenceLayout
from ..pattern import DilatedPattern
from ..plan import costs
from .workload import Workload

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""query, key, value -> out."""

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of query (and out), and of key and value."""

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a contender computes.

    Attributes:
        group: the ranks; an `Exchange` or None for ours, a ProcessGroup for baselines; None for one
            rank.
        size: their number.
        rank: this one.
        device: where the tensors are.
    """

    group: Group = None
    size: int = 1
    rank: int = 0
    device: torch.device

    def refuse_cpu(self, name: str) -> None:
        """Raise a `ValueError` unless the tensors are on a CUDA device."""
        if self.device.type != "cuda":
            raise ValueError(f"{name} runs on cuda, the inputs are on {self.device.type}")

    def refuse_several(self, name: str) -> None:
        """Raise a `ValueError` if there are several ranks."""
        if self.size > 1:
            raise ValueError(f"{name} runs on one device; got {self.size} ranks")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that computes a workload, or one rank's share of it.

    Attributes:
        attend: what is timed, once for each of `shapes`.
        shapes: of this rank's inputs.
        flops: useful operations of this rank's forward call.
        layout: which rank holds which positions.
        expected: what all ranks together should compute, differentiable, on float64 inputs
            (batch, sequence, heads, head_dim); None: nothing to compare with, as its inputs are not
            the workload's.
        kernel: which kernel computes, given the inputs of one of `shapes`; empty: not known.
        heads_first: whether tensors are (batch, heads, sequence, head_dim), as the contender likes
            them, instead of (batch, sequence, heads, head_dim).
        inside: the context in which it attends and differentiates.
    """

    attend: Attend
    shapes: tuple[Shapes, ...]
    flops: int
    layout: SequenceLayout
    expected: Attend | None
    kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], str] = lambda *_: ""
    heads_first: bool = False
    inside: Callable[[], AbstractContextManager[None]] = nullcontext


def even_layout(workload: Workload, size: int) -> SequenceLayout:
    """Zigzag for a causal workload on several ranks, otherwise contiguous."""
    return SequenceLayout.named("auto", workload.seq_len, size, is_causal=workload.is_causal)


def local_shapes(
    workload: Workload, layout: SequenceLayout, rank: int, *, heads_first: bool = False
) -> tuple[Shapes, ...]:
    """Of a rank's shards of query and key."""
    length = layout.local_length(rank)

    def shape(heads: int) -> tuple[int, ...]:
        inner = (heads, length) if heads_first else (length, heads)
        return workload.batch_size, *inner, workload.head_dim

    return ((shape(workload.num_heads), shape(workload.kv_heads)),)


def by_reference(workload: Workload, pattern: DilatedPattern) -> Attend:
    """Brute force on the whole sequence."""

    def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return reference_attention(query, key, value, pattern, is_causal=workload.is_causal)[0]

    return expected


def flops_on(
    workload: Workload, site: Site, layout: SequenceLayout, pattern: DilatedPattern | None = None
) -> int:
    """Useful operations of this rank's forward call, counted by the plan."""
    return costs.flops_by_rank(workload.plan(layout, pattern), workload.size)[site.rank]


def refuse_grouped_queries(name: str, workload: Workload) -> None:
    """Raise a `ValueError` if there are fewer KV heads than query heads."""
    if workload.kv_heads != workload.num_heads:
        raise ValueError(
            f"{name} has no grouped queries; got {workload.num_heads} heads and "
            f"{workload.kv_heads} KV heads"
        )


def refuse_other_patterns(name: str, workload: Workload) -> None:
    """Raise a `ValueError` unless the pattern is dense."""
    dense = DilatedPattern.dense()
    if workload.pattern != dense:
        raise ValueError(f"{name} computes the dense pattern {dense}; got {workload.pattern}")


def refuse_other_dtypes(name: str, workload: Workload) -> None:
    """Raise a `ValueError` unless the dtype is one of `HALVES`."""
    if workload.dtype not in HALVES:
        raise ValueError(f"{name} takes {', '.join(HALVES)}; got {workload.dtype}")
