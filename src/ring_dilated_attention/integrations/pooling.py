"""The pooled rows of a sharded sequence, the same on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange import Exchange, all_gather, settle, untraced
from ..layout import SequenceLayout


class Pool(NamedTuple):
    """What a model reads of the rows of a sequence.

    Attributes:
        first: whether it reads the row of position 0.
        mean: whether it reads the mean of the rows.
        skips_first: whether that mean leaves position 0 out.
    """

    first: bool
    mean: bool
    skips_first: bool


@untraced
def pooled(name: str, ends: Exchange, layout: SequenceLayout, hidden: Tensor, pool: Pool) -> Tensor:
    """What a model reads of the rows that all ranks hold, as a sequence of one or two rows.

    The gradient of a row is the sum of all ranks' gradients of it.

    Args:
        name: of the call, for messages.
        ends: this rank's end of the group.
        layout: which positions each rank holds.
        hidden: this rank's rows, (batch, local_sequence, embed_dim).
        pool: what is read.

    Returns:
        (batch, 1 or 2, embed_dim), the row of position 0 before the mean; the same bits on every
        rank, in the dtype of `hidden`.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    at = _row_of_first(layout, ends.rank)
    none = hidden[:, :0]
    rows = []
    if pool.first:
        row = none if at is None else hidden[:, at : at + 1]
        rows.append(row.sum(1, keepdim=True, dtype=wide))  # of no rows: 0, with a gradient
    if pool.mean:
        total = hidden.sum(1, keepdim=True, dtype=wide)
        if pool.skips_first and at is not None:
            kept = torch.cat([hidden[:, :at], hidden[:, at + 1 :]], 1) if at else hidden[:, 1:]
            total = kept.sum(1, keepdim=True, dtype=wide)
        rows.append(total / (layout.length - pool.skips_first))
    total = _SumOverRanks.apply(torch.cat(rows, 1), ends, name)  # type: ignore[no-untyped-call]
    assert isinstance(total, Tensor)
    return total.to(hidden.dtype)


def _row_of_first(layout: SequenceLayout, rank: int) -> int | None:
    """The local row of position 0; None where another rank holds it."""
    first = layout.pieces[0]
    return first.local if first.rank == rank else None


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks on every rank; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ends: Exchange, name: str) -> Tensor:
        with ends.calls.enter(name, "forward") as scope:
            settle(scope, ends, part.device)
            total = _total(ends, part)
        ctx.ends, ctx.of, ctx.number = ends, name, scope.call.number  # name() is that of the node
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ends = ctx.ends
        with ends.calls.enter(ctx.of, "backward", ctx.number) as scope:
            settle(scope, ends, gradient.device)
            return _total(ends, gradient), None, None


def _total(ends: Exchange, part: Tensor) -> Tensor:
    """The sum over ranks, added in their order on each, so that its bits are the same."""
    total, *others = all_gather(ends, part)
    for other in others:
        total += other
    return total
