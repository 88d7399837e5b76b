"""The calls of a rank that has nobody to agree with."""

from __future__ import annotations

from typing import Any

from .calls import Call, Calls, Finding, Scope


class _OfOneRank(Calls):
    """They have no order that others would have to follow, so they are not counted."""

    def __init__(self) -> None:
        self.number = 0

    def enter(self, name: str, part: str, of: int = 0) -> Scope:
        return Scope(self, Call(0, name, part, of))

    def before_rows(self) -> None:
        pass

    def leave(self, scope: Scope, error: BaseException | None) -> None:
        pass

    def fail(self, finding: Finding) -> bool:
        return False


ALONE: Any = _OfOneRank()
"""The calls of a world of one rank."""
