"""Messages as tensors: rows of K and V are packed and spread, their gradients summed and added.

`pack` and `spread` are what rows go through from one rank to the tiles of another, `sum_slots` and
`add_returned` their adjoints, in reverse order.

A message lists runs of rows, and each run is a strided view of the sender's tensors. So packing
rows and adding returned gradients are one pass per run, without index tables. Only where branches
share rows, each of which is sent once, the index of each row is needed. On CUDA what goes by index
is one launch of a Triton kernel; without Triton, and on other devices, torch operations do the
same.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from .. import kernels
from ..kernels import runs_triton
from ..plan import Message, Run
from .accumulate import add
from .device_tables import TABLES


def pack(key: torch.Tensor, value: torch.Tensor, message: Message) -> torch.Tensor:
    """Pack the rows of a message into one tensor to send.

    Args:
        key: (batch, local_sequence, kv_heads, head_dim).
        value: like `key`.
        message: which rows to take.

    Returns:
        (2, batch, rows, head_dim): K, then V.
    """
    packed = key.new_empty(2, key.shape[0], message.rows, key.shape[3])
    table = _rows_of_sender(message, key.device)
    if table is None:  # no row is in two runs: copy run by run
        add(*_runs_of(message, packed, (key, value)), store=True)
    elif runs_triton(packed):
        kernels.rows.index_rows((key, value), packed, *table)
    else:
        for tensor, into in zip((key, value), packed, strict=True):
            into.copy_(tensor[:, table[0], table[1]])
    return packed


def spread(packed: torch.Tensor, message: Message) -> torch.Tensor:
    """The slots (2, batch, slots, head_dim) of a message's rows (2, batch, rows, head_dim)."""
    table = _slots_of_receiver(message, packed.device)
    if table is None:
        return packed
    if not runs_triton(packed):
        return packed.index_select(2, table[0])
    slots = packed.new_empty(*packed.shape[:2], message.slots, packed.shape[3])
    kernels.rows.index_rows((packed[0], packed[1]), slots, table[0])
    return slots


def sum_slots(slots: torch.Tensor, message: Message) -> torch.Tensor:
    """Sum gradients of slots into gradients of rows: the adjoint of `spread`.

    On CUDA in float32, in the order of the slots.
    """
    table = _slots_of_receiver(message, slots.device)
    if table is None:
        return slots
    shape = *slots.shape[:2], message.rows, slots.shape[3]
    if not runs_triton(slots):
        return slots.new_zeros(shape).index_add_(2, table[0], slots)
    sums = slots.new_empty(shape)
    kernels.rows.sum_slots(slots, sums, *table[1:])
    return sums


def add_returned(
    dkey: torch.Tensor, dvalue: torch.Tensor, returned: torch.Tensor, message: Message
) -> None:
    """Add returned gradients (2, batch, rows, head_dim) to dK and dV: the adjoint of `pack`.

    `dkey` and `dvalue` are contiguous (batch, local_sequence, kv_heads, head_dim).
    """
    table = _rows_of_sender(message, dkey.device)
    if table is None:
        parts, totals = _runs_of(message, returned, (dkey, dvalue))
        add(totals, parts, store=False)
    elif runs_triton(dkey):
        kernels.rows.index_rows((dkey, dvalue), returned, *table, adds=True)
    else:
        for total, part in zip((dkey, dvalue), returned, strict=True):
            rows, flat = total.flatten(1, 2), table[0] * total.shape[2] + table[1]
            summed = rows.index_select(1, flat) + part  # in the wider dtype
            rows.index_copy_(1, flat, summed.to(total.dtype))


def _rows_of_sender(
    message: Message, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Local row and KV head of each row of a message that is sent, int64 (rows,).

    In the order that its receiver counts on. None where slot i is row i.
    """
    if message.rows == message.slots:
        return None

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        numbers, heads = _numbers_of(message)
        rows = torch.unique(numbers)
        assert len(rows) == message.rows, f"{message} packs {len(rows)} rows"
        return (rows // heads).to(device), (rows % heads).to(device)

    return TABLES.get(message, ("sent", device), device, make)


_SlotTable: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _slots_of_receiver(message: Message, device: torch.device) -> _SlotTable | None:
    """Slots of a received message, int64; None where slot i is row i.

    The row that each slot reads; the slots of each row, in ascending order, row after row; and
    where among these those of each row begin, and the end.
    """
    if message.rows == message.slots:
        return None

    def make() -> _SlotTable:
        numbers, slots = torch.sort(_numbers_of(message)[0], stable=True)
        is_first = torch.ones(len(slots) + 1, dtype=torch.bool)  # of its row; the end, too
        torch.ne(numbers[1:], numbers[:-1], out=is_first[1:-1])
        starts = is_first.nonzero().flatten()
        assert len(starts) == message.rows + 1, f"{message} has {len(starts) - 1} rows"
        row_of_slot = torch.empty_like(slots)
        row_of_slot[slots] = is_first[:-1].cumsum(0) - 1
        return row_of_slot.to(device), slots.to(device), starts.to(device)

    return TABLES.get(message, ("received", device), device, make)


def _numbers_of(message: Message) -> tuple[torch.Tensor, int]:
    """For each slot its local row * H + its KV head, int64 (slots,); and H, above all heads."""
    heads, parts = max(run.heads[-1] for run in message.runs) + 1, []
    for run in message.runs:
        number = torch.arange(len(run.heads))[:, None]
        local = run.rows.start + number * run.rows.head_stride
        local = local + torch.arange(run.rows.length) * run.rows.stride
        parts.append((local * heads + (run.heads.start + number * run.heads.step)).flatten())
    return torch.cat(parts), heads


def _runs_of(
    message: Message, packed: torch.Tensor, tensors: tuple[torch.Tensor, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The slots of every run of a message, for K and for V, and its rows in their tensors.

    Both as (batch, heads, length, head_dim).
    """
    shapes = [(len(run.heads), run.rows.length) for run in message.runs]
    slots = [
        x[:, run.slot : run.slot + heads * length].view(len(x), heads, length, x.shape[2])
        for x in packed
        for run, (heads, length) in zip(message.runs, shapes, strict=True)
    ]
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
