"""Branches computed row by row in one launch: which rows, and the kernels against the reference.

In the interpreter (TRITON_INTERPRET=1), or on CUDA; what is integers alone is tested anywhere.
"""

import math
import os
import random
import sys
import threading
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from support.tolerances import FLOAT32, assert_close_to

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    detached_dilated_attention,
    dilated_attention,
    plan_attention,
)
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.engine import TileCall, executor, own_rows
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels.own_programs import (
    build_programs,
)
from ring_dilated_attention.plan import OwnRange
from ring_dilated_attention.resolve import forget_plans
from ring_dilated_attention.tiles import Limits, Selection, backend_named

pytest.importorskip("triton")

EAGER = backend_named("eager")
ALL_BY_ROWS = Selection(None, (Limits(math.inf),))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    # As in test_kernel_attention.
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning", "ignore::DeprecationWarning", "ignore:Attempting to run cuBLAS"
    ),
]
GIGAPATH = DilatedPattern([12, 29, None], [1, 2, 4], head_offsets="blocked", zero_keys=True)
PROGRAMS = "ring_dilated_attention.kernels.own_programs"
SELECT = "ring_dilated_attention.resolve.select_backend"


@pytest.fixture(autouse=True)
def _no_plans_of_other_constants():
    """Set up before monkeypatch, and so torn down behind it."""
    forget_plans()
    yield
    forget_plans()


class Draw:
    """A random call: pattern, documents, heads and options."""

    def __init__(self, seed):
        dice = random.Random(seed)
        count = dice.randint(1, 4)
        lengths = [dice.choice([None, 1, 5, 7, 11, 16, 20, 33, 64]) for _ in range(count)]
        rates = [dice.choice([1, 1, 2, 3, 4, 6]) for _ in range(count)]
        self.kv_heads = dice.choice([1, 2, 3, 4])
        splits = dice.random() < 0.3 and count <= self.kv_heads
        self.pattern = DilatedPattern(
            lengths,
            rates,
            head_offsets="interleaved" if splits else dice.choice(["interleaved", "blocked"]),
            head_branches="split" if splits else "all",
            zero_keys=dice.random() < 0.5,
        )
        self.heads_per_kv = dice.choice([1, 1, 2])
        most = 30 if INTERPRETED else 300
        self.length, self.batch = dice.randint(1, most), dice.randint(1, 2)
        self.head_dim = dice.choice([8, 16, 24])
        self.is_causal = dice.random() < 0.4
        self.detached = dice.random() < 0.5
        self.scale = dice.choice([None, None, -0.3, 0.0])
        self.documents = self.layout = None
        if dice.random() < 0.2 and self.length > 5:  # one rank, and more than one range
            cuts = [0, *sorted(dice.sample(range(1, self.length), 2)), self.length]
            ranges = list(pairwise(cuts))
            dice.shuffle(ranges)
            self.layout = SequenceLayout([ranges])
        if dice.random() < 0.4 and self.length > 5:
            cuts = sorted(dice.sample(range(1, self.length), dice.randint(1, 3)))
            self.documents = [0, *cuts, self.length]
        if dice.random() < 0.3:  # some heads of a layer
            first = dice.randint(0, 5)
            stop = first + self.kv_heads
            head_slice = first, stop, stop + dice.randint(0, 5)
            self.pattern = self.pattern.of_heads(head_slice, self.kv_heads)

    def __repr__(self):
        return str(vars(self))

    def tensors(self):
        """q, k, v and dout; those of a sequence, and parts of larger tensors."""
        heads = self.heads_per_kv * self.kv_heads
        shape = self.batch, self.length + 3, heads + 2 * self.kv_heads, self.head_dim
        packed = torch.randn(shape, device=DEVICE)[:, 2:-1]
        q, k, v = packed.split([heads, self.kv_heads, self.kv_heads], 2)
        return q, k, v, torch.randn(q.shape, device=DEVICE)

    def run(self, leaves, dout, **options):
        """Out, lse and gradients."""
        q, k, v = leaves
        attend: Any = detached_dilated_attention if self.detached else dilated_attention
        out, lse = attend(
            q,
            k,
            v,
            self.pattern,
            is_causal=self.is_causal,
            scale=self.scale,
            documents=self.documents,
            layout=self.layout,
            return_lse=True,
            **options,
        )
        return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


