"""Rings cut up as only long sequences are."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ring_dilated_attention.engine import compute
from ring_dilated_attention.plan import attention
from ring_dilated_attention.resolve import forget_plans


@contextmanager
def rings_cut(round_pairs: int | None) -> Iterator[None]:
    """A few heads at a time, or one in pieces, their results added behind the compute.

    Args:
        round_pairs: see `plan.attention.ROUND_PAIRS`; None: as they are.
    """
    with pytest.MonkeyPatch.context() as patch:
        if round_pairs is not None:
            patch.setattr(attention, "ROUND_PAIRS", round_pairs)
            patch.setattr(compute, "LONG_FLOPS", 0)
        forget_plans()  # plans keep their rounds
        yield
    forget_plans()
