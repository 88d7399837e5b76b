"""What torchscale's configuration and constructor say, checked."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any


def ints_of(args: Any, name: str) -> Sequence[int]:
    """A list of ints of torchscale's configuration, which may be given as text."""
    if not hasattr(args, name):
        raise TypeError(f"args must have {name}, a list of ints; got {args!r}")
    value = getattr(args, name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"args.{name} must be a list of ints; got {value!r}") from None
    if not isinstance(value, list | tuple):
        raise TypeError(f"args.{name} must be a list of ints; got {value!r}")
    return value


def check_dropout(dropout: float) -> float:
    """The dropout of torchscale's constructor; raises unless it is a number in [0, 1]."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout must be a number, got {dropout!r}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must lie in [0, 1]; got {dropout!r}")
    return float(dropout)
