"""On the way to attention: ranks agree on arguments, padding masks become lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..documents import refuse_in_traces
from ..exchange import (
    Exchange,
    Group,
    Shared,
    agree,
    all_gather,
    exchange_named,
    group_name,
    refuse_capture,
    resolve_exchange,
    settle,
    together,
    untraced,
)
from ..layout import SequenceLayout
from ..pattern import in_brief, shape_in_brief
from .derivatives import LIBRARY, define, implement

AGREED = define("agreed(Tensor tensor, str name, str group) -> Tensor")
"""(tensor, name, group) -> a copy of the tensor, once every rank of the group has called the module
`name` with arguments that fit. What follows depends on the copy, so that a graph neither drops the
agreement nor moves it."""


def _agreed(tensor: torch.Tensor, name: str, group: str) -> torch.Tensor:
    agree(name, exchange_named(group), {}, None, tensor.device)
    return tensor.clone()


implement(AGREED, _agreed, lambda tensor, name, group: torch.empty_like(tensor))
torch.library.register_autograd(AGREED, lambda ctx, grad: (grad, None, None), lib=LIBRARY)

T = TypeVar("T")


def telling_ranks(group: Group, function: Callable[..., T], rows: object, *more: Any) -> T:
    """Call a function on the way to `dilated_attention`; the ranks of `group` are told if it fails.

    A rank that raised alone would leave the others waiting for it, and its next call would be
    taken for this one. Not for functions in which ranks of the group wait for each other. Where
    torch.compile traces, the function is called as it is.
    """
    if torch.compiler.is_compiling():
        return function(rows, *more)
    try:
        return function(rows, *more)
    except Exception as failure:
        tell_ranks(failure, group, rows)
        raise


def tell_ranks(failure: Exception, group: Group, rows: object) -> None:
    """Raise a failure on all ranks, whose next call is that of `dilated_attention`.

    On the others it is a `ValueError` that names this rank; `rows` is an argument, a tensor or not.
    While torch.compile traces, nothing is told: what is not compiled then runs again.
    """
    if not torch.compiler.is_compiling():
        device = rows.device if isinstance(rows, torch.Tensor) else torch.device("cpu")
        _refuse(failure, "dilated_attention", group, device)


@untraced
def _refuse(failure: Exception, name: str, group: Group, device: torch.device) -> None:
    agree(name, exchange_named(group_name(group)), None, failure, device)


def agreed(
    tensor: torch.Tensor | None,
    name: str,
    group: Group,
    failure: Exception | None,
    device: torch.device,
) -> torch.Tensor:
    """Raise on every rank unless the arguments of all ranks fit; see `exchange.agree`.

    Args:
        tensor: a small tensor that all that follows depends on; None if this rank refused.
        name: the module that was called, for messages.
        group: the ranks that share each sequence.
        failure: why this rank refused its arguments; None if it did not. Under torch.compile the
            ranks are told outside of the graph: with ``fullgraph=True`` compilation fails.
        device: of the arguments.

    Returns:
        The tensor, or a copy of it.
    """
    if failure is not None:
        _refuse(failure, name, group, device)
    elif not torch.compiler.is_compiling():
        agree(name, exchange_named(group_name(group)), {}, None, device)
    elif tensor is not None and group is not None:
        tensor = AGREED(tensor, name, group_name(group))
    assert tensor is not None
    return tensor


@untraced
def sum_over_ranks(part: torch.Tensor, name: str, group: Group) -> torch.Tensor:
    """The sum over ranks, with the same bits on every rank; its gradient is the sum of theirs.

    Args:
        part: this rank's; a `ValueError` on every rank unless all have the same shape.
        name: of the module that was called, for messages.
        group: the ranks; or this rank's end of it.
    """
    total: torch.Tensor = _SumOverRanks.apply(part, name, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, name: str, group: Group) -> torch.Tensor:
        ctx.name, ctx.ends = name, resolve_exchange(group)
        total, ctx.number = _total(part, name, ctx.ends, "forward")
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _total(gradient, ctx.name, ctx.ends, "backward", ctx.number)[0], None, None


def _total(
    part: torch.Tensor, name: str, ends: Exchange, direction: str, number: int = 0
) -> tuple[torch.Tensor, int]:
    """The sum, and the number of the call."""
    with ends.calls.enter(name, direction, number) as scope:
        settle(scope, ends, part.device, Shared.of({"shape": tuple(part.shape)}))
        total, *others = all_gather(ends, part)  # added in the order of ranks
    for other in others:
        total += other
    return total, scope.call.number


# --- Padding masks

LENGTHS = define("lengths_of_mask(Tensor mask, SymInt[] layout, str group) -> Tensor")
"""(mask, layout, group) -> lengths: mask boolean (batch, local_sequence), True where a position is
padding; layout and group as in `resolve.FlatOptions`; lengths int64 (batch,) on the CPU, the same
on every rank. It waits for the mask. torch.compile makes one call of those of all layers."""


def _lengths(mask: torch.Tensor, layout: Sequence[int], group: str) -> torch.Tensor:
    ends = exchange_named(group)
    refuse_in_graphs("key_padding_mask", "pass lengths")
    refuse_capture("dilated_attention", ends, mask.device)
    given = SequenceLayout.from_flat(tuple(layout)) if layout else None
    words = {"batch": mask.shape[0], "layout": str(given or f"{mask.shape[1]} positions")}
    with ends.calls.enter("dilated_attention", "key_padding_mask") as scope:
        with together(scope, ends, mask.device) as shared:
            if given is not None:
                held = f"its key_padding_mask has a local sequence length of {mask.shape[1]}"
                given.check_shard(ends.rank, ends.world_size, mask.shape[1], held)
            shared.on(words)
        found = lengths_of_mask(mask, ends, given, scope)
    return torch.tensor(found, dtype=torch.int64)


implement(
    LENGTHS,
    _lengths,
    lambda mask, layout, group: torch.empty(len(mask), dtype=torch.int64, device="cpu"),
)


def check_padding_mask(mask: Any, batch: int, local_length: int, device: torch.device) -> None:
    """Raise a `TypeError` or `ValueError` unless this can be the shard of a padding mask."""
    refuse_in_traces("key_padding_mask")
    is_tensor = isinstance(mask, torch.Tensor)
    if not is_tensor or mask.is_nested or mask.layout != torch.strided:
        raise TypeError(f"key_padding_mask must be a dense tensor, got {in_brief(mask)}")
    if mask.dtype != torch.bool:
        raise TypeError(
            "key_padding_mask must be boolean, True where a position is padding; got "
            f"{mask.dtype}: pass mask != 0 if padding is what is not 0, as in torchscale, and "
            "mask == 0 if it is what is 0, as in transformers"
        )
    if mask.shape != (batch, local_length):
        raise ValueError(
            f"key_padding_mask must have shape (batch, local_sequence), {(batch, local_length)}; "
            f"got {shape_in_brief(mask)}"
        )
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on {device}; got {mask.device}")


_REFUSAL = (
    "key_padding_mask must be a right padding (dilated attention has no other masks): {}. True "
    "means padding: if the mask is True at valid positions, pass ~mask"
)


@untraced
def lengths_of_mask(
    mask: torch.Tensor,
    ends: Exchange,
    layout: SequenceLayout | None,
    scope: Any,
    refusal: str = _REFUSAL,
) -> list[int]:
    """The lengths that a right padding stands for: one small collective, and a wait for `mask`.

    Args:
        mask: this rank's shard, boolean (batch, local_sequence), True where a position is padding;
            batch and the kind of layout are the same on every rank.
        ends: this rank's end of the group.
        layout: which rank holds which positions; None: contiguous equal shards.
        scope: of the call that this is part of, as `Calls.enter` returns it.
        refusal: the message for a mask that is no right padding, with ``{}`` for where; a
            `ValueError` on every rank.

    Returns:
        The number of valid positions of each row of the batch, the same on every rank.
    """
    batch, length = mask.shape
    if layout is None:
        total, positions = length * ends.world_size, torch.arange(length, device=mask.device)
        positions += ends.rank * length
    else:
        total, positions = layout.length, layout.positions(ends.rank, device=mask.device)
    # Of each row: one position behind the last valid one, and minus the first padded one.
    column = torch.zeros(batch, 1, dtype=torch.int64, device=mask.device)
    stops = torch.cat((torch.where(mask, 0, positions + 1), column), 1).amax(1)
    padded = torch.cat((torch.where(mask, -positions, -total), column - total), 1).amax(1)
    found = torch.tensor(ends.share(torch.cat((stops, padded)).tolist())).amax(0).tolist()
    lengths, paddings = found[:batch], [-x for x in found[batch:]]
    for row, (stop, first) in enumerate(zip(lengths, paddings, strict=True)):
        if first < stop:
            scope.in_step = True  # every rank has found the same
            where = f"in row {row}, position {first} is padding and position {stop - 1} is not"
            raise ValueError(refusal.format(where))
    return lengths


KNOWN_LENGTHS: Any = WeakTensorKeyDictionary()
"""By mask: its version, the layout, the lengths, and the layers that have asked for them."""


def padding(
    caller: object,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    layout: SequenceLayout | None,
    group: Group,
) -> dict[str, Any]:
    """A mask as a layer hands it to `dilated_attention`, or the lengths that it stands for.

    Reading a mask makes the host wait for everything queued on the device, and a model gives all
    its layers the same mask: the first layer reads it for those that follow. torch counts most
    writes to a tensor, but not all (a broadcast, or one through `Tensor.data`). So a mask is read
    again when a layer comes again, or after a backward.

    Args:
        caller: the layer.
        mask: None, or what `dilated_attention` takes as `key_padding_mask`.
        query: of the call, as are `layout` and `group`.
        layout: see `query`.
        group: see `query`.

    Returns:
        The argument by its name.
    """
    given = {"key_padding_mask": mask}
    # Of several ranks, some might know and the others ask. On the CPU there is nothing to wait for.
    if mask is None or torch.compiler.is_compiling() or not query.is_cuda:
        return given
    # Nor does a rank refuse a mask by itself: `dilated_attention` tells the others.
    ends = exchange_named(group_name(group))
    if ends.world_size > 1 or (layout and layout.local_length(0) != query.shape[1]):
        return given
    check_padding_mask(mask, query.shape[0], query.shape[1], query.device)
    refuse_in_graphs("key_padding_mask", "pass lengths")
    counted = not mask.is_inference()  # whether torch counts writes to it
    kept: Any = KNOWN_LENGTHS.get(mask) if counted else None
    if kept is None or kept[:2] != (mask._version, layout) or id(caller) in kept[3]:
        with ends.calls.enter("dilated_attention", "key_padding_mask") as scope:
            lengths = lengths_of_mask(mask, ends, layout, scope)
        kept = mask._version if counted else 0, layout, lengths, set()
        if counted:
            KNOWN_LENGTHS[mask] = kept
    kept[3].add(id(caller))
    return {"lengths": kept[2]}


def refuse_in_graphs(what: str, instead: str) -> None:
    """Raise a `RuntimeError` in a CUDA graph, every replay of which would use the same numbers."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} cannot be captured in a CUDA graph: every replay would use the numbers of the "
            f"capture; {instead}, and capture one graph for each of them"
        )
