"""How far a result is from another, and memory in which what was not written shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nan_in_uninitialized_memory() -> Iterator[None]:
    """`torch.empty` returns NaN, so that whatever is read before it is written shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch fills only while deterministic algorithms are asked for.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; 0 for two equal tensors, inf for any NaN."""
    actual, expected = actual.double(), expected.double()
    difference = torch.linalg.vector_norm(actual - expected).item()
    if difference == 0:
        return 0.0
    size = torch.linalg.vector_norm(expected).item()
    error = difference / size if size else torch.inf
    return error if error == error else torch.inf
