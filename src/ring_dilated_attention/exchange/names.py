"""What may be given as a `group`, and the names by which operators find it again."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TypeAlias, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from ..pattern import in_brief
from .groups import ProcessGroupExchange
from .interface import Exchange, SoloExchange

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Exchange | None
"""What a `group` argument may be: a ProcessGroup, a 1-D DeviceMesh, an Exchange, or None for one
process on its own."""

_OWN = "exchange "
"""Begins the names of `Exchange` objects that callers have made."""

_MEMBERS = ("rank", "world_size", "calls", "start", "maximum", "share")
"""What tells an `Exchange`."""

_registered: WeakValueDictionary[str, Exchange] = WeakValueDictionary()
"""The `Exchange` objects that were passed as a group, by name. Operators take no Python objects, so
groups reach them as names; torch.distributed knows the names of process groups, this the others.
Weak: the caller keeps the object, and autograd does until backward."""


def group_name(group: Group) -> str:
    """The name by which `exchange_named` finds `group` in this process; "" for None.

    Raises:
        TypeError: `group` is none of the kinds allowed.
        ValueError: a DeviceMesh is not 1-D, or this rank is not a member of the group.
    """
    if group is None:
        return ""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh; got {group.ndim} dimensions: {group}. Take one, "
                f"as in mesh[{(group.mesh_dim_names or ('sequence',))[-1]!r}]"
            )
        if group.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the DeviceMesh {group}")
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    # What `new_group` returns on ranks outside of the group is no ProcessGroup at all.
    if group is cast(object, dist.GroupMember.NON_GROUP_MEMBER):
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group it was given"
        )
    if all(hasattr(group, name) for name in _MEMBERS):
        name = f"{_OWN}{id(group)}"  # no two objects that are alive share it
        _registered[name] = group
        return name
    raise TypeError(
        "group must be a torch.distributed ProcessGroup, a 1-D DeviceMesh, an Exchange or None; "
        f"got {in_brief(group)}"
    )


def one_group(group: Group, mesh: Group) -> Group:
    """The ranks of a call, which callers name by `group` or by `mesh`.

    Raises:
        ValueError: both are given.
    """
    if mesh is None:
        return group
    if group is not None:
        raise ValueError(
            f"pass the ranks as group or as mesh, not as both; got group {in_brief(group)} and "
            f"mesh {in_brief(mesh)}"
        )
    return mesh


def exchange_named(name: str) -> Exchange:
    """This rank's end of the group that `group_name` named.

    Raises:
        KeyError: it was an `Exchange` that nobody has kept.
        ValueError: there is no group, and this process is one of several ranks that have none yet;
            or the process group was destroyed.
    """
    if not name:
        if not torch.compiler.is_compiling():  # the operator asks again when it runs
            _refuse_a_missing_group()
        return SoloExchange()
    if name.startswith(_OWN):
        return _registered[name]
    try:
        group = _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(
            f"there is no process group {name!r} any more: it was destroyed before its last call, "
            "or before the backward of one; call destroy_process_group after them"
        ) from error
    return ProcessGroupExchange(group)


def own_exchange(name: str) -> Exchange | None:
    """The caller's `Exchange` that `group_name` named; None: it named a process group, or none."""
    return _registered[name] if name.startswith(_OWN) else None


def resolve_exchange(group: Group) -> Exchange:
    """This rank's end of `group`.

    Raises:
        TypeError: `group` is none of the kinds allowed.
        ValueError: a DeviceMesh is not 1-D, or this rank is not a member of the group.
    """
    return exchange_named(group_name(group))


def place_in(group: Group) -> tuple[int, int]:
    """This process's rank in `group`, and its number of ranks; torch.compile can trace it.

    Raises:
        TypeError, ValueError: see `resolve_exchange`.
    """
    if torch.compiler.is_compiling():  # which knows these, but no `Exchange` of them
        if isinstance(group, DeviceMesh):
            return group.get_local_rank(), group.size()
        if isinstance(group, dist.ProcessGroup):
            return dist.get_rank(group), dist.get_world_size(group)
    ends = resolve_exchange(group)
    return ends.rank, ends.world_size


def _refuse_a_missing_group() -> None:
    """``dist.group.WORLD`` is None before `init_process_group`: no rank must then compute alone."""
    ranks = ranks_of_launcher()
    if ranks != "1" and not dist.is_initialized():
        raise ValueError(
            f"group is None in one of {ranks} ranks (WORLD_SIZE), and torch.distributed is not "
            "initialized: call init_process_group first, then pass a group; a rank that is to "
            "compute alone passes SoloExchange(), of ring_dilated_attention.exchange"
        )


@lru_cache(maxsize=1)
def ranks_of_launcher() -> str:
    """The number of ranks that a launcher such as torchrun says there are, ``"1"`` without one."""
    return os.environ.get("WORLD_SIZE", "1")
