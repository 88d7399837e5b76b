"""Ranks of one process that take turns on one device, counting what they exchange and how long.

The ranks of `run_loopback` are threads. Here one of them goes on at a time, and whoever waits for
another rank lets the others go on, so that the time which a rank computes is its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..exchange import Exchange, Pending


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What a rank exchanges with others in one direction of a call.

    Attributes:
        sent: bytes sent.
        received: bytes received.
        messages: messages sent.
        peers: the ranks sent to or received from, in rising order.
    """

    sent: int
    received: int
    messages: int
    peers: tuple[int, ...]


class Clock:
    """Adds up the time between `start` and `stop`, in seconds, until it is taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Begin to count."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop counting when the device is done."""
        if self._since is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._sum += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """The sum since this was last called."""
        taken, self._sum = self._sum, 0.0
        return taken

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing inside of ``with``."""
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()


class Turns:
    """An `Exchange` whose rank goes on only while no other rank of its world does.

    It has its turn inside of ``with``, but for the times when it waits for other ranks. It counts
    what it exchanges, and the received rows that are there at once.
    """

    def __init__(self, ends: Exchange, clock: Clock, lock: threading.Lock) -> None:
        self.rank, self.world_size, self.sent_bytes = ends.rank, ends.world_size, 0
        self.calls = ends.calls
        self.clock = clock
        self.most_buffered = 0
        self.waited: Callable[[], None] = lambda: None
        """Is called after every wait for rows, when the rank has its turn again."""
        self._ends, self._lock = ends, lock
        self._buffered = self._received_bytes = self._messages = 0
        self._peers: set[int] = set()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def others_go_on(self) -> Iterator[None]:
        """End the turn, and take another one at the end."""
        with self.clock.stopped():
            self._lock.release()
            try:
                yield
            finally:
                self._lock.acquire()

    def take(self) -> Transfers:
        """What was exchanged since this was last called."""
        taken = Transfers(
            sent=self.sent_bytes,
            received=self._received_bytes,
            messages=self._messages,
            peers=tuple(sorted(self._peers)),
        )
        self.sent_bytes = self._received_bytes = self._messages = 0
        self._peers.clear()
        return taken

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is not None:
            self.sent_bytes += send[1].nbytes
            self._messages += 1
            self._peers.add(send[0])
        if receive is not None:
            rows = receive[1]
            self._received_bytes += rows.nbytes
            self._peers.add(receive[0])
            self._buffered += rows.nbytes
            self.most_buffered = max(self.most_buffered, self._buffered)
            weakref.finalize(rows, self._freed, rows.nbytes).atexit = False
        with self.clock.stopped():  # the loopback copies what it sends
            return _Wait(self._ends.start(send, receive), self)

    def _freed(self, nbytes: int) -> None:
        self._buffered -= nbytes

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        with self.others_go_on():
            return self._ends.maximum(values, device)

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        with self.others_go_on():
            return self._ends.share(value)


class _Wait:
    """A transfer whose rank lets the others go on while it waits."""

    def __init__(self, pending: Pending, turns: Turns) -> None:
        self._pending, self._turns = pending, turns

    def wait(self) -> None:
        with self._turns.others_go_on():
            self._pending.wait()
        self._turns.waited()
