"""Whole calls on loopback ranks whose additions run on a side stream that is late."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cut_rings import set_round_pairs
from support.late_streams import LateExchange, late_streams
from support.strategies import cases
from support.tolerances import FLOAT32, FLOAT64

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import Case, relative_error
from ring_dilated_attention.engine import RingCall, accumulate, compute, ring_backward, ring_forward
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels import has_triton
from ring_dilated_attention.tiles import Limits, Selection, backend_named

TENSORS = ("out", "lse", "dquery", "dkey", "dvalue")

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
    "slide": (DilatedPattern([5, 12, 9, None], [1, 2, 3, 6]), SequenceLayout.contiguous(49, 2), {}),
    "one branch": (DilatedPattern([None], [3]), SequenceLayout.contiguous(50, 3), {}),
}
WAYS = {"ring": (False, None), "few heads at a time": (False, 20), "gather": (True, None)}
"""Whether messages are gathered, and for how many pairs heads are computed at a time."""
HAS_CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run(case, ends, selection, *, gathers=False, workspace=None, detached=False):
    """What the engine finds on this rank: every tensor of TENSORS."""
    plan = case.plan()
    exchange = LateExchange(ends)
    scale = case.head_dim**-0.5
    sizes, options = (case.batch, case.head_dim), (gathers, workspace, detached)
    call = RingCall(plan.rank(ends.rank), *sizes, selection, scale, *options)
    query, key, value, dout = (
        case.layout.shard(x.to(case.dtype), ends.rank, 1) for x in case.inputs()
    )
    out, lse = ring_forward(query, key, value, call, exchange)
    gradients = ring_backward(dout, query, key, value, out, lse, call, exchange)
    return dict(zip(TENSORS, (out, lse, *gradients), strict=True))


expected_of = lru_cache(maxsize=len(CASES))(Case.expected)


def check(case, selection, *, seed, early=0.0, gathers=False, workspace=None):
    """Run it on all ranks; the largest error, and how often additions went behind."""
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
            got, want = got[seen], want[seen]
            # Some are 0 but for rounding: of a query that sees one key, say.
            if want.numel():
                largest = (got - want).abs().max().item()
                errors.append(min(relative_error(got, want), largest))
    assert not any(x.queue for x in streams)
    return max(errors), sum(x.queued for x in streams)


@pytest.mark.parametrize(("gathers", "round_pairs"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", CASES)
def test_additions_that_are_late(name, round_pairs, gathers, monkeypatch):
    if round_pairs is not None:
        set_round_pairs(monkeypatch, round_pairs)
    pattern, layout, options = CASES[name]
    case = Case(pattern=pattern, layout=layout, **options)
    for number, backend in enumerate((EAGER, INTO, INTO, EAGER)):
        monkeypatch.setattr(compute, "LONG_FLOPS", (0.0, 2e3)[number // 2])
        how = {"early": (0.0, 0.3)[number % 2], "workspace": (None, 0.3)[number // 2]}
        error, queued = check(case, Selection(backend), seed=number, gathers=gathers, **how)
        assert error < FLOAT64
        assert queued > layout.world_size


@settings(max_examples=20)
@given(
    cases(),
    st.sampled_from([0.0, 2e3, math.inf]),
    st.sampled_from([EAGER, INTO]),
    st.booleans(),
    st.sampled_from([None, 0.3]),
    st.integers(0, 9),
)
def test_any_call(case, long, backend, gathers, workspace, seed):
    """Whatever runs behind what, and however late."""
    case = replace(case, dtype=torch.float64, views=())
    how = {"gathers": gathers, "workspace": workspace, "early": seed % 2 / 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "LONG_FLOPS", long)
        error, _ = check(case, Selection(backend), seed=seed, **how)
    assert error < FLOAT64


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["one rank", "one rank, bare"])
def test_an_error_frees_nothing_that_is_still_to_be_written(name, direction, monkeypatch):
    """Not even where nobody waits for it: out of memory, say, and the program goes on."""
    monkeypatch.setattr(compute, "LONG_FLOPS", 0.0)
    monkeypatch.setattr(compute, "WORKSPACE_FLOOR", 0)
    pattern, layout, options = CASES[name]
    case, called = Case(pattern=pattern, layout=layout, **options), threading.local()

    def fails(*tile):
        called.times = getattr(called, "times", 0) + 1
        if called.times == 3:
            raise torch.OutOfMemoryError("of the third kernel call")
        return getattr(EAGER, direction)(*tile)

    def until_it_fails(ends):
        with pytest.raises(torch.OutOfMemoryError):
            run(case, ends, selection)

    failing: dict[str, Any] = {direction: fails}
    selection = Selection(replace(EAGER, **failing))
    with late_streams(0, 0.0) as streams:
        run_loopback(layout.world_size, until_it_fails)
        queued = [late for each in streams for late in each.queue]
        assert queued
        for late in queued:
            late.end()  # which raises where its memory is freed


needs_interpreter = pytest.mark.skipif(
    not has_triton() or (HAS_CUDA and not INTERPRETED), reason="needs Triton's interpreter"
)


@pytest.fixture
def launches(monkeypatch):
    """Those of table-driven kernels and of kernels that go row by row, in order."""
    from ring_dilated_attention import kernels

    lock, found = threading.Lock(), []

    def locked(name, launch):
        def one_at_a_time(*args, **options):
            with lock:  # the interpreter is no thread's own
                found.append(name)
                launch(*args, **options)

        return one_at_a_time

    for name in ("tiles_forward", "tiles_backward", "ranges_forward", "ranges_backward"):
        monkeypatch.setattr(kernels, name, locked(name, getattr(kernels, name)))
    return found


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("long_flops", [math.inf, 0.0])
@pytest.mark.parametrize(
    ("name", "kind", "flops"),
    [
        *((name, "ranges", 6e3) for name in ("one rank", "slide", "mixed zigzag")),
        *(("one rank", "tiles", 6e3), ("mixed zigzag", "tiles", 1e3)),
    ],
)
def test_launches_beside_larger_calls(name, kind, flops, long_flops, launches, monkeypatch):
    """Row by row, or of small tiles: they add to what additions of larger calls write, too."""
    pattern, layout, options = CASES[name]
    case = Case(pattern=pattern, layout=layout, dtype=torch.float32, **options)
    monkeypatch.setattr(compute, "LONG_FLOPS", long_flops)
    limits = Limits(own=flops) if kind == "ranges" else Limits(0.0, flops, flops)
    error, _ = check(case, Selection(EAGER, (limits,)), seed=0)
    assert error < FLOAT32
    assert {f"{kind}_forward", f"{kind}_backward"} == set(launches)


def test_streams_that_compute_have_side_streams_of_their_own(monkeypatch):
    """Or rows of one group would wait for those of another, which wait for these elsewhere."""

    class Stream:
        def __init__(self, device, priority):
            self.device, self.priority = device, priority

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    computing: list[Any] = [Computing(number) for number in (1, 2, 1)]
    first, second, again = (accumulate.side_stream(x) for x in computing)
    assert first is not second
    assert again is first
    assert (first.device, first.priority) == (computing[0].device, -1)


class Computing(NamedTuple):
    """A CUDA stream, equal to others of its number."""

    number: int
    device: torch.device = torch.device("cuda", 1)
