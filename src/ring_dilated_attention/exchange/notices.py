"""What the ranks of a group leave for each other in the store that they met in."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch.distributed as dist

from .waiter import Waiter

T = TypeVar("T")

_ANSWER_S = 2.0
"""The store may take so long to answer; then it is not asked again."""


class Notices:
    """Texts in a store. The process that holds it may end or be stopped: nobody waits for it then.

    Args:
        store: of the group.

    Attributes:
        are_lost: whether the store has failed to answer; nothing is left or found any more.
        holder_has_ended: whether that was because its process has ended.
        silent_since: when it was first asked in vain (`time.monotonic`) while its process may still
            run; None: never.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.are_lost = self.holder_has_ended = False
        self.silent_since: float | None = None

    @cached_property
    def _waiter(self) -> Waiter:
        return Waiter()

    def leave(self, key: str, text: str = "") -> None:
        """Leave a text, which all ranks may read."""
        self._ask(lambda: self._store.set(key, text), None)

    def read(self, key: str) -> str | None:
        """A text that a rank has left; None: there is none yet."""
        store = self._store
        return self._ask(lambda: store.get(key).decode() if store.check([key]) else None, None)

    def remove(self, key: str) -> None:
        """Take a text away."""
        self._ask(lambda: self._store.delete_key(key), False)

    def _ask(self, function: Callable[[], T], otherwise: T) -> T:
        begun = time.monotonic()

        def look() -> None:
            if time.monotonic() > begun + _ANSWER_S:
                raise TimeoutError

        if not self.are_lost:
            try:
                return self._waiter.run(function, look)
            except (RuntimeError, TimeoutError) as error:
                self.are_lost = True
                self.holder_has_ended = isinstance(error, RuntimeError)
                self.silent_since = None if self.holder_has_ended else begun
        return otherwise
