"""Queries, keys and values as DTensors: what a rank has of them, and results as DTensors again.

A dimension of the mesh may replicate them, or shard the batch (Shard(0)), the sequence (Shard(1))
or the heads (Shard(2)); ranks along that of the sequence are the group of the call. Gradients are
DTensors with the same placements. Dimensions are cut as torch cuts them: every rank but the last
has ceil(n / p) positions, or what is left of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..exchange import Group, group_name
from ..layout import SequenceLayout
from ..pattern import in_brief

_BATCH, _SEQUENCE, _HEADS = range(3)
_OF_LSE = {_BATCH: 0, _SEQUENCE: 2, _HEADS: 1}  # (batch, heads, sequence)
_OF_MASK = {_BATCH: 0, _SEQUENCE: 1}  # (batch, sequence)


def is_dtensor(value: Any) -> bool:
    """Whether this is a DTensor; importing their module takes a while."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def group_of_dtensors(*tensors: Any) -> DeviceMesh | None:
    """The ranks that surely make a call with these: a mesh of one dimension; None: not known."""
    meshes = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]
    return meshes[0] if meshes and meshes[0].ndim == 1 else None


@torch.no_grad()
def fill(parameter: torch.Tensor, draw: Callable[[torch.Tensor], Any]) -> None:
    """Fill a parameter from torch's random state; a DTensor as if it were whole.

    Every rank draws the whole tensor and keeps its part of what the first rank of the mesh drew:
    the values do not depend on how, or whether, the parameter is sharded.

    Args:
        parameter: to write to; on the meta device nothing happens.
        draw: fills a tensor of its shape.
    """
    if parameter.is_meta:
        return
    if not is_dtensor(parameter):
        draw(parameter)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    draw(whole)
    mesh, placements = _placement(parameter)
    parameter.copy_(distribute_tensor(whole, mesh, placements))


