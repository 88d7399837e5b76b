"""What a KV cache keeps after a text of some length, and what a step reads. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from ..pattern import DilatedPattern
from .cache import CachedBranch, CachePlan, plan_cache


@dataclass(frozen=True, kw_only=True)
class BranchUse:
    """What a cache has of one branch after a text of some length.

    Attributes:
        index: of the branch in the pattern.
        heads: how many KV heads run the branch.
        kept: rows that a later position can still be shown, of all these heads.
        steps: over how many of the newest positions `shown` is counted: a segment, if the branch
            has ended one; else as many as the dilation rate.
        shown: rows that the queries of these positions are shown, of all these heads; the query's
            own row is one of them.
    """

    index: int
    heads: int
    kept: int
    steps: int
    shown: int

    @property
    def mean_kept(self) -> float:
        """Rows that a later position can still be shown, of a head on average."""
        return self.kept / max(self.heads, 1)

    @property
    def mean_shown(self) -> float:
        """Rows that a query of a head is shown, averaged over heads and positions."""
        return self.shown / (max(self.heads, 1) * self.steps)


def plan_any_length(pattern: DilatedPattern, num_kv_heads: int, length: int) -> CachePlan:
    """A cache whose text goes on beyond `length` positions, and beyond every segment that ends.

    Of a text that ends with the first segment of a branch, no row is ever dropped.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads, at least one.
        length: positions so far.
    """
    ends = [segment for segment in pattern.segment_lengths if segment is not None]
    return plan_cache(pattern, num_kv_heads, max([length, *ends]) + 1)


def cache_use(pattern: DilatedPattern, num_kv_heads: int, length: int) -> list[BranchUse]:
    """What each branch keeps after `length` positions, and what a step reads.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads, at least one.
        length: positions so far, at least 1.
    """
    plan = plan_any_length(pattern, num_kv_heads, length)
    planned = {branch.index: branch for branch in plan.branches}
    return [
        _use(pattern, num_kv_heads, length, index, planned.get(index))
        for index in range(len(pattern.branches))
    ]


def _use(
    pattern: DilatedPattern,
    num_kv_heads: int,
    length: int,
    index: int,
    planned: CachedBranch | None,
) -> BranchUse:
    """Of one branch; `planned` None: no head of it sees anything."""
    segment, rate = pattern.branches[index]
    has_ended = segment is not None and segment <= length
    steps = segment if has_ended and segment is not None else min(rate, length)
    kept = shown = 0
    for _, offset in planned.heads if planned else ():
        assert planned
        before = planned.members_before(offset, length)
        new = before - planned.members_before(offset, length - steps)
        kept += len(planned.kept(offset, length))
        # Of a whole segment the members are shown 1, 2, ... rows. In the first segment, as many
        # positions as the rate have one member at most, the newest.
        shown += new * (new + 1) // 2 if has_ended else new * before
    heads = len(pattern.heads(index, num_kv_heads))
    return BranchUse(index=index, heads=heads, kept=kept, steps=steps, shown=shown)
