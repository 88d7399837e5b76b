"""Zero-copy views: the rows of a tile as (batch, heads, rows, ...) strided views.

In a (batch, sequence, heads, head_dim) tensor with strides (Sb, Sn, Sh, 1) the rows of a tile are
evenly spaced in batch entry, segment, head and row. Kernels take four dimensions, the last two of
which are rows and head_dim. A `Block` is what one kernel call can take: its first two dimensions
are the longest evenly spaced axes of a tile, and it stands at one point of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple, TypeAlias

import torch

from ..pattern import pairs_of
from ..plan import Rows, Tile
from ..tiles import ALIGNMENT, Selection, reads_aligned_rows, reads_separate_rows

MOST_PROGRAMS = 65_535
"""Limit of a CUDA grid in its second and third axis, which kernels lay along segments and heads."""


Place: TypeAlias = tuple[int, ...]
"""(batch, row, head) of a query and of a key: six numbers; or steps from one place to another."""


class Axis(NamedTuple):
    """`size` evenly spaced copies of something, with the step between them."""

    size: int
    step: Place


_SINGLE = Axis(1, (0,) * 6)


def _ahead(place: Place, step: Place, count: int) -> Place:
    """The place `count` steps on."""
    return tuple(a + count * b for a, b in zip(place, step, strict=True))


class Placement(NamedTuple):
    """Size, stride and offset of a view, as `as_strided` takes them."""

    size: tuple[int, ...]  # the shape of the view
    stride: tuple[int, ...]  # its strides
    offset: int  # its first element, counted from the tensor's

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class Block(NamedTuple):
    """Part of a tile, or of several equal ones, that one kernel call can take."""

    member: int  # which of the query heads of a KV head it computes; 0 of all of them
    group: int  # how many of them: one, or all
    is_causal: bool  # row i sees keys 0 to i
    band: tuple[int, int] | None  # as of a `Tile`
    outer: Axis  # its first dimension
    inner: Axis  # its second dimension
    start: Place  # the first query row and key row
    queries: Rows  # rows, of which only `length` and `stride` matter here
    keys: Rows  # rows, of which only `length` and `stride` matter here

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs computed."""
        of_one = pairs_of(self.queries.length, self.keys.length, self.is_causal, self.band)
        return self.outer.size * self.inner.size * self.group * of_one

    @property
    def rows(self) -> int:
        """Number of query rows or of key rows, whichever is larger."""
        longest = max(self.queries.length * self.group, self.keys.length)
        return self.outer.size * self.inner.size * longest

    def place_queries(self, tensor: torch.Tensor, *, rows_first: bool = False) -> Placement:
        """Where its query rows are in tensors like this (batch, local_sequence, heads, ...).

        As (outer, inner, rows, ...), or (outer, rows, inner, ...) with `rows_first`.
        """
        found = self._place(tensor, slice(3), self.queries, rows_first)
        if self.group == 1:
            return found
        # Heads are the second dimension of the block, and side by side in the tensor.
        dim = 2 if rows_first else 1
        sizes, strides = list(found.size), list(found.stride)
        sizes[dim], strides[dim] = self.inner.size * self.group, tensor.stride(2)
        return Placement(tuple(sizes), tuple(strides), found.offset)

    def place_keys(self, tensor: torch.Tensor, *, rows_first: bool = False) -> Placement:
        """The same of key rows: (batch, local_sequence, kv_heads, ...), or `by_slot`."""
        return self._place(tensor, slice(3, None), self.keys, rows_first)

    def _place(self, tensor: torch.Tensor, side: slice, rows: Rows, rows_first: bool) -> Placement:
        batch, row, head, *rest = tensor.stride()

        def elements(place: Place) -> int:
            entries, rows, heads = place[side]
            return entries * batch + rows * row + heads * head

        # The stride of a single element does not matter, but kernels may take 0 for a broadcast,
        # and a step that is never made may be longer than an address.
        outer, inner = (
            elements(axis.step) if axis.size > 1 else batch for axis in (self.outer, self.inner)
        )
        row_stride = rows.stride * row if rows.length > 1 else row
        outer_size, inner_size, last = self.outer.size, self.inner.size, tensor.shape[3:]
        offset = elements(self.start)
        if rows_first:
            size = outer_size, rows.length, inner_size, *last
            return Placement(size, (outer, row_stride, inner, *rest), offset)
        size = outer_size, inner_size, rows.length, *last
        return Placement(size, (outer, inner, row_stride, *rest), offset)

    def slices(self, most_rows: float) -> Iterator[Block]:
        """Cut it along its longer axis, then the other, into blocks of at most `most_rows` rows.

        A single segment of a single head is the smallest block. No axis is longer than a CUDA grid
        may be, whatever `most_rows` is.
        """
        cuts_outer = self.outer.size >= self.inner.size
        axis = self.outer if cuts_outer else self.inner
        if axis.size == 1 or (self.rows <= most_rows and axis.size <= MOST_PROGRAMS):
            yield self
            return
        largest = max(1, int(min(most_rows * axis.size / self.rows, MOST_PROGRAMS)))
        count = -(-axis.size // largest)
        for start, stop in pairwise(axis.size * i // count for i in range(count + 1)):
            size = axis._replace(size=stop - start)
            part = self._replace(
                outer=size if cuts_outer else self.outer,
                inner=self.inner if cuts_outer else size,
                start=_ahead(self.start, axis.step, start),
            )
            yield from part.slices(most_rows)


class Family(NamedTuple):
    """Alike tiles whose starts are evenly spaced, as those of heads that repeat offsets are."""

    tiles: tuple[Tile, ...]  # the tiles
    axis: Axis  # the axis over them; its heads are KV heads

    def blocks(self, batch: int, group: int, *, grouped: bool = False) -> Iterator[Block]:
        """Cut the tiles into as few blocks as views allow; `group`: query heads per KV head.

        Blocks of one member of the query heads of a KV head follow those of another. With `grouped`
        a block has all members where all heads have the same query rows.
        """
        tile, (_, row, head, _, key_row, key_head) = self.tiles[0], self.axis.step
        q, k, step = tile.queries, tile.keys, tile.heads.step
        axes = [
            Axis(size, place)
            for size, place in (
                (batch, (1, 0, 0, 1, 0, 0)),
                (tile.segments, (0, q.segment_stride, 0, 0, k.segment_stride, 0)),
                (self.axis.size, (0, row, head * group, 0, key_row, key_head)),
                (len(tile.heads), (0, q.head_stride, step * group, 0, k.head_stride, step)),
            )
            if size > 1
        ]
        first = tile.heads.start
        if grouped and group > 1 and q.head_stride == 0 and step == 1:
            inner = Axis(len(tile.heads), (0, 0, group, 0, k.head_stride, 1))
            others = _merge(axes[: len(axes) - (inner.size > 1)])
            outer = max(others, key=lambda axis: axis.size, default=_SINGLE)
            looped = [axis for axis in others if axis is not outer]
            members, held = range(1), group
        else:
            axes = _merge(axes)
            kept = sorted(range(len(axes)), key=lambda i: -axes[i].size)[:2]
            outer, inner = ([axes[i] for i in sorted(kept)] + [_SINGLE, _SINGLE])[:2]
            looped = [x for i, x in enumerate(axes) if i not in kept]
            members, held = range(group), 1
        for member, *index in product(members, *(range(axis.size) for axis in looped)):
            start: Place = (0, q.start, first * group + member, 0, k.start, first)
            for axis, i in zip(looped, index, strict=True):
                start = _ahead(start, axis.step, i)
            yield Block(member, held, tile.is_causal, tile.band, outer, inner, start, q, k)


def families(tiles: Sequence[Tile]) -> Iterator[Family]:
    """Sort the tiles of a `TileGroup` into families."""
    by_shape: dict[tuple[object, ...], list[Tile]] = {}
    for tile in tiles:
        branch, heads, segments, is_causal, queries, keys, band = tile
        shape = branch, len(heads), heads.step, segments, is_causal, band, queries[1:], keys[1:]
        by_shape.setdefault(shape, []).append(tile)
    for alike in by_shape.values():
        run, axis = [alike[0]], _SINGLE
        for tile in alike[1:]:
            head = tile.heads.start - run[-1].heads.start
            row = tile.queries.start - run[-1].queries.start
            step: Place = (0, row, head, 0, tile.keys.start - run[-1].keys.start, head)
            # A view cannot step backwards.
            if min(step) >= 0 and (len(run) == 1 or axis.step == step):
                run.append(tile)
                axis = Axis(len(run), step)
                continue
            yield Family(tuple(run), axis)
            run, axis = [tile], _SINGLE
        yield Family(tuple(run), axis)


def _merge(axes: list[Axis]) -> list[Axis]:
    """Join axes of which one continues the other."""
    merged: list[Axis] = []
    for axis in axes:
        if merged and merged[-1].step == tuple(axis.size * x for x in axis.step):
            merged[-1] = axis._replace(size=merged[-1].size * axis.size)
        else:
            merged.append(axis)
    return merged


def readable(tensor: torch.Tensor, selection: Selection | None = None) -> torch.Tensor:
    """The tensor itself where views of it can be read, else a copy.

    Strides may be anything: 0 where a dimension is expanded, small where rows overlap, odd where a
    dimension has one element. An expanded tensor is copied at its full size, unless all tiles are
    computed by ``backend="triton"`` or ``"eager"``.

    Args:
        tensor: (batch, sequence, heads, head_dim).
        selection: what is to read it; None: any of the device's back ends.

    Returns:
        The same values. The stride of a dimension of one element is one that the dimension could
        have with more.
    """
    _, length, heads, head_dim = tensor.shape
    batch_stride, row_stride, head_stride, element_stride = tensor.stride()
    # What most calls have, parts of a joint tensor included, in less time than `reads` takes.
    if (
        element_stride == 1
        and head_stride == head_dim
        and row_stride >= heads * head_dim
        and batch_stride >= length * row_stride
    ):
        strides = (batch_stride | row_stride | head_dim) * tensor.element_size()
        if not tensor.is_cuda or (tensor.data_ptr() | strides) % ALIGNMENT == 0:
            return tensor
    if 1 in tensor.shape:
        dense = length * heads * head_dim, heads * head_dim, head_dim, 1
        given = zip(tensor.shape, tensor.stride(), dense, strict=True)
        tensor = tensor.as_strided(
            tensor.shape, [plain if size == 1 else stride for size, stride, plain in given]
        )
    strictest = reads_aligned_rows if tensor.is_cuda else reads_separate_rows
    reads = strictest if selection is None else selection.reads
    if reads(tensor) or not tensor.numel():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def readable_in_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    selection: Selection,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of backward, laid out such that tiles can be views of them: see `readable`.

    Returns:
        The same values in the same order; dout and out are contiguous.
    """
    if selection.backend is not None and selection.backend.wants_one_layout:
        query = query.contiguous()  # one copy, in place of three of each tile
    query, key, value = (readable(x, selection) for x in (query, key, value))
    dout, out = (readable(x.contiguous(), selection) for x in (dout, out))
    return dout, query, key, value, out


def by_slot(slots: torch.Tensor) -> torch.Tensor:
    """Slots (batch, slots, head_dim) as a tensor that `Block.place_keys` can index.

    A slot belongs to one head already, so the head dimension gets stride 0.
    """
    batch, count, head_dim = slots.shape
    stride = slots.stride()
    return slots.as_strided((batch, count, 1, head_dim), (stride[0], stride[1], 0, stride[2]))
