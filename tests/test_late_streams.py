"""Whole calls on loopback ranks whose additions run on a side stream that is late."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from cut_rings import set_round_pairs
from late_streams import LateExchange, late_streams

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import TENSORS, Case, relative_error
from ring_dilated_attention.engine import compute, parts, ring
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels import has_triton
from ring_dilated_attention.tiles import Limits, Selection, backend_named

EAGER = backend_named("eager")
INTO = replace(
    EAGER,
    forward_into=lambda tile, *into: _write(EAGER.forward(tile), into),
    backward_into=lambda tile, gradients, *into: _write(EAGER.backward(tile, gradients), into),
)
"""Like flash-attn-4, it writes where results belong if nothing is there yet."""


def _write(results, into):
    for result, place in zip(results, into, strict=True):
        place.copy_(result)


DENSE = DilatedPattern.dense()
MIXED = DilatedPattern([5, 16, None], [1, 2, 3])  # its branches share rows of messages
BARE = DilatedPattern([7, None], [2, 3])  # no branch covers
CASES: dict[str, tuple[DilatedPattern, SequenceLayout, dict[str, Any]]] = {
    "one rank": (MIXED, SequenceLayout.contiguous(41, 1), {}),
    "one rank, bare": (BARE, SequenceLayout.contiguous(41, 1), {"is_causal": True}),
    "dense zigzag": (DENSE, SequenceLayout.zigzag(48, 3), {"is_causal": True}),
    "dense, grouped": (DENSE, SequenceLayout.contiguous(36, 4), {"num_kv_heads": 2}),
    "mixed zigzag": (MIXED, SequenceLayout.zigzag(46, 2), {"is_causal": True}),
    "mixed, grouped": (MIXED, SequenceLayout.contiguous(41, 2), {"num_kv_heads": 2}),
    "mixed": (MIXED, SequenceLayout.contiguous(50, 3), {"documents": (0, 3, 31, 50)}),
    "bare": (BARE, SequenceLayout.zigzag(50, 3), {}),
    "one branch": (DilatedPattern([None], [3]), SequenceLayout.contiguous(50, 3), {}),
}
FEW_FLOPS = {"one rank": 6e3, "mixed zigzag": 1e3}
"""Of a tile: some groups of each case have larger ones and smaller ones."""
HAS_CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run(case, ends, selection, *, gathers, workspace):
    """What `ring` finds on this rank: every tensor of TENSORS."""
    plan = case.plan()
    exchange = LateExchange(ends)
    scale = case.head_dim**-0.5
    call = ring.RingCall(plan.rank(ends.rank), exchange, selection, scale, gathers, workspace)
    query, key, value, dout = (
        case.layout.shard(x.to(case.dtype), ends.rank, 1) for x in case.inputs()
    )
    out, lse = ring.ring_forward(query, key, value, call)
    gradients = ring.ring_backward(dout, query, key, value, out, lse, call)
    return dict(zip(TENSORS, (out, lse, *gradients), strict=True))


expected_of = lru_cache(maxsize=len(CASES))(Case.expected)


def check(case, selection, *, seed, early=0.0, gathers=False, workspace=None):
    """Run it on all ranks; the largest relative error, and how often additions went behind."""
    size = case.layout.world_size
    with late_streams(seed, early) as streams:
        found = run_loopback(
            size, lambda ends: run(case, ends, selection, gathers=gathers, workspace=workspace)
        )
    expected, errors = expected_of(case), []
    for rank, of_rank in enumerate(found):
        for name, got in of_rank.items():
            want = case.layout.shard(expected[name], rank, 2 if name == "lse" else 1)
            seen = torch.isfinite(want)  # lse is -inf where no branch covers
            assert torch.equal(seen, torch.isfinite(got)), name
            errors.append(relative_error(got[seen], want[seen]))
    assert not any(x.queue for x in streams)
    return max(errors), sum(x.queued for x in streams)


@pytest.mark.parametrize("backend", [EAGER, INTO], ids=["apart", "into"])
@pytest.mark.parametrize(
    ("gathers", "round_pairs"),
    [(False, None), (False, 20), (True, None)],
    ids=["ring", "few heads at a time", "gather"],
)
@pytest.mark.parametrize("name", CASES)
def test_additions_that_are_late(name, round_pairs, gathers, backend, monkeypatch):
    if round_pairs is not None:
        set_round_pairs(monkeypatch, round_pairs)
    pattern, layout, options = CASES[name]
    case = Case(pattern=pattern, layout=layout, **options)
    for number, (early, long_flops) in enumerate(product((0.0, 0.3), (0.0, 2e3))):
        monkeypatch.setattr(compute, "LONG_FLOPS", long_flops)
        how = {"early": early, "gathers": gathers, "workspace": (None, 0.3)[number % 2]}
        error, queued = check(case, Selection(backend), seed=number, **how)
        assert error < 1e-12
        assert queued > layout.world_size


@pytest.mark.parametrize("backend", [EAGER, INTO], ids=["apart", "into"])
@pytest.mark.parametrize("gathers", [False, True], ids=["ring", "gather"])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("dense")])
def test_small_calls_beside_larger_ones(name, gathers, backend, monkeypatch):
    """They are computed on the side stream, where others are only added."""
    pattern, layout, options = CASES[name]
    case = Case(pattern=pattern, layout=layout, **options)
    counts = []
    for number, (early, long_flops, beside) in enumerate(
        [(0.0, math.inf, math.inf), (0.0, math.inf, 0.0), (0.3, 0.0, 0.0)]
    ):
        monkeypatch.setattr(compute, "LONG_FLOPS", long_flops)
        monkeypatch.setattr(parts, "BESIDE_FLOPS", beside)
        how = {"early": early, "gathers": gathers, "workspace": (None, 0.3)[number % 2]}
        error, queued = check(case, Selection(backend), seed=number, **how)
        assert error < 1e-12
        counts.append(queued)
    assert counts[1] > counts[0]


@pytest.mark.skipif(
    not has_triton() or (HAS_CUDA and not INTERPRETED), reason="needs Triton's interpreter"
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FEW_FLOPS)
def test_launches_of_tables_wait_for_additions(name, monkeypatch):
    """Small tiles share a launch, which adds to what additions of large ones are under way to."""
    from ring_dilated_attention import kernels

    lock, launches = threading.Lock(), []

    def locked(launch):
        def one_at_a_time(*args, **options):
            with lock:  # the interpreter is no thread's own
                launches.append(launch)
                launch(*args, **options)

        return one_at_a_time

    for kernel in ("tiles_forward", "tiles_backward"):
        monkeypatch.setattr(kernels, kernel, locked(getattr(kernels, kernel)))
    pattern, layout, options = CASES[name]
    case = Case(pattern=pattern, layout=layout, dtype=torch.float32, **options)
    monkeypatch.setattr(compute, "LONG_FLOPS", 0)
    shares = Selection(EAGER, (Limits(0.0, FEW_FLOPS[name], FEW_FLOPS[name]),))
    error, queued = check(case, shares, seed=0)
    assert error < 1e-5
    assert queued > layout.world_size
    assert len(launches) >= 2 * layout.world_size
