"""What torch.compile never traces: what implements operators, and what talks to other ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """A function that torch.compile runs as it is.

    In a compiled graph an operator is one call. But where torch.compile leaves a graph before the
    call and does not come back to it, the operator runs like any other function: torch.compile
    would trace what implements it, and fail at the first kernel. What talks to other ranks is no
    operator, and tracing it fails at the first thing of torch.distributed that is not known there.

    Args:
        function: of positional arguments.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*arguments: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # importing it takes a second
            return function(*arguments)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments)

    return run  # type: ignore[return-value]
