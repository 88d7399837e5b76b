"""Branches computed row by row in one launch: which rows, and the kernels against the reference.

In the interpreter (TRITON_INTERPRET=1), or on CUDA; what is integers alone is tested anywhere.
"""

import math
import os
import random
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.plans import forget_plans

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import Case, ViewKind, combine, run_case
from ring_dilated_attention.engine import TileCall, executor, own_rows
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels.own_programs import build_programs
from ring_dilated_attention.plan import OwnRange
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
PROGRAMS = "ring_dilated_attention.kernels.own_programs"
SELECT = "ring_dilated_attention.resolve.select_backend"


@pytest.fixture(autouse=True)
def _no_plans_of_other_constants():
    """Set up before monkeypatch, and so torn down behind it."""
    forget_plans()
    yield
    forget_plans()


def shards_of(dice, length, ranks):
    """A layout of several ranges on each rank, in any order."""
    cuts = sorted(dice.sample(range(1, length), min(length - 1, dice.randint(ranks, 5))))
    ranges = list(pairwise([0, *cuts, length]))
    dice.shuffle(ranges)
    return SequenceLayout([ranges[rank::ranks] for rank in range(ranks)])


def drawn_case(seed, ranks=1):
    """A random call: pattern, heads of a layer, layout, documents and options."""
    dice = random.Random(seed)
    count, kv_heads = dice.randint(1, 4), dice.choice([1, 2, 3, 4])
    splits = dice.random() < 0.3 and count <= kv_heads
    pattern = DilatedPattern(
        [dice.choice([None, 1, 5, 7, 11, 16, 20, 33, 64]) for _ in range(count)],
        [dice.choice([1, 1, 2, 3, 4, 6]) for _ in range(count)],
        head_offsets="interleaved" if splits else dice.choice(["interleaved", "blocked"]),
        head_branches="split" if splits else "all",
        zero_keys=dice.random() < 0.5,
    )
    if dice.random() < 0.3:  # some heads of a layer
        first = dice.randint(0, 5)
        stop = first + kv_heads
        pattern = pattern.of_heads((first, stop, stop + dice.randint(0, 5)), kv_heads)
    length = dice.randint(6, 36 if INTERPRETED else 300)
    whole = ranks == 1 and dice.random() < 0.8
    cuts = sorted(dice.sample(range(1, length), dice.randint(1, 3)))
    return Case(
        pattern=pattern,
        layout=SequenceLayout.contiguous(length, 1) if whole else shards_of(dice, length, ranks),
        num_heads=kv_heads * dice.choice([1, 1, 2]),
        num_kv_heads=kv_heads,
        head_dim=dice.choice([8, 16, 24]),
        batch=dice.randint(1, 2),
        is_causal=dice.random() < 0.4,
        documents=(0, *cuts, length) if dice.random() < 0.4 else None,
        scale=dice.choice([None, None, 0.3, 1e-3]),
        branch_gradients=dice.choice(["exact", "detached"]),
        exchange=dice.choice(["ring", "gather"]),
        dtype=torch.float32,
        device=DEVICE.type,
        backend="triton" if ranks == 1 else "auto",
        seed=seed,
        views=(ViewKind.named()["part of qkv"],) * 4,
    )


def check(case):
    """Compare a call with the reference in float64."""
    ranks = case.layout.world_size
    (outcome,) = combine(run_loopback(ranks, lambda ends: [run_case(case, ends)]))
    assert outcome.passes(case.dtype), (case, outcome)


@pytest.mark.parametrize("first", range(4))
def test_random_calls_are_the_reference(first, monkeypatch):
    monkeypatch.setattr(own_rows, "FEWEST_ROWS", 0)  # the kernels take any
    if first % 2:  # programs of as many rows as can be, some of which are members of a branch
        monkeypatch.setattr(f"{PROGRAMS}.LOADED_ROWS", 1e9)
    for seed in range(first, 8 if INTERPRETED else 40, 4):
        check(drawn_case(seed))


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


GIGAPATH_CASE = Case(
    pattern=DilatedPattern([12, 29, None], [1, 2, 4], head_offsets="blocked", zero_keys=True),
    layout=SequenceLayout.contiguous(37, 1),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.2,
    dtype=torch.float32,
    device=DEVICE.type,
    backend="triton",
)


def test_patterns_of_many_branches():
    """Which branches a range has is bits of an int32: of more, none is computed row by row."""
    lengths = [2 + number % 4 for number in range(33)]
    pattern = DilatedPattern(lengths, [1 + number % 2 for number in range(33)])
    check(replace(GIGAPATH_CASE, pattern=pattern, layout=SequenceLayout.contiguous(5, 1)))


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
    """What is kept of launches belongs to a layout, a batch, a scale and a direction."""
    views = (ViewKind.named()["part of qkv"],) * 4
    changes: list[dict[str, Any]] = [{}, {"views": views}, {"scale": 0.5}, {"batch": 2}, {}]
    for each in changes:
        check(replace(GIGAPATH_CASE, layout=SequenceLayout.contiguous(31, 1), **each))


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
    for seed in range(first, 4 if INTERPRETED else 24, 4):
        limit = (1e3, 1e4, 1e9, 1e9)[(seed + seed // 4) % 4]
        monkeypatch.setattr(
            SELECT, lambda *_, limit=limit, **__: Selection(EAGER, (Limits(limit),))
        )
        before = launched[0]
        check(drawn_case(seed, ranks=1 + (seed + 1) % 3))
        assert launched[0] > before or limit < 1e9
        forget_plans()


@pytest.mark.parametrize("head_dim", [40, 48, 80])
def test_head_dims_of_two_parts(head_dim, monkeypatch):
    """A power of two and a tail, which may be padded: in all three kernels, whatever the table."""
    tuning = vars(sys.modules["ring_dilated_attention.kernels.device_profile"])
    with_tail = {key: replace(each, tail=True) for key, each in tuning["CONFIGS"].items()}
    monkeypatch.setitem(tuning, "CONFIGS", with_tail)
    parts = tuning["head_dim_constants"](head_dim, True)
    assert (parts["BLOCK_D"], parts["TAIL"]) == ((64, 16) if head_dim == 80 else (32, 16))
    gradients: Any = "detached" if head_dim == 40 else "exact"
    check(replace(GIGAPATH_CASE, head_dim=head_dim, branch_gradients=gradients))
