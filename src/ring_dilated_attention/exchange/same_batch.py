"""Whether the ranks that share a sequence were given the same batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pattern import in_brief
from .agreement import agree
from .devices import device_for
from .dtensors import is_dtensor
from .groups import ProcessGroupExchange
from .interface import Exchange
from .names import Group, resolve_exchange

_CHUNK = 1 << 20
"""Values that are digested at a time: bounds the temporary memory to a few times 8 MiB."""

_SAMPLE = 1 << 16
"""Floating values of a tensor that are digested, evenly spaced: embeddings are large, and those of
different sequences differ nearly everywhere. Integers are digested one and all."""

_GOLDEN = -7046029254386353131
"""2**64 divided by the golden ratio, odd, as int64: the step of the generator splitmix64."""

_MIX = -4658895280553007687, -7723592293110705685
"""The multipliers of splitmix64 (Steele et al. 2014), as int64."""

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
    65,536 evenly spaced values do. Tensors on a GPU are digested there, and then waited for:
    compare a batch before it is moved there.

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
    given: Any = batch
    failure = None
    if not isinstance(given, Mapping):
        failure = TypeError(f"batch must be a dict of tensors by name; got {in_brief(given)}")
        given = {}
    agree_on_batch("check_same_batch", given, resolve_exchange(group), failure)


def agree_on_batch(
    name: str, batch: Mapping[str, Any], ends: Exchange, failure: Exception | None
) -> None:
    """`check_same_batch` as a part of another function.

    Args:
        name: of the function, for messages.
        batch: the whole batch.
        ends: this rank's end of the group.
        failure: why this rank refuses its arguments; None if it does not.

    Raises:
        Exception: `failure`; and see `check_same_batch`.
    """
    from torch.utils.data import get_worker_info  # takes a while to import

    if ends.world_size > 1 and get_worker_info() is not None:
        raise RuntimeError(
            f"{name} was called in a worker process of a DataLoader, which cannot compare its "
            f"batch with that of {ends.world_size} ranks: call it in the training loop, on the "
            "batch that the DataLoader returns"
        )
    words, device = None, torch.device("cpu")
    if failure is None and ends.world_size > 1:
        try:
            words = _described(batch)
        except Exception as error:  # whatever it is, the other ranks are to be told
            failure = error
    tensors = (x for x in batch.values() if isinstance(x, Tensor))
    device = next((x.device for x in tensors), device)
    if isinstance(ends, ProcessGroupExchange):  # for which its first call may prepare transfers
        device = device_for(ends.group, device)
    agree(name, ends, None if failure else words or {}, failure, device, _ADVICE)


@dataclass
class _Values:
    """A tensor that prints as its shape, its dtype and a digest of its values."""

    tensor: Tensor
    digest: int = 0

    def __repr__(self) -> str:
        shape, dtype = tuple(self.tensor.shape), self.tensor.dtype
        return f"{shape} {dtype} {self.digest % (1 << 64):016x}"


def _described(batch: Mapping[str, Any]) -> dict[str, str]:
    """Each entry of a batch in words, tensors in it by shape, dtype and a digest."""
    found: list[_Values] = []
    entries = {name: _printable(name, x, found) for name, x in batch.items()}
    for device in {x.tensor.device for x in found}:
        there = [x for x in found if x.tensor.device == device]
        digests = torch.stack([_digest(x.tensor) for x in there])
        for one, digest in zip(there, digests.tolist(), strict=True):  # waits for a device once
            one.digest = digest
    return {name: repr(entry) for name, entry in entries.items()}


def _printable(name: str, entry: Any, found: list[_Values]) -> Any:
    """An entry whose `repr` tells all of its values; `found` gets its tensors."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(entry, numpy.ndarray):
        try:
            entry = torch.from_numpy(entry.copy())  # which may be read-only, or step backwards
        except (TypeError, ValueError):  # of strings, for example
            return entry.tolist()
    if is_dtensor(entry):
        raise TypeError(
            f"batch must hold the whole tensors, of which each rank takes its part; {name} has a "
            "DTensor: compare batches before they are distributed"
        )
    if isinstance(entry, Tensor):
        found.append(_Values(entry))
        return found[-1]
    if isinstance(entry, Mapping):
        return {key: _printable(name, value, found) for key, value in entry.items()}
    if isinstance(entry, list | tuple):
        return [_printable(name, value, found) for value in entry]
    return entry


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    """The same number for the same values, on every device: int64, 0-d.

    A sum of values, each multiplied by a random odd number of its place, modulo 2**64.
    """
    flat = tensor.detach().resolve_conj().reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        flat = flat[:: max(1, -(-len(flat) // _SAMPLE))].contiguous()
        flat = flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(flat), _CHUNK):
        values = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(values), device=tensor.device)
        total += (_mixed(values) * (_mixed(places) | 1)).sum()
    return total


def _mixed(numbers: Tensor) -> Tensor:
    """The generator splitmix64 of these numbers, but for shifts that keep the sign."""
    numbers = (numbers + 1) * _GOLDEN
    for shift, factor in zip((30, 27), _MIX, strict=True):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)
