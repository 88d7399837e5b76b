"""`rda bench`: what it measures, what follows from the numbers, and its JSON."""

import statistics
import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from ring_dilated_attention import DilatedPattern, reference_attention
from ring_dilated_attention.bench import (
    BASELINES,
    OURS,
    Result,
    Settings,
    Workload,
    bench,
    contenders,
    peak_bytes,
    report,
    take_turns,
)
from ring_dilated_attention.bench.contenders import Place, make_contender

CPU = torch.device("cpu")
PATTERN = DilatedPattern([16, 64], [1, 4])
SPLIT = DilatedPattern([16, 64], [1, 4], head_branches="split")


def workload(**options):
    usual: dict[str, Any] = {
        "pattern": PATTERN,
        "seq_len": 101,
        "num_heads": 4,
        "head_dim": 8,
        "dtype": "float32",
    }
    return Workload(**usual | options)


def result(contender=OURS, ranks=1, backward=False, samples_ms=(2.0, 1.0, 9.0), **options):
    return Result(
        workload=workload(),
        ranks=ranks,
        contender=contender,
        backward=backward,
        samples_ms=samples_ms,
        flops=8_000_000,
        **options,
    )


@pytest.fixture(scope="module")
def measured():
    baselines = "kernel", "torchscale", "sdpa"
    settings = Settings(ranks=(1, 2), baselines=baselines, device="cpu", repeats=3)
    return bench([workload(), workload(is_causal=True, num_kv_heads=2)], settings)


def of(results, **wanted):
    return [x for x in results if all(getattr(x, name) == y for name, y in wanted.items())]


def test_bench_measures_every_contender_forward_and_with_backward(measured):
    assert len(measured) == 2 * 2 * 4 * 2  # ranks, workloads, contenders, passes
    for ranks in (1, 2):
        for each in of(measured, contender=OURS, ranks=ranks):
            assert len(each.samples_ms) == 3
            assert min(each.samples_ms) > 0
            assert each.reason == ""
    assert all(each.samples_ms for each in of(measured, ranks=1, workload=workload()))


def test_bench_says_why_a_baseline_is_left_out(measured):
    grouped = of(measured, ranks=1, contender="torchscale", workload=measured[-1].workload)
    assert all("no split branches or grouped queries" in x.reason for x in grouped)
    assert {x.reason for x in of(measured, ranks=2, contender="sdpa")} == {
        "sdpa runs on one rank; got 2"
    }
    assert all(not x.samples_ms for x in measured if x.reason)


def test_bench_counts_useful_flops(measured):
    forward, both = of(measured, contender=OURS, ranks=1, workload=workload())
    visible = sum(
        len(range(head % rate, min(w, 101 - start), rate)) ** 2
        for w, rate in ((16, 1), (64, 4))
        for start in range(0, 101, w)
        for head in range(4)
    )
    assert forward.flops == 4 * 8 * visible
    assert both.flops == 3.5 * forward.flops
    dense = of(measured, contender="sdpa", ranks=1, workload=workload())[0]
    assert dense.flops == 4 * 8 * 4 * 101**2


def test_bench_report(measured):
    parts = list(report(measured))
    lines = [part for part in parts if isinstance(part, str)]
    tables = [part for part in parts if not isinstance(part, str)]
    assert "kernel, 2 ranks: kernel runs on one rank; got 2" in lines
    assert len(tables) == 2
    for _, headings, rows in tables:
        assert {len(row) for row in rows} == {len(headings)}


def test_bench_results_compare_times():
    ours, slow, two = every = [
        result(), result("sdpa", samples_ms=(6.0,)), result(ranks=2, samples_ms=(0.5,))
    ]  # fmt: skip
    assert ours.median_ms == 2
    assert ours.tflops == 0.004
    assert two.tflops == 0.008
    assert slow.time_over(OURS, 1, every) == 3
    assert two.time_over(OURS, 1, every) == 0.25
    assert slow.time_over(OURS, 2, [slow]) is None
    unmeasured = replace(slow, samples_ms=(), reason="out of memory")
    assert unmeasured.median_ms is None
    assert unmeasured.time_over(OURS, 1, every) is None
    lines = list(map(str, report([*every, unmeasured])))
    assert "sdpa, 1 rank, forward: takes 3.00 times as long as ours" in lines
    assert "ours, 2 ranks, forward: 4.00 times as fast as on 1 rank" in lines
    assert "sdpa, 1 rank: out of memory" in lines


