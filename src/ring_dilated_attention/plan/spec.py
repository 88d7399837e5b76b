"""What a plan is made from, and what follows from it for all ranks alike. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..layout import SequenceLayout
from ..pattern import DilatedPattern
from .rows import Part, Span, cut, spans
from .tiling import Tiling, tiling_of

if TYPE_CHECKING:
    from typing_extensions import Self


FEW_ADDITIONS = 8.0
"""Additions to a row, on average, that may round to half precision each: errors of out and of the
gradients stay below those of the kernels (benchmarks/results/attention_speed.md)."""

ROUND_PAIRS = 1 << 31
"""(Query, key) pairs of a head and step that keep a rank busy: 1.7 ms of an H200's forward at a
head_dim of 128 (half of it if causal), behind which their rows travel and the gaps between kernels
matter little. With half as many, forward of a dense causal ring of 65,536 tokens on four takes 15
to 30% longer, with a quarter three times as long: the host does not keep up.
"""


@dataclass(frozen=True)
class PlanSpec:
    """Everything that `plan_attention` was told, and what follows for all ranks alike.

    Attributes:
        pattern: the branches.
        layout: which rank holds which positions.
        is_causal: whether a query sees only keys at positions <= its own.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads.
        documents: cumulative lengths ``[0, ..., n]`` of the documents; ``(0, n)`` is one document.
        narrowed_to: the KV heads that the plan is for; None: all of them.
    """

    pattern: DilatedPattern
    layout: SequenceLayout
    is_causal: bool
    num_heads: int
    num_kv_heads: int
    documents: tuple[int, ...]
    narrowed_to: range | None = None

    @cached_property
    def ranks(self) -> dict[int, Any]:
        """The `RankPlan` of each rank that was asked for."""
        return {}

    @property
    def kv_heads(self) -> range:
        """The KV heads that the plan is for."""
        return range(self.num_kv_heads) if self.narrowed_to is None else self.narrowed_to

    @cached_property
    def single_branches(self) -> tuple[Self, ...]:
        """The plan of each branch by itself; heads run all branches."""
        return tuple(replace(self, pattern=pattern) for pattern in self.pattern.single_branches())

    @cached_property
    def rounds(self) -> tuple[Self, ...]:
        """The plan for a few heads at a time: what a ring runs.

        Its buffers then hold rows of these heads alone. They are as few as keep a rank busy, or as
        many as make a message of K and V an eighth of the query: with grouped queries more heads a
        round are fewer kernel calls, and still less memory.
        """
        # Of a head, in the branch that has the most of them in a shard.
        rows = max(
            -(-min(self.layout.max_local_length, length or self.layout.length) // rate)
            for length, rate in self.pattern.branches
        )
        pairs = max(rows * rows * (self.num_heads // self.num_kv_heads), 1)
        total = self.num_kv_heads
        heads = max(-(-ROUND_PAIRS // pairs), self.num_heads // 16)
        count = -(-total // min(total, heads))
        if count == 1:
            return (self,)
        borders = (total * i // count for i in range(count + 1))
        return tuple(replace(self, narrowed_to=range(a, b)) for a, b in pairwise(borders))

    @cached_property
    def covering(self) -> int | None:
        """The first branch in which every row of every head takes part; None if there is none."""
        return next(
            (
                branch
                for branch, rate in enumerate(self.pattern.dilation_rates)
                if rate == 1 and len(self.tiling.heads[branch]) == len(self.kv_heads)
            ),
            None,
        )

    @cached_property
    def branches(self) -> list[tuple[int, int | None]]:
        """The number of each branch and its segments' length; the one that covers first."""
        lengths = enumerate(length for length, _ in self.pattern.branches)
        return sorted(lengths, key=lambda item: item[0] != self.covering)

    def crossing_spans(self, parts: Sequence[Part]) -> tuple[list[Span], list[Span]]:
        """Where other parts lie whose keys queries of `parts` see, or whose queries see theirs."""
        cut_parts = [part for part in parts if not part.is_whole]
        found = [
            span
            for branch, length in self.branches
            for part in cut_parts
            for span in spans(branch, part, length)
        ]
        if not self.is_causal:
            return found, found
        return [x for x in found if x.is_before], [x for x in found if not x.is_before]

    def parts_of(self, rank: int) -> list[Part]:
        """The ranges that `rank` holds, cut at document borders."""
        return cut(self.layout.ranges[rank], self.documents, rank)

    @cached_property
    def returns_wide(self) -> bool:
        """Whether gradients of received rows are summed, and returned, in float32 at least.

        Else in the dtype of the inputs. It is alike on all ranks: a branch reaches one row in its
        rate, once from each part of the rank that received it and for each query head of a KV head.
        """
        parts = max(map(len, self.layout.ranges))  # of a document
        heads_per_kv = self.num_heads // self.num_kv_heads
        reached = sum(1 / rate for rate in self.pattern.dilation_rates)
        return heads_per_kv * parts * reached > FEW_ADDITIONS

    @cached_property
    def tiling(self) -> Tiling:
        """Which rows each head takes part with."""
        return tiling_of(self.pattern, self.num_kv_heads, self.is_causal, self.kv_heads)

    @cached_property
    def gathers(self) -> bool:
        """What ``exchange="auto"`` means here: True for gather, False for ring.

        Gather is chosen where received keys and values take no more memory than the query and out
        of the largest shard: fewer, larger kernel calls are then worth it. With grouped queries,
        whose K and V are small, that is true of dense attention on a few ranks. A bound, not each
        rank's own count, decides, so that every rank decides alike: a piece shares at most two
        segments of a branch with other pieces.
        """
        layout, pattern = self.layout, self.pattern
        pieces = max(map(len, layout.ranges))
        documents = [b - a for a, b in pairwise(self.documents)] or [1]
        longest = max(documents)
        bound = 0
        for branch, (length, rate) in enumerate(pattern.branches):
            w = longest if length is None else min(length, longest)
            segments = min(2 * pieces, sum(-(-document // w) for document in documents))
            bound += segments * -(-w // rate) * len(pattern.heads(branch, self.num_kv_heads))
        return bound <= layout.max_local_length * self.num_heads
