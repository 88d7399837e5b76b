"""Rows of a message: which local rows it packs, and which row each slot of it reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .plan import Message


class MessageIndex(NamedTuple):
    """A message's rows as tensors.

    Attributes:
        positions: int64 (rows,): local row of the sender of each row sent.
        heads: int64 (rows,): its KV head.
        row_of_slot: int64 (slots,): the row that each slot reads; None where slot i is row i.
    """

    positions: torch.Tensor
    heads: torch.Tensor
    row_of_slot: torch.Tensor | None


def index_message(message: Message, num_kv_heads: int, device: torch.device) -> MessageIndex:
    """Work out a message's rows; sender and receiver come to the same answer."""
    parts = []
    for run in message.runs:
        number = torch.arange(len(run.heads), device=device)[:, None]
        row = torch.arange(run.rows.length, device=device)
        local = run.rows.start + number * run.rows.head_stride + row * run.rows.stride
        parts.append((local * num_kv_heads + (run.heads.start + number * run.heads.step)).flatten())
    slots = torch.cat(parts)
    row_of_slot = None
    if message.rows < message.slots:
        slots, row_of_slot = torch.unique(slots, return_inverse=True)
    assert len(slots) == message.rows, f"{message} packs {len(slots)} rows"
    return MessageIndex(slots // num_kv_heads, slots % num_kv_heads, row_of_slot)


def pack(key: torch.Tensor, value: torch.Tensor, index: MessageIndex) -> torch.Tensor:
    """Rows of K and V (batch, local_sequence, kv_heads, head_dim) as (2, batch, rows, head_dim)."""
    return torch.stack([tensor[:, index.positions, index.heads] for tensor in (key, value)])


def spread(rows: torch.Tensor, index: MessageIndex) -> torch.Tensor:
    """The slots (2, batch, slots, head_dim) of a message's rows (2, batch, rows, head_dim)."""
    return rows if index.row_of_slot is None else rows.index_select(2, index.row_of_slot)


def gather(slots: torch.Tensor, index: MessageIndex) -> torch.Tensor:
    """Sum gradients of slots into gradients of rows: the adjoint of `spread`."""
    if index.row_of_slot is None:
        return slots
    shape = (*slots.shape[:2], len(index.positions), slots.shape[3])
    return slots.new_zeros(shape).index_add_(2, index.row_of_slot, slots)


def add_home(
    dkey: torch.Tensor, dvalue: torch.Tensor, rows: torch.Tensor, index: MessageIndex
) -> None:
    """Add returned gradients (2, batch, rows, head_dim) to dK and dV: the adjoint of `pack`.

    `dkey` and `dvalue` are contiguous (batch, local_sequence, kv_heads, head_dim).
    """
    flat = index.positions * dkey.shape[2] + index.heads
    for gradient, returned in zip((dkey, dvalue), rows, strict=True):
        total = gradient.flatten(1, 2)
        summed = total.index_select(1, flat) + returned  # in the wider dtype; rows are distinct
        total.index_copy_(1, flat, summed.to(total.dtype))
