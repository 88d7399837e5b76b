"""Rows and agreements as messages of torch.distributed: gloo for the CPU, NCCL for GPUs.

Both are communicators of this package's own: their messages do not queue behind the caller's
collectives, nor these behind them. They are put together here because `new_group` needs ranks that
are not in the group: all of them, or, with ``use_local_synchronization``, that they have made as
many groups before.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from .interface import LostPeerError, Message, Nothing

T = TypeVar("T")

_HEAD = struct.Struct("=qq")
"""The header of an agreement: a number, and how many bytes come with it."""

_LEFT = "left"
"""Key of the store under which the first rank that leaves says why."""

_ANSWER_S = 2.0
"""Seconds that the store may take to answer; as a rule it lives in the process of a rank."""


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether this is one of torch's groups for dry runs, which have no other ranks."""
    return dist.get_backend(group) == "fake"


def timeout_of(group: dist.ProcessGroup) -> float:
    """Timeout of a group in seconds; that for tensors on the CPU where it takes those."""
    if is_fake(group):
        return 0.0
    device = torch.device("cpu" if "cpu" in dist.get_backend_config(group) else "cuda")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()


class Gloo:
    """A rank's end of a communicator of gloo, for agreements and for rows on the CPU.

    Its construction is a collective.

    Args:
        store: in which the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds to wait for another rank.

    Raises:
        LostPeerError: a rank did not come.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._world_size = store, world_size
        self._under_way: WeakSet[_Works] = WeakSet()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = _devices(store)
        try:
            self._gloo: Any = gloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise LostPeerError([], _said(error)) from error

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        heads, work = self._to_all(_HEAD.pack(number, len(data)))

        def wait() -> list[tuple[int, bytes]]:
            _wait(work, [])
            found = list(_HEAD.iter_unpack(heads))
            largest = max(size for _, size in found)
            if not largest:
                return [(number, b"") for number, _ in found]
            padded, more = self._to_all(data.ljust(largest, b"\0"))
            _wait(more, [])
            rows = [padded[i * largest : i * largest + n] for i, (_, n) in enumerate(found)]
            return [(number, bytes(row)) for (number, _), row in zip(found, rows, strict=True)]

        return wait

    def _to_all(self, data: bytes) -> tuple[bytearray, Any]:
        """Send this to every rank; what they send, by rank, is there when the work is done.

        Of gloo's collectives all-to-all alone takes a single step.
        """
        found = bytearray(self._world_size * len(data))
        into = torch.frombuffer(found, dtype=torch.uint8)  # cheaper than tensors of numbers
        sent = torch.frombuffer(bytearray(data * self._world_size), dtype=torch.uint8)
        try:
            if self._gloo is None:
                raise LostPeerError([])
            return found, self._gloo.alltoall_base(into, sent, [], [], AllToAllOptions())
        except RuntimeError as error:
            raise LostPeerError([], _said(error)) from error

    def transfer(self, send: Message | None, receive: Message | None, number: int) -> _Works:
        """See `Exchange.start`; messages of call `number` are received in that call alone."""
        if self._gloo is None:
            raise LostPeerError([])
        works, tag = _Works(), number % 2**31
        self._under_way.add(works)
        for start, one in ((self._gloo.send, send), (self._gloo.recv, receive)):
            if one is not None:
                peer, tensor = one
                try:
                    works.add([peer], [tensor], start([tensor], peer, tag))
                except RuntimeError as error:
                    raise LostPeerError([peer], _said(error)) from error
        return works

    def leave(self, why: str) -> None:
        """See `Connection`."""
        # Its answer is waited for: whoever finds the connection closed looks there next.
        self._ask(lambda: self._store.compare_set(_LEFT, "", why))
        for works in list(self._under_way):
            works.forget()
        self._gloo = None

    def reason(self) -> str | None:
        """See `Connection`."""
        store = self._store
        return self._ask(lambda: store.get(_LEFT).decode() if store.check([_LEFT]) else None)

    def _ask(self, function: Callable[[], T]) -> T | None:
        """The result of a function of the store; None if the store does not answer."""
        found: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the process that had it has ended
                found.append(function())

        # A store whose process is stopped does not answer, and torch would wait for good.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return found[0] if found else None


class DryRun:
    """In place of `Gloo` for torch's ``fake`` groups: nobody answers, so all are like this rank.

    Shapes, memory and calls are those of a rank; numbers are not: rows of other ranks are 0.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        return lambda: [(number, data)] * self._world_size

    def transfer(self, send: Message | None, receive: Message | None, number: int) -> Nothing:
        """See `Exchange.start`."""
        if receive is not None:
            receive[1].zero_()
        return Nothing()

    def leave(self, why: str) -> None:
        """See `Connection`."""

    def reason(self) -> None:
        """See `Connection`."""


