"""Whole tensors to the shards of ranks and back, and batches that must be equal on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import string_at
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..exchange import (
    Exchange,
    Group,
    ProcessGroupExchange,
    all_gather,
    exchange_named,
    group_name,
    place_in,
    resolve_exchange,
    settle,
    together,
    untraced,
)
from ..layout import SequenceLayout
from ..pattern import in_brief
from .averaging import device_for
from .dtensors import is_dtensor

_SAMPLE = 1 << 16
"""Floating values of a tensor that are digested, evenly spaced: embeddings are large, and those of
different sequences differ nearly everywhere. Integers are digested one and all."""

_ADVICE = (
    "All ranks of a group must be given the same whole batch, of which each takes its part: split "
    "data over data-parallel groups only, for example by a DistributedSampler with "
    "num_replicas=data-parallel groups and rank=the index of this rank's group"
)


def check_same_batch(batch: Mapping[str, Any], group: Group) -> None:
    """Raise on every rank unless all ranks of a group were given the same batch.

    A sampler that splits data over all ranks gives the ranks of a group different sequences; their
    shards would then be taken for parts of one sequence. `integrations.transformers.shard_batch`
    checks this by itself; a loop of your own calls this function before it takes the shards.

    What the ranks compare is a digest of shapes, dtypes and values, in one small collective,
    whatever the size of the batch. Integers and bools count one and all; of a floating tensor,
    65,536 evenly spaced values do. Tensors on a GPU are copied to the host for it: compare a batch
    before it is moved there.

    Args:
        batch: the whole batch, by name: tensors of any shape and dtype on any device, arrays of
            numpy, numbers, strings or None, and lists, tuples and dicts of these.
        group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process.

    Raises:
        TypeError: `batch` is no mapping, or holds a DTensor.
        ValueError: batches differ; the message names the entries and the ranks.
        RuntimeError: this is a worker process of a DataLoader, which cannot talk to other ranks.
    """
    with comparing("check_same_batch", resolve_exchange(group)) as compared:
        given: Any = batch
        if not isinstance(given, Mapping):
            raise TypeError(f"batch must be a dict of tensors by name; got {in_brief(given)}")
        compared.update(given)


@contextmanager
def comparing(name: str, ends: Exchange) -> Iterator[dict[str, Any]]:
    """`check_same_batch` in a function of this name: of a dict that the block fills, or raises."""
    from torch.utils.data import get_worker_info  # takes a while to import

    if ends.world_size > 1 and get_worker_info() is not None:
        raise RuntimeError(
            f"{name} was called in a worker process of a DataLoader, which cannot compare its "
            f"batch with that of {ends.world_size} ranks: call it in the training loop, on the "
            "batch that the DataLoader returns"
        )
    batch: dict[str, Any] = {}
    with together(name, ends, torch.device("cpu"), advice=_ADVICE) as agreed:
        if isinstance(ends, ProcessGroupExchange):
            agreed.device = device_for(ends.group, agreed.device)
        yield batch
        tensors = (x for x in batch.values() if isinstance(x, Tensor))
        agreed.device = next((x.device for x in tensors), agreed.device)
        if ends.world_size > 1:
            agreed.on({key: repr(_printable(key, value)) for key, value in batch.items()})


class _Words(str):
    """Text that is printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _printable(name: str, entry: Any) -> Any:
    """An entry whose `repr` tells all of its values: tensors as shape, dtype and a digest."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(entry, numpy.ndarray):
        try:
            entry = torch.from_numpy(entry.copy())  # which may be read-only, or step backwards
        except (TypeError, ValueError):  # of strings, for example
            return entry.tolist()
    if is_dtensor(entry):
        raise TypeError(
            "batch must hold the whole tensors, of which each rank takes its part; "
            f"{name} has a DTensor: compare batches before they are distributed"
        )
    if isinstance(entry, Tensor):
        return _Words(f"{tuple(entry.shape)} {entry.dtype} {_digest(entry)}")
    if isinstance(entry, Mapping):
        return {key: _printable(name, value) for key, value in entry.items()}
    if isinstance(entry, list | tuple):
        return [_printable(name, value) for value in entry]
    return entry


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        flat = flat[:: max(1, -(-len(flat) // _SAMPLE))]
    flat = flat.contiguous().cpu()
    return blake2b(string_at(flat.data_ptr(), flat.nbytes), digest_size=8).hexdigest()


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
    with comparing("shard", ends) as compared:
        leaves = _leaves(buffers, seq_dims)
        found = _layout_of(leaves, layout, world_size)
        dims = ", ".join(f"{name} {dim % tensor.ndim}" for name, tensor, dim in leaves)
        compared.update(layout=_in_words(layout), seq_dims=dims)
        compared.update({name: tensor for name, tensor, _ in leaves})
    shards = iter([found.shard(tensor, rank, dim) for _, tensor, dim in leaves])
    return pytree.tree_map(lambda x: x if x is None else next(shards), buffers)


def unshard(mesh: Group, buffers: Any, seq_dims: Any, layout: SequenceLayout | None = None) -> Any:
    """Gather the shards of all ranks into whole tensors, on every rank: the inverse of `shard`.

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
    with together("unshard", ends, torch.device("cpu")) as agreed:
        leaves = _leaves(buffers, seq_dims)
        agreed.device = leaves[0][1].device
        _check_layout(layout, world_size)
        words = {"layout": _in_words(layout)}  # what must be equal on all ranks
        for name, tensor, dim in leaves:
            shape = list(tensor.shape)
            if layout is not None:
                held = f"and {name} has {shape[dim]} along dimension {dim}"
                layout.check_shard(rank, world_size, shape[dim], held)
                shape[dim] = -1
            elif not shape[dim]:
                raise ValueError(f"{name} has no positions along dimension {dim}; pass the layout")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"unshard returns tensors without a gradient, and {name} requires one: call it "
                    "under torch.no_grad() or pass a detached tensor, and compute losses from "
                    "shards"
                )
            words[name] = f"{tensor.dtype} {shape} {tensor.device.type} {dim % tensor.ndim}"
        agreed.on(words)
    whole = iter([_gathered(ends, tensor.detach(), dim, layout) for _, tensor, dim in leaves])
    return pytree.tree_map(lambda x: x if x is None else next(whole), buffers)


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
        if type(dim) is not int or not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(
                f"the sequence dimension of {name} must be one of its {tensor.ndim}; got "
                f"{in_brief(dim)}"
            )
        leaves.append((name, tensor, dim))
    if not leaves:
        raise ValueError("buffers must hold a tensor; got none")
    return leaves


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


def _in_words(layout: SequenceLayout | None) -> str:
    return f"{layout!r} ({layout.digest[:8]})" if isinstance(layout, SequenceLayout) else "None"


@untraced
def _gathered(ends: Any, tensor: Tensor, dim: int, layout: SequenceLayout | None) -> Tensor:
    """The whole tensor out of all ranks' shards."""
    ranks, shape = ends.world_size, list(tensor.shape)
    if layout is None:
        layout = SequenceLayout.contiguous(shape[dim] * ranks, ranks)
    shapes = []
    for rank in range(ranks):
        shape[dim] = layout.local_length(rank)
        shapes.append(tuple(shape))
    with ends.calls.enter("unshard", "inputs") as scope:
        settle(scope, ends, tensor.device)
        everyone = all_gather(ends, tensor, shapes)
    return layout.unshard(everyone, dim)
