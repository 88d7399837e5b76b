"""Where a rank keeps the rows of a cache: in slots, which branches and heads have side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..plan import CachedBranch, CachePlan, KeptRows


def keys_and_values(
    batch: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each (batch, rows, head_dim), contiguous and not set.

    On a CPU one behind the other in memory, so that a step can write both at once: see `both_of`.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    shape = batch, rows, head_dim
    if device.type == "cpu":
        keys, values = torch.empty(2, *shape, dtype=dtype, device=device).unbind()
        return keys, values
    return (
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(shape, dtype=dtype, device=device),
    )


def are_together(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether these are one behind the other, as `keys_and_values` makes them on a CPU.

    Others are not, those that were pickled, say.
    """
    return keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def both_of(keys: torch.Tensor) -> torch.Tensor:
    """(1, 2 * rows, head_dim): keys of a batch of one, and the values that lie behind them."""
    _, rows, head_dim = keys.shape
    return keys.as_strided((1, 2 * rows, head_dim), keys.stride())


class Slots(NamedTuple):
    """Where a rank keeps rows.

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

    def keep_new(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        rows: slice,
        length: int,
        shard: int,
    ) -> None:
        """Write what this rank keeps of new positions.

        Args:
            tensors: keys and values, (batch, m, kv_heads, head_dim), of the whole batch.
            rows: of the batch, all of this length.
            length: positions so far.
            shard: this rank's share.
        """
        for kept in self.plan.appended(length, tensors[0].shape[1], shard):
            self.keep(rows, kept, [rows_of(x, rows, kept) for x in tensors])

    def clear_rest(self, length: int, longest: int) -> None:
        """Fill with 0 all rows that no later position can be shown, whatever is taken back.

        Args:
            length: positions so far, of all rows of the batch; nobody shares them.
            longest: the most positions since the document began: with more than `length`, fewer
                can still be taken back, and rows before those were perhaps never written.
        """
        rewind = self.plan.max_rewind - (longest - length)
        for branch in self.plan.branches:
            for offset, heads, _ in branch.by_offset():
                kept = branch.kept(offset, length, rewind)
                rest = range(kept.stop, kept.start + branch.slots)
                for rows in self.of_branch(branch):
                    for _, slots in runs_of_slots(rest, branch.slots):
                        rows[:, heads, slots] = 0

    def copy(self) -> Slots:
        """The same rows in memory of their own."""
        (batch, rows, head_dim), like = self.keys.shape, (self.keys.dtype, self.keys.device)
        found = Slots(self.plan, *keys_and_values(batch, rows, head_dim, *like))
        found.keys.copy_(self.keys)
        found.values.copy_(self.values)
        return found

    def grown(self, plan: CachePlan) -> Slots:
        """The same rows where there is room for longer documents: a copy.

        Args:
            plan: as this one, of a larger `max_length`.
        """
        batch, _, head_dim = self.keys.shape
        like = self.keys.dtype, self.keys.device
        found = Slots(plan, *keys_and_values(batch, plan.rows, head_dim, *like))
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