class _Works:
    """Transfers under way, and the tensors that must outlive them."""

    def __init__(self) -> None:
        self._works: list[tuple[list[int], list[torch.Tensor], Any]] = []

    def add(self, peers: list[int], tensors: list[torch.Tensor], work: Any) -> None:
        self._works.append((peers, tensors, work))

    def wait(self) -> None:
        """See `Pending.wait`; of NCCL's, streams wait."""
        for peers, _, work in self._works:
            _wait(work, peers)
        self.forget()

    def forget(self) -> None:
        """Let go of them: while one is there, gloo keeps its connection open."""
        self._works = []


def _wait(work: Any, peers: list[int]) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LostPeerError(peers, _said(error)) from error


def _said(error: RuntimeError) -> str:
    return str(error).splitlines()[0].partition(". This is typically caused by")[0]


def _devices(store: dist.Store) -> list[Any]:
    """Interfaces for gloo: those that the user names, else the one that leads to the store's host.

    gloo would take the one that this host's name leads to, which can be the loopback interface.
    """
    gloo: Any = dist.ProcessGroupGloo
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return [gloo.create_device(interface=name) for name in named.split(",")]
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return [gloo.create_default_device()]
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)
    family, kind, *_, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        return [gloo.create_device(hostname=probe.getsockname()[0])]


_MOST_CTAS = 16
"""Multiprocessors that NCCL may take from the compute behind which it runs."""


class Nccl:
    """A rank's end of a communicator of NCCL, for rows on GPUs; its construction is a collective.

    A rank that does not answer ends the process at `timeout`, as in torch's own groups.

    Args:
        group: the group.
        store: in which the ranks meet.
        device: where the tensors are.
        timeout: seconds to wait for another rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, device: torch.device, timeout: float
    ) -> None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        # Few multiprocessors, but those before the attention kernels.
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = _MOST_CTAS
        options._timeout = timedelta(seconds=timeout)
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        options.group_name = f"ring_dilated_attention {group.group_name}"
        self.device, self._messages = device, dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.NCCL
        self._messages._set_default_backend(kind)
        backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        self._messages._register_backend(torch.device("cuda"), kind, backend)
        # Pairs of ranks connect at their first transfer, which takes long: they do it now.
        sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
        self._messages.allreduce([sent]).wait()
        for step in range(1, world_size):
            to, source = (rank + step) % world_size, (rank - step) % world_size
            self.transfer((to, sent), (source, received), 0).wait()
        torch.cuda.synchronize(device)

    def transfer(self, send: Message | None, receive: Message | None, number: int) -> _Works:
        """See `Exchange.start`. Both in one launch: two would wait for each other."""
        messages: Any = self._messages
        works, peers = _Works(), [one[0] for one in (receive, send) if one is not None]
        try:
            messages._start_coalescing(self.device)
            try:
                for start, one in ((messages.send, send), (messages.recv, receive)):
                    if one is not None:
                        start([one[1]], one[0], 0)
            finally:  # else all that this thread asks NCCL for waits for it
                work = messages._end_coalescing(self.device)
        except dist.DistBackendError as error:
            raise LostPeerError(peers, _said(error)) from error
        works.add(peers, [one[1] for one in (send, receive) if one is not None], work)
        return works
