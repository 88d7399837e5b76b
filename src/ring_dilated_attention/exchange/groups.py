"""Move rows between ranks.

An `Exchange` is one rank's end of a group. `ProcessGroupExchange` is that of torch.distributed's
groups: rows travel by copies between GPUs of one host (`peer_memory`), else by messages
(`communicator`). `loopback.LoopbackExchange` connects ranks that are threads of one process.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from ..version import VERSION
from .board import Shown, make_board
from .calls import ALONE, Calls, ExchangeError, LostPeerError
from .collectives import Collectives
from .communicator import Communicator, timeout_of
from .peer_memory import PeerMemory, out_of_reach, place_of
from .waiter import Waiter


class Pending(Protocol):
    """A started transfer."""

    def wait(self) -> None:
        """Return when the received tensor may be read and the sent one reused."""


class Exchange(Protocol):
    """One rank's end of a group of ranks.

    Attributes:
        rank: this rank, in [0, world_size).
        world_size: number of ranks.
        sent_bytes: bytes that `start` has sent so far.
        calls: the calls of the group: transfers and agreements are part of one.

    It may have a `stopwatch` too, which is started where compute waits for transfers in a way that
    `Pending.wait` does not show; what it returns is called when compute goes on. And it may have a
    `show`, which begins a `maximum` whose result is waited for later: see `settle_later`.

    Whatever waits for a rank that has ended, has failed, or does not come in time raises a
    `LostPeerError`, which `Calls` explains.
    """

    rank: int
    world_size: int
    sent_bytes: int

    @property
    def calls(self) -> Calls:
        """See above."""

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """Begin sending a contiguous tensor to a rank, and receiving one from a rank.

        Between two ranks, transfers pair up in the order in which both start them.
        """

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """The elementwise maximum of `values` (int64) over all ranks: one small collective.

        It runs in shared memory where all ranks are on one Linux host, else over gloo. Nothing
        waits for what `device`, where the ranks' tensors are, has still to compute.
        """

    def share(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank: a collective of small Python objects."""


