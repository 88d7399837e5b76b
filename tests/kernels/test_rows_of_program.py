"""Which rows a program of the kernels that go row by row has; interpreted without a GPU."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from ring_dilated_attention.kernels.forward import rows_of_program  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@triton.jit
def _find_rows(program, ranges, order, found, block: tl.constexpr):
    _, first, _, count = rows_of_program(program, ranges, order, tl.program_id(0), block)
    tl.store(found, first)
    tl.store(found + 1, count)


@pytest.mark.parametrize("block", [0, 16_382, 16_383])
def test_rows_of_long_sequences_are_counted_in_32_bits(block):
    """2^20 - 1 rows in blocks of 64: rows times blocks are 2^34."""
    high = 2**20 - 1
    ranges = torch.tensor([0, high, 0, high, 1, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    program = torch.tensor([0, 0, high, 0, block], dtype=torch.int32, device=DEVICE)
    order, found = torch.zeros(2, 1 + 1, dtype=torch.int32, device=DEVICE)
    _find_rows[(1,)](program, ranges, order, found, block=64)
    assert found.tolist() == [64 * block, 64 - (block == 16_383)]
