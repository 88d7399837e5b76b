"""Waits that cannot be interrupted, in a thread that can be left behind.

Most of torch.distributed's waits return when another rank ends, and not all: gloo never tells who
waits for the rest of a message of which some has come. So whoever waits looks at the other ranks
now and then, and goes on without an answer if one of them is lost.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from .calls import LostPeerError

T = TypeVar("T")

LOOK_S = 0.2
"""Between two looks at the other ranks."""


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


class Waiter:
    """A thread that waits in place of others, one after the other. It ends with this object."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # Of no pool: whoever has given up a wait must not wait for it when the process ends.
        thread = threading.Thread(
            target=_run, args=(self._tasks,), daemon=True, name="ring-dilated-attention waits"
        )
        weakref.finalize(self, self._tasks.put, None)
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


def _run(tasks: SimpleQueue[_Task | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task.run()
        del task  # what it holds may be waited for
