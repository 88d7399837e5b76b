"""Whole tensors to the shards of ranks and back, in one call each: `shard` and `unshard`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..layout import SequenceLayout
from ..pattern import in_brief
from .agreement import Shared, agree, settle
from .names import Group, exchange_named, group_name, place_in
from .same_batch import agree_on_batch
from .untraced import untraced


def shard(mesh: Group, buffers: Any, seq_dims: Any, layout: SequenceLayout | None = None) -> Any:
    """This rank's shards of whole tensors: of inputs, labels, positions, masks in one call.

    It is what `torch.distributed.tensor.experimental.context_parallel` does with its ``buffers``
    and ``buffer_seq_dims``, in the order of a `SequenceLayout` and with results that are returned.
    Labels are shifted before. Ranks compare their whole tensors in one small collective, as
    `check_same_batch` does: a sampler that splits data over the ranks of a group is found here.

    Args:
        mesh: the ranks that share each sequence: a 1-D DeviceMesh (``mesh["sp"]``), a ProcessGroup,
            an `Exchange`, or None for one process.
        buffers: whole tensors, in any nesting of dicts, lists and tuples; None stays None.
        seq_dims: the sequence dimension of each, in the same nesting, or one int for all of them.
        layout: which positions each rank holds; the call takes the same. None: contiguous equal
            shards.

    Returns:
        The shards, in the nesting of `buffers`: views where a rank holds one range, else copies.

    Raises:
        TypeError, ValueError: an argument does not fit, or the ranks have different tensors; on
            every rank.

    Examples:
        >>> batch = {"tokens": torch.arange(6)[None], "position_ids": torch.arange(6)}
        >>> shard(None, batch, {"tokens": 1, "position_ids": 0})["position_ids"].tolist()
        [0, 1, 2, 3, 4, 5]
    """
    rank, world_size = place_in(mesh)
    ends = exchange_named(group_name(mesh))
    leaves: list[tuple[str, Tensor, int]] = []
    found, failure = layout, None
    try:
        leaves = _leaves(buffers, seq_dims)
        found = _layout_of(leaves, layout, world_size)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    batch = {name: tensor for name, tensor, _ in leaves}
    dims = ", ".join(f"{name} {dim % tensor.ndim}" for name, tensor, dim in leaves)
    words = {"layout": _in_words(layout), "seq_dims": dims}
    agree_on_batch("shard", {**words, **batch}, ends, failure)
    assert found is not None
    shards = iter([found.shard(tensor, rank, dim) for _, tensor, dim in leaves])
    return _mapped(buffers, lambda _: next(shards))


def unshard(mesh: Group, buffers: Any, seq_dims: Any, layout: SequenceLayout | None = None) -> Any:
    """Whole tensors out of the shards of all ranks, on every rank: the inverse of `shard`.

    Results have no gradient: it would depend on whether each rank's loss is taken for a part of the
    loss or for all of it. Compute losses from shards.

    Args:
        mesh: the ranks that share each sequence, as for `shard`.
        buffers: this rank's shards, in any nesting of dicts, lists and tuples; None stays None.
        seq_dims: the sequence dimension of each, in the same nesting, or one int for all of them.
        layout: which positions each rank holds. None: contiguous equal shards.

    Returns:
        Whole tensors (copies), in the nesting of `buffers`.

    Raises:
        TypeError, ValueError: an argument does not fit on some rank, or tensors of ranks differ in
            more than their sequence; on every rank.
    """
    rank, world_size = place_in(mesh)
    ends = exchange_named(group_name(mesh))
    leaves: list[tuple[str, Tensor, int]] = []
    failure, device = None, torch.device("cpu")
    try:
        leaves = _leaves(buffers, seq_dims)
        device = leaves[0][1].device
        for name, tensor, dim in leaves:
            _check_shard(name, tensor, dim, layout, rank, world_size)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    words: dict[str, Any] = {name: _kind(x, dim, layout) for name, x, dim in leaves}
    words["layout"] = _in_words(layout)
    agree("unshard", ends, None if failure else words, failure, device)
    whole = iter([_gathered(ends, tensor.detach(), dim, layout) for _, tensor, dim in leaves])
    return _mapped(buffers, lambda _: next(whole))


def _leaves(buffers: Any, seq_dims: Any) -> list[tuple[str, Tensor, int]]:
    """(name, tensor, sequence dimension) of every tensor."""
    named, spec = pytree.tree_flatten_with_path(buffers)
    if isinstance(seq_dims, int):
        dims: list[Any] = [seq_dims] * len(named)
    else:
        dims, of_dims = pytree.tree_flatten(seq_dims)
        if of_dims != spec:
            raise ValueError(
                "seq_dims must be nested as buffers are, with an int for each tensor, or be one "
                f"int for all; got {in_brief(seq_dims)} for {len(named)} buffers"
            )
    leaves = []
    for (path, tensor), dim in zip(named, dims, strict=True):
        name = f"buffers{pytree.keystr(path)}"
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor or None; got {in_brief(tensor)}")
        if (
            isinstance(dim, bool)
            or not isinstance(dim, int)
            or not -tensor.ndim <= dim < tensor.ndim
        ):
            raise ValueError(
                f"the sequence dimension of {name} must be one of its {tensor.ndim}; got "
                f"{in_brief(dim)}"
            )
        leaves.append((name, tensor, dim))
    if not leaves:
        raise ValueError("buffers must hold a tensor; got none")
    return leaves


def _mapped(buffers: Any, function: Any) -> Any:
    return pytree.tree_map(lambda x: x if x is None else function(x), buffers)


def _layout_of(
    leaves: list[tuple[str, Tensor, int]], layout: SequenceLayout | None, world_size: int
) -> SequenceLayout:
    """The layout of whole tensors; raises unless all have its length."""
    _check_layout(layout, world_size)
    first, tensor, dim = leaves[0]
    length = tensor.shape[dim] if layout is None else layout.length
    for name, each, axis in leaves:
        if each.shape[axis] != length:
            whose = f"{first} has" if layout is None else "the layout has"
            raise ValueError(
                f"{whose} {length} positions; {name} has {each.shape[axis]} along dimension {axis}"
            )
    if layout is not None:
        return layout
    if length % world_size:
        raise ValueError(
            f"{length} positions make no equal shards for {world_size} ranks, which layout=None "
            "means: pass a layout, here and to the call, such as "
            f"SequenceLayout.contiguous({length}, {world_size})"
        )
    return SequenceLayout.contiguous(length, world_size)


def _check_layout(layout: Any, world_size: int) -> None:
    if layout is None:
        return
    if not isinstance(layout, SequenceLayout):
        raise TypeError(
            f"layout must be a SequenceLayout or None, got {in_brief(layout)}; "
            "SequenceLayout.from_load_balancer makes one of a load balancer"
        )
    layout.check_ranks(world_size)


def _check_shard(
    name: str,
    tensor: Tensor,
    dim: int,
    layout: SequenceLayout | None,
    rank: int,
    world_size: int,
) -> None:
    _check_layout(layout, world_size)
    if layout is None and not tensor.shape[dim]:
        raise ValueError(f"{name} has no positions along dimension {dim}; pass the layout")
    if layout is not None:
        held = f"and {name} has {tensor.shape[dim]} along dimension {dim}"
        layout.check_shard(rank, world_size, tensor.shape[dim], held)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"unshard returns tensors without a gradient, and {name} requires one: call it under "
            "torch.no_grad() or pass a detached tensor, and compute losses from shards"
        )


def _in_words(layout: SequenceLayout | None) -> str:
    return f"{layout!r} ({layout.digest[:8]})" if isinstance(layout, SequenceLayout) else "None"


def _kind(tensor: Tensor, dim: int, layout: SequenceLayout | None) -> str:
    """What must be equal on all ranks."""
    shape = list(tensor.shape)
    if layout is not None:
        shape[dim] = -1
    return f"{tensor.dtype} {shape} {tensor.device.type} {dim % tensor.ndim}"


@untraced
def _gathered(ends: Any, tensor: Tensor, dim: int, layout: SequenceLayout | None) -> Tensor:
    """The whole tensor out of all ranks' shards: every rank sends its own to each other."""
    tensor, ranks = tensor.contiguous(), ends.world_size
    if layout is None:
        layout = SequenceLayout.contiguous(tensor.shape[dim] * ranks, ranks)
    everyone, pending = {ends.rank: tensor}, []
    with ends.calls.enter("unshard", "inputs") as scope:
        settle(scope, ends, tensor.device, Shared.of({}))
        for step in range(1, ranks):
            to, source = (ends.rank + step) % ranks, (ends.rank - step) % ranks
            shape = list(tensor.shape)
            shape[dim] = layout.local_length(source)
            everyone[source] = tensor.new_empty(shape)
            send = (to, tensor) if tensor.numel() else None
            receive = (source, everyone[source]) if everyone[source].numel() else None
            pending.append(ends.start(send, receive))
        for one in pending:
            one.wait()
    return layout.unshard([everyone[each] for each in range(ranks)], dim)
