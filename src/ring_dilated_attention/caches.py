"""Caches that are bounded by what they hold, not by how many entries they have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")

INT_BYTES = 40
"""Of an int in a tuple: the object, and the reference to it."""


def cache_by_size(
    most_bytes: int, nbytes: Callable[[Any, Any], int]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Keep the results of a function's most recent calls, as far as they fit in `most_bytes`.

    The result of the last call is kept whatever its size is: its caller holds it anyway.

    Args:
        most_bytes: of all arguments and results together.
        nbytes: ``nbytes(arguments, result)``, roughly what the two take; `arguments` is a tuple.

    Returns:
        A decorator for functions of positional, hashable arguments. Threads may share the function;
        its `held` returns the bytes that it keeps, and its `forget` drops everything.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        total = 0
        lock = Lock()

        @wraps(function)
        def cached(*arguments: Hashable) -> T:
            nonlocal total
            with lock:
                if arguments in kept:
                    kept.move_to_end(arguments)
                    return kept[arguments][0]
            result = function(*arguments)
            size = nbytes(arguments, result)
            with lock:
                if arguments not in kept:
                    kept[arguments] = result, size
                    total += size
                while total > most_bytes and len(kept) > 1:
                    total -= kept.popitem(last=False)[1][1]
            return result

        def forget() -> None:
            nonlocal total
            with lock:
                kept.clear()
                total = 0

        cached.held = lambda: total  # type: ignore[attr-defined]
        cached.forget = forget  # type: ignore[attr-defined]
        return cached

    return decorate


def keep_few(entries: dict[Hashable, T], key: Hashable, make: Callable[[], T], most: int) -> T:
    """The entry of `key`, made if there is none; of more than `most`, the oldest goes."""
    found = entries.get(key)
    if found is None:
        found = entries[key] = make()
        if len(entries) > most:
            entries.pop(list(entries)[0], None)  # another thread may do the same
    return found
