"""Waits that cannot be interrupted, in a thread that can be left behind.

Most of torch.distributed's waits return when another rank ends, and not all: gloo never tells who
waits for the rest of a message of which some has come. So whoever waits looks at the other ranks
now and then, and goes on without an answer if one of them is lost.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet, finalize

from .calls import ExchangeError, LostPeerError

T = TypeVar("T")

LOOK_S = 0.2
"""Between two looks at the other ranks."""
_END_S = 1.0
"""What was left behind may take so long when the process ends; it ends as other ranks do."""


@contextmanager
def waiting(peers: Sequence[int], timeout: float) -> Iterator[None]:
    """A wait for other ranks: whatever error ends it says how long it was.

    What a rank's timeout breaks fails for others, who say so; whichever of the two errors this rank
    sees first, its own wait has taken the timeout.

    Args:
        peers: the ranks waited for; empty: any of the group.
        timeout: seconds after which the wait is given up.

    Raises:
        LostPeerError: in place of a RuntimeError or TimeoutError.
    """
    begun = time.monotonic()
    try:
        yield
    except (RuntimeError, TimeoutError) as error:  # a LostPeerError is one
        if isinstance(error, LostPeerError):
            peers = error.peers
        elif isinstance(error, ExchangeError):  # says itself what has happened
            raise
        waited = timeout if time.monotonic() - begun >= timeout else None
        raise LostPeerError(peers, waited) from error


class _Task:
    """A function, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = threading.Lock()
        self.is_done.acquire()

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        self.is_done.release()


class _Thread(threading.Thread):
    """Runs tasks, one after the other, until it finds a None."""

    def __init__(self) -> None:
        # Of no pool: whoever has given up a wait must not wait for it when the process ends.
        super().__init__(daemon=True, name="ring-dilated-attention waits")
        self.tasks: SimpleQueue[_Task | None] = SimpleQueue()

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            task.run()
            del task  # what it holds may be waited for


_threads: WeakSet[_Thread] = WeakSet()
"""Of this process."""


class Waiter:
    """A thread that waits in place of others, one after the other. It ends with this object."""

    def __init__(self) -> None:
        thread = _Thread()
        self._tasks = thread.tasks
        finalize(self, self._tasks.put, None)
        _threads.add(thread)
        thread.start()

    def run(self, function: Callable[[], T], look: Callable[[], None]) -> T:
        """What a function returns, or raises.

        Args:
            function: waits for other ranks.
            look: called now and then; when it raises, the function is left behind.
        """
        task = _Task(function)
        self._tasks.put(task)
        while not task.is_done.acquire(timeout=LOOK_S):
            look()
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result


def _end_all() -> None:
    """End the threads before Python ends: one that comes back from torch later ends the process.

    It then needs Python's lock, and is made to exit where C++ allows no exit.
    """
    threads = list(_threads)
    for thread in threads:
        thread.tasks.put(None)
    deadline = time.monotonic() + _END_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)
