"""`rda bench` in less time."""

import pytest

from ring_dilated_attention.bench import measure


def measure_little(patch: pytest.MonkeyPatch, size: int = 64, device: str = "cpu") -> None:
    """Have the rates of a device measured with matrices of this side, and a copy of 64 KiB."""
    patch.setitem(measure.MATMUL_SIZES, device, size)
    patch.setitem(measure.COPY_BYTES, device, 2**16)
