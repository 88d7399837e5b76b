"""The transfers of a ring: packing rows of K and V, fetching remote ones, returning gradients.

Every rank starts its transfers in the same order, empty ones included: fetches of step 1, 2, ...
each before the compute of the step before it, returns after the compute of their step. What the
order needs is thus the same on all ranks, and no rank can wait for one that waits for it.

A message lists runs of rows, and each run is a strided view of the sender's tensors. So packing
rows and adding returned gradients are one pass per run, without index tables. Only where branches
share rows, each of which is sent once, the index of each row is needed. On CUDA what goes by index
is one launch of a Triton kernel; without Triton, and on other devices, torch operations do the
same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from .. import kernels
from ..exchange import Exchange, Pending
from ..kernels import runs_triton
from ..plan import Message, Run, Step
from .accumulate import add
from .device_tables import TABLES

_DENSE = 16
"""If the largest of n numbers is at most 16 n, they index an array of that length; else they are
sorted, which takes longer."""


class RowTable(NamedTuple):
    """The rows of a message, as tensors of its sender.

    Attributes:
        positions: int64 (rows,): local row of each.
        heads: int64 (rows,): its KV head.
    """

    positions: torch.Tensor
    heads: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return tuple(self)


class SlotTable(NamedTuple):
    """The slots of a message, as tensors of its receiver.

    Attributes:
        row_of_slot: int64 (slots,): the row that each slot reads.
        slots: int64 (slots,): the slots of each row, in ascending order, row after row.
        starts: int64 (rows + 1,): where in `slots` those of each row begin, and the end.
    """

    row_of_slot: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return tuple(self)


class SentRows(NamedTuple):
    """A message that is sent, and what is needed to find its rows.

    Attributes:
        message: the message.
        table: of its distinct rows; None where slot i is row i.
    """

    message: Message
    table: RowTable | None


class ReceivedRows(NamedTuple):
    """A message that is received, and what is needed to find the rows of its slots.

    Attributes:
        message: the message.
        table: of its slots; None where slot i is row i, or rows are not spread to slots.
    """

    message: Message
    table: SlotTable | None


def sent_rows(message: Message, num_kv_heads: int, device: torch.device) -> SentRows:
    """Work out the rows of a message that is sent, in the order that its receiver counts on."""
    if message.rows == message.slots:
        return SentRows(message, None)
    make = partial(_row_table, message, num_kv_heads, device)
    return SentRows(message, TABLES.get(message, ("sent", num_kv_heads, device), device, make))


def received_rows(message: Message, num_kv_heads: int, device: torch.device) -> ReceivedRows:
    """Work out which rows the slots of a message that is received read."""
    if message.rows == message.slots:
        return ReceivedRows(message, None)
    make = partial(_slot_table, message, num_kv_heads, device)
    key = "received", num_kv_heads, device
    return ReceivedRows(message, TABLES.get(message, key, device, make))


def numbers_of(message: Message, num_kv_heads: int) -> torch.Tensor:
    """For each slot its local row * `num_kv_heads` + its KV head: int64 (slots,)."""
    parts = []
    for run in message.runs:
        number = torch.arange(len(run.heads))[:, None]
        row = torch.arange(run.rows.length)
        local = run.rows.start + number * run.rows.head_stride + row * run.rows.stride
        parts.append((local * num_kv_heads + (run.heads.start + number * run.heads.step)).flatten())
    return torch.cat(parts)


def received_numbers(message: Message, num_kv_heads: int) -> torch.Tensor:
    """The same for each distinct row, in the order in which they travel: int64 (rows,)."""
    numbers = numbers_of(message, num_kv_heads)
    return numbers if message.rows == message.slots else _distinct(numbers)


def _distinct(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, each once, in ascending order."""
    most = int(numbers.max())
    if most > _DENSE * len(numbers):
        sorted_numbers: torch.Tensor = torch.unique(numbers)
        return sorted_numbers
    occurs = torch.zeros(most + 1, dtype=torch.bool)
    occurs[numbers] = True
    return occurs.nonzero().flatten()


