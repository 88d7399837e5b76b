"""Rows of a sharded prompt go to the ranks that keep them: each rank hands over those that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..exchange import Exchange, Pending
from ..layout import SequenceLayout
from ..plan import KeptRows
from .prompts import Prompt
from .slots import Slots, rows_of

Both = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


def hand_over(
    ends: Exchange,
    tensors: Both,
    slots: Slots,
    layout: SequenceLayout,
    prompts: Sequence[Prompt],
) -> None:
    """Fill a cache with the rows of a prompt, of which each rank has a shard, inside of a call.

    Every rank sends to each other the rows that this one keeps, in one message, and no others. Two
    messages are under way at a time, so that a large cache does not take twice its memory.

    Args:
        ends: this rank's end of the group.
        tensors: this rank's keys and values, (batch, local_sequence, kv_heads, head_dim).
        slots: where this rank keeps what it gets.
        layout: which positions each rank holds.
        prompts: all rows of the batch, in the same order on every rank.
    """
    own = _Message(slots, layout, prompts, ends.rank, ends.rank)
    for prompt, kept, _ in own.parts():
        slots.keep(prompt.to, kept, [rows_of(x, prompt.rows, kept) for x in tensors])
    packed: torch.Tensor | None = None
    started: list[tuple[Pending, _Message, torch.Tensor, torch.Tensor]] = []
    for step in range(1, ends.world_size):
        to, source = (ends.rank + step) % ends.world_size, (ends.rank - step) % ends.world_size
        if packed is None or slots.plan.shards > 1:  # else all get the same
            packed = _Message(slots, layout, prompts, ends.rank, to).packed(tensors)
        incoming = _Message(slots, layout, prompts, source, ends.rank)
        buffer = slots.keys.new_empty(incoming.size)
        send = (to, packed) if packed.numel() else None
        receive = (source, buffer) if buffer.numel() else None
        if send or receive:
            started.append((ends.start(send, receive), incoming, buffer, packed))
        if len(started) > 1:
            _finish(*started.pop(0))
    for one in started:
        _finish(*one)


def _finish(
    transfer: Pending, incoming: _Message, buffer: torch.Tensor, _sent: torch.Tensor
) -> None:
    """Wait for a message, until which what is sent stays in memory, and keep its rows."""
    transfer.wait()
    incoming.unpack(buffer)


class _Message:
    """What one rank hands to another.

    Args:
        slots: where rows are kept, on the rank that asks.
        layout: which positions each rank holds.
        prompts: all rows of the batch.
        source: the rank that has the rows.
        to: the rank that keeps them.
    """

    def __init__(
        self,
        slots: Slots,
        layout: SequenceLayout,
        prompts: Sequence[Prompt],
        source: int,
        to: int,
    ) -> None:
        shard = to if slots.plan.shards > 1 else 0
        self._slots = slots
        self._parts = [
            (prompt, kept)
            for prompt in prompts
            for kept in slots.plan.handed_over(layout, prompt.document, source, shard)
        ]
        self.size = sum(2 * _product(shape) for *_, shape in self.parts())

    def parts(self) -> Iterator[tuple[Prompt, KeptRows, tuple[int, int, int, int]]]:
        """All parts in order, each with the shape of its keys, and of its values."""
        batch, _, head_dim = self._slots.keys.shape
        for prompt, kept in self._parts:
            rows = len(range(batch)[prompt.to])
            heads = len(range(len(kept.branch.heads))[kept.heads])
            yield prompt, kept, (rows, heads, len(kept.members), head_dim)

    def _views(self, packed: torch.Tensor) -> Iterator[tuple[Prompt, KeptRows, torch.Tensor]]:
        """All parts in order, each with its keys and values: (2, batch, heads, rows, head_dim)."""
        taken = 0
        for prompt, kept, shape in self.parts():
            count = 2 * _product(shape)
            yield prompt, kept, packed.narrow(0, taken, count).view(2, *shape)
            taken += count

    def packed(self, tensors: Both) -> torch.Tensor:
        """The message of the rank that has the rows.

        Args:
            tensors: its keys and values, (batch, local_sequence, kv_heads, head_dim).
        """
        packed = tensors[0].new_empty(self.size)
        for prompt, kept, both in self._views(packed):
            for part, tensor in zip(both, tensors, strict=True):
                part.copy_(rows_of(tensor, prompt.rows, kept))
        return packed

    def unpack(self, packed: torch.Tensor) -> None:
        """Write the rows of a message where this rank keeps them."""
        for prompt, kept, both in self._views(packed):
            self._slots.keep(prompt.to, kept, both.unbind(0))


def _product(shape: tuple[int, int, int, int]) -> int:
    batch, heads, rows, head_dim = shape
    return batch * heads * rows * head_dim
