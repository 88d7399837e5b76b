"""Rows of a sharded prompt go to the ranks that keep them: each rank hands over those that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..exchange import Exchange
from ..layout import SequenceLayout
from ..plan import CachedBranch, CachePlan, KeptRows


class Prompt(NamedTuple):
    """Rows of a batch whose prompts are alike.

    Attributes:
        rows: which, evenly spaced: indexing with it gives a view.
        document: the positions of the document that goes on, in the whole sequence.
    """

    rows: slice
    document: range


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
        count = len(branch.heads)
        return [
            x.narrow(1, branch.first_row, count * branch.slots).unflatten(1, (count, branch.slots))
            for x in (self.keys, self.values)
        ]


def runs_of_slots(members: range, slots: int) -> Iterator[tuple[slice, slice]]:
    """Consecutive members, at most as many as slots, as (places among them, slots): at most two."""
    first = members.start % slots
    before_end = min(len(members), slots - first)
    yield slice(0, before_end), slice(first, first + before_end)
    if before_end < len(members):
        yield slice(before_end, len(members)), slice(0, len(members) - before_end)


def hand_over(
    ends: Exchange,
    tensors: tuple[torch.Tensor, torch.Tensor],
    slots: Slots,
    layout: SequenceLayout,
    prompts: Sequence[Prompt],
) -> None:
    """Fill a cache with the rows of a prompt, of which each rank has a shard, inside of a call.

    Every rank sends to each other the rows that this one keeps, in one message, and no others.

    Args:
        ends: this rank's end of the group.
        tensors: this rank's keys and values, (batch, local_sequence, kv_heads, head_dim).
        slots: where this rank keeps what it gets.
        layout: which positions each rank holds.
        prompts: all rows of the batch, in the same order on every rank.
    """
    world = ends.world_size
    shard = _shard(slots.plan, ends.rank)
    packed: dict[int, torch.Tensor] = {}  # by shard: where every rank keeps all, there is one
    pending = []
    for step in range(1, world):
        to, source = (ends.rank + step) % world, (ends.rank - step) % world
        wanted = _shard(slots.plan, to)
        if wanted not in packed:
            packed[wanted] = _pack(tensors, slots.plan, layout, prompts, ends.rank, wanted)
        incoming = sum(
            _batch(slots, prompt) * len(handed.members) * _size(handed.heads)
            for prompt in prompts
            for handed in slots.plan.handed_over(layout, prompt.document, source, shard)
        )
        buffer = slots.keys.new_empty(2 * incoming * slots.keys.shape[2])
        outgoing = packed[wanted]
        send = (to, outgoing) if outgoing.numel() else None
        receive = (source, buffer) if buffer.numel() else None
        if send or receive:
            pending.append((ends.start(send, receive), source, buffer))
    for prompt in prompts:
        for handed in slots.plan.handed_over(layout, prompt.document, ends.rank, shard):
            keep(slots, prompt.rows, handed, [_rows_of(x, prompt, handed) for x in tensors])
    for transfer, source, buffer in pending:
        transfer.wait()
        _unpack(slots, layout, prompts, source, shard, buffer)


def _shard(plan: CachePlan, rank: int) -> int:
    return rank if plan.shards > 1 else 0


def _batch(slots: Slots, prompt: Prompt) -> int:
    return len(range(slots.keys.shape[0])[prompt.rows])


def _size(numbers: slice) -> int:
    return len(range(numbers.start, numbers.stop, numbers.step or 1))


def _rows_of(tensor: torch.Tensor, prompt: Prompt, handed: KeptRows) -> torch.Tensor:
    """(batch, heads, rows, head_dim): a view."""
    return tensor[prompt.rows, handed.rows, handed.kv_heads].transpose(1, 2)


def keep_new(
    slots: Slots,
    tensors: tuple[torch.Tensor, torch.Tensor],
    rows: slice,
    length: int,
    shard: int,
) -> None:
    """Write what this rank keeps of new positions.

    Args:
        slots: where it keeps them.
        tensors: keys and values, (batch, m, kv_heads, head_dim), of the whole batch.
        rows: of the batch, all of this length.
        length: positions so far.
        shard: this rank's share.
    """
    prompt = Prompt(rows, range(0))
    for kept in slots.plan.appended(length, tensors[0].shape[1], shard):
        keep(slots, rows, kept, [_rows_of(x, prompt, kept) for x in tensors])


def _pack(
    tensors: tuple[torch.Tensor, torch.Tensor],
    plan: CachePlan,
    layout: SequenceLayout,
    prompts: Sequence[Prompt],
    rank: int,
    shard: int,
) -> torch.Tensor:
    """All that a rank hands to another, in the order in which that unpacks it."""
    parts = [
        _rows_of(tensor, prompt, handed).flatten()
        for prompt in prompts
        for handed in plan.handed_over(layout, prompt.document, rank, shard)
        for tensor in tensors
    ]
    return torch.cat(parts) if parts else tensors[0].new_empty(0)


def _unpack(
    slots: Slots,
    layout: SequenceLayout,
    prompts: Sequence[Prompt],
    source: int,
    shard: int,
    packed: torch.Tensor,
) -> None:
    taken = 0
    for prompt in prompts:
        batch = _batch(slots, prompt)
        for handed in slots.plan.handed_over(layout, prompt.document, source, shard):
            shape = (batch, _size(handed.heads), len(handed.members), slots.keys.shape[2])
            count = shape[0] * shape[1] * shape[2] * shape[3]
            both = packed.narrow(0, taken, 2 * count).view(2, *shape)
            taken += 2 * count
            keep(slots, prompt.rows, handed, both.unbind(0))


def keep(slots: Slots, rows: slice, kept: KeptRows, both: Sequence[torch.Tensor]) -> None:
    """Write keys and values, (batch, heads, rows, head_dim), where they are kept."""
    for target, source in zip(slots.of_branch(kept.branch), both, strict=True):
        for places, to in runs_of_slots(kept.members, kept.branch.slots):
            target[rows, kept.heads, to] = source[:, :, places]
