"""Lets one thread begin transfers until another one ends all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from .calls import LostPeerError

T = TypeVar("T")

_WAIT_S = 2.0
"""A transfer takes less to begin, except where the device's queue is full."""


class Gate:
    """Transfers are begun by its `begin`, until it has been shut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shut = False

    def begin(self, transfer: Callable[[], T]) -> T:
        """What a function returns that begins a transfer.

        Raises:
            LostPeerError: the gate has been shut; whoever did so knows why.
        """
        with self._lock:  # by itself: an error that a thread is told may come in any function
            if self._is_shut:
                raise LostPeerError([])
            return transfer()

    def shut(self) -> None:
        """Let no transfer begin any more, and wait for one that is being begun."""
        self._is_shut = True
        if self._lock.acquire(timeout=_WAIT_S):
            self._lock.release()
