"""Tensors that lie in memory in every way that callers have them. For tests and `rda verify`.

An expanded view, or one of overlapping windows, repeats elements, so there are two steps:
`ViewKind.fit` makes numbers that a view of a kind can hold, and `ViewKind.view` makes a view that
holds given numbers, in a larger storage that is NaN everywhere else. `view` may be called for a
part of what was fitted.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch

BATCH, SEQUENCE, HEADS, HEAD_DIM = range(4)


class ViewKind(NamedTuple):
    """How a tensor (batch, sequence, heads, head_dim) lies in memory.

    Attributes:
        expanded: dimensions with stride 0: all that is along them is the same.
        window: a dimension each of whose rows begins one element behind the row before it, so that
            rows overlap; None: there is none.
        order: the dimensions, from that with the largest stride to that with the smallest.
        steps: of each dimension of the storage, every how many-th element is the tensor's.
        offset: elements of the storage before the tensor's first.
    """

    expanded: tuple[int, ...] = ()
    window: int | None = None
    order: tuple[int, ...] = (BATCH, SEQUENCE, HEADS, HEAD_DIM)
    steps: tuple[int, ...] = (1, 1, 1, 1)
    offset: int = 0

    @property
    def repeats_positions(self) -> bool:
        """Whether positions, or rows of the batch, share elements."""
        return BATCH in self.expanded or SEQUENCE in self.expanded or self.window == SEQUENCE

    def fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers of the same shape that views of this kind can hold, taken from `tensor`."""
        if self.window is not None and tensor.numel():
            # Row i holds the elements from i on of one long row: the first, and the others' ends.
            rows = tensor.movedim(self.window, 0)
            long = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1)
            windows = long.unfold(-1, tensor.shape[-1], 1)
            tensor = windows.movedim(-2, self.window)
        for dim in self.expanded:
            if tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, 1).expand_as(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this kind that holds what `tensor` holds, which is such that one can.

        Rows overlap only if those of `tensor` do, which a shard of several ranges is not made for.
        """
        shape = list(tensor.shape)
        if not tensor.numel():
            return tensor
        kept = [1 if dim in self.expanded else size for dim, size in enumerate(shape)]
        values = tensor[tuple(slice(size) for size in kept)]
        window = self.window if self.window not in self.expanded else None
        if window is not None and not _overlaps(values, window):
            window = None
        if window is not None:
            rows = values.movedim(window, 0)
            values = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1).unsqueeze(window)
        strides, room = [0] * 4, 1
        for dim in reversed(self.order):
            strides[dim] = room * self.steps[dim]
            room *= values.shape[dim] * self.steps[dim]
        filler = float("nan") if tensor.is_floating_point() else -1
        storage = tensor.new_full((self.offset + room + 1,), filler)
        storage.as_strided(values.shape, strides, self.offset).copy_(values)
        if window is not None:
            strides[window] = strides[HEAD_DIM]
        for dim in self.expanded:
            strides[dim] = 0
        view = storage.as_strided(shape, strides, self.offset)
        assert torch.equal(view.nan_to_num(), tensor.nan_to_num()), (self, "cannot hold the tensor")
        return view


def _overlaps(tensor: torch.Tensor, window: int) -> bool:
    """Whether each row along `window` holds the row before it, moved on by one element."""
    rows = tensor.nan_to_num().movedim(window, 0)
    return all(torch.equal(a[..., 1:], b[..., :-1]) for a, b in pairwise(rows))


KINDS = {
    "contiguous": ViewKind(),
    "expanded batch": ViewKind(expanded=(BATCH,)),
    "expanded sequence": ViewKind(expanded=(SEQUENCE,)),
    "expanded heads": ViewKind(expanded=(HEADS,)),
    "expanded head_dim": ViewKind(expanded=(HEAD_DIM,)),
    "one number": ViewKind(expanded=(BATCH, SEQUENCE, HEADS, HEAD_DIM)),
    "heads first": ViewKind(order=(BATCH, HEADS, SEQUENCE, HEAD_DIM), offset=16),
    "sequence first": ViewKind(order=(SEQUENCE, BATCH, HEADS, HEAD_DIM)),
    "head_dim first": ViewKind(order=(BATCH, HEAD_DIM, HEADS, SEQUENCE), offset=3),
    "part of qkv": ViewKind(steps=(1, 3, 1, 1), offset=64),
    "part of a head": ViewKind(steps=(1, 1, 2, 1), offset=8),
    "every other number": ViewKind(steps=(1, 1, 1, 2), offset=1),
    "odd offset": ViewKind(offset=5),
    "windows over the sequence": ViewKind(window=SEQUENCE, offset=2),
    "windows over heads": ViewKind(window=HEADS, offset=7),
    "expanded heads of a transposed tensor": ViewKind(
        expanded=(HEADS,), order=(HEADS, SEQUENCE, BATCH, HEAD_DIM), steps=(2, 1, 1, 1), offset=9
    ),
}
"""Kinds by name."""


def any_kind(random: Random) -> ViewKind:
    """One of `KINDS` half of the time, else a mixture."""
    if random.random() < 0.5:
        return random.choice(list(KINDS.values()))
    order = random.sample(range(4), 4)
    if random.random() < 0.7:  # head_dim is innermost, as most callers have it
        order = [*(dim for dim in order if dim != HEAD_DIM), HEAD_DIM]
    return ViewKind(
        expanded=tuple(dim for dim in range(4) if random.random() < 0.15),
        window=random.choice([None] * 6 + [SEQUENCE, HEADS]),
        order=tuple(order),
        steps=tuple(random.choice([1, 1, 1, 2, 3]) for _ in range(4)),
        offset=random.choice([0, 0, 1, 8, 13]),
    )
