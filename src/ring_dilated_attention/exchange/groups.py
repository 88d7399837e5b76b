"""Groups of torch.distributed: this rank's end of one, and what may be given as a `group`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group

from .. import __version__
from ..pattern import in_brief
from .agreement import Agreeing
from .interface import (
    ALONE,
    Calls,
    Exchange,
    ExchangeError,
    LostPeerError,
    Message,
    Nothing,
    Pending,
    SoloExchange,
    untraced,
)
from .messages import DryRun, Gloo, Nccl, is_fake, timeout_of


class _Members:
    """This rank's communicators and calls of a process group, from its first call on.

    A collective: all ranks make theirs in their first call. It holds no reference to the group.

    Attributes:
        gloo: for agreements, and for rows on the CPU.
        nccl: for rows on GPUs, from the first call with some on.
        calls: of the group.

    Raises:
        ExchangeError: a rank did not come, or ranks have different versions of this package.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = _get_process_group_store(group)
        self.store = dist.PrefixStore("ring_dilated_attention", store)
        self.timeout = timeout_of(group)
        self.nccl: Nccl | None = None
        self.gloo: Gloo | DryRun
        try:
            if is_fake(group):
                self.gloo = DryRun(world_size)
            else:
                self.gloo = Gloo(self.store, rank, world_size, self.timeout)
            versions = [data.decode() for _, data in self.gloo.begin(0, __version__.encode())()]
        except LostPeerError as lost:
            raise ExchangeError(
                f"{lost}; this is rank {rank} in its first call of the group of {world_size} ranks"
            ) from lost
        # Ranks of different versions might not mean the same by the same message.
        if len(set(versions)) > 1:
            found = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(versions))
            raise ExchangeError(
                "all ranks of a group must have one version of ring-dilated-attention; got "
                f"{found}: install the same one everywhere"
            )
        self.calls = Calls(rank, world_size, self.gloo)


@untraced
def _meet(group: dist.ProcessGroup) -> _Members:
    return _members.setdefault(group, _Members(group))


_members: WeakKeyDictionary[dist.ProcessGroup, _Members] = WeakKeyDictionary()
"""Of each group that has made a call, for as long as the group lives."""


class ProcessGroupExchange(Agreeing):
    """An `Exchange` over a ProcessGroup of torch.distributed (gloo, NCCL).

    Rows on the CPU travel over gloo, rows on GPUs over NCCL. The communicators are this package's
    own, so that rows do not queue behind the caller's collectives, nor these behind them. The first
    call with a group makes them, which takes seconds on GPUs. Their timeout is that of the group
    (see `torch.distributed.init_process_group`) at its first call. In a ``fake`` group of torch's,
    for dry runs, nothing travels: shapes and memory are those of a rank, numbers are not.

    Ranks agree on every call over gloo, before its first row moves: ranks in different calls, or
    with arguments that do not fit, raise on every rank, and may go on. A rank that fails alone, or
    ends, ends the group: the other ranks' hosts raise as soon as they wait for it, and their
    streams stop at the timeout, when NCCL ends the process. A wait for a rank that is stopped lasts
    until the timeout. torchrun ends all ranks when one has ended.

    Args:
        group: the group, of gloo, NCCL or ``fake``; this process must be a member.

    Raises:
        ValueError: this process is not a member of the group; from a call: its tensors are on
            another GPU than those of the first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup):  # as that of ranks outside of it is none
            raise ValueError(f"rank {dist.get_rank()} is not a member of the group {group!r}")
        self.rank, self.world_size = group.rank(), group.size()  # dist.get_rank takes longer
        self.sent_bytes = 0
        self._group = group
        self._found: _Members | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that this is an end of."""
        return self._group

    @property
    def hosts(self) -> int:
        """Hosts of the ranks by torchrun's numbers, 1 without it; if uneven, one for each rank."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        of_ranks = [rank // local for rank in dist.get_process_group_ranks(self._group)]
        counts = Counter(of_ranks).values()
        is_even = of_ranks == sorted(of_ranks) and len({*counts}) == 1
        return len(counts) if is_even else self.world_size

    @property
    def _met(self) -> _Members:
        if self._found is None:
            self._found = _members.get(self._group) or _meet(self._group)
        return self._found

    @property
    def calls(self) -> Calls:
        """See `Exchange`."""
        return ALONE if self.world_size == 1 else self._met.calls

    def start(self, send: Message | None, receive: Message | None) -> Pending:
        """See `Exchange.start`."""
        if send is None and receive is None:
            return Nothing()
        met = self._met
        met.calls.before_rows()
        if send is not None:
            self.sent_bytes += send[1].nbytes
        _, tensor = send or receive or (0, torch.empty(0))
        uses_nccl = tensor.is_cuda and isinstance(met.gloo, Gloo)
        transport = self._nccl(tensor.device) if uses_nccl else met.gloo
        return transport.transfer(send, receive, met.calls.number)

    def prepare(self, device: torch.device) -> None:
        """Make what rows on `device` travel by, unless it is there; all members do so at once."""
        if device.type == "cuda" and isinstance(self._met.gloo, Gloo):
            self._nccl(device)

    def _nccl(self, device: torch.device) -> Nccl:
        met = self._met
        if met.nccl is None:
            index = torch.cuda.current_device() if device.index is None else device.index
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)  # of this thread, which may be one of autograd's
            store = dist.PrefixStore("nccl", met.store)
            met.nccl = Nccl(self._group, store, device, met.timeout)
        elif device.index is not None and device != met.nccl.device:
            raise ValueError(
                f"this group moves rows of {met.nccl.device} on rank {self.rank}, where its first "
                f"call was; got tensors on {device}: make another group for them "
                "(torch.distributed.new_group), on all ranks"
            )
        return met.nccl

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        return self._met.gloo.begin(number, data)


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Exchange | None
"""Type of a `group` argument: a ProcessGroup, a 1-D DeviceMesh, an Exchange, or None for one
process on its own."""

_OWN = "exchange "
"""Prefix of the names of `Exchange` objects that callers have made."""

_MEMBERS = ("rank", "world_size", "calls", "start", "begin", "share")
"""The members by which an `Exchange` is recognised."""

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
    ranks = os.environ.get("WORLD_SIZE", "1")  # as torchrun sets it
    if ranks != "1" and not dist.is_initialized():
        raise ValueError(
            f"group is None in one of {ranks} ranks (WORLD_SIZE), and torch.distributed is not "
            "initialized: call init_process_group first, then pass a group; a rank that is to "
            "compute alone passes SoloExchange(), of ring_dilated_attention.exchange"
        )
