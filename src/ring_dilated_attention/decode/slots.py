"""Where a rank keeps the rows of a cache: in slots, which branches and heads have side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..plan import CachedBranch, CachePlan, KeptRows


class Slots(NamedTuple):
    """The rows of a cache, by branches, heads and slots.

    Attributes:
        plan: what is kept, and where.
        keys: (batch, rows, head_dim).
        values: like `keys`.
    """

    plan: CachePlan
    keys: torch.Tensor
    values: torch.Tensor

    def of_branch(self, branch: CachedBranch) -> list[torch.Tensor]:
        """Keys and values of a branch: each (batch, heads, slots, head_dim), a view."""
        batch, _, head_dim = self.keys.shape
        heads, slots = len(branch.heads), branch.slots
        return [
            x.narrow(1, branch.first_row, heads * slots).view(batch, heads, slots, head_dim)
            for x in (self.keys, self.values)
        ]

    def keep(self, rows: slice, kept: KeptRows, both: Sequence[torch.Tensor]) -> None:
        """Write keys and values where they are kept.

        Args:
            rows: of the batch.
            kept: which ones these are.
            both: keys and values, each (batch rows, heads, members, head_dim).
        """
        for target, source in zip(self.of_branch(kept.branch), both, strict=True):
            for places, to in runs_of_slots(kept.members, kept.branch.slots):
                target[rows, kept.heads, to] = source[:, :, places]

    def grown(self, plan: CachePlan) -> Slots:
        """The same rows where there is room for longer documents: a copy.

        Args:
            plan: as this one, of a larger `max_length`.
        """
        batch, _, head_dim = self.keys.shape
        shape = batch, plan.rows, head_dim
        found = Slots(plan, self.keys.new_empty(shape), self.values.new_empty(shape))
        before = {branch.index: branch for branch in self.plan.branches}
        for branch in plan.branches:
            known = before.get(branch.index)
            if known is None:
                continue
            # A branch that gets more slots had one for each member: they stay where they were. It
            # may get more heads too, whose offsets lie behind the former max_length.
            places = [branch.heads.index(head) for head in known.heads]
            both = zip(found.of_branch(branch), self.of_branch(known), strict=True)
            for target, source in both:
                target[:, places, : known.slots] = source
        return found


def rows_of(tensor: torch.Tensor, rows: slice, kept: KeptRows) -> torch.Tensor:
    """The kept rows, (batch, heads, rows, head_dim), of (batch, sequence, kv_heads, head_dim)."""
    return tensor[rows, kept.rows, kept.kv_heads].transpose(1, 2)


def runs_of_slots(members: range, slots: int) -> Iterator[tuple[slice, slice]]:
    """The slots of consecutive members, at most one per slot: one or two (places, slots)."""
    first = members.start % slots
    before_end = min(len(members), slots - first)
    yield slice(0, before_end), slice(first, first + before_end)
    if before_end < len(members):
        yield slice(before_end, len(members)), slice(0, len(members) - before_end)
