"""A prompt goes to the ranks that keep its rows: the last document of each row of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch

from ..documents import Integers, as_ints, packed_rows
from ..exchange import Exchange, Pending
from ..layout import SequenceLayout
from ..pattern import in_brief
from ..plan import KeptRows
from .slots import Slots, rows_of


class Prompt(NamedTuple):
    """Rows of a batch whose prompts are alike.

    Attributes:
        rows: of the prompt, evenly spaced: indexing with it gives a view.
        to: the rows of the cache that take them, as many.
        document: the positions of the document that goes on, in the whole sequence.
    """

    rows: slice
    to: slice
    document: range


def resolve_layout(layout: SequenceLayout | None, count: int, ends: Exchange) -> SequenceLayout:
    """The layout of a prompt.

    Args:
        layout: which positions each rank holds; None: contiguous equal shards.
        count: positions that this rank holds.
        ends: this rank's end of the group.

    Raises:
        TypeError, ValueError: it is not a layout, or not of these ranks and positions.
    """
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None, got {in_brief(layout)}")
    if layout is None:
        if count == 0:
            raise ValueError(
                "the prompt is empty: key has no rows, and no layout is given; reset() drops all "
                "rows of a cache"
            )
        layout = SequenceLayout.contiguous(count * ends.world_size, ends.world_size)
    held = f"its key has a local sequence length of {count}"
    layout.check_shard(ends.rank, ends.world_size, count, held)
    return layout


def find_prompts(
    documents: Integers | None, lengths: Integers | None, total: int, rows: Sequence[int]
) -> list[Prompt]:
    """The last document of each row of a prompt.

    Args:
        documents: cumulative lengths; None: one document.
        lengths: valid positions of each row; None: all.
        total: positions of the whole prompt.
        rows: of the cache, one for each row of the prompt.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if len(set(rows)) < len(rows):
        raise ValueError(f"rows must differ, to take a prompt each; got {tuple(rows)}")
    borders = () if documents is None else tuple(as_ints("documents", documents))
    valid = () if lengths is None else tuple(as_ints("lengths", lengths))
    in_order = list(rows) == list(range(len(rows)))
    found = []
    for some, ends in packed_rows(borders, valid, len(rows), total):
        document = range(*ends[-2:]) if len(ends) > 1 else range(0)
        if in_order:
            found.append(Prompt(some, slice(*some.indices(len(rows))), document))
            continue
        for row in range(len(rows))[some]:
            to = slice(rows[row], rows[row] + 1)
            found.append(Prompt(slice(row, row + 1), to, document))
    return found


def words_of(layout: SequenceLayout, prompts: Sequence[Prompt], batch: int) -> dict[str, str]:
    """What must be equal on all ranks of a prompt, for a cache of `batch` rows."""
    found = [
        f"{prompt.document.start} to {prompt.document.stop} in rows {list(range(batch)[prompt.to])}"
        for prompt in prompts
    ]
    digest = blake2b(repr(found).encode(), digest_size=4).hexdigest()
    return {
        "layout": f"{layout!r} ({layout.digest[:8]})",
        "the document that goes on": f"{', '.join(found[:3])} ({digest})",
    }


def hand_over(
    ends: Exchange,
    tensors: tuple[torch.Tensor, torch.Tensor],
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
    under_way: list[tuple[Pending, _Message, torch.Tensor, torch.Tensor]] = []
    for step in range(1, ends.world_size):
        to, source = (ends.rank + step) % ends.world_size, (ends.rank - step) % ends.world_size
        if packed is None or slots.plan.shards > 1:  # else all get the same
            packed = _Message(slots, layout, prompts, ends.rank, to).packed(tensors)
        incoming = _Message(slots, layout, prompts, source, ends.rank)
        buffer = slots.keys.new_empty(incoming.size)
        send = (to, packed) if packed.numel() else None
        receive = (source, buffer) if buffer.numel() else None
        if send or receive:
            # What is sent stays in memory until the message has arrived.
            under_way.append((ends.start(send, receive), incoming, buffer, packed))
        if len(under_way) > 1:
            _finish(under_way.pop(0))
    for transfer in under_way:
        _finish(transfer)


def _finish(transfer: tuple[Pending, _Message, torch.Tensor, torch.Tensor]) -> None:
    """Wait for a message, and keep its rows."""
    pending, incoming, buffer, _ = transfer
    pending.wait()
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
        self.size = sum(2 * prod(shape) for *_, shape in self.parts())

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
            count = 2 * prod(shape)
            yield prompt, kept, packed.narrow(0, taken, count).view(2, *shape)
            taken += count

    def packed(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
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
