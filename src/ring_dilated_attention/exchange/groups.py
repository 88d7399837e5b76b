"""This rank's end of a group of torch.distributed.

Rows travel by copies between GPUs of one host (`peer_memory`), else by messages (`communicator`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist

from .. import __version__
from .board import Shown, make_board
from .calls import ALONE, Calls, ExchangeError, LostPeerError
from .collectives import Collectives
from .communicator import Communicator, timeout_of
from .interface import Pending
from .peer_memory import PeerMemory, out_of_reach, place_of
from .untraced import untraced
from .waiter import Waiter


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
            _check_versions(share(__version__))
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


@untraced
def _meet(group: dist.ProcessGroup, timeout: float | None) -> _Members:
    return _Members(group, timeout)


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
