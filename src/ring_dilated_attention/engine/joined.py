"""Keys of a `Joined` in their slots: those that a rank holds between those that it receives.

Shape legend: B batch, n local rows, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..layout import SequenceLayout
from ..plan import Joined, Message, RankPlan
from .accumulate import Accumulator
from .device_tables import TABLES
from .transfer import (
    Fetched,
    ReceivedRows,
    SlotTable,
    add_slots,
    places_of,
    received_numbers,
    sum_some,
    take_slots,
)

BESIDE_BYTES = 32 << 20
"""Of all slots, from which rows are put there, and gradients of own ones added, on the side stream:
0.03 ms on an H200. The side stream takes the CPU 0.1 ms."""


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
    """The slots of a `Joined` in one call, and the rows of others on their way there.

    Where that is long, all of it is done beside what is computed meanwhile, from packing the rows
    that others need on: on the side stream, whose memory it takes.

    Args:
        joined: what is computed.
        one: what the rank does.
        key: this rank's K, (B, n, K, D).
        value: its V, (B, n, K, D).
        fetch: of K and V, sends rows of this rank and returns those of others, step by step.
        sums: what is added through it from now on may come behind rows that are awaited.

    Attributes:
        joined: as given.
        slots: (2, B, slots, D): K and V, from `filled` on.
        is_long: whether copies of the slots are worth the side stream.
    """

    def __init__(
        self,
        joined: Joined,
        one: RankPlan,
        key: torch.Tensor,
        value: torch.Tensor,
        fetch: Callable[[torch.Tensor, torch.Tensor], Iterator[Fetched]],
        sums: Accumulator,
    ) -> None:
        self.joined, self._layout, self._rank = joined, one.plan.layout, one.index
        self._heads, self._device, self._sums = key.shape[2], key.device, sums
        batch, _, _, head_dim = key.shape
        self.slots = key.new_empty(2, batch, joined.message.slots, head_dim)
        self._steps: list[Fetched] = []
        self._arriving: Iterator[Fetched] = iter(())
        self.is_long = self.slots.nbytes >= BESIDE_BYTES
        # What `begin` needs: not a method of this object, which would then refer to itself.
        self._waiting: tuple[Any, ...] = ()
        if self.is_long and sums.has_streams:
            self._waiting = fetch, key, value, sums.mark()
        else:
            self._arriving = fetch(key, value)
            take_slots((key, value), self.slots, *self._own().rows)

    def begin(self) -> None:
        """Begin what is done beside the compute, and beside what it has queued since this is made.

        Not at once: the GPU computes while the CPU sends rows, and waits for other ranks' CPUs.
        """
        if not self._waiting:
            return
        (fetch, key, value, since), self._waiting = self._waiting, ()
        fill = partial(self._fill, fetch, key, value, self.slots)
        self._sums.start(fill, key, value, into=(self.slots,), since=since)

    def filled(self) -> Sequence[Fetched]:
        """Wait until all slots have their rows; the steps of the others', without these."""
        self.begin()
        self._sums.finish()
        self._take_all(self._arriving, self.slots)
        return self._steps

    def _fill(
        self,
        fetch: Callable[[torch.Tensor, torch.Tensor], Iterator[Fetched]],
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        arriving = fetch(key, value)
        take_slots((key, value), slots, *self._own().rows)
        self._take_all(arriving, slots)

    def _take_all(self, arriving: Iterator[Fetched], slots: torch.Tensor) -> None:
        for fetched in arriving:
            self._take(fetched, slots)
            self._steps.append(fetched._replace(rows=None))
            del fetched  # before the next is waited for

    def _take(self, fetched: Fetched, slots: torch.Tensor) -> None:
        """Put the rows that a rank has sent into their slots."""
        if fetched.rows is not None and fetched.received is not None:
            found = self._received(fetched.received.message)
            pair, rows = (fetched.rows[0], fetched.rows[1]), found.table.row_of_slot
            take_slots(pair, slots, found.slots, rows)

    def add_own(self, dslots: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor) -> None:
        """Add the gradients (2, B, slots, D) of this rank's rows to those of K and V."""
        for rows in self._own().branches:  # a row may have a slot of each branch
            add_slots((dkey, dvalue), dslots, *rows)

    def returned(self, dslots: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """The gradients (2, B, rows, D) of the rows of a message, of those of the slots."""
        found = self._received(received.message)
        return sum_some(dslots, found.table, found.slots)

    def _own(self) -> _Own:
        make = partial(_make_own, self.joined, self._layout, self._rank, self._device)
        key = "own", self._device
        return TABLES.get(self.joined, key, self._device, make)

    def _received(self, message: Message) -> _Received:
        given = self.joined, self._layout, message, self._heads, self._device
        key = message.sender, self._heads, self._device
        return TABLES.get(self.joined, key, self._device, partial(_make_received, *given))


class _Rows(NamedTuple):
    """Rows of one rank that slots hold.

    Attributes:
        slots: int64 (any,): these slots, in ascending order.
        positions: int64 (any,): local row of each.
        heads: int64 (any,): its KV head.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    heads: torch.Tensor


class _Own(NamedTuple):
    """Rows of this rank.

    Attributes:
        rows: all of them.
        branches: those of each branch that has any, which are views of these.
    """

    rows: _Rows
    branches: tuple[_Rows, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that are no views."""
        return tuple(self.rows)


def _held_by(joined: Joined, layout: SequenceLayout, rank: int) -> tuple[_Rows, list[slice]]:
    """The rows of a rank, and which of them each branch reads."""
    pieces: list[tuple[int, int, int, int, int]] = []  # slot, rows, local row, its stride, head
    behind = 0  # local rows before those of a range
    for start, stop in layout.ranges[rank]:
        for run in joined.message.runs:
            first, length, stride, of_head, _ = run.rows
            for number, head in enumerate(run.heads):
                ahead = start - (first + number * of_head)  # of the range, of the first row
                low, high = max(-(-ahead // stride), 0), -(-(ahead + stop - start) // stride)
                high = min(high, length)
                if low < high:
                    slot = run.slot + number * length + low
                    pieces.append((slot, high - low, behind + low * stride - ahead, stride, head))
        behind += stop - start
    pieces.sort()
    ends = [sum(x[1] for x in pieces if x[0] < branch.stop) for branch in joined.branches]
    none = torch.empty(0, dtype=torch.int64)
    slots = [torch.arange(slot, slot + rows) for slot, rows, _, _, _ in pieces]
    local = [torch.arange(at, at + rows * step, step) for _, rows, at, step, _ in pieces]
    heads = [torch.full((rows,), head) for _, rows, _, _, head in pieces]
    columns = [torch.cat(x) if x else none for x in (slots, local, heads)]
    return _Rows(*columns), list(map(slice, [0, *ends[:-1]], ends))


def _make_own(joined: Joined, layout: SequenceLayout, rank: int, device: torch.device) -> _Own:
    held, branches = _held_by(joined, layout, rank)
    rows = _Rows(*(x.to(device) for x in held))
    return _Own(rows, tuple(_Rows(*(x[at] for x in rows)) for at in branches if at.start < at.stop))


def _make_received(
    joined: Joined,
    layout: SequenceLayout,
    message: Message,
    num_kv_heads: int,
    device: torch.device,
) -> _Received:
    held, branches = _held_by(joined, layout, message.sender)
    numbers = held.positions * num_kv_heads + held.heads
    rows = places_of(numbers, received_numbers(message, num_kv_heads))
    starts = torch.zeros(message.rows + 1, dtype=torch.int64)
    torch.cumsum(rows.bincount(minlength=message.rows), 0, out=starts[1:])
    order, place = torch.empty_like(rows), starts[:-1].clone()
    for at in branches:  # no two slots of one hold the same row
        of_slots = place[rows[at]]
        order[of_slots] = held.slots[at]
        place[rows[at]] = of_slots + 1
    slots, rows, order, starts = (x.to(device) for x in (held.slots, rows, order, starts))
    return _Received(slots, SlotTable(rows, order, starts))