def of_own_part(
    function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    """A DTensor of which this rank's part is computed from its part of another one, of one shape.

    Args:
        function: of a local tensor; returns one of its shape.
        tensor: a DTensor, whose placement the result has.
    """
    mesh, placements = _placement(tensor)
    local = function(tensor.to_local())  # type: ignore[attr-defined]
    return dtensor_of(local, mesh, placements, tensor.shape, tensor.stride())


def dtensor_of(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    shape: Sequence[int],
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A DTensor of a shape (and stride; None: contiguous), of which `local` is this rank's part."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def torch_cuts(size: int, ranks: int) -> list[tuple[int, int]]:
    """First element and end of what each rank has of a sharded dimension of a DTensor.

    As `torch.chunk` cuts it: ceil(size / ranks) elements, or what is left.
    """
    each = -(-size // ranks)
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(ranks)]


def own_part(mesh: Any, cuts: Sequence[bool], size: int) -> range:
    """What this rank has of a dimension that is cut by `torch_cuts`.

    Args:
        mesh: a DeviceMesh that this rank is in.
        cuts: of each dimension of the mesh, in order, whether its ranks cut the dimension.
        size: of the whole dimension.
    """
    own = range(size)
    for place, ranks, is_cut in zip(mesh.get_coordinate(), mesh.shape, cuts, strict=True):
        if is_cut:
            start, stop = torch_cuts(len(own), ranks)[place]
            own = own[start:stop]
    return own


class Placed(NamedTuple):
    """How the query, key and value of a call are placed on a mesh."""

    mesh: DeviceMesh  # all of its ranks make the call
    placements: tuple[Any, ...]  # one for each dimension of the mesh
    shape: tuple[int, ...]  # of the whole query
    group: Group  # the ranks that share each sequence; None: every rank has all of it
    # which of them holds which positions; None: contiguous equal shards
    layout: SequenceLayout | None

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Group,
        layout: SequenceLayout | None,
    ) -> Placed:
        """How a query, key and value are placed that the caller gives with this group and layout.

        Raises:
            TypeError: some of them are no DTensors.
            ValueError: they are placed differently, or as no call can be made, or some rank has no
                row of the batch or no head.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not is_dtensor(tensor):
                raise TypeError(
                    "query, key and value must all be DTensors or all be local tensors; "
                    f"{name} is no DTensor"
                )
        mesh, placements = _placement(query)
        for name, tensor in (("key", key), ("value", value)):
            if _placement(tensor) != (mesh, placements):
                raise ValueError(
                    "query, key and value must have one mesh and the same placements; "
                    f"query has {placements} on {mesh}, {name} "
                    f"{_placement(tensor)[1]} on {_placement(tensor)[0]}"
                )
        for dim, what in ((_BATCH, "row of the batch"), (_HEADS, "head")):
            _refuse_empty_parts(mesh, placements, dim, query.shape[dim], what)
        axes = [axis for axis, one in enumerate(placements) if _cuts(one) == _SEQUENCE]
        if len(axes) > 1:
            raise ValueError(
                f"the sequence must be sharded over one dimension of the mesh; got {placements} on "
                f"{mesh}: flatten these dimensions to one, mesh[...]._flatten()"
            )
        shape = tuple(query.shape)
        if not axes:
            if group is not None:
                raise ValueError(
                    "a group shares sequences that are sharded over it; got DTensors whose "
                    f"placements {placements} shard no sequence: leave group out where they are "
                    "whole sequences, redistribute them first, "
                    "x.redistribute(placements=[Shard(1)]), or, where each rank of the group holds "
                    "a part of which they do not know, pass x.to_local(), and head_slice if heads "
                    "are sharded"
                )
            return cls(mesh, placements, shape, None, layout)
        (axis,) = axes
        found = _same_ranks(group, mesh.get_group(axis))
        size, length = mesh.size(axis), query.shape[1]
        if layout is None and length % size:
            layout = _torch_layout(length, size)
        return cls(mesh, placements, shape, found, layout)

    def rows_of(self, name: str, values: Any) -> Any:
        """Of numbers for each row of the whole batch, those of this rank's rows."""
        if is_dtensor(values):
            raise TypeError(f"{name} must be a list of ints or a local tensor; got a DTensor")
        is_list = isinstance(values, (list, tuple, range))
        is_list = is_list or (isinstance(values, torch.Tensor) and values.ndim == 1)
        if not is_list or not self._cuts_any(_BATCH):
            return values  # other types are refused by `dilated_attention`, with what is allowed
        if len(values) != self.shape[0]:
            raise ValueError(
                f"{name} must hold one number for each of the {self.shape[0]} rows of the whole "
                f"batch; got {len(values)}"
            )
        own = self._own(_BATCH, len(values))
        return values[own.start : own.stop]

    def head_slice(self, given: Any, key: torch.Tensor) -> Any:
        """(start, stop, total) of this rank's KV heads; what the caller gave where it has all."""
        if not self._cuts_any(_HEADS):
            return given
        if given is not None:
            raise ValueError(
                "head_slice is for local tensors; query and key are DTensors whose heads are "
                f"sharded, {self.placements}, which says the same: leave it out"
            )
        heads, kv_heads = self.shape[2], key.shape[2]
        query, own = self._own(_HEADS, heads), self._own(_HEADS, kv_heads)
        if (query.start * kv_heads, query.stop * kv_heads) != (own.start * heads, own.stop * heads):
            raise ValueError(
                f"heads must be sharded so that query heads are with their KV heads; of {heads} "
                f"and {kv_heads}, this rank has query heads {query.start} to {query.stop} and KV "
                f"heads {own.start} to {own.stop}: use a number of ranks that divides both"
            )
        return own.start, own.stop, kv_heads

    def _cuts_any(self, dim: int) -> bool:
        return any(_cuts(one) == dim for one in self.placements)

    def _own(self, dim: int, size: int) -> range:
        """What this rank has of a dimension, cut over one dimension of the mesh after the other."""
        return own_part(self.mesh, [_cuts(x) == dim for x in self.placements], size)

    def local_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of a padding mask."""
        if mask is None:
            return None
        if not is_dtensor(mask):
            raise TypeError(
                "key_padding_mask must be a DTensor, as query is; got a local tensor: use "
                "DTensor.from_local"
            )
        expected = self._placements(_OF_MASK)
        if _placement(mask) != (self.mesh, expected):
            raise ValueError(
                f"key_padding_mask must be placed as query is, {expected} on {self.mesh}; got "
                f"{_placement(mask)[1]} on {_placement(mask)[0]}"
            )
        local: torch.Tensor = mask.to_local()  # type: ignore[attr-defined]
        return local

    def out(self, local: torch.Tensor) -> torch.Tensor:
        """The whole output, of which `local` is this rank's part."""
        return dtensor_of(local, self.mesh, self.placements, self.shape)

    def lse(self, local: torch.Tensor) -> torch.Tensor:
        """The whole lse, (batch, heads, sequence), of which `local` is this rank's part."""
        batch, length, heads, _ = self.shape
        placements = self._placements(_OF_LSE)
        return dtensor_of(local, self.mesh, placements, (batch, heads, length))

    def _placements(self, dims: dict[int, int]) -> tuple[Any, ...]:
        """How a tensor is placed whose dimensions are these of the query's."""
        from torch.distributed.tensor import Replicate, Shard

        cut = map(_cuts, self.placements)
        return tuple(Replicate() if one not in dims else Shard(dims[one]) for one in cut)


def _placement(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[Any, ...]]:
    return tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]


