"""Every rank on one device, taking turns: what `simulate` finds, and that it finds faults."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.changed_messages import change_rows, lose_returned_gradients
from support.strategies import cases
from support.wrong_bytes import send_a_byte_more

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import Case, make_layout, simulate
from ring_dilated_attention.checks.simulation import Transfers
from ring_dilated_attention.engine import compute
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import costs

TENSORS = ("out", "lse", "dquery", "dkey", "dvalue")

PATTERN = DilatedPattern([16, 50, None], [1, 3, 4])
CASE = Case(pattern=PATTERN, layout=SequenceLayout.zigzag(101, 3), dtype=torch.float32, head_dim=8)


@settings(max_examples=20)
@given(cases())
def test_simulate_finds_any_case_as_planned(case):
    found = simulate(case)
    assert found.ok, found.problems
    assert len(found.ranks) == case.layout.world_size
    assert sum(x.positions for x in found.ranks) == case.layout.length
    for direction in ("forward", "backward"):
        counted = [getattr(x, direction).counted for x in found.ranks]
        assert sum(x.sent for x in counted) == sum(x.received for x in counted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", [DilatedPattern([4], [4]), DilatedPattern([1], [1])])
def test_simulate_allows_gradients_that_are_nothing_but_rounding(pattern, dtype):
    """Every query sees one key: the gradients of query and key are 0."""
    case = replace(CASE, pattern=pattern, layout=make_layout("uneven", 37, 5), dtype=dtype)
    found = simulate(case)
    assert found.ok, found.problems


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_simulate_counts_what_is_counted_by_hand(exchange):
    """Dense and causal, 3 positions on each of 2 of 3 ranks: one message, one way, each pass."""
    layout = SequenceLayout([[(0, 3)], [], [(3, 6)]])
    case = Case(
        pattern=DilatedPattern.dense(),
        layout=layout,
        is_causal=True,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        exchange=exchange,
    )
    found = simulate(case)
    assert found.ok, found.problems
    first, empty, last = found.ranks
    rows = 2 * 3 * 4 * 4  # key and value, 3 rows of 4 floats
    nothing = Transfers(sent=0, received=0, messages=0, peers=())
    assert first.forward.counted == Transfers(sent=rows, received=0, messages=1, peers=(2,))
    assert last.forward.counted == Transfers(sent=0, received=rows, messages=0, peers=(0,))
    assert first.backward and empty.backward and last.backward  # noqa: PT018
    both_ways = Transfers(sent=rows, received=rows, messages=1, peers=(2,))
    assert first.backward.counted == both_ways  # keys and values out, gradients in
    assert last.backward.counted == replace(both_ways, peers=(0,))
    assert empty.forward.counted == empty.backward.counted == nothing
    assert last.held_memory == costs.Memory(
        query=96, key=48, value=48, out=96, lse=24, buffers=rows
    )
    # 2 heads, 6 and 15 pairs, 4 operations for each of 4 elements
    assert [x.flops for x in found.ranks] == [2 * 6 * 16, 0, 2 * 15 * 16]
    assert found.balance.largest_rank == 2
    assert found.balance.imbalance == pytest.approx(15 / 7)
    assert last.of_mean == found.balance.imbalance


def test_simulate_lets_one_rank_compute_at_a_time(monkeypatch):
    computing, most = [], []

    def watched(function):
        def call(*arguments, **options):
            computing.append(1)
            most.append(len(computing))
            time.sleep(0.001)  # for whoever would come in between
            function(*arguments, **options)
            computing.pop()

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(compute, name, watched(getattr(compute, name)))
    found = simulate(replace(CASE, layout=SequenceLayout.contiguous(101, 5)))
    assert found.ok
    assert len(most) > 2 * 2 * 5
    assert max(most) == 1
    assert all(x.forward.seconds >= 0.002 for x in found.ranks)


def test_simulate_without_backward():
    found = simulate(CASE, backward=False)
    assert found.ok
    assert list(found.errors) == ["out", "lse"]
    assert all(x.backward is None and x.seconds == x.forward.seconds for x in found.ranks)


FAULTS = {
    "lost gradients": (lose_returned_gradients, ["dkey", "dvalue"]),
    "wrong rows": (lambda patch: change_rows(patch, lambda rows: rows + 1), list(TENSORS)),
    "NaN": (lambda patch: change_rows(patch, lambda rows: rows * torch.nan), list(TENSORS)),
    "bytes": (lambda patch: send_a_byte_more(patch, [1]), ["rank 1, forward", "rank 1, backward"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_simulate_finds_faults(fault, monkeypatch):
    break_it, found_in = FAULTS[fault]
    break_it(monkeypatch)
    found = simulate(CASE)
    assert list(dict.fromkeys(text.split(":")[0] for text in found.problems)) == found_in
    if fault == "lost gradients":
        assert found.errors["dkey"] > 1e-2 > found.errors["dquery"]


def test_simulate_finds_rows_that_are_kept_too_long(monkeypatch):
    kept = []
    loopback: Any = run_loopback(1, type)[0]
    start = loopback.start

    def keep(self, send, receive):
        if receive is not None:
            kept.append(receive[1])
        return start(self, send, receive)

    monkeypatch.setattr(loopback, "start", keep)
    found = simulate(replace(CASE, layout=SequenceLayout.contiguous(101, 5)))
    assert any("held Memory" in text for text in found.problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch, heads, kv_heads and head_dim must be >= 1"),
        ({"head_dim": 0}, "batch, heads, kv_heads and head_dim must be >= 1"),
        ({"num_kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"exchange": "bus"}, "exchange must be one of 'auto', 'ring', 'gather'"),
        ({"exchange": "heads"}, "no exchange by heads"),
        ({"backend": "cudnn"}, "cudnn"),
    ],
)
def test_simulate_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        simulate(replace(CASE, **change))
    with pytest.raises(TypeError, match="case must be a Case, got"):
        simulate(change)
