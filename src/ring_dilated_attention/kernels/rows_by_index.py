"""Triton kernels for rows that are found by index: taken, added to, summed. One launch each.

What branches share of a message is sent once, so its rows are no strided views. Tensors come in
pairs, those of K and of V, of which a launch takes both. A program takes `BLOCK_ROWS` rows of one
batch entry. Nothing is added by atomics: a row has one program, and sums go by the order of their
table. Offsets are int64 and strides are in units, as in `rows.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from .blocks import row_launch
from .launch import KernelLaunch, Launcher


@triton.jit
def _place(
    rows, row_blocks, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """The batch entry of this program, its rows, which of them there are, and their elements."""
    program = tl.program_id(0)
    row = (program % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = row < rows
    where = valid[:, None] & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
    return (program // row_blocks).to(tl.int64), row, valid, where


@triton.jit
def _elements(base, offsets, UNIT: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Pointers to the elements of rows, whose offsets are in units."""
    return base + offsets[:, None] * UNIT + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def _found(
    first, second, positions, heads, batch, row, valid,
    first_batch, first_row, first_head, second_batch, second_row, second_head,
    UNIT: tl.constexpr, BLOCK_DIM: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Pointers to rows that are found by index, in the tensor of a pair that this program takes."""
    base, of_batch, of_row, of_head = first, first_batch, first_row, first_head
    if tl.program_id(1) == 1:
        base, of_batch, of_row, of_head = second, second_batch, second_row, second_head
    offsets = batch * of_batch + tl.load(positions + row, mask=valid, other=0) * of_row
    if BY_HEAD:
        offsets += tl.load(heads + row, mask=valid, other=0) * of_head
    return _elements(base, offsets, UNIT, BLOCK_DIM)


@triton.jit(
    do_not_specialize=[
        "rows", "row_blocks", "first_batch", "first_row", "first_head",
        "second_batch", "second_row", "second_head", "packed_pair", "packed_batch", "packed_row",
    ]
)  # fmt: skip
def _index_kernel(
    first, second, packed, positions, heads, slots, rows, row_blocks,
    first_batch, first_row, first_head, second_batch, second_row, second_head,
    packed_pair, packed_batch, packed_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BY_HEAD: tl.constexpr, BY_SLOT: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    batch, row, valid, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    found = _found(
        first, second, positions, heads, batch, row, valid,
        first_batch, first_row, first_head, second_batch, second_row, second_head,
        UNIT, BLOCK_DIM, BY_HEAD,
    )  # fmt: skip
    pair = tl.program_id(1).to(tl.int64) * packed_pair
    slot = tl.load(slots + row, mask=valid, other=0) if BY_SLOT else row
    at = _elements(packed, pair + batch * packed_batch + slot * packed_row, UNIT, BLOCK_DIM)
    if ADDS:
        total = tl.load(found, mask=where, other=0.0).to(tl.float32)
        total += tl.load(at, mask=where, other=0.0).to(tl.float32)
        tl.store(found, total.to(first.dtype.element_ty), mask=where)
    else:
        tl.store(at, tl.load(found, mask=where), mask=where)


@triton.jit
def _slot(
    slots, order, from_slots, start, number, count, slots_row, where,
    UNIT: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One slot of each row, float32; 0 for rows that have fewer."""
    more = number < count
    slot = tl.load(order + start + number, mask=more, other=0)
    part = _elements(slots, from_slots + slot * slots_row, UNIT, BLOCK_DIM)
    return tl.load(part, mask=where & more[:, None], other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "rows", "row_blocks", "slots_pair", "slots_batch", "slots_row",
        "sums_pair", "sums_batch", "sums_row",
    ]
)  # fmt: skip
def _sum_kernel(
    slots, sums, order, starts, rows, row_blocks,
    slots_pair, slots_batch, slots_row, sums_pair, sums_batch, sums_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    batch, row, valid, where = _place(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
    pair = tl.program_id(1).to(tl.int64)
    from_slots = pair * slots_pair + batch * slots_batch
    start = tl.load(starts + row, mask=valid, other=0)
    count = tl.load(starts + row + 1, mask=valid, other=0) - start
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for number in tl.static_range(2):  # loaded together: few rows have more slots
        total += _slot(
            slots, order, from_slots, start, number, count, slots_row, where, UNIT, BLOCK_DIM
        )
    for number in range(2, tl.max(count.to(tl.int32))):
        total += _slot(
            slots, order, from_slots, start, number, count, slots_row, where, UNIT, BLOCK_DIM
        )
    at = _elements(sums, pair * sums_pair + batch * sums_batch + row * sums_row, UNIT, BLOCK_DIM)
    tl.store(at, total.to(sums.dtype.element_ty), mask=where)


_launch_index, _launch_sum = map(Launcher, (_index_kernel, _sum_kernel))

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Tensors of one shape and dtype, of K and of V."""


def take_rows(
    pair: Pair,
    packed: torch.Tensor,
    positions: torch.Tensor,
    heads: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Copy rows: ``packed[i, b, slots[j]] = pair[i][b, positions[j], heads[j]]``.

    Args:
        pair: two views (batch, positions, heads, head_dim), or without `heads` (batch, positions,
            head_dim); head_dim contiguous, of any other strides and any floating dtype.
        packed: (2, batch, any, head_dim) of the same dtype, head_dim contiguous.
        positions: int64 (rows,), contiguous, as all tables are.
        heads: int64 (rows,); None: the pair has no heads.
        slots: int64 (rows,), no two of them the same; None: row j of `packed` is slot j.
    """
    _by_index(pair, packed, positions, heads, slots, adds=False)


def add_to_rows(
    pair: Pair,
    packed: torch.Tensor,
    positions: torch.Tensor,
    heads: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Add to rows in float32: ``pair[i][b, positions[j], heads[j]] += packed[i, b, slots[j]]``.

    Args:
        pair: as of `take_rows`, but no two rows of the index share memory; not float64. Changed in
            place.
        packed: (2, batch, any, head_dim) of any floating dtype but float64, head_dim contiguous.
        positions: int64 (rows,); no two rows are the same.
        heads: int64 (rows,); None: the pair has no heads.
        slots: int64 (rows,); None: row j of `packed` is slot j.
    """
    _by_index(pair, packed, positions, heads, slots, adds=True)


def sum_slots(
    slots: torch.Tensor, sums: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> None:
    """Sum the slots of each row in float32, one after the other; rounds once.

    ``sums[i, b, j] = sum(slots[i, b, order[starts[j] : starts[j + 1]]])``.

    Args:
        slots: (2, batch, slots, head_dim), head_dim contiguous, any floating dtype but float64.
        sums: (2, batch, rows, head_dim), head_dim contiguous, any floating dtype but float64.
        order: int64 (slots,): the slots of row 0, of row 1, and so on.
        starts: int64 (rows + 1,): where in `order` those of each row begin, and the end.
    """
    launch = _launch_of(sums.shape, slots.stride(), sums.stride())
    _launch_sum(launch.grid, (slots, sums, order, starts), *launch[1:])


def _by_index(
    pair: Pair,
    packed: torch.Tensor,
    positions: torch.Tensor,
    heads: torch.Tensor | None,
    slots: torch.Tensor | None,
    *,
    adds: bool,
) -> None:
    by_head, by_slot = heads is not None, slots is not None
    # Without heads there is one, whose stride does not matter.
    strides = [x.stride() if by_head else (*x.stride()[:2], 0, 1) for x in pair]
    shape = torch.Size((*packed.shape[:2], len(positions), packed.shape[3]))
    options = {"BY_HEAD": by_head, "BY_SLOT": by_slot, "ADDS": adds}
    launch = _launch_of(shape, *strides, packed.stride(), **options)
    tables = [positions if x is None else x for x in (positions, heads, slots)]
    _launch_index(launch.grid, (*pair, packed, *tables), *launch[1:])


@lru_cache(maxsize=1024)
def _launch_of(packed: torch.Size, *strides: tuple[int, ...], **options: bool) -> KernelLaunch:
    """Worked out once for a layout: launches are short, and the layers of a model are alike."""
    pair, batch, rows, head_dim = packed
    return row_launch((batch, pair), (), rows, head_dim, strides, **options)