def test_bench_goes_on_where_a_baseline_fails(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(contenders, "dense_attention", fails)
    settings = Settings(baselines=("sdpa", "torchscale"), device="cpu", repeats=3)
    results = bench([workload()], settings)
    assert [len(x.samples_ms) for x in results] == [3, 3, 0, 0, 3, 3]
    assert {x.reason for x in of(results, contender="sdpa")} == {"RuntimeError: out of memory"}


def test_bench_take_turns_rotates_and_keeps_to_its_time(monkeypatch):
    order, clock = [], count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 1e3)
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = take_turns(calls, CPU, repeats=4)
    assert "".join(order) == "aa" + "bb" + "ab" + "ba" + "ab" + "ba"
    assert {name: len(samples) for name, samples in times.items()} == {"a": 4, "b": 4}
    assert statistics.median(times["a"]) == pytest.approx(1)
    for seconds, samples in ((10.0, 7), (0.005, 5), (1e-6, 3)):
        clock = count()  # anew: differences of large numbers would not be a millisecond
        found = take_turns({"a": lambda: None}, CPU, repeats=7, seconds=seconds)
        assert len(found["a"]) == samples


@pytest.mark.parametrize("is_causal", [False, True])
def test_bench_torchscale_is_the_definition(is_causal):
    """Where segments and rates divide the length, it differs by its weights' gradient alone."""
    pattern = DilatedPattern([16, 64], [1, 4], head_offsets="blocked")
    case = workload(pattern=pattern, seq_len=128, is_causal=is_causal)
    contender = make_contender("torchscale", case, Place(device=CPU))
    inputs = torch.randn(3, *contender.shapes[0][0], generator=torch.Generator().manual_seed(0))
    query, key, value = inputs.double()
    expected, _ = reference_attention(query, key, value, pattern, is_causal=is_causal)
    torch.testing.assert_close(contender.attend(*inputs).double(), expected, rtol=1e-5, atol=1e-5)


def test_bench_kernel_does_as_many_flops_where_segments_divide_the_length():
    case = workload(seq_len=128, num_heads=8)
    contender = make_contender("kernel", case, Place(device=CPU))
    assert contender.flops == case.flops()
    assert contender.shapes == (((8, 16, 8, 8),) * 2, ((2, 16, 8, 8),) * 2)


@pytest.mark.parametrize(
    ("name", "place", "options", "message"),
    [
        ("context_parallel", Place(device=CPU), {}, "runs on several ranks; got 1"),
        ("context_parallel", Place(device=CPU, ranks=2), {}, "runs on GPUs"),
        ("context_parallel", Place(device=torch.device("cuda"), ranks=2), {}, "the dense pattern"),
        ("torchscale", Place(device=CPU), {"pattern": SPLIT}, "no split branches or"),
        ("sdpa", Place(device=CPU), {"documents": (0, 50, 101)}, "sdpa takes no documents"),
    ],
)
def test_bench_baselines_refuse(name, place, options, message):
    with pytest.raises(ValueError, match=message):
        make_contender(name, workload(**options), place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_needs_a_gpu_for_each_rank():
    with pytest.raises(ValueError, match="each needs its own; there are 0"):
        bench([workload()], Settings(device="cuda"))
    assert peak_bytes(CPU, lambda: None) is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # flash-attn-4's
def test_bench_on_cuda():
    case = workload(seq_len=1000, head_dim=64, dtype="float16")
    settings = Settings(baselines=BASELINES, device="cuda", repeats=3)
    results = bench([case], settings)
    for each in results:
        if each.samples_ms:
            assert each.memory is not None
    reasons = {x.contender: x.reason for x in results if x.reason}
    assert reasons.keys() == {"context_parallel"}, reasons
    forward, both = of(results, contender=OURS)
    assert both.memory > forward.memory > 4 * 4 * 1000 * 64 * 2
