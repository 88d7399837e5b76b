"""The benchmark: what it counts, what it compares with, and that a failure stays a row."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.small_ceilings import measure_little

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.bench import (
    Options,
    Result,
    Workload,
    bench,
    contenders,
    named_workload,
    plot,
    report,
)
from ring_dilated_attention.bench.contender import Site
from ring_dilated_attention.bench.contenders import contender
from ring_dilated_attention.bench.result import (
    BACKWARD,
    Ceilings,
    RankMemory,
    Timing,
    compare,
    to_dict,
)
from ring_dilated_attention.bench.team import Team
from ring_dilated_attention.bench.torchscale import KERNELS, torchscale_attention
from ring_dilated_attention.bench.turns import Turn, take_turns
from ring_dilated_attention.named_patterns import NAMES

CPU = Site(device=torch.device("cpu"))
PATTERN = DilatedPattern([8, 13, 40], [1, 2, 3])
SMALL = Workload(pattern=PATTERN, seq_len=37, num_heads=4, head_dim=8, dtype="float32")
QUICK: dict[str, Any] = {"device": "cpu", "repeats": 2}


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    measure_little(monkeypatch)


def timings(result):
    assert result.status == "ok", (result.contender, result.reason)
    assert result.forward is not None
    assert result.forward_backward is not None
    return result.forward, result.forward_backward


def errors(result):
    assert result.errors is not None, result.errors_reason
    return result.errors.out, result.errors.gradients


def by_brute_force(query, key, value, pattern, is_causal):
    """torchscale's definition, head by head and segment by segment, without padding a tensor."""
    n, heads = query.shape[1:3]
    outs, lses = [], []
    for w, r in pattern.branches:
        w = n if w is None else min(w, n)
        # A branch that has no row of a head at a position has no say there.
        rows = [[None] * heads for _ in range(n)]
        weights = query.new_full((n, heads), -math.inf)
        for head in range(heads):
            for start in range(0, n, w):
                seen = list(range(start + head // -(-heads // r), min(start + w, n), r))
                zeros = -(-w // r) - len(seen)
                for i in seen:
                    keys = [j for j in seen if j <= i or not is_causal]
                    scores = query[0, i, head] @ key[0, keys, head].T * query.shape[-1] ** -0.5
                    if not is_causal:
                        scores = torch.cat([scores, scores.new_zeros(zeros)])
                    rows[i][head] = scores.softmax(0)[: len(keys)] @ value[0, keys, head]
                    weights[i, head] = scores.logsumexp(0).detach()
        nothing = query.new_zeros(query.shape[-1])
        outs.append(
            torch.stack([torch.stack([nothing if x is None else x for x in row]) for row in rows])
        )
        lses.append(weights)
    alpha = torch.stack(lses).softmax(0).nan_to_num(0.0)
    return sum(a[..., None] * out for a, out in zip(alpha, outs, strict=True))[None]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
@pytest.mark.parametrize(
    ("pattern", "length", "heads"),
    [
        (DilatedPattern([4, 7, 16], [1, 2, 4]), 21, 4),
        (DilatedPattern([5, 11, None], [2, 3, 5]), 23, 4),  # no rate divides, uncovered positions
        (DilatedPattern([100], [3]), 13, 2),  # fewer heads than the rate
    ],
)
def test_torchscale_is_its_definition(pattern, length, heads, kernel, is_causal):
    tensors = torch.randn(4, 1, length, heads, 8, dtype=torch.float64).unbind(0)
    query, key, value = leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    dout = tensors[3]
    out = torchscale_attention(
        query, key, value, pattern, is_causal=is_causal, kernel=KERNELS[kernel]
    )
    expected = by_brute_force(query, key, value, pattern, is_causal)
    torch.testing.assert_close(out, expected)
    for got, want in zip(
        torch.autograd.grad(out, leaves, dout),
        torch.autograd.grad(expected, leaves, dout),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_torchscale_with_a_batch():
    tensors = torch.randn(3, 3, 19, 4, 8, dtype=torch.float64)

    def attend(tensors):
        query, key, value = tensors.unbind(0)
        return torchscale_attention(
            query, key, value, PATTERN, is_causal=False, kernel=KERNELS["math"]
        )

    out = attend(tensors)
    for b in range(3):
        torch.testing.assert_close(out[b : b + 1], attend(tensors[:, b : b + 1]))


def test_flops_by_hand():
    dense = Workload(
        pattern=DilatedPattern.dense(),
        seq_len=5,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        batch_size=3,
    )
    assert dense.flops() == 4 * 3 * 2 * 4 * 25
    assert replace(dense, is_causal=True).flops() == 4 * 3 * 2 * 4 * 15
    # (4, 2) on 10 positions, offsets 0 and 1: segments of 4, 4, 2 with 2, 2, 1 rows a head
    dilated = replace(dense, pattern=DilatedPattern([4], [2]), seq_len=10, num_kv_heads=2)
    assert dilated.flops() == 4 * 3 * 2 * 4 * (4 + 4 + 1)
    assert dilated.flops(DilatedPattern.dense()) == 4 * 3 * 2 * 4 * 100
    assert contender("sdpa", dilated, CPU).flops == 4 * 3 * 2 * 4 * 100
    assert contender("torchscale", dilated, CPU).flops == dilated.flops()


def test_kernel_has_the_shapes_of_full_segments():
    workload = replace(SMALL, num_heads=4, num_kv_heads=2, batch_size=2)
    made = contender("kernel", workload, CPU)
    assert made.shapes == (
        ((8, 4, 8, 8), (8, 2, 8, 8)),  # 37 // 8 segments of 2 sequences, 8 rows
        ((4, 4, 7, 8), (4, 2, 7, 8)),  # 13 positions by 2
        ((2, 4, 13, 8), (2, 2, 13, 8)),  # 40 is cut to 37, by 3
    )
    pairs = 8 * 8**2 + 4 * 7**2 + 2 * 13**2
    assert made.flops == 4 * 8 * 4 * pairs
    causal = contender("kernel", replace(workload, is_causal=True), CPU)
    assert causal.flops == 4 * 8 * 4 * (8 * 36 + 4 * 28 + 2 * 91)


def test_twins_keep_the_shape_of_the_pattern():
    workload = named_workload("gigapath", 45_681)
    twin = workload.twin(3001)
    assert (twin.seq_len, twin.num_heads, twin.dtype) == (3001, workload.num_heads, workload.dtype)
    assert twin.pattern.segment_lengths == (67, 381, 2153, 12177, 68886)
    assert twin.pattern.dilation_rates == workload.pattern.dilation_rates
    assert twin.pattern.head_offsets == "blocked"
    assert replace(SMALL, batch_size=3).twin(1001) == SMALL  # short enough as it is
    assert named_workload("gigapath", 10**9).twin(101).pattern.segment_lengths[:4] == (1, 2, 4, 8)
    assert named_workload("dense", 10**6).twin(101).pattern == DilatedPattern.dense()


def test_names_are_cases():
    shapes = {name: named_workload(name, 100) for name in NAMES}
    assert list(shapes) == ["longnet", "gigapath", "longvit", "dense"]
    assert (shapes["gigapath"].num_heads, shapes["gigapath"].head_dim) == (16, 48)
    assert shapes["gigapath"].dtype == "float16"
    assert named_workload("longnet", 100, num_heads=3).num_heads == 3
    with pytest.raises(ValueError, match="pattern must be one of 'longnet', 'gigapath'"):
        named_workload("shortnet", 100)


def test_a_run_adds_up(tmp_path):
    names = ("sdpa", "torchscale", "kernel")
    workloads = [SMALL, replace(SMALL, is_causal=True, seq_len=300, dtype="bfloat16")]
    seen: list[tuple[float, str]] = []
    options = Options(baselines=names, **QUICK)
    results = bench(workloads, options, progress=lambda done, what: seen.append((done, what)))
    assert list(dict.fromkeys(what for _, what in seen)) == [f"{x} on 1 rank" for x in workloads]
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert 1.5 < done[-1] < 2
    assert [(r.workload, r.contender) for r in results] == [
        (workload, name) for workload in workloads for name in ("ours", *names)
    ]
    for result in results:
        forward, forward_backward = timings(result)
        assert len(forward.times_ms) == 2
        assert min(forward.times_ms) > 0
        assert forward.wall_ms == forward.times_ms
        assert forward.memory.peak is None
        assert forward_backward.flops_by_rank[0] == (1 + BACKWARD) * forward.flops_by_rank[0]
        assert result.ceilings.matmul_tflops > 0
        if result.contender == "kernel":
            assert result.errors is None
        else:
            tolerance = 1e-6 if result.workload is workloads[0] else 1e-2
            assert all(0 < error < tolerance for error in errors(result))
    ours, sdpa = results[:2]
    (forward, forward_backward), (sdpa_forward, sdpa_both) = timings(ours), timings(sdpa)
    assert compare(ours, results, False).ours_to_this is None
    assert forward.flops_by_rank == (SMALL.flops(),) < sdpa_forward.flops_by_rank
    ratio = forward.tflops / sdpa_forward.tflops
    assert compare(sdpa, results, False).ours_to_this == pytest.approx(ratio)
    ratio = sdpa_both.median_ms / forward_backward.median_ms
    assert compare(sdpa, results, True).time_to_ours == pytest.approx(ratio)
    assert sdpa.kernel == "flash"

    path = report.write_json(tmp_path, results, report.environment("cpu"), ["rda", "bench"])
    document = json.loads(path.read_text())
    assert document["environment"]["torch"] == torch.__version__
    derived = document["results"][0]["derived"]["forward"]
    assert derived["median_ms"] == forward.median_ms
    assert derived["fraction_of_matmul"] == forward.fraction
    assert plot(tmp_path, results).read_bytes().startswith(b"\x89PNG")
    assert len(report.tables(results)) == 2
    assert not report.memory_tables(results)  # of several ranks


def test_derived_numbers():
    memory = RankMemory(
        rank=0, query=1184, key=0, value=0, dout=0, out=0, lse=None, buffers=None, gradients=0,
        peak=4736, outbox=None,
    )  # fmt: skip
    forward = Timing(
        flops_by_rank=(2 * 10**9,), calls=1, times_ms=(3.0, 1.0, 2.0), matmul_tflops=(4.0,),
        matmul_size=64, memory=memory, wall_ms=(5.0,),
    )  # fmt: skip
    result = Result(
        base=SMALL, workload=SMALL, ranks=1, scaling="strong", contender="ours", layout="auto",
        exchange="auto", ceilings=Ceilings(matmul_tflops=5.0, matmul_size=64, copy_gb_s=1.0),
        forward=forward,
        forward_backward=replace(forward, flops_by_rank=(7 * 10**9,), times_ms=(4.5,)),
    )  # fmt: skip
    assert forward.tflops == pytest.approx(1.0)
    assert forward.fraction == pytest.approx(0.25)
    assert result.backward_tflops == pytest.approx(2.0)
    derived = json.loads(json.dumps(to_dict(result, [result])))["derived"]
    assert derived["forward_backward"]["peak_in_queries"] == pytest.approx(4.0)
    assert derived["forward"]["wall_median_ms"] == 5.0
    assert derived["query_bytes"] == SMALL.query_bytes


def spied(monkeypatch, attending):
    """Every contender's calls go through ``attending(name, attend, *inputs)``."""
    real = contenders.contender

    def made(name, *args, **kwargs):
        found = real(name, *args, **kwargs)
        return replace(found, attend=lambda *inputs: attending(name, found.attend, *inputs))

    monkeypatch.setattr("ring_dilated_attention.bench.run.contender", made)


def test_contenders_take_turns_within_their_time(monkeypatch):
    order: list[str] = []

    def attending(name, attend, *inputs):
        order.append(name)
        return attend(*inputs)

    spied(monkeypatch, attending)
    bench([SMALL], Options(baselines=("sdpa",), errors=False, **QUICK))
    # Two warm-ups and two samples, forward and forward+backward; who comes first changes.
    warm = ["ours", "ours", "sdpa", "sdpa"]
    assert order == [*warm, "ours", "sdpa", "sdpa", "ours"] * 2
    order.clear()
    hurried = Options(errors=False, device="cpu", repeats=50, seconds=1e-9)
    (result,) = bench([SMALL], hurried)
    assert len(timings(result)[0].times_ms) == 3


@pytest.mark.parametrize("ranks", [(1,), (1, 2)])
def test_one_rank_beside_several_is_timed_like_them(ranks, monkeypatch):
    """From an idle device on; alone it may queue its samples, whose time is then the GPU's."""
    done: list[str] = []

    def start_timing(device, call):
        call()

        def elapsed():
            done.append("waited")
            return 1.0

        return elapsed

    def call(number):
        done.append("called")
        return (torch.ones(1),)

    monkeypatch.setattr("ring_dilated_attention.bench.measure.start_timing", start_timing)
    monkeypatch.setattr(
        "ring_dilated_attention.bench.measure.synchronize", lambda device: done.append("idle")
    )
    alone = SimpleNamespace(
        size=1,
        device=torch.device("cpu"),
        attempt=lambda call: call(),
        share=lambda value: [value],
        barrier=lambda: None,
    )
    failed: Any = pytest.fail
    turn: Any = Turn(name="ours", call=call)
    options = Options(ranks=ranks, repeats=3, seconds=1e-9, device="cpu")
    take_turns([turn], cast(Team, alone), options, failed, lambda share: None)
    warm_up = ["called", "idle", "idle", "called", "waited", "waited"]
    sample = ["called"] if ranks == (1,) else ["idle", "called", "waited"]
    assert done == [*warm_up, *sample * 3, *["waited"] * 3]


def test_wrong_results_show(monkeypatch):
    def doubled(*args, **kwargs):
        return 2 * dilated_attention(*args, **kwargs)

    monkeypatch.setattr(contenders, "dilated_attention", doubled)
    (result,) = bench([SMALL], Options(**QUICK))
    assert errors(result) == pytest.approx((1.0, 1.0), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("torchscale", {"num_kv_heads": 2}, "no grouped queries; got 4 heads and 2 KV heads"),
        (
            "torchscale",
            {"pattern": DilatedPattern([4, 8], [1, 2], head_branches="split")},
            "every branch on every head; got head_branches 'split'",
        ),
        ("flash4", {}, r"flash4 computes the dense pattern \(document, 1\); got \(8, 1\)"),
        ("flash4", {"pattern": DilatedPattern.dense()}, "flash4 takes float16, bfloat16"),
        ("sdpa:cudnn", {}, "sdpa:cudnn runs on cuda, the inputs are on cpu"),
    ],
)
def test_a_refusal_is_a_row(name, change, reason):
    options = Options(baselines=(name,), errors=False, **QUICK)
    ours, baseline = bench([replace(SMALL, **change)], options)
    assert ours.status == "ok"
    assert baseline.status == "refused"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(baseline.reason)
    assert baseline.forward is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (RuntimeError("illegal memory access"), "failed"),
    ],
)
def test_a_failure_in_backward_keeps_forward(monkeypatch, tmp_path, error, status):
    def attending(name, attend, *inputs):
        if torch.is_grad_enabled() and name == "sdpa":
            raise error
        return attend(*inputs)

    spied(monkeypatch, attending)
    results = bench([SMALL], Options(baselines=("sdpa",), **QUICK))
    assert results[0].forward_backward is not None
    failed = results[1]
    assert failed.status == status
    assert str(error) in failed.reason
    assert compare(failed, results, False).ours_to_this is not None
    assert failed.forward_backward is None
    assert failed.errors is None
    assert str(error) in failed.errors_reason
    assert any(str(error) in line for line in report.notes(results))
    plot(tmp_path, results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": ()}, "ranks must not be empty"),
        ({"ranks": (2,), "cuda_graph": True}, r"cuda_graph needs one rank.*got \(2,\)"),
        ({"baselines": ("xformers",)}, "baseline must be one of 'sdpa', 'sdpa:cudnn'"),
        ({"device": "tpu"}, "device must be one of 'auto', 'cpu', 'cuda'; got 'tpu'"),
        ({"repeats": 0}, "repeats must be >= 1, got 0"),
        ({"seconds": 0.0}, "seconds must be > 0 and <= 2,592,000 seconds, got 0.0"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        Options(**change)


def test_bad_arguments():
    with pytest.raises(ValueError, match="workloads must not be empty"):
        bench([], Options(device="cpu"))
    with pytest.raises(ValueError, match=r"need ranks of 1 to 1, .*; got \[2\]"):
        bench([SMALL], Options(device="cpu", ranks=(2,)))


def test_bad_workloads():
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads; got 4"):
        replace(SMALL, num_kv_heads=3)
    with pytest.raises(ValueError, match="dtype must be one of 'bfloat16'"):
        replace(SMALL, dtype="int8")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # kernels of others say what they cannot do
def test_on_cuda(monkeypatch):
    measure_little(monkeypatch, 2048, "cuda")
    workload = Workload(pattern=PATTERN, seq_len=1001, num_heads=4, head_dim=64)
    forced = ("sdpa:cudnn", "sdpa:flash", "torchscale", "torchscale:cudnn", "kernel")
    options = Options(baselines=forced, device="cuda", repeats=3, cuda_graph=True)
    results = bench([workload], options)
    for result in results:
        forward, forward_backward = (timing.memory.peak for timing in timings(result))
        assert forward is not None
        assert forward_backward is not None
        assert forward_backward >= forward > 0
        assert result.contender == "kernel" or max(errors(result)) < 1e-2
    assert timings(results[-1])[0].graph_ms
    assert [result.kernel for result in results[1:3]] == ["cudnn", "flash"]
