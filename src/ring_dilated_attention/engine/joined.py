"""Keys of a `Joined` in their slots: those that a rank holds between those that it receives.

Shape legend: B batch, n local rows, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from ..layout import SequenceLayout
from ..plan import Joined, Message, RankPlan
from .accumulate import Accumulator
from .device_tables import TABLES
from .messages import (
    ReceivedRows,
    SlotTable,
    add_slots,
    numbers_of,
    received_numbers,
    sum_some,
    take_slots,
)
from .transfer import Fetched

BESIDE_BYTES = 32 << 20
"""Of all slots, from which own rows are put there, and their gradients added, on the side stream:
0.03 ms on an H200. The side stream takes the CPU 0.1 ms."""


class _Own(NamedTuple):
    """Which slots hold rows of this rank.

    Attributes:
        slots: int64 (any,): these slots, in ascending order.
        positions: int64 (any,): local row of each.
        heads: int64 (any,): its KV head.
        borders: of each branch, one behind the other, which of these it reads.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    heads: torch.Tensor
    borders: tuple[range, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return self.slots, self.positions, self.heads


class _Received(NamedTuple):
    """Which slots hold rows of another rank.

    Attributes:
        slots: int64 (any,): these slots, in ascending order.
        table: of these slots, for the rows of its message.
    """

    slots: torch.Tensor
    table: SlotTable

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return self.slots, *self.table


class JoinedRows:
    """The slots of a `Joined` in one call.

    Args:
        joined: what is computed.
        one: what the rank does.
        key: this rank's K, (B, n, K, D).
        value: its V, (B, n, K, D).
        sums: beside what follows, this rank's rows are put into their slots.

    Attributes:
        joined: as given.
        slots: (2, B, slots, D): K and V, when `sums` has been joined and all has been taken.
    """

    def __init__(
        self,
        joined: Joined,
        one: RankPlan,
        key: torch.Tensor,
        value: torch.Tensor,
        sums: Accumulator,
    ) -> None:
        self.joined, self._layout, self._rank = joined, one.plan.layout, one.index
        self._heads, self._device, self._sums = key.shape[2], key.device, sums
        batch, _, _, head_dim = key.shape
        self.slots = key.new_empty(2, batch, joined.message.slots, head_dim)
        own = self._own()
        take = partial(take_slots, (key, value), self.slots, own.slots, own.positions, own.heads)
        self._beside(take, key, value, into=(self.slots,))

    def _beside(
        self,
        work: Callable[[], None],
        *tensors: torch.Tensor,
        into: tuple[torch.Tensor, ...],
    ) -> None:
        is_long = self.slots.nbytes >= BESIDE_BYTES
        self._sums.run(work, *tensors, into=into, is_long=is_long, holds=False)

    def take(self, fetched: Fetched) -> None:
        """Put the rows that a rank has sent into their slots."""
        self._sums.join(self.slots)
        if fetched.rows is not None and fetched.received is not None:
            found = self._received(fetched.received.message)
            pair, rows = (fetched.rows[0], fetched.rows[1]), found.table.row_of_slot
            take_slots(pair, self.slots, found.slots, rows)

    def add_own(self, dslots: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor) -> None:
        """Add the gradients (2, B, slots, D) of this rank's rows to those of K and V.

        Beside what follows: `sums` is to be joined.
        """
        add_all = partial(self._add_own, dslots, dkey, dvalue)
        self._beside(add_all, dslots, into=(dkey, dvalue))

    def _add_own(self, dslots: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor) -> None:
        own = self._own()
        for some in own.borders:  # a row may have a slot of each branch
            if len(some):
                at = slice(some.start, some.stop)
                add_slots((dkey, dvalue), dslots, own.slots[at], own.positions[at], own.heads[at])

    def returned(self, dslots: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """The gradients (2, B, rows, D) of the rows of a message, of those of the slots."""
        found = self._received(received.message)
        return sum_some(dslots, found.table, found.slots)

    def _own(self) -> _Own:
        make = partial(_make_own, self.joined, self._layout, self._rank, self._heads, self._device)
        key = "own", self._heads, self._device
        return TABLES.get(self.joined, key, self._device, make)

    def _received(self, message: Message) -> _Received:
        given = self.joined, self._layout, message, self._heads, self._device
        key = message.sender, self._heads, self._device
        return TABLES.get(self.joined, key, self._device, partial(_make_received, *given))


def _held_by(
    joined: Joined, layout: SequenceLayout, rank: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots that hold rows of a rank, and the number of each row there; see `numbers_of`."""
    numbers = numbers_of(joined.message, num_kv_heads)
    positions = numbers // num_kv_heads
    ranges = torch.tensor(layout.ranges[rank]).view(-1, 2)
    sizes = (ranges[:, 1] - ranges[:, 0]).tolist()
    slots, found = [], []
    for (start, stop), behind in zip(ranges.tolist(), accumulate([0, *sizes]), strict=False):
        at = ((positions >= start) & (positions < stop)).nonzero().flatten()
        slots.append(at)
        found.append(numbers[at] + (behind - start) * num_kv_heads)
    order = torch.cat(slots).argsort()
    return torch.cat(slots)[order], torch.cat(found)[order]


def _make_own(
    joined: Joined, layout: SequenceLayout, rank: int, num_kv_heads: int, device: torch.device
) -> _Own:
    slots, numbers = _held_by(joined, layout, rank, num_kv_heads)
    ends = torch.tensor([0, *(branch.stop for branch in joined.branches)])
    borders = torch.searchsorted(slots, ends).tolist()
    parts = tuple(map(range, borders[:-1], borders[1:]))
    tensors = slots, numbers // num_kv_heads, numbers % num_kv_heads
    slots, positions, heads = (x.to(device) for x in tensors)
    return _Own(slots, positions, heads, parts)


def _make_received(
    joined: Joined,
    layout: SequenceLayout,
    message: Message,
    num_kv_heads: int,
    device: torch.device,
) -> _Received:
    slots, numbers = _held_by(joined, layout, message.sender, num_kv_heads)
    ordered, number = torch.sort(received_numbers(message, num_kv_heads))
    at = torch.searchsorted(ordered, numbers)
    assert torch.equal(ordered[at], numbers), f"{message} has not all rows of {joined.message}"
    rows = number[at]
    starts = torch.cat([at.new_zeros(1), rows.bincount(minlength=message.rows).cumsum(0)])
    order = slots[rows.argsort(stable=True)]
    slots, rows, order, starts = (x.to(device) for x in (slots, rows, order, starts))
    return _Received(slots, SlotTable(rows, order, starts))