def _cuts(placement: Any) -> int | None:
    """The dimension of a query that a placement cuts; None where it replicates.

    Raises:
        ValueError: attention cannot be computed from tensors placed like this.
    """
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Replicate):
        return None
    dim = placement.dim if type(placement) is Shard else None
    if dim in (_BATCH, _SEQUENCE, _HEADS):
        return dim
    raise ValueError(
        "query, key and value must be placed by Shard(1) (sequence), Shard(0) (batch), Shard(2) "
        f"(heads) or Replicate(); got {placement}: redistribute them first, "
        "x.redistribute(placements=[Shard(1)])"
    )


def _refuse_empty_parts(
    mesh: DeviceMesh, placements: tuple[Any, ...], dim: int, size: int, what: str
) -> None:
    """Raise, on every rank, where a rank has nothing of a dimension that is sharded."""
    sizes = {size}
    for axis, one in enumerate(placements):
        if _cuts(one) == dim:  # torch.compile cannot go through `mesh.shape` before torch 2.13
            cuts = [cut for each in sizes for cut in torch_cuts(each, mesh.size(axis))]
            sizes = {stop - start for start, stop in cuts}
    if 0 in sizes:
        raise ValueError(
            f"every rank must have a {what}; got {size} on {mesh} with {placements}, which leave "
            "some with none: shard them over fewer ranks"
        )


def _same_ranks(group: Group, found: dist.ProcessGroup) -> Group:
    """The group of a call; raises a `ValueError` unless it has the ranks that were found."""
    if group is None or group_name(group) == group_name(found):
        return found
    own = group.get_group() if isinstance(group, DeviceMesh) else group
    ranks = dist.get_process_group_ranks(found)
    if isinstance(own, dist.ProcessGroup) and dist.get_process_group_ranks(own) == ranks:
        return own
    got = in_brief(group)
    if isinstance(own, dist.ProcessGroup):
        got = f"ranks {dist.get_process_group_ranks(own)}"
    raise ValueError(
        "group must be the ranks over which the DTensors' sequence is sharded, or be left out; "
        f"they are ranks {ranks}, and group is {got}"
    )


@lru_cache(maxsize=64)
def _torch_layout(length: int, world_size: int) -> SequenceLayout:
    """Which positions ranks hold of a DTensor's sequence."""
    return SequenceLayout([cut] for cut in torch_cuts(length, world_size))