def all_gather(ends: Exchange, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, by rank, inside of a call.

    Args:
        ends: this rank's end of the group.
        tensor: this rank's; shapes, dtypes and devices are the same on all ranks.

    Returns:
        One tensor for each rank, which the caller may write to. A rank sends its own to each other.
    """
    tensor = tensor.contiguous()
    everyone = {ends.rank: tensor.clone()}
    pending = []
    for step in range(1, ends.world_size):
        to, source = (ends.rank + step) % ends.world_size, (ends.rank - step) % ends.world_size
        everyone[source] = torch.empty_like(tensor)
        pending.append(ends.start((to, tensor), (source, everyone[source])))
    for one in pending:
        one.wait()
    return [everyone[rank] for rank in range(ends.world_size)]


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Exchange | None
"""What a `group` argument may be: a ProcessGroup, a 1-D DeviceMesh, an Exchange, or None for one
process on its own."""


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
                f"group must be a 1-D DeviceMesh; got {group.ndim} dimensions: {group}"
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
        name = f"exchange {id(group)}"  # no two objects that are alive share it
        _registered[name] = group
        return name
    raise TypeError(
        "group must be a torch.distributed ProcessGroup, a 1-D DeviceMesh, an Exchange or None; "
        f"got {group!r}"
    )


def exchange_named(name: str) -> Exchange:
    """This rank's end of the group that `group_name` named.

    Raises:
        KeyError: it was an `Exchange` that nobody has kept.
        ValueError: there is no group, and this process is one of several ranks that have none yet.
    """
    if not name:
        if not torch.compiler.is_compiling():  # the operator asks again when it runs
            _refuse_a_missing_group()
        return SoloExchange()
    if name.startswith("exchange "):
        return _registered[name]
    return ProcessGroupExchange(_resolve_process_group(name))  # type: ignore[arg-type]


def resolve_exchange(group: Group) -> Exchange:
    """This rank's end of `group`.

    Raises:
        TypeError: `group` is none of the kinds allowed.
        ValueError: a DeviceMesh is not 1-D, or this rank is not a member of the group.
    """
    return exchange_named(group_name(group))


def _refuse_a_missing_group() -> None:
    """``dist.group.WORLD`` is None before `init_process_group`: no rank must then compute alone."""
    ranks = _ranks_of_launcher()
    if ranks != "1" and not dist.is_initialized():
        raise ValueError(
            f"group is None in one of {ranks} ranks (WORLD_SIZE), and torch.distributed is not "
            "initialized: call init_process_group first, then pass a group; a rank that is to "
            "compute alone passes SoloExchange(), of ring_dilated_attention.exchange"
        )


@lru_cache(maxsize=1)
def _ranks_of_launcher() -> str:
    return os.environ.get("WORLD_SIZE", "1")


class SoloExchange:
    """A world of one rank: as a `group`, says that this process holds the whole sequence."""

    rank = 0
    world_size = 1
    sent_bytes = 0
    calls = ALONE

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`; there is nobody to send to."""
        raise AssertionError("a single rank has no peer")

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        return list(values)

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        return [value]


class _Transport(Protocol):
    """How rows travel between the ranks of a group."""

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""

    def close(self) -> None:
        """End all transfers, so that no other rank waits for this one."""


class _Members:
    """What this process keeps of a process group, from its first call on.

    All ranks make theirs at once, in their first call.

    Args:
        group: the group, which is not kept alive.
        timeout: seconds to wait for the others; None: the group's own.

    Attributes:
        timeout: the group's own, in seconds.

    Raises:
        LostPeerError: a rank did not come.
        ExchangeError: ranks have different versions of this package.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.timeout = timeout_of(group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.transports: dict[Any, _Transport] = {}
        self.is_closed = False
        close = _weakly(self.close)  # a thread that watches transfers holds what it may call
        self.collectives = Collectives(group, close)
        limit = self.timeout if timeout is None else timeout
        share = partial(self.collectives.share, timeout=limit)
        try:
            _check_versions(share(VERSION))
            self.board = make_board(rank, world_size, share)
            if self.board is None:
                self.collectives.meet(limit)
        except LostPeerError as lost:
            raise ExchangeError(
                f"{self.collectives.explain(lost).text}; this is rank {rank} in its first call of "
                f"the group of {world_size} ranks"
            ) from lost
        self.roll = self.board or self.collectives
        self.calls = Calls(rank, world_size, self.roll, close)

    def close(self) -> None:
        """End all transfers, and begin no other."""
        self.is_closed = True
        for transport in self.transports.values():  # which stay: streams may still be using them
            transport.close()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method, as long as its object lives."""
    found = WeakMethod(method)

    def call() -> None:
        method = found()
        if method is not None:
            method()

    return call


def _check_versions(versions: list[str]) -> None:
    """Ranks of different versions might not mean the same by the same message."""
    if len(set(versions)) > 1:
        found = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(versions))
        raise ExchangeError(
            f"all ranks of a group must have one version of ring-dilated-attention; got {found}: "
            "install the same one everywhere"
        )


_members: WeakKeyDictionary[dist.ProcessGroup, _Members] = WeakKeyDictionary()
"""Of each group that has made a call, for as long as the group lives: nothing in it keeps that."""


