"""Triton kernels for rows of strided views and for rows found by index: merged, added, taken.

A tile's results are added into strided views of the whole in one pass each. Views are (outer,
inner, rows, head_dim), head_dim contiguous, as the engine makes them. A program takes `BLOCK_ROWS`
rows of one (outer, inner) pair. Offsets are computed in int64: tensors may exceed 2^31 elements.
Strides are counted in units of `UNIT` elements: the compiler then knows that rows are aligned, and
is not to be asked again for every other stride.

What branches share of a message is sent once, so its rows are no strided views: they are found by
index. Tensors come in pairs, those of K and of V, of which a launch takes both. Nothing is added by
atomics: a row has one program, and sums go by the order of their table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from .blocks import row_launch
from .launch import KernelLaunch, Launcher


@triton.jit
def _place(inner, row_blocks, BLOCK_ROWS: tl.constexpr):
    """The (outer, inner) pair of this program, and its rows."""
    program = tl.program_id(0)
    pair = program // row_blocks
    row = (program % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return (pair // inner).to(tl.int64), (pair % inner).to(tl.int64), row.to(tl.int64)


@triton.jit
def _rows_at(base, a, b, row, dim, outer, inner, stride, UNIT: tl.constexpr):
    """Pointers to rows of a pair: strides are in units."""
    return base + (a * outer + b * inner + row[:, None] * stride) * UNIT + dim[None, :]


@triton.jit
def _sigmoid(x):
    # The exponential of a number that is never positive cannot overflow.
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit(
    do_not_specialize=[
        "inner", "rows", "row_blocks", "out_outer", "out_inner", "out_row",
        "tile_outer", "tile_inner", "tile_row", "lse_outer", "lse_inner", "lse_row",
        "tile_lse_outer", "tile_lse_inner", "tile_lse_row",
    ]
)  # fmt: skip
def _merge_kernel(
    out, lse, tile_out, tile_lse, inner, rows, row_blocks,
    out_outer, out_inner, out_row, tile_outer, tile_inner, tile_row,
    lse_outer, lse_inner, lse_row, tile_lse_outer, tile_lse_inner, tile_lse_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    valid = row < rows
    where = valid[:, None] & (dim < HEAD_DIM)[None, :]
    lse_at = lse + a * lse_outer + b * lse_inner + row * lse_row
    out_at = _rows_at(out, a, b, row, dim, out_outer, out_inner, out_row, UNIT)
    tile_lse_at = tile_lse + a * tile_lse_outer + b * tile_lse_inner + row * tile_lse_row
    tile_at = _rows_at(tile_out, a, b, row, dim, tile_outer, tile_inner, tile_row, UNIT)
    new_lse = tl.load(tile_lse_at, mask=valid, other=-float("inf"))
    new = tl.load(tile_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        old_lse = tl.load(lse_at, mask=valid, other=-float("inf"))
        old = tl.load(out_at, mask=where, other=0.0).to(tl.float32)
        # Where one side has seen no key the other stands as it is; (-inf) - (-inf) never happens.
        nothing_new = new_lse == -float("inf")
        nothing_old = old_lse == -float("inf")
        difference = tl.where(nothing_new, 0.0, new_lse) - tl.where(nothing_old, 0.0, old_lse)
        weight = tl.where(nothing_new, 0.0, _sigmoid(difference))
        larger = tl.maximum(new_lse, old_lse)
        both = larger + tl.log(1.0 + tl.exp(-tl.abs(difference)))
        new_lse = tl.where(nothing_new | nothing_old, larger, both)
        merged = old + weight[:, None] * (new - old)
        new = tl.where(nothing_old[:, None], tl.where(nothing_new[:, None], old, new), merged)
        # Several warps may load the lse of one row, one stores it: all loads come first.
        tl.debug_barrier()
    tl.store(out_at, new.to(out.dtype.element_ty), mask=where)
    tl.store(lse_at, new_lse, mask=valid)


@triton.jit(
    do_not_specialize=[
        "inner", "rows", "row_blocks", "total_outer", "total_inner", "total_row",
        "part_outer", "part_inner", "part_row",
    ]
)  # fmt: skip
def _add_kernel(
    total, part, second_total, second_part, third_total, third_part, inner, rows, row_blocks,
    total_outer, total_inner, total_row, part_outer, part_inner, part_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 1:
        total, part = second_total, second_part
    if which == 2:
        total, part = third_total, third_part
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    where = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    at = _rows_at(total, a, b, row, dim, total_outer, total_inner, total_row, UNIT)
    part_at = _rows_at(part, a, b, row, dim, part_outer, part_inner, part_row, UNIT)
    new = tl.load(part_at, mask=where, other=0.0).to(tl.float32)
    if not STORE:
        new += tl.load(at, mask=where, other=0.0).to(tl.float32)
    tl.store(at, new.to(total.dtype.element_ty), mask=where)


@triton.jit(
    do_not_specialize=[
        "inner", "rows", "row_blocks", "dout_outer", "dout_inner", "dout_row",
        "out_outer", "out_inner", "out_row", "delta_outer", "delta_inner", "delta_row",
    ]
)  # fmt: skip
def _delta_kernel(
    dout, out, delta, inner, rows, row_blocks,
    dout_outer, dout_inner, dout_row, out_outer, out_inner, out_row,
    delta_outer, delta_inner, delta_row,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    a, b, row = _place(inner, row_blocks, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    where = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    dout_at = _rows_at(dout, a, b, row, dim, dout_outer, dout_inner, dout_row, UNIT)
    out_at = _rows_at(out, a, b, row, dim, out_outer, out_inner, out_row, UNIT)
    x = tl.load(dout_at, mask=where, other=0.0).to(tl.float32)
    y = tl.load(out_at, mask=where, other=0.0).to(tl.float32)
    delta_at = delta + a * delta_outer + b * delta_inner + row * delta_row
    tl.store(delta_at, tl.sum(x * y, 1), mask=row < rows)


def merge_rows(
    out: torch.Tensor,
    lse: torch.Tensor,
    tile_out: torch.Tensor,
    tile_lse: torch.Tensor,
    *,
    store: bool,
) -> None:
    """Merge a tile's result into `out` and `lse`, in place: `engine.merge_` in one kernel.

    Args:
        out: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        lse: (outer, inner, rows) view, float32, natural log; -inf where nothing has been seen yet.
        tile_out: (outer, inner, rows, head_dim), head_dim contiguous.
        tile_lse: (outer, inner, rows), float32.
        store: whether to write the tile's result instead, without reading `out` and `lse`.
    """
    of_rows = out.stride(), tile_out.stride()
    launch = _launch_of(out.shape, of_rows, (lse.stride(), tile_lse.stride()), STORE=store)
    _launch_merge(launch.grid, (out, lse, tile_out, tile_lse), *launch[1:])


def add_rows(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, store: bool) -> None:
    """Add each part to its total in float32, in place; up to three that are alike share a launch.

    Args:
        totals: (outer, inner, rows, head_dim) views, any floating dtype but float64; disjoint.
        parts: views of the same shapes, any floating dtype but float64.
        store: whether to write the parts instead, without reading the totals.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for total, part in zip(totals, parts, strict=True):
        layout = total.shape, total.stride(), part.stride(), total.dtype, part.dtype
        alike.setdefault(layout, []).extend((total, part))
    for (shape, *strides, _, _), pairs in alike.items():
        launch = _launch_of(shape, tuple(strides), STORE=store)
        for start in range(0, len(pairs), 6):
            few = pairs[start : start + 6]
            grid = launch.grid[0], len(few) // 2
            few += few[:2] * (3 - grid[1])  # not touched: there is no program for them
            _launch_add(grid, few, *launch[1:])


