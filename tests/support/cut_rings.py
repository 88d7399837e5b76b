"""Rings cut up as only long sequences are."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ring_dilated_attention.engine import compute
from ring_dilated_attention.plan import attention
from support.plans import forget_plans

ROUND_PAIRS = attention.ROUND_PAIRS
"""As the package has them."""


def set_round_pairs(patch: pytest.MonkeyPatch, pairs: int) -> None:
    """Have plans cut rings into rounds of this many pairs: see `plan.attention.ROUND_PAIRS`."""
    patch.setattr(attention, "ROUND_PAIRS", pairs)


@contextmanager
def rings_cut(pairs: int | None) -> Iterator[None]:
    """A few heads at a time, or one in pieces, their results added behind the compute.

    Args:
        pairs: see `set_round_pairs`; None: as they are.
    """
    with pytest.MonkeyPatch.context() as patch:
        if pairs is not None:
            set_round_pairs(patch, pairs)
            patch.setattr(compute, "LONG_FLOPS", 0)
        forget_plans()  # plans keep their rounds
        yield
    forget_plans()
