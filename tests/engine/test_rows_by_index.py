"""Rows of messages that branches share: Triton's kernels against torch; interpreted without a GPU.

Copies are exact, sums are those of float32 in the order of the slots, to the last bit.
"""

import os
from itertools import pairwise

import pytest
import torch
from support.tolerances import rounding_bound

pytest.importorskip("triton")

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.engine import transfer
from ring_dilated_attention.kernels.rows import index_rows, sum_slots
from ring_dilated_attention.plan import plan_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu, pytest.mark.filterwarnings("default")]),
    # As in test_kernel_attention.
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
BATCH, LENGTH, HEADS, ROWS = 2, 45, 3, 97


def _random(*shape, dtype=FLOAT):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def _index():
    """Positions and heads of distinct rows, in no order."""
    number = torch.randperm(LENGTH * HEADS, device=DEVICE)[:ROWS]
    return number // HEADS, number % HEADS


def _views(kind, head_dim, dtype):
    """K and V (batch, length, heads, head_dim), whose rows are not where they would be."""
    if kind == "plain":
        return tuple(_random(2, BATCH, LENGTH, HEADS, head_dim, dtype=dtype))
    if kind == "joint":  # of one projection, not all of whose rows are in use
        joint = _random(BATCH, LENGTH + 3, 3 * HEADS + 1, head_dim, dtype=dtype)[:, 2:-1]
        return joint[:, :, HEADS : 2 * HEADS], joint[:, :, 2 * HEADS : -1]
    if kind == "heads first":
        key = _random(BATCH, HEADS, LENGTH, head_dim, dtype=dtype).transpose(1, 2)
        return key, _random(LENGTH, BATCH, HEADS, head_dim, dtype=dtype).transpose(0, 1)
    assert kind == "expanded"
    key = _random(1, LENGTH, 1, head_dim, dtype=dtype).expand(BATCH, LENGTH, HEADS, head_dim)
    value = _random(BATCH, 1, HEADS, head_dim, dtype=dtype).expand(BATCH, LENGTH, HEADS, head_dim)
    return key, value


KINDS = ["plain", "joint", "heads first", "expanded"]
SIZES = [(7, HALF), (48, FLOAT), (128, BRAIN)]


@pytest.mark.parametrize(("head_dim", "dtype"), SIZES)
def test_rows_are_taken_as_they_are(head_dim, dtype):
    torch.manual_seed(0)
    for kind in KINDS:
        pair, (positions, heads) = _views(kind, head_dim, dtype), _index()
        held = torch.full((2, BATCH, ROWS + 2, head_dim), torch.nan, device=DEVICE, dtype=dtype)
        index_rows(pair, held[:, :, 1:-1], positions, heads)
        for tensor, found in zip(pair, held, strict=True):
            assert torch.equal(found[:, 1:-1], tensor[:, positions, heads]), kind
            assert found[:, [0, -1]].isnan().all(), kind


@pytest.mark.parametrize(
    ("dtype", "part_dtype"),
    [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, HALF), (HALF, FLOAT), (BRAIN, BRAIN), (FLOAT, BRAIN)],
)
def test_adding_rounds_once(dtype, part_dtype):
    torch.manual_seed(0)
    for kind in KINDS[:3]:
        pair, (positions, heads) = _views(kind, 48, dtype), _index()
        parts = _random(2, BATCH, ROWS, 48, dtype=part_dtype)
        want = [x.float() for x in pair]
        for tensor, part in zip(want, parts, strict=True):
            tensor[:, positions, heads] += part
        index_rows(pair, parts, positions, heads, adds=True)
        for tensor, expected in zip(pair, want, strict=True):
            assert_rounded_once(tensor, expected)


def assert_rounded_once(got, exact):
    if INTERPRETED and got.dtype == BRAIN:  # the interpreter cuts off what bf16 cannot hold
        assert relative_error(got, exact) < torch.finfo(BRAIN).eps
    else:
        assert torch.equal(got, exact.to(got.dtype))


