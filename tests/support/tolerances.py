"""Tolerances that are derived: from plain code in the same precision, or from a count.

A constant that one processor's rounding decided fails on the next one. Compare with the exact
result, in float64, and allow a small factor of the error that plain code has in the dtype under
test; or, where there is no plain code, of the epsilon of that dtype.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch

from ring_dilated_attention.checks.verify import TOLERANCE as TOLERANCE  # of `rda verify`


def rounding_bound(dtype: torch.dtype, terms: int = 1) -> float:
    """The relative error to be expected of a sum of `terms` products that is kept in `dtype`.

    Roundings are independent, so their sum grows with the root of their number; four times that is
    never reached by chance.

    Args:
        dtype: what results are kept in.
        terms: how many roundings go into one number: head_dim of a score, keys of an output.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(max(terms, 1))


def assert_close_to(
    actual: torch.Tensor,
    exact: torch.Tensor,
    *,
    plain: torch.Tensor | None = None,
    factor: float = 2.0,
    terms: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Check that the largest error of `actual` is at most `factor` times that of `plain`.

    Errors are relative to the largest finite number of `exact`, or to 1 where that is smaller than
    1: gradients that cancel to nothing have no relative error. Where `plain` happens to be exact,
    `rounding_bound` of `terms` is allowed, as it is where no `plain` is given.

    Args:
        actual: the result to be checked, any shape.
        exact: the same in float64; infinite where, and only where, `actual` is to be.
        plain: the same computation, done plainly in the precision of `actual`.
        factor: how much worse than plain code a result may be.
        terms: see `rounding_bound`.
        dtype: in which `actual` was computed; None: its own.

    Raises:
        AssertionError: with the error and what is allowed.
    """
    device, shape = actual.device, tuple(actual.shape)  # there: many rows take long on a CPU
    exact = exact.detach().to(device).double()
    assert shape == tuple(exact.shape), f"shape {shape}, {tuple(exact.shape)} expected"
    finite = exact.isfinite()
    values = actual.detach().double()
    assert torch.equal(values[~finite], exact[~finite]), "not infinite where it is to be"
    if not finite.any():
        return
    scale = max(1.0, exact[finite].abs().max().item())
    allowed = scale * rounding_bound(dtype or actual.dtype, terms)
    if plain is not None:
        of_plain = plain.detach().to(device).double()[finite] - exact[finite]
        allowed = max(allowed, factor * of_plain.abs().max().item())
    error = (values[finite] - exact[finite]).abs()
    worst = error.max().item()  # NaN, if there is one
    assert worst <= allowed, f"error {worst:.3g} of {scale:.3g}, {allowed:.3g} allowed"


BITS_MAY_DIFFER = "MKL_CBWR" in os.environ
"""MKL's products by the kernels that this asks for depend on where in memory operands lie."""


def assert_same(
    actual: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    exact: Callable[[], Sequence[torch.Tensor]],
) -> None:
    """Check that two ways to run one computation make equal bits, and equal strides.

    Where `BITS_MAY_DIFFER`, what MKL multiplies is checked as `assert_close_to` does, `expected`
    being the plain computation.

    Args:
        actual: results of one way.
        expected: those of the other.
        exact: computes them in float64.
    """
    exacts = exact() if BITS_MAY_DIFFER else expected
    for a, b, want in zip(actual, expected, exacts, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        if BITS_MAY_DIFFER and a.dtype in (torch.float32, torch.float64):
            assert_close_to(a, want, plain=b, terms=64)
        else:
            assert torch.equal(a, b)


FLOAT64 = rounding_bound(torch.float64, 256 * 256)
"""Relative error of a small call in float64: up to 256 keys of up to 256 elements."""
FLOAT32 = rounding_bound(torch.float32, 64 * 64)
"""Relative error of a small call in float32: up to 64 keys of up to 64 elements."""
