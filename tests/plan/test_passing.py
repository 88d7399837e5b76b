"""Rows that several ranks of a host need cross to it once: the plan, and calls that follow it."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from support.cut_rings import rings_cut
from support.sweep_sample import sweep_sample

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import combine, references, run_case, sweep
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import TensorSize, plan_attention, traffic

HOSTS = [
    (0, 0, 1, 1),
    (0, 0, 0, 1, 1, 1),
    (0, 1, 2),
    (0, 1, 1, 1),
    (0, 0, 0, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1, 2),
    (0, 1, 2, 2, 2, 1),
]
PATTERNS = [
    DilatedPattern.dense(),
    DilatedPattern([8, 32, None], [1, 2, 5]),
    DilatedPattern([12, None], [1, 7], head_offsets="blocked"),
]
ONE_ROW = TensorSize(batch=1, head_dim=1, element_size=1)


def plans(world_size):
    """Of several patterns and layouts, whole and in pieces."""
    for pattern in PATTERNS:
        for is_causal in (True, False):
            for deal in (SequenceLayout.zigzag, SequenceLayout.contiguous):
                layout = deal(61, world_size)
                plan = plan_attention(pattern, layout, is_causal=is_causal, num_heads=4)
                yield plan
                yield replace(plan, pieces=2)


def rows_needed(plan, hosts):
    """How many (row, head) pairs each host needs of others, by the definition of the pattern."""
    owner = {
        position: rank
        for rank, ranges in enumerate(plan.layout.ranges)
        for start, stop in ranges
        for position in range(start, stop)
    }
    length, needed = plan.layout.length, set()
    for branch, (w, rate) in enumerate(plan.pattern.branches):
        for start in range(0, length, w or length):
            stop = min(start + (w or length), length)
            for head, offset in plan.pattern.heads(branch, plan.num_kv_heads):
                rows = range(start + offset, stop, rate)
                needed |= {
                    (hosts[owner[query]], key, head)
                    for query in rows
                    for key in rows
                    if (key <= query or not plan.is_causal)
                    and hosts[owner[query]] != hosts[owner[key]]
                }
    return len(needed)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_bytes_across_hosts_are_the_lower_bound(hosts):
    """Rows forward; in backward rows again, and as many gradients."""
    for plan in plans(len(hosts)):
        ranks = [plan.rank(rank) for rank in range(len(hosts))]
        found = [traffic(rank, ONE_ROW, hosts) for rank in ranks]
        bound = 2 * rows_needed(plan, hosts)
        assert sum(x.forward_across for x in found) == bound
        gradients = sum(x.backward_across - x.forward_across for x in found)
        assert gradients == bound * (4 if plan.returns_wide else 1)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_what_a_rank_sends_another_one_receives(hosts):
    for plan in plans(len(hosts)):
        ranks = [plan.rank(rank) for rank in range(len(hosts))]
        found = [traffic(rank, ONE_ROW, hosts) for rank in ranks]
        for one, other in (
            ("forward_sent", "forward_received"),
            ("backward_sent", "backward_received"),
        ):
            assert sum(getattr(x, one) for x in found) == sum(getattr(x, other) for x in found)
        together = [rank.passing_steps(hosts) for rank in ranks]
        if None in together:
            assert together == [None] * len(hosts)
            continue
        for steps in zip(*together, strict=True):
            _check_step(steps)
        for rank, steps in zip(ranks, together, strict=True):
            computed = Counter(step.step for step in steps if step.step.receive is not None)
            assert computed == Counter(s for s in rank.steps() if s.receive is not None)


def _check_step(steps):
    """What all ranks do at a step."""
    ranks = range(len(steps))
    assert len({step.ends_turn for step in steps}) == 1
    sent = {(i, x.receiver): x for i in ranks if (x := steps[i].sends) is not None}
    received = {(x.sender, i): x for i in ranks if (x := steps[i].receives) is not None}
    assert sent == received
    passed = {(i, x.receiver): x for i in ranks if (x := steps[i].passes_on) is not None}
    near = {
        (steps[i].source, i): steps[i].step.receive
        for i in ranks
        if steps[i].source not in (None, i)
    }
    assert passed == near
    completed = {(i, x.sender): x for i in ranks if (x := steps[i].completes) is not None}
    returned = {(x.receiver, i): x for i in ranks if (x := steps[i].returned) is not None}
    assert completed == returned


def test_what_nobody_shares_is_not_relayed():
    """A segment across two hosts, of which only the ranks at the border hold parts."""
    plan = plan_attention(
        DilatedPattern([20], [1]), SequenceLayout.contiguous(40, 4), is_causal=False
    )
    for steps in (plan.rank(rank).passing_steps((0, 1, 1, 0)) for rank in range(4)):
        assert steps
        assert not any(step.sends_load or step.passes_on for step in steps)


class Told:
    """An exchange that counts what crosses between hosts."""

    def __init__(self, ends):
        self._ends, self.across = ends, 0

    def __getattr__(self, name):
        return getattr(self._ends, name)

    def start(self, send, receive):
        if send is not None and self.hosts[send[0]] != self.hosts[self.rank]:
            self.across += send[1].nbytes
        return self._ends.start(send, receive)


def planned_across(case, rank, hosts):
    plan = case.plan()
    size = TensorSize(batch=case.batch, head_dim=case.head_dim, element_size=case.dtype.itemsize)
    found = traffic(plan.rank(rank), size, hosts)
    return found.forward_across + found.backward_across


@cache
def swept(world_size):
    """The cases of the sweep, and what they should find."""
    cases = list(sweep(world_size))
    return cases, [references(case) for case in cases]


@pytest.mark.parametrize("round_pairs", [None, 1, 300], ids=["whole", "pieces", "rounds"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_calls(hosts, round_pairs):
    """Results, and the bytes that the plan says: in all, and across hosts."""
    cases, wanted = swept(len(hosts))
    if round_pairs is not None or len(hosts) >= 5:
        sample = sweep_sample(len(hosts))
        cases, wanted = ([each[number] for number in sample] for each in (cases, wanted))

    def rank(ends):
        told = Told(ends)
        outcomes, across = [], []
        for case, want in zip(cases, wanted, strict=True):
            before = told.across
            outcomes.append(run_case(case, told, want))
            across.append(told.across - before)
        return outcomes, across

    with rings_cut(round_pairs):
        found = run_loopback(len(hosts), rank, hosts=hosts)
    outcomes = combine([outcomes for outcomes, _ in found])
    assert not [case for case, x in zip(cases, outcomes, strict=True) if not x.passes(case.dtype)]
    compared = 0
    for number, case in enumerate(cases):
        if not case.wanted or case.lengths or case.branch_gradients != "exact":
            continue
        compared += 1
        crossed = sum(across[number] for _, across in found)
        assert crossed == sum(planned_across(case, each, hosts) for each in range(len(hosts)))
    assert compared > len(cases) // 3


def test_hosts_that_are_told_are_checked():
    with pytest.raises(ValueError, match=r"hosts must be 2 integers >= 0, .*; got \[0\]"):
        run_loopback(2, lambda ends: None, hosts=[0])