def _slots_of_rows(most):
    """Slots in the order of their rows, and where those of each begin: 1 to `most` of each."""
    counts = torch.randint(1, most + 1, (ROWS,))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    order = torch.randperm(int(starts[-1]))
    return order.to(DEVICE), starts.to(DEVICE)


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize(("head_dim", "dtype"), SIZES)
def test_sums_are_of_float32_and_in_order(head_dim, dtype, most):
    torch.manual_seed(0)
    order, starts = _slots_of_rows(most)
    slots = _random(2, BATCH, len(order), head_dim, dtype=dtype)
    slots[:, :, ::3] *= 1000  # another order would round to another sum
    sums = torch.full((2, BATCH, ROWS, head_dim), torch.nan, device=DEVICE, dtype=dtype)
    sum_slots(slots, sums, order, starts)
    want = torch.zeros(sums.shape, device=DEVICE)
    for row, (start, stop) in enumerate(pairwise(starts.tolist())):
        for slot in order[start:stop]:
            want[:, :, row] += slots[:, :, slot]
    assert_rounded_once(sums, want)


def _message():
    """A message whose branches share rows."""
    pattern = DilatedPattern([6, 16, None], [1, 2, 4], head_offsets="blocked")
    plan = plan_attention(pattern, SequenceLayout.contiguous(45, 2), is_causal=False, num_heads=4)
    (step,) = plan.rank(0).steps()
    assert step.send is not None
    assert step.send.rows < step.send.slots
    return step.send


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_messages_are_what_torch_makes_of_them(dtype, monkeypatch):
    torch.manual_seed(0)
    message = _message()
    key, value = _random(2, BATCH, 45, 4, 48, dtype=dtype)
    slots = _random(2, BATCH, message.slots, 48, dtype=dtype)
    results = []
    for runs in (False, True):
        monkeypatch.setattr(transfer, "runs_triton", lambda _, runs=runs: runs)
        packed, totals = transfer.pack(key, value, message), (key.clone(), value.clone())
        transfer.add_returned(*totals, packed, message)
        spread, sums = transfer.spread(packed, message), transfer.sum_slots(slots, message)
        results.append([packed, spread, *totals, sums])
    *torchs, torch_sums = results[0]
    *ours, our_sums = results[1]
    for got, want in zip(ours, torchs, strict=True):
        assert torch.equal(got, want)
    want = transfer.sum_slots(slots.double(), message) if INTERPRETED else torch_sums
    assert relative_error(our_sums, want) < rounding_bound(dtype)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.xdist_group("large")
def test_offsets_beyond_31_bits():
    """The last rows of tensors of more than 2^31 elements."""
    positions, heads, head_dim = 2**20 + 3, 32, 64
    key = torch.zeros(1, positions, heads, head_dim, device=DEVICE, dtype=HALF)
    assert key.numel() > 2**31
    last = key[:, -5:]
    last.copy_(_random(*last.shape))
    at = torch.arange(positions - 5, positions, device=DEVICE)
    head = torch.full_like(at, heads - 1)
    packed = key.new_empty(2, 1, 5, head_dim)
    index_rows((key, key), packed, at, head)
    assert torch.equal(packed, last[:, :, -1].expand(2, 1, 5, head_dim))
    want = last[:, :, -1] * 2
    index_rows((key, torch.zeros_like(key)), packed, at, head, adds=True)
    assert torch.equal(last[:, :, -1], want)
    slots = key.view(2, 1, -1, head_dim)
    rows = slots.shape[2]
    order = torch.tensor([rows - 1, rows - 33], device=DEVICE)
    sums = key.new_empty(2, 1, 1, head_dim)
    sum_slots(slots, sums, order, torch.tensor([0, 2], device=DEVICE))
    assert torch.equal(sums[1, 0, 0], want[0, -1] + want[0, -2])
