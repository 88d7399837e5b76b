"""What `rda plan` and `rda simulate` are asked about: a workload on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..bench import Workload
from ..checks import check_pattern, check_size
from ..layout import SequenceLayout, resolve_layout
from ..plan import AttentionPlan
from ..terminal import count_of


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A workload whose sequence is sharded.

    Attributes:
        workload: what all ranks compute together.
        ranks: number of ranks.
        most_ranks: the most that the command takes.
        layout_name: one of `layout.LAYOUTS`; ``"auto"`` becomes what it stands for.
        documents: cumulative lengths of packed documents; None: one document.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    workload: Workload
    ranks: int
    most_ranks: int
    layout_name: str
    documents: Sequence[int] | None

    def __post_init__(self) -> None:
        check_size("ranks", self.ranks, self.most_ranks)
        name = resolve_layout(self.layout_name, self.ranks, is_causal=self.workload.is_causal)
        object.__setattr__(self, "layout_name", name)
        check_pattern(self.workload.pattern, self.documents)

    @cached_property
    def layout(self) -> SequenceLayout:
        """Which rank holds which positions."""
        return SequenceLayout.named(
            self.layout_name, self.workload.seq_len, self.ranks, is_causal=self.workload.is_causal
        )

    @cached_property
    def plan(self) -> AttentionPlan:
        """What each rank computes and exchanges."""
        return self.workload.plan(self.layout, documents=self.documents)

    @property
    def options(self) -> dict[str, Any]:
        """All of it by the names of the options, for JSON."""
        w = self.workload
        return {
            "pattern": w.name or None,
            "segment_lengths": list(w.pattern.segment_lengths),
            "dilation_rates": list(w.pattern.dilation_rates),
            "head_offsets": w.pattern.head_offsets,
            "head_branches": w.pattern.head_branches,
            "zero_keys": w.pattern.zero_keys,
            "causal": w.is_causal,
            "documents": None if self.documents is None else list(self.documents),
            "seq_len": w.seq_len,
            "num_heads": w.num_heads,
            "num_kv_heads": w.kv_heads,
            "head_dim": w.head_dim,
            "batch_size": w.batch_size,
            "dtype": w.dtype,
            "ranks": self.ranks,
            "layout": self.layout_name,
        }

    def __str__(self) -> str:
        """A title, in rich's markup."""
        w, count = self.workload, self.ranks
        documents = 0 if self.documents is None else len(self.documents) - 1
        packed = f", {count_of(documents, 'document')}" if documents else ""
        return (
            f"[bold]{w.pattern}[/bold]: {count_of(w.seq_len, 'position')} on "
            f"{count_of(count, 'rank')} ({self.layout_name}), {count_of(w.num_heads, 'head')} of "
            f"{w.head_dim}, {count_of(w.kv_heads, 'KV head')}, batch {w.batch_size}, "
            f"{w.dtype}, {'causal' if w.is_causal else 'not causal'}{packed}"
        )
