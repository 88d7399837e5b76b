"""The call that a benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checks import check_pattern, check_size
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice
from ..plan import AttentionPlan, costs, plan_attention
from ..tiles import Backend

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of `dilated_attention`.

    Attributes:
        pattern: the branches.
        seq_len: positions of the whole sequence.
        num_heads: query heads.
        num_kv_heads: KV heads; None: as many as query heads.
        head_dim: elements of a head.
        batch_size: sequences in the batch.
        dtype: of query, key and value, one of `DTYPES`.
        is_causal: whether a query sees no later keys.
        backend: of `dilated_attention`; baselines ignore it.
        name: what reports call the pattern; empty: its branches.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    pattern: DilatedPattern
    seq_len: int
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_dim: int = 64
    batch_size: int = 1
    dtype: str = "bfloat16"
    is_causal: bool = False
    backend: Backend = "auto"
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("seq_len", "num_heads", "head_dim", "batch_size"):
            check_size(name, getattr(self, name))
        check_size("num_kv_heads", self.kv_heads)
        check_choice("dtype", self.dtype, DTYPES)
        check_pattern(self.pattern)
        self.plan()  # refuses numbers that do not go together

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of query, key and value."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def size(self) -> costs.TensorSize:
        """The sizes that turn rows of a plan into bytes and FLOPs."""
        itemsize = self.torch_dtype.itemsize
        return costs.TensorSize(
            batch=self.batch_size, head_dim=self.head_dim, element_size=itemsize
        )

    def shapes(self, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(batch_size, length, heads, head_dim) of query, and of key and value."""
        query, key = (
            (self.batch_size, length, heads, self.head_dim)
            for heads in (self.num_heads, self.kv_heads)
        )
        return query, key

    def layout(self, ranks: int) -> SequenceLayout:
        """Shards of equal length: zigzag if causal and on several ranks, else contiguous."""
        return SequenceLayout.named("auto", self.seq_len, ranks, is_causal=self.is_causal)

    def plan(self, ranks: int = 1, pattern: DilatedPattern | None = None) -> AttentionPlan:
        """The plan of the call on so many ranks; `pattern` None: the workload's own."""
        return plan_attention(
            self.pattern if pattern is None else pattern,
            self.layout(ranks),
            is_causal=self.is_causal,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
        )

    def flops(self, pattern: DilatedPattern | None = None) -> int:
        """Useful FLOPs of forward: 4 * head_dim for each visible (query, key) pair."""
        return sum(costs.flops_by_rank(self.plan(pattern=pattern), self.size))

    def __str__(self) -> str:
        groups = "" if self.kv_heads == self.num_heads else f" ({self.kv_heads} KV)"
        return (
            f"{self.name or self.pattern}, {self.seq_len:,} tokens, {self.num_heads}{groups} heads "
            f"of {self.head_dim}, {self.dtype}{', causal' if self.is_causal else ''}"
            f"{f', batch {self.batch_size}' if self.batch_size > 1 else ''}"
            f"{f', backend {self.backend}' if self.backend != 'auto' else ''}"
        )
