"""All-to-all by heads: exact on any number of ranks, and with the bytes of the plan."""

import importlib
import random
from functools import partial

import pytest
import torch

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.checks.verify import Case, make_layout, run_case, run_cases
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import head_split

PATTERNS = [
    DilatedPattern.dense(),
    DilatedPattern([5, 13, None], [2, 3, 6]),
    DilatedPattern([6, 10, 31], [1, 3, 5], head_offsets="blocked", zero_keys=True),
    DilatedPattern([4, 9, None], [1, 2, 3], head_branches="split"),
]


def cases(world_size: int, kv_heads: int, count: int) -> list[Case]:
    draw = random.Random(10 * world_size + kv_heads)
    found: list[Case] = []
    while len(found) < count:
        heads = kv_heads * draw.choice((1, 2, 3, 4))
        pattern = draw.choice(PATTERNS)
        most = heads if pattern.heads_are_alike else kv_heads
        groups = [m for m in range(2, most + 1) if world_size % m == 0]
        length = draw.choice((53, 2 * world_size + 1, world_size))
        batch = draw.choice((1, 2))
        found.append(
            Case(
                pattern=pattern,
                layout=make_layout(
                    draw.choice(("contiguous", "zigzag", "uneven")), length, world_size
                ),
                num_heads=heads,
                num_kv_heads=kv_heads,
                batch=batch,
                is_causal=draw.random() < 0.5,
                exchange=draw.choice(["heads", *(f"heads:{m}" for m in groups)]),
                documents=(0, length // 3, length // 3, length) if draw.random() < 0.5 else None,
                lengths=(length,) * (batch - 1) + (length // 2,) if draw.random() < 0.3 else None,
                **draw.choice(({"loss_of": ("out", "lse")}, {"branch_gradients": "detached"}, {})),
                dtype=draw.choice((torch.float64, torch.float32)),
            )
        )
    return found


def run_one(case, ends):
    return run_case(case, ends)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 7])
def test_any_number_of_ranks_and_heads(world_size, kv_heads):
    for case in cases(world_size, kv_heads, 4):
        of_ranks = run_loopback(world_size, partial(run_one, case))
        outcome = sum(of_ranks[1:], of_ranks[0])
        assert outcome.passes(case.dtype), (case, outcome)


def test_on_processes():
    of_ranks = run_ranks(run_cases, 4, cases(4, 2, 6))
    for case, *outcomes in zip(cases(4, 2, 6), *of_ranks, strict=True):
        assert sum(outcomes[1:], outcomes[0]).passes(case.dtype), case


@pytest.mark.parametrize(
    ("exchange", "heads", "ranks", "group", "most"),
    [
        ("heads", (32, 8), 8, 8, 4),
        ("heads", (32, 8), 3, 3, 11),
        ("heads", (6, 3), 2, 2, 3),
        ("heads", (4, 1), 6, 3, 2),
        ("heads:2", (8, 1), 4, 2, 4),
    ],
)
def test_heads_are_dealt_out_evenly(exchange, heads, ranks, group, most):
    layout = SequenceLayout.contiguous(64, ranks)
    split = head_split(exchange, DilatedPattern.dense(), layout, *heads)
    assert split is not None
    assert split.ranks == group
    per_unit = heads[0] // split.units
    assert max(len(split.units_of(rank)) for rank in range(ranks)) * per_unit == most


@pytest.mark.parametrize(("exchange", "ranks"), [("ring", 4), ("heads", 1), ("heads", 7)])
def test_nothing_to_exchange_by_heads(exchange, ranks):
    layout = SequenceLayout.contiguous(64, ranks)
    assert head_split(exchange, DilatedPattern.dense(), layout, 3, 3) is None


def few_heads(ends):
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"'heads:4' needs .*; got 4 ranks and 2 heads"):
        dilated_attention(x, x, x, DilatedPattern.dense(), group=ends, exchange="heads:4")


def test_refused():
    run_loopback(4, few_heads)
    x = torch.randn(1, 4, 2, 8)
    for value in ("heads:", "heads:x", "head"):
        with pytest.raises(ValueError, match="exchange must be one of"):
            dilated_attention(x, x, x, DilatedPattern.dense(), exchange=value)


def shares(ends):
    x = torch.randn(1, 8, 4, 8)
    kinds = "ring", "heads"
    with pytest.raises(ValueError, match="exchange is ring on rank 0, heads on rank 1"):
        dilated_attention(x, x, x, DilatedPattern.dense(), group=ends, exchange=kinds[ends.rank])


def test_ranks_that_differ():
    run_loopback(2, shares)


def rows_of_any_strides(ends):
    x = torch.randn(1, 8, 4, 8, dtype=torch.float64)
    query = x.transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    pattern = DilatedPattern([None], [1], head_slice=(4, 8, 8))
    found = []
    for exchange in ("ring", "heads"):
        out = dilated_attention(query, x, x, pattern, group=ends, exchange=exchange)
        found.append((out, *torch.autograd.grad(out.sum(), query)))
    return found


def test_kernels_are_given_whole_rows(monkeypatch):
    """Of a transposed query, and of a gradient that is one number: kernels know no other stride."""
    heads = importlib.import_module("ring_dilated_attention.engine.heads")
    add = heads.add

    def checked(totals, parts, *, store):
        assert {x.stride(-1) for x in (*totals, *parts)} == {1}
        add(totals, parts, store=store)

    monkeypatch.setattr(heads, "add", checked)
    for ring, by_heads in run_loopback(2, rows_of_any_strides):
        for a, b in zip(ring, by_heads, strict=True):
            torch.testing.assert_close(a, b)
