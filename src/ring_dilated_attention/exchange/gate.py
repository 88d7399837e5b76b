"""Lets one thread begin transfers until another one ends all of them."""

from __future__ import annotations

import threading
from types import TracebackType

from .calls import LostPeerError

_WAIT_S = 2.0
"""A transfer takes less to begin, except where the device's queue is full."""


class Gate:
    """Use it in a ``with`` statement, in which a transfer is begun.

    Raises:
        LostPeerError: it has been shut; whoever did so knows why.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shut = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._is_shut:
            self._lock.release()
            raise LostPeerError([])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def shut(self) -> None:
        """Let no transfer begin any more, and wait for one that is being begun."""
        self._is_shut = True
        if self._lock.acquire(timeout=_WAIT_S):
            self._lock.release()
