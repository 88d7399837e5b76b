"""Groups of torch.distributed: this rank's end of one, and what may be given as a `group`.

Rows travel by copies between GPUs of one host (`peer_memory`), else by messages (`communicator`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import __version__
from ..pattern import in_brief
from .board import Shown, make_board
from .calls import Calls, ExchangeError, LostPeerError
from .collectives import Collectives
from .communicator import timeout_of
from .interface import ALONE, Exchange, Pending, SoloExchange, untraced
from .peer_memory import PeerMemory
from .processes import announce, own_host
from .relay import Passed
from .transports import Site, Transport, make_transport
from .waiter import Waiter


class _Members:
    """What this process keeps of a process group, from its first call on.

    All ranks make theirs at once, in their first call.

    Args:
        group: the group, which is not kept alive.
        timeout: seconds to wait for the others; None: the group's own.

    Attributes:
        timeout: the group's own, in seconds.
        is_one_host: whether all ranks are on one.
        board: how ranks of one host agree; None between hosts.
        relay: how others do; None with a board, and where they do not reach each other's ports.
        agreements: the one of these that there is, else collectives of the group.
        generation: how often the ranks have begun anew.

    Raises:
        LostPeerError: a rank did not come.
        ExchangeError: ranks have different versions of this package.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.timeout = timeout_of(group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.transports: dict[Any, Transport] = {}
        self.devices: dict[Any, torch.device] = {}  # whose rows each of them moves
        self.is_closed, self.generation = False, 0
        close = _weakly(self.close)  # a thread that watches transfers holds what it may call
        self.collectives = Collectives(group, close)
        limit = self.timeout if timeout is None else timeout
        share = partial(self.collectives.share, timeout=limit)
        try:
            versions, hosts = zip(*share((__version__, own_host())), strict=True)
            _check_versions(versions)
            self.is_one_host = len(set(hosts)) == 1
            self.board = self.relay = None
            if self.is_one_host:
                self.board = make_board(rank, world_size, share)
            if self.board is None:
                self.relay = self.collectives.meet(limit)
        except LostPeerError as lost:
            raise ExchangeError(
                f"{self.collectives.explain(lost).text}; this is rank {rank} in its first call of "
                f"the group of {world_size} ranks"
            ) from lost
        self.roll = self.board or self.collectives
        self.agreements = self.board or self.relay or self.collectives
        begin_anew, stop = _weakly(self.begin_anew), _weakly(self.stop)
        self.calls = Calls(rank, world_size, self.roll, close, begin_anew=begin_anew, stop=stop)

    def close(self) -> None:
        """End all transfers, and begin no other."""
        self.is_closed = True
        for transport in self.transports.values():  # which stay: streams may still be using them
            transport.close()

    def stop(self) -> None:
        """Begin no transfer any more; return when none is being begun."""
        for transport in list(self.transports.values()):
            transport.stop()

    def begin_anew(self) -> None:
        """Let go of transfers that all ranks know to be in vain; the next call makes others."""
        if self.board is None:  # else they have agreed before the first
            self.generation += 1
            while self.transports:
                self.transports.popitem()[1].abandon()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method, as long as its object lives."""
    found = WeakMethod(method)

    def call() -> None:
        method = found()
        if method is not None:
            method()

    return call


def _check_versions(versions: Sequence[str]) -> None:
    """Ranks of different versions might not mean the same by the same message."""
    if len(set(versions)) > 1:
        found = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(versions))
        raise ExchangeError(
            f"all ranks of a group must have one version of ring-dilated-attention; got {found}: "
            "install the same one everywhere"
        )


@untraced
def _meet(group: dist.ProcessGroup, timeout: float | None) -> _Members:
    return _Members(group, timeout)


_members: WeakKeyDictionary[dist.ProcessGroup, _Members] = WeakKeyDictionary()
"""What each group that has made a call keeps, for as long as the group lives; it does not keep the
group."""


class ProcessGroupExchange:
    """An `Exchange` over a ProcessGroup of torch.distributed (gloo, NCCL).

    GPUs that can read each other's memory move rows by their copy engines, where all ranks of the
    group are on one host: that takes no multiprocessor from the compute, and NVLink's whole rate.
    Elsewhere rows travel as messages, over a communicator of their own: they do not queue behind
    the caller's collectives, nor these behind them. The first call with a group makes what is
    needed; a communicator of NCCL connects every pair of ranks, which takes seconds.

    Ranks of several hosts agree over TCP, without waiting for each other but for the first call of
    a kind: where they turn out to be in different calls, all raise in the next one at the latest.

    A rank whose process has ended ends the others' waits for it within seconds, for streams of
    their devices too. Where ranks share a host, that holds from the time on when each has made an
    object of this class, or a module of this package with the group; between hosts from the
    group's first call on.

    Args:
        group: the group; this process must be a member.
        peer_memory: whether copy engines move rows within a host; the same on all ranks. None:
            where they can, with a warning where the ranks' GPUs can read each other's memory and
            the system does not let them share it. They take 32 MiB of a GPU for each group, beside
            what torch has allocated.
        timeout: how long to wait for another rank that is alive and does not answer, in seconds or
            as a timedelta; the same on all ranks. None: the group's own timeout (see
            `torch.distributed.init_process_group`), as it is at the group's first call.

    Raises:
        TypeError: `timeout` is neither a number, a timedelta nor None.
        ValueError: this process is not a member of the group, or `timeout` is not > 0 and finite;
            from the first call, with ``peer_memory=True``: the ranks are on several hosts, or do
            not have their tensors on CUDA devices that can read each other's memory; from a later
            call: its tensors are on another GPU than those of the first.
        RuntimeError: from the first call, with ``peer_memory=True``: they cannot share it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        peer_memory: bool | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):  # as that of ranks outside of it is none
            raise ValueError(f"rank {dist.get_rank()} is not a member of the group {group!r}")
        self.rank, self.world_size = group.rank(), group.size()  # dist.get_rank takes longer
        self.sent_bytes = 0
        self._group = group
        self._peer_memory = peer_memory
        self._given_timeout = None if timeout is None else _seconds(timeout)
        self._found: _Members | None = None
        if self.world_size > 1:
            announce(group, self.rank)

    @property
    def waits(self) -> int:
        """How often this rank has waited for all others at once, to agree or to share an object.

        Of ranks of several hosts, or without a board; those of one host wait in nearly every call.
        """
        relay = self._met.relay
        return 0 if relay is None else relay.waits

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that this is an end of."""
        return self._group

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    @property
    def _timeout(self) -> float:
        return self._met.timeout if self._given_timeout is None else self._given_timeout

    @property
    def _met(self) -> _Members:
        met = self._found  # cached_property takes a lock, several times a call
        if met is None:
            met = _members.get(self._group)
            if met is None:
                met = _members[self._group] = _meet(self._group, self._given_timeout)
            self._found = met
        return met

    @property
    def calls(self) -> Calls:
        """See `Exchange`."""
        return ALONE if self.world_size == 1 else self._met.calls

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is None and receive is None:
            return _Nothing()
        self.calls.before_rows()
        if send is not None:
            self.sent_bytes += send[1].nbytes
        _, tensor = send or receive or (0, torch.empty(0))
        return self._transport(tensor.device).transfer(send, receive)

    def _key(self, device: torch.device) -> tuple[Any, ...]:
        return device.type, self._peer_memory, self._timeout

    def _transport(self, device: torch.device) -> Transport:
        """How rows on `device` travel; for the first time, all members ask at once."""
        met = self._met
        if met.is_closed:
            raise LostPeerError([])
        key = self._key(device)
        transport = met.transports.get(key)
        if transport is None:
            self.calls.agree_now()  # it is not made in a call that has been given up meanwhile
            if device == torch.device("cuda"):  # which one, the thread that makes it cannot say
                device = torch.device("cuda", torch.cuda.current_device())
            transport = met.transports[key] = Waiter().run(
                lambda: self._make(device), lambda: met.roll.look(self._others)
            )
            met.devices[key] = device
        elif device.index is not None and device != met.devices[key]:
            raise ValueError(
                f"this group moves rows of {met.devices[key]} on rank {self.rank}, where its first "
                f"call was; got tensors on {device}: make another group for them "
                "(torch.distributed.new_group), on all ranks"
            )
        return transport

    def _make(self, device: torch.device) -> Transport:
        met, own = self._met, self._timeout
        name = f"{own} {met.generation}"
        site = Site(self._group, met.is_one_host, self.share, met.calls, met.roll, own, name)
        return make_transport(site, device, peer_memory=self._peer_memory)

    def outbox_bytes(self, device: torch.device) -> int:
        """Bytes of `device` that copies take beside what torch has allocated.

        0 before the first call, and where rows travel as messages.
        """
        if self._group not in _members:
            return 0
        transport = self._met.transports.get(self._key(device))
        return transport.nbytes if isinstance(transport, PeerMemory) else 0

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        if self.world_size == 1:
            return list(values)
        self.calls.agree_now()
        *found, some, none = self._met.agreements.maximum(_told(values, device), self._timeout)
        if some == -none:  # all ranks are here, and on such devices: what making it needs
            self._transport(device)
        return found

    def show(self, values: Sequence[int], device: torch.device) -> Shown | None:
        """Begin a `maximum`.

        None, and nothing is begun, where the ranks are not on one host, and where they have yet to
        make what rows on `device` travel by, which all ranks do at once.
        """
        met = self._met if self.world_size > 1 else None
        if met is None or met.board is None or self._key(device) not in met.transports:
            return None
        return met.board.show(_told(values, device), self._timeout)

    def show_ahead(self, values: Sequence[int], device: torch.device) -> Passed | None:
        """Begin a `maximum` whose result need not be waited for within the call.

        None, and nothing is begun, where the ranks are on one host, and where they have yet to make
        what rows on `device` travel by, which all ranks do at once.
        """
        met = self._met
        if met.relay is None or self._key(device) not in met.transports:
            return None
        return met.relay.show(_told(values, device), self._timeout)

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        if self.world_size == 1:
            return [value]
        self.calls.agree_now()
        return self._met.agreements.share(value, self._timeout)


def _told(values: Sequence[int], device: torch.device) -> list[int]:
    """What is shown of values; every rank's are as many, whichever method it is in."""
    on_cuda = int(device.type == "cuda")
    return [*values, on_cuda, -on_cuda]


def _seconds(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(
            f"timeout must be a number of seconds, a timedelta or None; got {timeout!r}"
        )
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be > 0 and finite; got {timeout}")
    return float(timeout)


class _Nothing:
    """A transfer of nothing."""

    def wait(self) -> None:
        pass


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