def assert_close(got, want, what):
    """By the largest number, or by 0.1 where all are smaller."""
    seen = want[1] > -torch.inf
    assert torch.equal(got[1] > -torch.inf, seen), what
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        x, y = (a[seen], b[seen]) if name == "lse" else (a, b)
        if y.numel():
            error = (x.double() - y).abs().max() / max(y.abs().max().item(), 0.1)
            assert error < FLOAT32, (name, error, what)


def check(case, seed=0):
    """Compare a call by the kernels with the reference in float64."""
    torch.manual_seed(seed)
    *inputs, dout = case.tensors()
    leaves = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
    want = case.run(wide, dout.double().cpu())
    got = [x.cpu() for x in case.run(leaves, dout, backend="triton")]
    assert_close(got, want, case)


@pytest.mark.parametrize("first", range(4))
def test_random_calls_are_the_reference(first, monkeypatch):
    monkeypatch.setattr(own_rows, "FEWEST_ROWS", 0)  # the kernels take any
    if first % 2:  # programs of as many rows as can be, some of which are members of a branch
        monkeypatch.setattr(f"{PROGRAMS}.LOADED_ROWS", 1e9)
    for seed in [*range(10), 12, 21] if INTERPRETED else range(40):
        if seed % 4 == first:
            check(Draw(seed), seed)


@pytest.mark.parametrize("rate", [37, 1000, 100_000, 2**40])
def test_high_rates_make_no_empty_programs(rate):
    """There is a program for each residue: of rates beyond the rows there would be millions."""
    for pattern in (DilatedPattern([None, 64], [1, rate]), DilatedPattern([None], [rate])):
        layout = SequenceLayout.contiguous(2000, 1)
        one = plan_attention(pattern, layout, is_causal=False, num_heads=4).rank(0)
        call = TileCall(ALL_BY_ROWS, 1.0, 1, 1)
        schedule = own_rows.own_schedule(one, call, 16)
        programs = [len(each.programs(64, torch.device("cpu")).rows) for each in schedule.launches]
        assert sum(programs) <= 2000 / own_rows.FEWEST_ROWS
        groups = (*schedule.covering, *schedule.others)
        assert bool(groups) == (rate > 37 or len(pattern.branches) == 2)


def test_patterns_of_many_branches():
    """Which branches a range has is bits of an int32: of more, none is computed row by row."""
    lengths = [2 + number % 5 for number in range(33)]
    pattern = DilatedPattern(lengths, [1 + number % 2 for number in range(33)])
    q, k, v = (torch.randn(1, 7, 1, 8, device=DEVICE) for _ in range(3))
    out = dilated_attention(q, k, v, pattern, backend="triton")
    want, _ = reference_attention(q.double(), k.double(), v.double(), pattern)
    assert_close_to(out, want, terms=64)


def test_integers_are_wide_where_keys_are_further_apart_than_rows():
    """A rate may be a multiple of the step between rows of a program."""
    own = OwnRange(0, 4096, 0, 4096, 0, 4096, 0b11)
    branches = [(2048, 4), (4096, 64)]
    given: dict[str, Any] = {"block": 64, "is_causal": False, "stores": 1, "device": "cpu"}
    both = build_programs([own], branches, [[0], [0]], **given)
    assert int(both.ranges[:, 5].max()) < 64
    assert both.reach == 4096  # a block of keys of the rate of 64 reaches the end of its segment
    first = own._replace(branches=0b01)
    assert build_programs([first], branches, [[0], [0]], **given).reach == 1024


def test_one_plan_in_many_layouts():
    """What is kept of launches belongs to a layout, a scale and a direction."""
    length, heads, head_dim = 23, 2, 16
    layouts: dict[str, Any] = {
        "plain": lambda x: x,
        "part of a joint tensor": lambda x: (
            x.new_empty(1, length, 3, heads, head_dim).unbind(2)[1].copy_(x)
        ),
        "heads outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "two at once": lambda x: torch.cat([x, x.flip(1)]),
    }
    q, k, v, dout = torch.randn(4, 1, length, heads, head_dim, device=DEVICE)
    for name, scale in [("plain", 0.5), *product(layouts, (0.25,)), ("plain", 0.25)]:
        results: list[list[torch.Tensor]] = []
        for is_own in (True, False):
            dtype = torch.float32 if is_own else torch.float64
            leaves = [layouts[name](x).to(dtype).detach().requires_grad_() for x in (q, k, v)]
            out, lse = dilated_attention(
                leaves[0],
                leaves[1],
                leaves[2],
                GIGAPATH,
                scale=scale,
                backend="triton" if is_own else "eager",
                return_lse=True,
            )
            gradients = torch.autograd.grad(out, leaves, layouts[name](dout).to(dtype))
            results.append([x.cpu() for x in (out.detach(), lse, *gradients)])
        assert_close(results[0], results[1], (name, scale))