class ProcessGroupExchange:
    """An `Exchange` over a ProcessGroup of torch.distributed (gloo, NCCL).

    GPUs of one host that can read each other's memory move rows by their copy engines, which take
    no multiprocessor from the compute and NVLink's whole rate. Elsewhere rows travel as messages,
    over a communicator of their own: they do not queue behind the caller's collectives, nor these
    behind them. The first call with a group makes what is needed; a communicator of NCCL connects
    every pair of ranks, which takes seconds.

    A rank whose process has ended ends the others' waits for it within seconds. Where ranks share a
    host, that holds from the group's first call on, and for streams of their devices too.

    Args:
        group: the group; this process must be a member.
        peer_memory: whether copy engines move rows; the same on all ranks. None: where they can,
            with a warning where the ranks' GPUs can read each other's memory and the system does
            not let them share it. They take 32 MiB of a GPU for each group, beside what torch has
            allocated.
        timeout: how long to wait for another rank that is alive and does not answer, in seconds or
            as a timedelta; the same on all ranks. None: the group's own timeout (see
            `torch.distributed.init_process_group`), as it is at the group's first call.

    Raises:
        TypeError: `timeout` is neither a number, a timedelta nor None.
        ValueError: this process is not a member of the group, or `timeout` is not > 0 and finite;
            from the first call, with ``peer_memory=True``: the tensors are not on CUDA devices of
            one host that can read each other's memory.
        RuntimeError: from the first call, with ``peer_memory=True``: they cannot share it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        peer_memory: bool | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the group {group!r}")
        self.world_size = dist.get_world_size(group)
        self.sent_bytes = 0
        self._group = group
        self._peer_memory = peer_memory
        self._given_timeout = None if timeout is None else _seconds(timeout)
        self._found: _Members | None = None

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
                met = _members[self._group] = _Members(self._group, self._given_timeout)
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
        self.calls.agree_now()
        if send is not None:
            self.sent_bytes += send[1].nbytes
        _, tensor = send or receive or (0, torch.empty(0))
        return self._transport(tensor.device).transfer(send, receive)

    def _transport(self, device: torch.device) -> _Transport:
        """How rows on `device` travel; for the first time, all members ask at once."""
        met = self._met
        if met.is_closed:
            raise LostPeerError([])
        key = device.type, self._peer_memory, self._timeout
        if key not in met.transports:
            if device == torch.device("cuda"):  # which one, the thread that makes it cannot say
                device = torch.device("cuda", torch.cuda.current_device())
            met.transports[key] = Waiter().run(
                lambda: self._make(device), lambda: met.roll.look(self._others)
            )
        return met.transports[key]

    def _make(self, device: torch.device) -> _Transport:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of the thread that makes it
        copies = self._peer_memory or (self._peer_memory is None and device.type == "cuda")
        made = self._share_memory(device) if copies else None
        if made is not None:
            return made
        met = self._met
        try:
            return Communicator(self._group, device, self._timeout, met.calls, met.roll)
        except RuntimeError:
            met.roll.look(self._others)  # they may be what it could not connect to
            raise

    def _share_memory(self, device: torch.device) -> PeerMemory | None:
        """Peer memory of the group; None where that is not to be had, and was not asked for."""
        reason = out_of_reach(self.share(place_of(device)))
        if reason is not None:
            if self._peer_memory:
                raise ValueError(
                    "peer_memory=True needs ranks on CUDA devices of one host, which can read each "
                    f"other's memory and are visible to every rank; {reason}"
                )
            return None
        made, failure = None, ""
        try:
            met = self._met
            made = PeerMemory(
                self.rank, self.world_size, self.share, device, met.calls, met.roll, self._timeout
            )
        except RuntimeError as error:
            failure = f"rank {self.rank}: {error}"
        # Having heard of all, nobody writes to memory that its rank has yet to clear.
        failures = [one for one in self.share(failure) if one]
        if failures and self._peer_memory:
            raise RuntimeError(f"peer_memory=True, but memory cannot be shared: {failures}")
        if failures:
            warnings.warn(
                "the GPUs of this host could read each other's memory, but cannot share it, so "
                "rows travel as messages, which is slower (peer_memory=False asks for that): "
                f"{failures}",
                stacklevel=2,
            )
            return None
        return made

    def outbox_bytes(self, device: torch.device) -> int:
        """Bytes of `device` that copies take beside what torch has allocated.

        0 before the first call, and where rows travel as messages.
        """
        if self._group not in _members:
            return 0
        key = device.type, self._peer_memory, self._timeout
        transport = self._met.transports.get(key)
        return transport.nbytes if isinstance(transport, PeerMemory) else 0

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        if self.world_size == 1:
            return list(values)
        self.calls.agree_now()
        on_cuda = int(device.type == "cuda")
        met = self._met
        found = (met.board or met.collectives).maximum([*values, on_cuda, -on_cuda], self._timeout)
        *found, some, none = found
        if some == -none:  # all ranks are here, and on such devices: what making it needs
            self._transport(device)
        return found

    def show(self, values: Sequence[int], device: torch.device) -> Shown | None:
        """Begin a `maximum`; None, and nothing is begun, where ranks are not on one host."""
        board = self._met.board if self.world_size > 1 else None
        if board is None:
            return None
        on_cuda = int(device.type == "cuda")  # as `maximum`, which other ranks may be in
        return board.show([*values, on_cuda, -on_cuda], self._timeout)

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        if self.world_size == 1:
            return [value]
        self.calls.agree_now()
        met = self._met
        return (met.board or met.collectives).share(value, self._timeout)


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
