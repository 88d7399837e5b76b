"""What a benchmark measures: one call of `dilated_attention`, and its small twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..checks import check_pattern, check_size
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice
from ..plan import AttentionPlan, costs, plan_attention
from ..tiles import Backend

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call: a pattern, sizes and options.

    Attributes:
        pattern: the branches.
        seq_len: positions of the sequence.
        name: what reports call the pattern; empty: its branches.
        num_heads: query heads.
        num_kv_heads: KV heads; None: as many.
        head_dim: elements of a row of a head.
        batch_size: sequences in the batch.
        dtype: of query, key and value, one of `DTYPES`.
        is_causal: whether queries see no later keys.
        backend: of `dilated_attention`; baselines ignore it.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    pattern: DilatedPattern
    seq_len: int
    name: str = ""
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_dim: int = 64
    batch_size: int = 1
    dtype: str = "bfloat16"
    is_causal: bool = False
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("seq_len", "num_heads", "head_dim", "batch_size"):
            check_size(name, getattr(self, name))
        check_pattern(self.pattern)
        if self.num_heads % check_size("num_kv_heads", self.kv_heads):
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads; "
                f"got {self.num_heads} and {self.kv_heads}"
            )
        check_choice("dtype", self.dtype, DTYPES)

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of query, key and value."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def query_shape(self) -> tuple[int, ...]:
        """(batch_size, seq_len, num_heads, head_dim)."""
        return self.batch_size, self.seq_len, self.num_heads, self.head_dim

    @property
    def key_shape(self) -> tuple[int, ...]:
        """(batch_size, seq_len, num_kv_heads, head_dim)."""
        return self.batch_size, self.seq_len, self.kv_heads, self.head_dim

    @property
    def query_bytes(self) -> int:
        """Bytes of query: the unit of peak memory."""
        elements = self.batch_size * self.seq_len * self.num_heads * self.head_dim
        return elements * self.torch_dtype.itemsize

    @property
    def size(self) -> costs.TensorSize:
        """What turns its rows into bytes."""
        return costs.TensorSize(
            batch=self.batch_size, head_dim=self.head_dim, element_size=self.torch_dtype.itemsize
        )

    def plan(
        self,
        layout: SequenceLayout,
        pattern: DilatedPattern | None = None,
        documents: Sequence[int] | None = None,
    ) -> AttentionPlan:
        """What each rank computes and exchanges.

        Args:
            layout: which rank holds which positions.
            pattern: what to compute instead of the workload's own pattern.
            documents: cumulative lengths of packed documents; None: one document.
        """
        return plan_attention(
            self.pattern if pattern is None else pattern,
            layout,
            is_causal=self.is_causal,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            documents=documents,
        )

    def flops(self, pattern: DilatedPattern | None = None) -> int:
        """Useful operations of a forward call, counted by the plan.

        Args:
            pattern: what to compute instead of the workload's own pattern.
        """
        alone = SequenceLayout.contiguous(self.seq_len, 1)
        return costs.flops(self.plan(alone, pattern).rank(0), self.size)

    def twin(self, most: int) -> Workload:
        """The workload on at most `most` positions, batch 1, for comparing with brute force.

        Segments shrink in proportion, so that as many of them, and as ragged ones, come up; a
        segment keeps room for every offset of its rate.
        """
        if self.seq_len <= most:
            return replace(self, batch_size=1)
        lengths = [
            None if w is None else max(r, round(w * most / self.seq_len))
            for w, r in self.pattern.branches
        ]
        pattern = DilatedPattern(
            lengths,
            self.pattern.dilation_rates,
            head_offsets=self.pattern.head_offsets,
            head_branches=self.pattern.head_branches,
            zero_keys=self.pattern.zero_keys,
        )
        return replace(self, pattern=pattern, seq_len=most, batch_size=1)

    def __str__(self) -> str:
        kv_heads = "" if self.kv_heads == self.num_heads else f" ({self.kv_heads} KV)"
        return (
            f"{self.name or self.pattern} n={self.seq_len:,} {self.num_heads}{kv_heads} x "
            f"{self.head_dim} {self.dtype}{' causal' if self.is_causal else ''}"
            f"{f' batch {self.batch_size}' if self.batch_size > 1 else ''}"
            f"{f' {self.backend}' if self.backend != 'auto' else ''}"
        )