def row_sums(dout: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> None:
    """Write ``delta = rowsum(dout * out)``, computed in float32.

    Args:
        dout: (outer, inner, rows, head_dim) view, any floating dtype but float64.
        out: view of the same shape, any floating dtype but float64.
        delta: (outer, inner, rows) view, float32.
    """
    launch = _launch_of(out.shape, (dout.stride(), out.stride()), (delta.stride(),))
    _launch_delta(launch.grid, (dout, out, delta), *launch[1:])


_launch_merge, _launch_add, _launch_delta = map(
    Launcher, (_merge_kernel, _add_kernel, _delta_kernel)
)


@lru_cache(maxsize=4096)  # of about 2 KiB: 8 MiB in all
def _launch_of(
    shape: torch.Size,
    of_rows: tuple[tuple[int, ...], ...],
    of_sums: tuple[tuple[int, ...], ...] = (),
    **options: bool,
) -> KernelLaunch:
    """How to launch a kernel that goes over all rows of views of this shape.

    Worked out once for a layout: launches are short, and many in a call.

    Args:
        shape: (outer, inner, rows, head_dim).
        of_rows: strides of such views.
        of_sums: strides of views without head_dim.
        options: what else the kernel is compiled for.
    """
    outer, inner, rows, head_dim = shape
    launch = row_launch((outer * inner, 1), (inner,), rows, head_dim, of_rows, **options)
    return launch._replace(numbers=(*launch.numbers, *chain.from_iterable(of_sums)))


@triton.jit
def _place_by_index(
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
    batch, row, valid, where = _place_by_index(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
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
    batch, row, valid, where = _place_by_index(rows, row_blocks, BLOCK_ROWS, HEAD_DIM, BLOCK_DIM)
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
    launch = _launch_of_by_index(sums.shape, slots.stride(), sums.stride())
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
    launch = _launch_of_by_index(shape, *strides, packed.stride(), **options)
    tables = [positions if x is None else x for x in (positions, heads, slots)]
    _launch_index(launch.grid, (*pair, packed, *tables), *launch[1:])


@lru_cache(maxsize=1024)
def _launch_of_by_index(
    packed: torch.Size, *strides: tuple[int, ...], **options: bool
) -> KernelLaunch:
    """Worked out once for a layout: launches are short, and the layers of a model are alike."""
    pair, batch, rows, head_dim = packed
    return row_launch((batch, pair), (), rows, head_dim, strides, **options)