def places_of(numbers: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """The index of each number among others, which are different ones and include them all."""
    most = int(among.max())
    if most > _DENSE * len(among):
        ordered, order = torch.sort(among)
        found = order[torch.searchsorted(ordered, numbers).clamp(max=len(order) - 1)]
    else:
        index = torch.zeros(most + 1, dtype=torch.int64)
        index[among] = torch.arange(len(among))
        found = index[numbers.clamp(max=most)]
    assert torch.equal(among[found], numbers), "a row is asked for that has not been received"
    return found


def _row_table(message: Message, num_kv_heads: int, device: torch.device) -> RowTable:
    distinct = _distinct(numbers_of(message, num_kv_heads))
    assert len(distinct) == message.rows, f"{message} packs {len(distinct)} rows"
    return RowTable(*(x.to(device) for x in (distinct // num_kv_heads, distinct % num_kv_heads)))


def _slot_table(message: Message, num_kv_heads: int, device: torch.device) -> SlotTable:
    numbers, slots = torch.sort(numbers_of(message, num_kv_heads), stable=True)
    is_first = torch.ones(len(slots) + 1, dtype=torch.bool)  # of its row; the end, too
    torch.ne(numbers[1:], numbers[:-1], out=is_first[1:-1])
    starts = is_first.nonzero().flatten()
    assert len(starts) == message.rows + 1, f"{message} has {len(starts) - 1} rows"
    row_of_slot = torch.empty_like(slots)
    row_of_slot[slots] = is_first[:-1].cumsum(0) - 1
    return SlotTable(*(x.to(device) for x in (row_of_slot, slots, starts)))


class PartRows(NamedTuple):
    """Where the rows of a message are among those of another one.

    Attributes:
        numbers: int64 (rows,).
    """

    numbers: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return tuple(self)


def part_rows(
    message: Message, load: Message, num_kv_heads: int, device: torch.device
) -> PartRows | None:
    """Where a message's rows are among those of a load that has them all; None: they are these."""
    if message.runs == load.runs:
        return None
    make = partial(_part_rows, message, load, num_kv_heads, device)
    return TABLES.get(message, (load, num_kv_heads, device), device, make)


def _part_rows(
    message: Message, load: Message, num_kv_heads: int, device: torch.device
) -> PartRows:
    wanted, held = (received_numbers(each, num_kv_heads) for each in (message, load))
    return PartRows(places_of(wanted, held).to(device))


def pack(key: torch.Tensor, value: torch.Tensor, rows: SentRows) -> torch.Tensor:
    """Rows of K and V (batch, local_sequence, kv_heads, head_dim) as (2, batch, rows, head_dim)."""
    packed = key.new_empty(2, key.shape[0], rows.message.rows, key.shape[3])
    if rows.table is None:
        add(*_runs_of(rows.message, packed, (key, value)), store=True)
    else:
        take_slots((key, value), packed, None, *rows.table)
    return packed


def rows_at(packed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows of a message by number: of (2, batch, rows, head_dim) those that `numbers` lists.

    `numbers` is int64 (any,), on the device of the rows.
    """
    if not runs_triton(packed):
        return packed.index_select(2, numbers)
    pair, batch, _, head_dim = packed.shape
    found = packed.new_empty(pair, batch, len(numbers), head_dim)
    kernels.rows.take_rows((packed[0], packed[1]), found, numbers)
    return found


def add_to_rows(total: torch.Tensor, gradients: torch.Tensor, numbers: torch.Tensor) -> None:
    """Add gradients (2, batch, any, head_dim) to rows of a message by number, each once, in place.

    `total` is (2, batch, rows, head_dim), in the dtype in which gradients are summed.
    """
    if runs_triton(total):
        kernels.rows.add_to_rows((total[0], total[1]), gradients, numbers)
    else:
        total.index_add_(2, numbers, gradients.to(total.dtype))


def spread(packed: torch.Tensor, rows: ReceivedRows) -> torch.Tensor:
    """The slots (2, batch, slots, head_dim) of a message's rows (2, batch, rows, head_dim)."""
    return packed if rows.table is None else rows_at(packed, rows.table.row_of_slot)


def take_slots(
    pair: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    numbers: torch.Tensor | None,
    positions: torch.Tensor,
    heads: torch.Tensor | None = None,
) -> None:
    """Put rows into slots: ``slots[i, b, numbers[j]] = pair[i][b, positions[j], heads[j]]``.

    Args:
        pair: K and V, (batch, positions, heads, head_dim); without `heads` (batch, positions,
            head_dim).
        slots: (2, batch, slots, head_dim), changed in place.
        numbers: int64 (any,), no two of them the same; None: row j goes to slot j.
        positions: int64 (any,).
        heads: int64 (any,); None: the pair has no heads.
    """
    if runs_triton(slots):
        kernels.rows.take_rows(pair, slots, positions, heads, numbers)
        return
    for tensor, into in zip(pair, slots, strict=True):
        taken = tensor[:, positions] if heads is None else tensor[:, positions, heads]
        if numbers is None:
            into.copy_(taken)
        else:
            into.index_copy_(1, numbers, taken)


def add_slots(
    pair: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    numbers: torch.Tensor | None,
    positions: torch.Tensor,
    heads: torch.Tensor,
) -> None:
    """Add slots to rows: ``pair[i][b, positions[j], heads[j]] += slots[i, b, numbers[j]]``.

    Args:
        pair: dK and dV, (batch, positions, heads, head_dim), contiguous; changed in place.
        slots: (2, batch, slots, head_dim).
        numbers: int64 (any,); None: row j is slot j.
        positions: int64 (any,).
        heads: int64 (any,): no two rows are the same.
    """
    if runs_triton(pair[0]):
        kernels.rows.add_to_rows(pair, slots, positions, heads, numbers)
        return
    for total, part in zip(pair, slots, strict=True):
        rows = total.flatten(1, 2)
        flat = positions * total.shape[2] + heads
        added = part if numbers is None else part.index_select(1, numbers)
        summed = rows.index_select(1, flat) + added  # in the wider dtype
        rows.index_copy_(1, flat, summed.to(total.dtype))


def sum_slots(slots: torch.Tensor, rows: ReceivedRows) -> torch.Tensor:
    """Sum gradients of slots into gradients of rows: the adjoint of `spread`.

    On CUDA in float32, in the order of the slots.
    """
    return slots if rows.table is None else sum_some(slots, rows.table, None)


def sum_some(slots: torch.Tensor, table: SlotTable, numbers: torch.Tensor | None) -> torch.Tensor:
    """The same for some of the slots: `numbers` are those that `table` has; None: all of them."""
    shape = (*slots.shape[:2], len(table.starts) - 1, slots.shape[3])
    if not runs_triton(slots):
        some = slots if numbers is None else slots.index_select(2, numbers)
        return slots.new_zeros(shape).index_add_(2, table.row_of_slot, some)
    sums = slots.new_empty(shape)
    kernels.rows.sum_slots(slots, sums, table.slots, table.starts)
    return sums


def add_returned(
    dkey: torch.Tensor, dvalue: torch.Tensor, returned: torch.Tensor, rows: SentRows
) -> None:
    """Add returned gradients (2, batch, rows, head_dim) to dK and dV: the adjoint of `pack`.

    `dkey` and `dvalue` are contiguous (batch, local_sequence, kv_heads, head_dim).
    """
    if rows.table is None:
        parts, totals = _runs_of(rows.message, returned, (dkey, dvalue))
        add(totals, parts, store=False)
        return
    add_slots((dkey, dvalue), returned, None, *rows.table)


def _runs_of(
    message: Message, packed: torch.Tensor, tensors: tuple[torch.Tensor, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The slots of every run of a message, for K and for V, and its rows in their tensors."""
    slots = [_slots_of(run, each) for each in packed for run in message.runs]
    return slots, [_rows_of(run, each) for each in tensors for run in message.runs]


def _rows_of(run: Run, tensor: torch.Tensor) -> torch.Tensor:
    """A run of (batch, local_sequence, heads, head_dim): (batch, heads, length, head_dim)."""
    of_batch, of_row, of_head, of_dim = tensor.stride()
    return tensor.as_strided(
        (tensor.shape[0], len(run.heads), run.rows.length, tensor.shape[3]),
        (
            of_batch,
            run.rows.head_stride * of_row + run.heads.step * of_head,
            run.rows.stride * of_row,
            of_dim,
        ),
        tensor.storage_offset() + run.rows.start * of_row + run.heads.start * of_head,
    )


def _slots_of(run: Run, slots: torch.Tensor) -> torch.Tensor:
    """A run of (batch, slots, head_dim): (batch, heads, length, head_dim)."""
    batch, _, head_dim = slots.shape
    stop = run.slot + len(run.heads) * run.rows.length
    return slots[:, run.slot : stop].view(batch, len(run.heads), run.rows.length, head_dim)


class Fetched(NamedTuple):
    """A step with its remote rows at hand.

    Attributes:
        step: what to compute.
        rows: K and V of the received message, (2, batch, rows, head_dim); None if none came.
        received: what is needed to find the rows of its slots; None if none came.
        sent: the rows of the message sent at this step; None if none was.
    """

    step: Step
    rows: torch.Tensor | None
    received: ReceivedRows | None
    sent: SentRows | None

    def spread(self) -> tuple[torch.Tensor | None, Fetched]:
        """K and V of its slots, (2, batch, slots, head_dim), if any; the step without its rows."""
        if self.rows is None or self.received is None:
            return None, self
        return spread(self.rows, self.received), self._replace(rows=None)


@dataclass
class InFlight:
    """A step whose transfer has started.

    Attributes:
        pending: the transfer.
        packed: where its rows arrive, (2, batch, rows, head_dim); None: there are none.
        fetched: the step, without its rows.
    """

    pending: Pending
    packed: torch.Tensor | None
    fetched: Fetched


def fetch(steps: Iterator[Step], packer: Packer, depth: int) -> Iterator[Fetched]:
    """Start `depth` fetches, then yield each step when its rows are there, starting one more.

    Args:
        steps: what this rank exchanges.
        packer: sends and receives rows.
        depth: messages in flight behind the running compute: 1 is the ring.

    Returns:
        An iterator over the steps; the first `depth` transfers are under way when it is returned.
        Rows are freed when the caller drops a step: do so before asking for the next.
    """
    flight = deque(map(packer.start, islice(steps, depth)))
    if len(flight) < depth:
        packer.forget()

    def arrive() -> Fetched:
        one = flight.popleft()
        one.pending.wait()
        coming = next(steps, None)
        if coming is None:
            packer.forget()
        else:
            flight.append(packer.start(coming))
        return one.fetched._replace(rows=one.packed)

    def arrivals() -> Iterator[Fetched]:
        while flight:
            yield arrive()  # nothing here may outlive it: the caller decides when rows are freed

    return arrivals()


class Packer:
    """Packs rows of K and V; what several ranks in turn are to be sent, once.

    Args:
        exchange: this rank's end of the group.
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the shape of `key`.
        spreads: whether rows that are received are spread to the slots of their message.
    """

    def __init__(
        self,
        exchange: Exchange,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        spreads: bool = True,
    ) -> None:
        self._exchange, self.key, self.value, self._spreads = exchange, key, value, spreads
        self._message: Message | None = None
        self._packed: torch.Tensor | None = None

    def sent(self, message: Message | None) -> SentRows | None:
        """What is needed to find the rows of a message that is sent."""
        if message is None:
            return None
        return sent_rows(message, self.key.shape[2], self.key.device)

    def received(self, message: Message | None) -> ReceivedRows | None:
        """What is needed to find the rows of a message that is received."""
        if message is None:
            return None
        if not self._spreads:
            return ReceivedRows(message, None)
        return received_rows(message, self.key.shape[2], self.key.device)

    def pack(self, rows: SentRows) -> torch.Tensor:
        """The rows of a message, (2, batch, rows, head_dim)."""
        if self._packed is None or not rows.message.is_same_for(self._message):
            self._message, self._packed = rows.message, pack(self.key, self.value, rows)
        return self._packed

    def buffer(self, message: Message) -> torch.Tensor:
        """Where the rows of a message may arrive."""
        return self.key.new_empty(2, self.key.shape[0], message.rows, self.key.shape[3])

    def start(self, step: Step) -> InFlight:
        """Start the transfer of a step."""
        sent, received = self.sent(step.send), self.received(step.receive)
        send = receive = packed = None
        if step.send is not None and sent is not None:
            send = step.send.receiver, self.pack(sent)
        if step.receive is not None:
            packed = self.buffer(step.receive)
            receive = step.receive.sender, packed
        pending = self._exchange.start(send, receive)
        return InFlight(pending, packed, Fetched(step, None, received, sent))

    def forget(self) -> None:
        """All steps have started: let go of the rows that were packed last."""
        self._message = self._packed = None


class GradientReturn:
    """Gradients of remote rows on their way to their owner, and those that come to this rank.

    Args:
        home: where the latter are added.
        send: whom to send what; None: nothing.
        sent: own rows, whose gradients come from the receiver of their message; None: of none.

    Attributes:
        tensors: what is sent and received, held until it has finished.
        nbytes: their bytes.
    """

    def __init__(
        self, home: Home, send: tuple[int, torch.Tensor] | None, sent: SentRows | None
    ) -> None:
        self._home, self._sent = home, sent
        receive = None
        self._returned: torch.Tensor | None = None
        if sent is not None:
            self._returned = home.buffer(sent.message)
            receive = sent.message.receiver, self._returned
        self.tensors = [x[1] for x in (send, receive) if x is not None]
        self.nbytes = sum(x.nbytes for x in self.tensors)
        self._pending = home.exchange.start(send, receive)

    def finish(self) -> None:
        """Wait, and add what came back for this rank's own rows to its dK and dV."""
        self._pending.wait()
        if self._returned is not None and self._sent is not None:
            add_returned(self._home.dkey, self._home.dvalue, self._returned, self._sent)


class Home(NamedTuple):
    """Where gradients of this rank's rows of K and V are added up, and where they come from.

    Attributes:
        exchange: this rank's end of the group.
        dkey: this rank's dK so far, (batch, local_sequence, kv_heads, head_dim), contiguous.
        dvalue: its dV.
        dtype: of the gradients that are sent, on every rank; `dkey` and `dvalue` may have others.
    """

    exchange: Exchange
    dkey: torch.Tensor
    dvalue: torch.Tensor
    dtype: torch.dtype

    def buffer(self, message: Message) -> torch.Tensor:
        """Where the gradients of a message may arrive, (2, batch, rows, head_dim)."""
        shape = 2, self.dkey.shape[0], message.rows, self.dkey.shape[3]
        return self.dkey.new_empty(shape, dtype=self.dtype)

    def start(self, fetched: Fetched, dslots: torch.Tensor | None) -> GradientReturn:
        """Return the gradients of a step's remote rows.

        Args:
            fetched: the step.
            dslots: gradients of its slots, in the dtype in which gradients are summed.
        """
        send = None
        if fetched.received is not None:
            assert dslots is not None
            send = fetched.received.message.sender, sum_slots(dslots, fetched.received)
        return GradientReturn(self, send, fetched.sent)
