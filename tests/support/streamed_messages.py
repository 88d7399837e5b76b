"""Messages between processes on a CPU that behave as those of streams of GPUs do.

The host does not wait for them: a thread stands for the stream, and `synchronize` waits for it as
torch does, without running Python. What the peer does not send never comes, be the peer there or
not. `backward` runs in a thread of its own. So what watches transfers can be tested without a GPU;
results are worthless, since the compute waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ring_dilated_attention.exchange.transports import Site
from ring_dilated_attention.exchange.watch import Gate, UnderWay, Watch

ABORT_S = 0.2
"""So long NCCL takes to return from an abort, having let streams go on at once."""

_all: WeakSet[StreamedMessages] = WeakSet()


class StreamedMessages:
    """A `transports.Transport`."""

    def __init__(self, site: Site, device: torch.device, *, peer_memory: bool | None) -> None:
        store = dist.PrefixStore(f"streamed {site.name}", _get_process_group_store(site.group))
        size = site.group.size()
        self._messages: Any = dist.ProcessGroupGloo(store, site.rank, size, timedelta(minutes=10))
        self._let_go = threading.Event()
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._gate = Gate()
        threading.Thread(target=_run, args=[self._queue], daemon=True).start()
        self._watch = Watch(site.calls, site.roll, self._release, site.timeout)
        _all.add(self)

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> _Started:
        """See `Exchange.start`."""
        return self._gate.begin(partial(self._begin, send, receive))

    def _begin(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> _Started:
        done = threading.Event()
        peers = tuple(one[0] for one in (receive, send) if one is not None)
        self._queue.put(partial(self._do, send, receive, done))
        self._watch.add(UnderWay(lambda: True, done.is_set, peers))
        return _Started()

    def _do(
        self,
        send: tuple[int, torch.Tensor] | None,
        receive: tuple[int, torch.Tensor] | None,
        done: threading.Event,
    ) -> None:
        come = threading.Event()
        threading.Thread(target=self._move, args=[send, receive, come], daemon=True).start()
        while not come.is_set() and not self._let_go.is_set():
            time.sleep(0.0005)
        done.set()

    def _move(
        self,
        send: tuple[int, torch.Tensor] | None,
        receive: tuple[int, torch.Tensor] | None,
        come: threading.Event,
    ) -> None:
        with suppress(RuntimeError):  # the peer has gone
            works = [
                start([one[1]], one[0], one[1].nbytes)  # the tag: others would not fit
                for start, one in ((self._messages.send, send), (self._messages.recv, receive))
                if one is not None
            ]
            for work in works:
                work.wait()
            come.set()

    def wait_for_all(self) -> None:
        """Wait until the stream has done all that it has been given by now."""
        done = threading.Lock()
        done.acquire()
        self._queue.put(done.release)
        done.acquire()

    def _release(self, is_done: Callable[[], bool]) -> None:
        self._gate.shut()
        self._let_go.set()
        time.sleep(ABORT_S)

    def stop(self) -> None:
        """See `Transport`."""
        self._gate.shut()

    def close(self) -> None:
        """See `Transport`."""

    def abandon(self) -> None:
        """See `Transport`."""
        self._watch.end()
        self._release(lambda: True)


def _run(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


class _Started:
    """A transfer, for which a stream waits."""

    def wait(self) -> None:
        """See `Pending`."""


def synchronize() -> None:
    """Wait for all streams."""
    for transport in list(_all):
        transport.wait_for_all()


def use_streams(patch: pytest.MonkeyPatch, groups: Any) -> None:
    """Have groups of this process move rows so.

    Args:
        patch: undoes it.
        groups: the module `exchange.groups`.
    """
    patch.setattr(groups, "make_transport", StreamedMessages)
    backward = torch.Tensor.backward

    def in_a_thread(*args: Any, **options: Any) -> None:
        raised: list[BaseException] = []
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            try:
                backward(*args, **options)
            except BaseException as error:
                raised.append(error)
            done.release()

        threading.Thread(target=run, name=threading.current_thread().name).start()
        done.acquire()
        if raised:
            raise raised[0]

    patch.setattr(torch.Tensor, "backward", in_a_thread)
