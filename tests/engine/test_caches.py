"""Nothing that is kept between calls grows without a bound."""

import gc
import threading

import pytest
import torch
from support.plans import forget_plans
from support.tolerances import FLOAT64

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.engine import compute
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels import keep_few
from ring_dilated_attention.plan import AttentionPlan, RankPlan
from ring_dilated_attention.resolve import FEW_DOCUMENTS, KINDS_KEPT, PACKED_KEPT


@pytest.fixture
def _no_plans():
    forget_plans()
    gc.collect()
    # Other tests may hold plans.
    compute.SCHEDULES.clear()


def attend(length, batch=1, documents=None):
    query, pattern = torch.randn(batch, length, 2, 8), DilatedPattern([8], [3], zero_keys=True)
    return dilated_attention(query, query, query, pattern, documents=documents)


@pytest.mark.usefixtures("_no_plans")
def test_what_is_kept_for_a_plan_goes_with_it():
    for length in range(20, 40):
        attend(length)
    assert len(compute.SCHEDULES) >= 20 + 15  # those of zero keys, too
    for length in range(40, 40 + KINDS_KEPT + 10):
        attend(length)
    gc.collect()
    assert len(compute.SCHEDULES) <= 2 * KINDS_KEPT
    forget_plans()
    gc.collect()
    assert len(compute.SCHEDULES) == 0


@pytest.mark.usefixtures("_no_plans")
def test_plans_of_many_documents_are_fewer():
    for length in range(FEW_DOCUMENTS + 1, FEW_DOCUMENTS + 1 + PACKED_KEPT + 8):
        attend(length, documents=range(length + 1))
    gc.collect()
    assert PACKED_KEPT <= len(compute.SCHEDULES) <= 2 * PACKED_KEPT


@pytest.mark.usefixtures("_no_plans")
def test_what_is_kept_for_a_plan_does_not_grow():
    for batch in range(1, 30):
        attend(20, batch)
    assert [len(schedules) for schedules in compute.SCHEDULES.values()] == [8, 8]


@pytest.mark.usefixtures("_no_plans")
@pytest.mark.parametrize("most_blocks", [compute.MOST_BLOCKS, 0])
def test_kernel_calls_are_kept_for_few_layouts(most_blocks, monkeypatch):
    """And a call of a layout gets its own, whichever came before."""
    monkeypatch.setattr(compute, "MOST_BLOCKS", most_blocks)
    pattern = DilatedPattern([5, 16], [1, 3])
    query, dout = torch.randn(2, 1, 40, 2, 8, dtype=torch.float64)
    expected = None
    for _ in range(2):
        for wider in range(12):
            wide = query.new_empty(1, 40, 2 + wider, 8)
            given = wide[:, :, :2].copy_(query).requires_grad_()
            out = dilated_attention(given, given, given, pattern)
            found = out.detach(), *torch.autograd.grad(out, given, dout)
            expected = expected or found
            torch.testing.assert_close(found, expected, rtol=FLOAT64, atol=FLOAT64)
    (kept,) = {len(one.calls) for few in compute.SCHEDULES.values() for one in few.values()}
    assert kept == (8 if most_blocks else 0)


def test_threads_may_share_a_cache():
    entries: dict[object, int] = {}

    def work():
        for number in range(3000):
            assert keep_few(entries, number % 7, lambda: 1, 5) == 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entries) <= 5


@pytest.mark.usefixtures("_no_plans")
def test_equal_plans_of_two_threads(monkeypatch):
    """Threads that plan a call at the same time may have plans of their own."""
    monkeypatch.setattr(AttentionPlan, "rank", lambda plan, rank: RankPlan(plan, rank))
    layout = SequenceLayout.contiguous(20, 2)
    pattern = DilatedPattern([5, None], [1, 9], zero_keys=True)
    whole = torch.randn(1, 20, 2, 8, dtype=torch.float64)
    expected, _ = reference_attention(whole, whole, whole, pattern)

    def rank(ends):
        own = layout.shard(whole, ends.rank, 1).requires_grad_()
        given = {"group": ends, "layout": layout, "exchange": "ring"}
        out = dilated_attention(own, own, own, pattern, **given)
        out.sum().backward()
        return relative_error(out.detach(), layout.shard(expected, ends.rank, 1))

    assert max(run_loopback(2, rank)) < FLOAT64
