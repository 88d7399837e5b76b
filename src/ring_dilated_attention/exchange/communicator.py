"""Transfers between ranks by messages of torch.distributed: gloo and NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .calls import Calls, LostPeerError, Roll
from .waiter import Waiter, waiting
from .watch import Gate, UnderWay, Watch, prepare_to_watch


class Communicator:
    """A communicator of its own for the rows that a group exchanges.

    They do not queue behind the caller's collectives, nor these behind them. It is put together
    here because `new_group` needs ranks that are not in the group: all of them, or, with
    ``use_local_synchronization``, that they have made as many groups before. All members make
    theirs at once. gloo's messages say which call they belong to: one of another call is not
    received.

    Args:
        group: the group.
        device: where the tensors are.
        timeout: seconds to wait for another rank.
        calls: of the group.
        roll: what the ranks know of each other.
        name: tells it from the others of the group, on all ranks.
        peers: the ranks that rows travel to and from; NCCL connects to them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        calls: Calls,
        roll: Roll,
        name: str,
        peers: Collection[int],
    ) -> None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = dist.PrefixStore(
            f"ring_dilated_attention {device.type} {name}", _get_process_group_store(group)
        )
        self._timeout, self._calls, self._roll = timeout, calls, roll
        self._under_way: WeakSet[Works] = WeakSet()
        self._watch: Watch | None = None
        self._waiter = Waiter() if device.type == "cpu" else None
        self._side: torch.cuda.Stream | None = None  # waits for transfers, and for nothing else
        self._gate = Gate()
        self._messages: Any = dist.ProcessGroup(store, rank, world_size)
        limit = timedelta(seconds=timeout)
        if device.type == "cuda":
            kind = dist.ProcessGroup.BackendType.NCCL
            self._backend: Any = make_nccl(group, store, limit)
        else:
            kind = dist.ProcessGroup.BackendType.GLOO
            self._backend = dist.ProcessGroupGloo(store, rank, world_size, limit)
        self._messages._set_default_backend(kind)
        self._messages._register_backend(torch.device(device.type), kind, self._backend)
        if device.type == "cuda":
            self._connect(device, peers)
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            release = partial(_release, self._gate, self._backend)
            self._watch = Watch(calls, roll, release, timeout, partial(prepare_to_watch, device))

    def _connect(self, device: torch.device, peers: Collection[int]) -> None:
        """Connect pairs of ranks: NCCL does it at their first transfer, and takes long."""
        rank, world_size = self._messages.rank(), self._messages.size()
        self._messages.allreduce([torch.zeros(1, device=device)]).wait()
        for step in range(1, world_size):
            sent, received = torch.zeros(2, 1, device=device).unbind(0)
            to, source = (rank + step) % world_size, (rank - step) % world_size
            self.transfer(
                (to, sent) if to in peers else None,
                (source, received) if source in peers else None,
            ).wait()
        torch.cuda.synchronize(device)

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Works:
        """Begin to send, and to receive, together."""
        return self._gate.begin(partial(self._begin, send, receive))

    def _begin(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Works:
        transfers = [
            (start, peer, tensor)
            for start, one in ((self._messages.send, send), (self._messages.recv, receive))
            if one is not None
            for peer, tensor in (one,)
        ]
        tensors = [tensor for *_, tensor in transfers]
        if not transfers or not tensors[0].is_cuda:
            tag = self._calls.tag
            works = [(peer, _started(start, peer, x, tag)) for start, peer, x in transfers]
        else:
            device = tensors[0].device
            computed = torch.cuda.current_stream(device).record_event()
            peers = [peer for _, peer, _ in reversed(transfers)]
            work = start_together(self._messages, device, transfers)
            works = [(peers[0], work)]
            if self._watch is not None:
                assert self._side is not None
                # Not `work.is_completed`, which is also true of a transfer that has failed.
                with torch.cuda.stream(self._side):
                    work.wait()
                    done = self._side.record_event()
                self._watch.add(UnderWay(computed.query, done.query, tuple(peers)))
        begun = Works(works, tensors, self._timeout, self._calls, self._roll, self._waiter)
        self._under_way.add(begun)
        return begun

    def stop(self) -> None:
        """Begin no transfer any more; return when none is being begun."""
        self._gate.shut()

    def close(self) -> None:
        """End all transfers on the CPU: other ranks' waits for them fail. The watch ends others."""
        if self._watch is None:
            for works in list(self._under_way):
                works.forget()
            self._messages = self._backend = None

    def abandon(self) -> None:
        """End all transfers, which all ranks know to be in vain; nobody uses this object again."""
        if self._watch is not None:
            self._watch.end()
            self.stop()
            self._backend.abort()
        self._watch = None
        self.close()


def _started(start: Callable[..., Any], peer: int, tensor: torch.Tensor, tag: int) -> Any:
    try:
        return start([tensor], peer, tag)
    except RuntimeError as error:  # gloo: the connection is closed already
        raise LostPeerError([peer]) from error


def _release(gate: Gate, backend: Any, is_done: Callable[[], bool]) -> None:
    """See `watch.Watch`."""
    gate.shut()
    backend.abort()


def takes_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group's collectives take tensors on the CPU."""
    return "cpu" in dist.get_backend_config(group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long a group waits, in seconds: for tensors on the CPU where it takes those."""
    device = torch.device("cpu" if takes_cpu(group) else "cuda")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()


class Works:
    """Transfers of torch.distributed, and the tensors that must outlive them.

    Args:
        works: each with the rank that it waits for.
        tensors: what they send and receive.
        timeout: seconds after which a wait on the host fails.
        calls: that they are part of.
        roll: what the ranks know of each other.
        waiter: waits on the host; None: works are waited for by streams.
    """

    def __init__(
        self,
        works: list[tuple[int, Any]],
        tensors: list[torch.Tensor],
        timeout: float,
        calls: Calls,
        roll: Roll,
        waiter: Waiter | None,
    ) -> None:
        self._works, self._tensors, self._timeout = works, tensors, timeout
        self._calls, self._roll, self._waiter = calls, roll, waiter

    def wait(self) -> None:
        """See `exchange.Pending.wait`."""
        for peer, work in self._works:
            self._roll.waits_for(peer)
            with waiting([peer], self._timeout):
                if self._waiter is None:
                    work.wait()
                else:
                    self._waiter.run(work.wait, partial(self._look, peer))
            self._roll.waits_for(None)
        self._tensors.clear()

    def _look(self, peer: int) -> None:
        self._calls.look()  # first: ranks in different calls wait for each other in vain
        self._roll.look([peer])

    def forget(self) -> None:
        """Let go of transfers that nobody is to wait for any more."""
        self._works, self._tensors = [], []


_MOST_CTAS = 16
"""Multiprocessors that NCCL may take from the compute behind which it runs."""

_LATER = timedelta(seconds=60)

_SETTINGS = {
    # By default a thread of torch's ends the process when NCCL loses a connection, such as that to
    # a rank that has ended. The watch says which rank that is, in an error that may be caught.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # That thread then waits for four times as long, and nobody may begin or end anything meanwhile.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # Streams wait for transfers: a host that does could not be told that a rank has gone.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""What torch reads in the environment when a backend is made, and nowhere else."""


def make_nccl(group: dist.ProcessGroup, store: dist.Store, timeout: timedelta) -> Any:
    """A backend of NCCL for the ranks of a group.

    Args:
        group: the group.
        store: in which the ranks find each other.
        timeout: how long to wait for another rank.
    """
    # Few multiprocessors, but those before the attention kernels.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _MOST_CTAS
    options._timeout = timeout + _LATER  # the watch raises an error before
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = f"ring_dilated_attention {group.group_name}"
    with _environment(_SETTINGS):
        return dist.ProcessGroupNCCL(
            store, dist.get_rank(group), dist.get_world_size(group), options
        )


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Inside, this process has these environment variables."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_together(
    messages: Any,
    device: torch.device,
    transfers: Sequence[tuple[Callable[..., Any], int, torch.Tensor]],
) -> Any:
    """Start transfers in one launch: two would wait for each other.

    Args:
        messages: a ProcessGroup of NCCL.
        device: where the tensors are.
        transfers: each its `send` or `recv`, a rank and a tensor.

    Raises:
        LostPeerError: NCCL has lost a rank, be it in an earlier transfer.
    """
    try:
        messages._start_coalescing(device)
        try:
            for start, peer, tensor in transfers:
                start([tensor], peer, 0)
        except BaseException:
            with suppress(RuntimeError):  # else all that this thread asks NCCL for waits for it
                messages._end_coalescing(device)
            raise
        return messages._end_coalescing(device)
    except dist.DistBackendError as error:
        raise LostPeerError([peer for _, peer, _ in reversed(transfers)]) from error
