"""The cost model: beside measured speed-ups, and where its answer is known."""

from dataclasses import replace

import pytest

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.choice import h200_rates
from ring_dilated_attention.plan import costs, head_split

SIZE = costs.TensorSize(batch=1, head_dim=8, element_size=2)
COMPUTE = costs.ComputeRates(flops=1e9, half_keys=0, group_seconds=0, host_step=0)
PLAIN = costs.Rates(
    forward=COMPUTE,
    backward=COMPUTE,
    inside=costs.Link(bytes_per_second=1e30, latency=0),
    across=costs.Link(bytes_per_second=1e30, latency=0),
    beside_transfers=1.0,
    host_call=0,
    host_empty_step=0,
    host_message=0,
)
"""Rates with which nothing but operations takes time."""


def dense(ranks, *, length=1024, causal=False):
    layout = SequenceLayout.contiguous(length, ranks)
    return plan_attention(DilatedPattern.dense(), layout, is_causal=causal, num_heads=2)


@pytest.mark.parametrize("backward", [False, True])
def test_with_links_that_take_no_time_only_operations_count(backward):
    rank = dense(4).rank(1)
    found = costs.predict(rank, SIZE, PLAIN, backward=backward)
    assert found.seconds == pytest.approx(costs.flops(rank, SIZE) * (2.5 if backward else 1) / 1e9)
    assert found.exposed == pytest.approx(0)
    assert found.steps == 3
    assert costs.efficiency(
        dense(4), SIZE, PLAIN, found.seconds / (2.5 if backward else 1) * 3.5
    ) == (pytest.approx(1))


def test_a_slow_link_is_exposed():
    """A ring with one message in flight; ranks compute nothing to speak of."""
    rank = dense(4).rank(0)
    slow = costs.Link(bytes_per_second=1e3, latency=0.5)
    found = costs.predict(rank, SIZE, replace(PLAIN, inside=slow), backward=False)
    received = costs.traffic(rank, SIZE).forward_received
    messages = sum(len(list(one.steps())) for one in rank.rounds(gathers=False))
    assert found.inside_bytes == received
    assert found.across_bytes == 0
    expected = received / 1e3 + 0.5 * messages
    assert found.seconds == pytest.approx(expected, rel=1e-2)
    assert found.exposed == pytest.approx(found.seconds - found.compute)


@pytest.mark.parametrize(
    ("step", "transfer", "forward", "backward"), [(10, 5, 20, 55), (10, 15, 25, 65), (0, 1, 1, 2)]
)
def test_rows_are_exposed_behind_shorter_compute(step, transfer, forward, backward):
    """Two steps, 2.5 times as long in backward, behind which the gradients of the last travel."""
    rank = dense(2).rank(0)
    compute = replace(COMPUTE, flops=costs.flops(rank, SIZE) / 2 / (step or 1e-3))
    received = costs.traffic(rank, SIZE).forward_received
    link = costs.Link(bytes_per_second=received / transfer, latency=0)
    rates = replace(PLAIN, forward=compute, backward=compute, inside=link)
    found = [costs.predict(rank, SIZE, rates, backward=x).seconds for x in (False, True)]
    assert found == pytest.approx([forward, backward], rel=1e-2)


def test_bytes_inside_and_across_hosts():
    """Four ranks on two hosts: each receives all rows of the other host from there."""
    rank = dense(4).rank(0)
    found = costs.predict(rank, SIZE, PLAIN, backward=False, hosts=2)
    received = costs.traffic(rank, SIZE).forward_received
    assert (found.inside_bytes, found.across_bytes) == (received // 3, received * 2 // 3)
    alone = costs.predict(rank, SIZE, PLAIN, backward=False, hosts=4)
    assert (alone.inside_bytes, alone.across_bytes) == (0, received)


def test_the_host_decides_where_it_takes_longer():
    rank = dense(4).rank(0)
    rates = replace(PLAIN, forward=replace(COMPUTE, host_step=100.0), host_call=7.0)
    found = costs.predict(rank, SIZE, rates, backward=False)
    assert found.seconds == found.host == 307
    near = plan_attention(
        DilatedPattern([4], [1]), SequenceLayout.contiguous(64, 4), is_causal=False
    )
    idle = costs.predict(near.rank(0), SIZE, replace(rates, host_empty_step=50.0), backward=False)
    assert (idle.steps, idle.host) == (0, 157)


def test_rates_of_rows():
    def forward(**size):
        return h200_rates(replace(SIZE, **size)).forward.flops

    assert forward(head_dim=128, element_size=2) > forward(head_dim=64, element_size=2)
    assert forward(head_dim=64, element_size=2) > 5 * forward(head_dim=64, element_size=4)
    assert forward(element_size=8) == forward(element_size=4)


def test_heads_take_the_time_of_their_messages():
    rank = dense(4, causal=True).rank(2)
    slow = replace(PLAIN, inside=costs.Link(bytes_per_second=1e3, latency=0))
    for backward in (False, True):
        found = costs.predict(rank, SIZE, slow, backward=backward, exchange="heads:2")
        split = head_split("heads:2", rank.plan.pattern, rank.plan.layout, 2, 2)
        assert split is not None
        swap = split.traffic(2, SIZE)[backward] / 1e3
        own = costs.predict(split.plan_of(rank.plan, 2), SIZE, slow, backward=backward)
        assert found.seconds == pytest.approx(own.seconds + swap)
        assert swap > 0


def test_rows_behind_compute_are_not_exposed():
    """Each step computes 10 seconds; its rows take 5."""
    plan = dense(2)
    rank = plan.rank(0)
    step = costs.flops(rank, SIZE) / 2 / 10
    nbytes = costs.traffic(rank, SIZE).forward_received
    rates = replace(
        PLAIN,
        forward=replace(COMPUTE, flops=step),
        inside=costs.Link(bytes_per_second=nbytes / 5, latency=0),
    )
    found = costs.predict(rank, SIZE, rates, backward=False)
    assert found.seconds == pytest.approx(20)
    slower = replace(rates, inside=costs.Link(bytes_per_second=nbytes / 15, latency=0))
    assert costs.predict(rank, SIZE, slower, backward=False).seconds == pytest.approx(25)


def test_gradients_travel_too():
    """Backward with no compute: rows in, and as many bytes of gradients back."""
    rank = dense(2).rank(0)
    nbytes = costs.traffic(rank, SIZE).forward_received
    rates = replace(PLAIN, inside=costs.Link(bytes_per_second=nbytes, latency=0))
    assert costs.predict(rank, SIZE, rates, backward=False).seconds == pytest.approx(1, abs=0.2)
    assert costs.predict(rank, SIZE, rates, backward=True).seconds == pytest.approx(2, abs=0.2)


def test_short_tiles_and_groups_take_longer():
    rank = dense(1, length=512).rank(0)
    one = costs.predict(rank, SIZE, PLAIN, backward=False).seconds
    halved = replace(PLAIN, forward=replace(COMPUTE, half_keys=512, group_seconds=3.0))
    assert costs.predict(rank, SIZE, halved, backward=False).seconds == pytest.approx(2 * one + 3)