def shards_of(dice, length, ranks):
    """A layout of several ranges on each rank, in any order."""
    cuts = sorted(dice.sample(range(1, length), min(length - 1, dice.randint(ranks, 5))))
    ranges = list(pairwise([0, *cuts, length]))
    dice.shuffle(ranges)
    return SequenceLayout([ranges[rank::ranks] for rank in range(ranks)])


@pytest.mark.parametrize("first", range(4))
def test_random_calls_on_ranks_are_the_reference(first, monkeypatch):
    """Row by row what a rank holds all of, and of segments that it shares; larger cells by tile."""
    monkeypatch.setattr(own_rows, "FEWEST_ROWS", 0)
    one_at_a_time, launched = threading.Lock(), [0]  # the interpreter is not for threads

    def guarded(function):
        def call(*given, **options):
            with one_at_a_time:
                launched[0] += 1
                function(*given, **options)

        return call

    for name in ("forward_own", "backward_own"):
        monkeypatch.setattr(executor, name, guarded(getattr(executor, name)))
    for seed in ([1, 4, 6, 12][first],) if INTERPRETED else range(first, 24, 4):
        before = launched[0]
        limit = check_on_ranks(seed, monkeypatch)
        assert launched[0] > before or limit < 1e9
        forget_plans()


def check_on_ranks(seed, monkeypatch):
    """Compare a random call on ranks with the reference; up to which size it goes row by row."""
    dice, case = random.Random(seed), Draw(seed)
    case.length, case.layout = case.length + 6, None
    case.documents = dice.choice([None, [0, case.length // 3, case.length]])
    ranks = dice.choice([1, 2, 3])
    layout, exchange = shards_of(dice, case.length, ranks), dice.choice(["ring", "gather"])
    torch.manual_seed(seed)
    *whole, dout = case.tensors()
    want = case.run([x.double().cpu().requires_grad_() for x in whole], dout.double().cpu())
    limit = dice.choice([1e3, 1e4, 1e9])
    forget_plans()
    case.layout = layout

    def run(ends):
        own_rows = [layout.shard(x, ends.rank, 1).detach() for x in (*whole, dout)]
        leaves = [x.requires_grad_() for x in own_rows[:3]]
        return case.run(leaves, own_rows[3], group=ends, exchange=exchange)

    with monkeypatch.context() as patch:  # not for what other cases want
        patch.setattr(SELECT, lambda *_: Selection(EAGER, (Limits(limit),)))
        ran = run_loopback(ranks, run)
    got = [layout.unshard([r[i] for r in ran], 2 if i == 1 else 1).cpu() for i in range(5)]
    assert_close(got, want, (case, layout, limit))
    return limit


@pytest.mark.parametrize("head_dim", [40, 48, 80])
def test_head_dims_of_two_parts(head_dim, monkeypatch):
    """A power of two and a tail, which may be padded: in all three kernels, whatever the table."""
    tuning = vars(sys.modules["ring_dilated_attention.kernels.device_profile"])
    with_tail = {key: replace(each, tail=True) for key, each in tuning["CONFIGS"].items()}
    monkeypatch.setitem(tuning, "CONFIGS", with_tail)
    parts = tuning["head_dim_constants"](head_dim, True)
    assert (parts["BLOCK_D"], parts["TAIL"]) == ((64, 16) if head_dim == 80 else (32, 16))
    case: Any = Draw(0)
    sizes = {"length": 37, "heads_per_kv": 2, "kv_heads": 2, "head_dim": head_dim, "batch": 1}
    vars(case).update(pattern=GIGAPATH, is_causal=False, detached=head_dim == 40, scale=-0.2)
    vars(case).update(documents=None, layout=None, **sizes)
    check(case)
