"""Caches that are bounded by what they hold, not by how many entries they have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")

INT_BYTES = 40
"""Of an int in a tuple: the object, and the reference to it."""


class CachedBySize(Generic[T]):
    """A function of hashable positional arguments that keeps results: see `cache_by_size`."""

    def __init__(
        self, function: Callable[..., T], most_bytes: int, nbytes: Callable[[Any, Any], int]
    ) -> None:
        update_wrapper(self, function)
        self._function, self._most_bytes, self._nbytes = function, most_bytes, nbytes
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = Lock()
        self.held = 0

    def __call__(self, *arguments: Hashable) -> T:
        """The result, kept or made."""
        found = self._kept.get(arguments)
        if found is not None:  # without the lock, which takes as long as all of this
            try:  # noqa: SIM105 - on every call, and `suppress` takes twice as long
                self._kept.move_to_end(arguments)
            except KeyError:  # another thread has just dropped it
                pass
            return found[0]
        result = self._function(*arguments)
        size = self._nbytes(arguments, result)
        with self._lock:
            if arguments not in self._kept:
                self._kept[arguments] = result, size
                self.held += size
            while self.held > self._most_bytes and len(self._kept) > 1:
                self.held -= self._kept.popitem(last=False)[1][1]
        return result

    def forget(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
            self.held = 0


def cache_by_size(
    most_bytes: int, nbytes: Callable[[Any, Any], int]
) -> Callable[[Callable[..., T]], CachedBySize[T]]:
    """Keep the results of a function's most recent calls, as far as they fit in `most_bytes`.

    The result of the last call is kept whatever its size is: its caller holds it anyway.

    Args:
        most_bytes: of all arguments and results together.
        nbytes: ``nbytes(arguments, result)``, roughly what the two take; `arguments` is a tuple.

    Returns:
        A decorator. Threads may share the function; `held` is the bytes that it keeps.
    """
    return lambda function: CachedBySize(function, most_bytes, nbytes)


def keep_few(entries: dict[Hashable, T], key: Hashable, make: Callable[[], T], most: int) -> T:
    """The entry of `key`, made if there is none; of more than `most`, the oldest goes."""
    found = entries.get(key)
    if found is None:
        found = entries[key] = make()
        while len(entries) > most:
            oldest = list(entries)[:1]  # in one step: other threads may add, and drop the same
            entries.pop(oldest[0], None)
    return found
