"""Which kinds of calls the ranks of a group have agreed on before."""

from __future__ import annotations

from typing import Any

_MOST = 4096
"""Kinds that a group remembers: a kilobyte each at most."""


class Kinds:
    """Kinds of calls: the last ones, the same on all ranks, which add them in one order."""

    def __init__(self) -> None:
        self._kinds: dict[Any, None] = {}

    def __contains__(self, kind: Any) -> bool:
        return kind in self._kinds

    def add(self, kind: Any) -> None:
        """Add one, and drop the one that was added first of too many."""
        self._kinds[kind] = None
        if len(self._kinds) > _MOST:
            del self._kinds[next(iter(self._kinds))]

    def clear(self) -> None:
        """Forget all."""
        self._kinds.clear()
