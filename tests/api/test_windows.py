"""Sliding windows: what crosses between ranks, who computes them, and what is refused."""

from typing import cast

import pytest
import torch

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import Case, combine, reference_attention, run_case
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.pattern import Window, band_pairs
from ring_dilated_attention.plan import check_plan, plan_attention
from ring_dilated_attention.tiles import backend_named

LONG = 600  # several blocks of rows, where back ends take a band in blocks


def test_pairs_in_a_band_are_counted():
    for queries in range(6):
        for keys in range(6):
            for low in range(-7, 7):
                for high in range(low - 1, 7):
                    counted = sum(low <= j - i <= high for i in range(queries) for j in range(keys))
                    assert band_pairs(queries, keys, low, high) == counted


def test_a_window_needs_its_halo_alone():
    """In contiguous shards: as many rows as it is long, from as many ranks as hold them."""
    layout = SequenceLayout.contiguous(4096, 4)
    for left, ranks in ((100, 1), (1024, 1), (1500, 2)):
        plan = plan_attention(
            DilatedPattern.window(left), layout, is_causal=True, num_heads=8, num_kv_heads=2
        )
        assert plan.rank(3).total_received_rows == 2 * left
        assert sum(step.receive is not None for step in plan.rank(3).steps()) == ranks
        assert plan.rank(0).total_received_rows == 0
    both = plan_attention(DilatedPattern.window(64, 32), layout, is_causal=False)
    assert [rank.total_received_rows for rank in map(both.rank, range(4))] == [32, 96, 96, 64]


def test_of_a_dilated_window_only_what_is_seen_travels():
    layout = SequenceLayout([[(0, 40)], [(40, 42)], [(42, 60)]])
    plan = plan_attention(DilatedPattern.window(16, 0, 4), layout, is_causal=True)
    check_plan(plan)
    assert plan.rank(1).total_received_rows == 8  # 4 keys before each of 2 queries


@pytest.mark.parametrize(
    ("exchange", "backend"), [("ring", "eager"), ("gather", "cpu_flash"), ("heads", "auto")]
)
def test_windows_beside_other_branches_are_the_reference(exchange, backend):
    case = Case(
        pattern=DilatedPattern([Window(70, 9), 200, None], [2, 1, 5]),
        layout=SequenceLayout([[(0, 100), (560, LONG)], [(100, 131)], [(131, 560)]]),
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        dtype=torch.float64,
        exchange=exchange,
        backend=backend,
        documents=(0, 17, 300, LONG),
    )
    (outcome,) = combine(run_loopback(3, lambda ends: [run_case(case, ends)]))
    assert outcome.passes(case.dtype), outcome


@pytest.mark.parametrize("window", [Window(0), Window(3), Window(400), Window(LONG, LONG)])
def test_windows_of_any_length(window):
    q, k, v = torch.randn(3, 1, LONG, 2, 8, dtype=torch.float64).unbind()
    pattern = DilatedPattern([window], [1])
    out, lse = dilated_attention(q, k, v, pattern, return_lse=True)
    expected, expected_lse = reference_attention(q, k, v, pattern)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_windows_compile():
    q, k, v = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64).unbind()
    q.requires_grad_()
    pattern = DilatedPattern([Window(5, 2), None], [1, 7])
    found = []
    for call in (
        dilated_attention,
        torch.compile(dilated_attention, fullgraph=True, backend="aot_eager"),
    ):
        out = call(q, k, v, pattern)
        found += [out, *torch.autograd.grad(out.square().sum(), q)]
    assert found[0].equal(found[2])
    assert found[1].equal(found[3])


def test_a_back_end_without_windows_is_refused():
    assert not backend_named("cudnn").takes_bands
    rows = torch.randn(1, 9, 1, 8)
    with pytest.raises(ValueError, match=r"triton.*does not compute sliding windows"):
        dilated_attention(rows, rows, rows, DilatedPattern.window(4), backend="triton")


@pytest.mark.parametrize(
    ("sides", "error", "message"),
    [
        ((-1, 0), ValueError, "must not have negative sides"),
        ((1, 2, 3), TypeError, r"must be \(left, right\); got 3 numbers"),
        ((1.5, 0), TypeError, "a window must be an int"),
    ],
)
def test_what_is_no_window(sides, error, message):
    with pytest.raises(error, match=message):
        DilatedPattern([cast(Window, sides)], [1])


def test_windows_are_read_as_they_are_written():
    pattern = DilatedPattern([cast(Window, (4, 2)), None, Window(9)], [1, 2, 3])
    assert pattern.segment_lengths == (Window(4, 2), None, Window(9, 0))
    assert str(pattern) == "(window 4+2, 1) (document, 2) (window 9, 3)"
    assert DilatedPattern.window(4, 2) == DilatedPattern([cast(Window, [4, 2])], [1])
    assert DilatedPattern.window(4).heads_are_alike
