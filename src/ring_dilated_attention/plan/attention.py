"""From (pattern, layout) to what each rank computes and exchanges. Integers only.

A cell is (branch, segment, offset, heads); its rows are one arithmetic progression of positions.
The work of a rank is

- per part that it holds, its own segments: the run of full segments as ONE batched tile, and the
  clipped ones at its two ends (`RankPlan.local`);
- per pair of parts that share a segment, one tile: local where the rank holds both, else part of
  the step at which the keys' owner is the peer (`RankPlan.step`). Where the rank holds both one
  behind the other, the tiles of both and of the pair are one if they can be (`join_runs`).

Any rank can compute every rank's plan. What crosses between two ranks is a `Message`: the sender's
dilated rows that the receiver's queries need, each (row, head) once however many branches need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ..documents import document_borders
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_positive_int
from .crossings import Crossings
from .parts import Part, Span, parts_of, spans
from .rank import RankPlan
from .tiling import Tiling, tiling_of

FEW_ADDITIONS = 8.0
"""Additions to a row, on average, that may round to half precision each: errors of out and of the
gradients stay below those of the kernels (benchmarks/results/attention_speed.md)."""

ROUND_PAIRS = 1 << 31
"""(Query, key) pairs of a head and step that keep a rank busy: 1.7 ms of an H200's forward at a
head_dim of 128 (half of it if causal), behind which their rows travel and the gaps between kernels
matter little. With half as many, forward of a dense causal ring of 65,536 tokens on four takes 15
to 30% longer, with a quarter three times as long: the host does not keep up (benchmarks/rounds.py).
"""


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that `plan_attention` was told; `rank` derives what one rank does.

    Attributes:
        pattern: the branches.
        layout: which rank holds which positions.
        is_causal: whether a query sees only keys at positions <= its own.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads.
        documents: cumulative lengths ``[0, ..., n]`` of the documents; ``(0, n)`` is one document.
        narrowed_to: the KV heads that the plan is for; None: all of them.
        pieces: in how many pieces a rank fetches the rows that it needs of another: one, or as
            many as a rank has ranges.
        whole: the plan of all KV heads that `narrowed` made this one from; None: this plan is for
            all of them.
    """

    pattern: DilatedPattern
    layout: SequenceLayout
    is_causal: bool
    num_heads: int
    num_kv_heads: int
    documents: tuple[int, ...]
    narrowed_to: range | None = None
    pieces: int = 1
    whole: AttentionPlan | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def kv_heads(self) -> range:
        """The KV heads that the plan is for."""
        return range(self.num_kv_heads) if self.narrowed_to is None else self.narrowed_to

    @cached_property
    def _narrowed(self) -> dict[range, AttentionPlan]:
        return {}

    def narrowed(self, kv_heads: range) -> AttentionPlan:
        """The same for some of the KV heads. Heads have nothing to do with each other."""
        if kv_heads not in self._narrowed:
            narrowed = replace(self, narrowed_to=kv_heads)
            object.__setattr__(narrowed, "whole", self.whole or self)
            self._narrowed[kv_heads] = narrowed
        return self._narrowed[kv_heads]

    @cached_property
    def single_branches(self) -> tuple[AttentionPlan, ...]:
        """The plan of each branch by itself; heads run all branches."""
        return tuple(replace(self, pattern=pattern) for pattern in self.pattern.single_branches())

    @cached_property
    def rounds(self) -> tuple[AttentionPlan, ...]:
        """The plan for a few heads at a time, as few as keep a rank busy: what a ring runs.

        Its buffers then hold rows of these heads alone; where one head is more than enough, in as
        many pieces as a rank has ranges.
        """
        # Of a head, in the branch that has the most of them in a shard.
        rows = max(
            -(-min(self.layout.max_local_length, length or self.layout.length) // rate)
            for length, rate in self.pattern.branches
        )
        pairs = max(rows * rows * (self.num_heads // self.num_kv_heads), 1)
        ranges = max(map(len, self.layout.ranges))
        one = replace(self, pieces=ranges) if pairs >= ranges * ROUND_PAIRS else self
        total = self.num_kv_heads
        count = -(-total // min(total, -(-ROUND_PAIRS // pairs)))
        borders = (total * i // count for i in range(count + 1))
        return tuple(one.narrowed(range(a, b)) for a, b in pairwise(borders))

    def crossings(self, rank: int) -> Crossings:
        """The segments that `rank` shares with others: one object for plans of different heads."""
        if self.whole is not None and self.whole.covering == self.covering:
            return self.whole.crossings(rank)  # which branch covers decides their order
        if rank not in self._crossings:
            self._crossings[rank] = Crossings(self, rank)
        return self._crossings[rank]

    @cached_property
    def _crossings(self) -> dict[int, Crossings]:
        return {}

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
        return parts_of(self.layout, self.documents, rank)

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
    def _rank_plans(self) -> dict[int, RankPlan]:
        return {}

    def rank(self, rank: int) -> RankPlan:
        """What `rank` computes and exchanges."""
        if rank not in self._rank_plans:
            if not 0 <= rank < self.layout.world_size:
                raise ValueError(f"rank must lie in [0, {self.layout.world_size}), got {rank}")
            self._rank_plans[rank] = RankPlan(self, rank)
        return self._rank_plans[rank]

    @cached_property
    def gathers(self) -> bool:
        """What ``exchange="auto"`` means here: True for gather, False for ring.

        Gather is chosen when no rank can receive more rows than the largest shard has, so that
        holding all of them at once at most doubles K and V. A bound, not each rank's own count,
        decides, so that every rank decides alike: a piece shares at most two segments of a branch
        with other pieces.
        """
        layout, pattern = self.layout, self.pattern
        pieces = max(map(len, layout.ranges))
        longest = max((b - a for a, b in pairwise(self.documents)), default=1)
        bound = 0
        for branch, (length, rate) in enumerate(pattern.branches):
            w = longest if length is None else min(length, longest)
            segments = min(2 * pieces, layout.length // w + len(self.documents) - 1)
            bound += segments * -(-w // rate) * len(pattern.heads(branch, self.num_kv_heads))
        return bound <= layout.max_local_length * self.num_kv_heads

    def __str__(self) -> str:
        """A table: what the ranks hold, compute and exchange (the first 16 of them)."""
        layout, shown = self.layout, range(min(self.layout.world_size, 16))
        title = (
            f"{self.pattern} over {layout.length} positions on {layout.world_size} "
            f"rank{'s' * (layout.world_size != 1)}, "
            f"{self.num_heads} heads, {self.num_kv_heads} KV heads, "
            f"{'causal' if self.is_causal else 'not causal'}, "
            f"{len(self.documents) - 1} document(s), {'gather' if self.gathers else 'ring'}"
        )
        rows = [("rank", "positions", "local tiles", "pairs", "rows received", "rows sent")]
        for rank in map(self.rank, shown):
            figures = (
                rank.index,
                layout.local_length(rank.index),
                len(rank.local),
                rank.pairs,
                rank.total_received_rows,
                rank.total_sent_rows,
            )
            rows.append(tuple(map(str, figures)))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        more = [f"and {layout.world_size - len(shown)} more ranks"] * (
            layout.world_size > len(shown)
        )
        return "\n".join([title, *lines, *more])


def plan_attention(
    pattern: DilatedPattern,
    layout: SequenceLayout,
    *,
    is_causal: bool,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    documents: Sequence[int] | None = None,
    length: int | None = None,
    head_slice: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plan dilated attention of `pattern` over a sequence that `layout` shards.

    Args:
        pattern: the branches.
        layout: which rank holds which positions.
        is_causal: whether a query sees only keys at positions <= its own.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads, a divisor of `num_heads`; None: as many.
        documents: cumulative lengths ``[0, ..., layout.length]`` of documents packed in the
            sequence: each is cut into segments on its own and attention never crosses a border.
            None: one document. With `length` they may end behind it, and are cut off there.
        length: how many positions are valid: those from there on are padding, which belongs to no
            document. None: all.
        head_slice: (start, stop, total): the KV heads are heads start to stop (excluded) of a layer
            with total of them. None: they are all.

    Returns:
        A hashable plan; ``plan.rank(i)`` is what rank i does.

    Raises:
        TypeError, ValueError: an argument is not of its kind, `num_kv_heads` does not divide
            `num_heads`, `documents` does not rise from 0 to the layout's length, `length` lies
            outside of [0, layout.length], or `head_slice` names another number of heads.
    """
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {pattern!r}")
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout, got {layout!r}")
    num_heads = check_positive_int("num_heads", num_heads)
    kv_heads = (
        num_heads if num_kv_heads is None else check_positive_int("num_kv_heads", num_kv_heads)
    )
    if num_heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {num_heads} and {kv_heads}")
    pattern = pattern.of_heads(head_slice, kv_heads)
    borders = document_borders(documents, length, layout.length)
    return AttentionPlan(pattern, layout, bool(is_causal), num_heads, kv_heads, borders)
