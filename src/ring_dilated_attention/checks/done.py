"""Counts the operations that the ranks of a simulation have done, for progress bars."""

from __future__ import annotations

from collections.abc import Callable

Told = Callable[[float, str], None]
"""(operations done, what is being computed) -> None."""


class Total:
    """Operations that all ranks have done; the rank whose turn it is adds its own."""

    def __init__(self, told: Told) -> None:
        self._told, self._flops = told, 0.0

    def add(self, flops: float, what: str) -> None:
        """Count operations, and tell how many there are."""
        self._flops += flops
        self._told(self._flops, what)


class Done:
    """Operations that one rank has done of a pass: some more at every wait, all at the end."""

    def __init__(self, total: Total, name: str, flops: int, waits: int = 0) -> None:
        self._total, self._name, self._flops, self._parts = total, name, flops, waits + 1
        self._left, self._part, self._pass = 0.0, 0.0, ""

    def begin(self, name: str, cost: float) -> None:
        """Begin a pass of `cost` times the operations of forward."""
        self._left, self._pass = cost * self._flops, name
        self._part = self._left / self._parts
        self._total.add(0, f"{self._name}, {name}")

    def some(self) -> None:
        """Count a wait for rows; a pass has at most `waits` of them, often fewer."""
        part = min(self._part, self._left)
        self._left -= part
        self._total.add(part, f"{self._name}, {self._pass}")

    def end(self) -> None:
        """The pass is over."""
        self._total.add(self._left, f"{self._name}, {self._pass}")
        self._left = 0.0
