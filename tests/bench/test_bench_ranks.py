"""`rda bench --ranks`: several ranks measured, their waits, bytes and errors; failures end it."""

import dataclasses
import json
import math
import re
import time
from datetime import timedelta
from threading import Event

import pytest
import torch
import torch.distributed as dist
from support.small_ceilings import measure_little
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.bench import (
    OURS,
    Options,
    Workload,
    bench,
    command,
    contenders,
    launch,
    plot,
    report,
    ring,
    team,
)
from ring_dilated_attention.bench.contender import Site
from ring_dilated_attention.bench.contenders import MESSAGES, contender
from ring_dilated_attention.bench.launch import ERROR_NAME
from ring_dilated_attention.bench.memory import heaviest
from ring_dilated_attention.bench.plots import SCALING_NAME
from ring_dilated_attention.bench.report import bytes_match, notes, tables, write_json
from ring_dilated_attention.bench.result import RankMemory, compare
from ring_dilated_attention.bench.waits import TimedExchange
from ring_dilated_attention.checks import RankError, run_ranks
from ring_dilated_attention.cli import app
from ring_dilated_attention.exchange import ProcessGroupExchange

pytestmark = pytest.mark.xdist_group("bench_ranks")  # its fixtures are made once

DENSE = Workload(
    pattern=DilatedPattern.dense(),
    seq_len=257,
    num_heads=4,
    head_dim=8,
    dtype="float32",
    is_causal=True,
)
# LongNet's shape, with a branch that crosses ranks; no length divides another.
DILATED = Workload(
    pattern=DilatedPattern([16, 50, None], [1, 3, 6]),
    seq_len=301,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    dtype="float32",
)
SIZES = (1, 2, 3)
BASELINE = "cp:allgather"
OPTIONS = Options(device="cpu", ranks=SIZES, repeats=2, baselines=(BASELINE,))
FLOAT32 = 1e-5


def _measure(rank, world_size):
    """What the test below looks at, in one world of processes."""
    measure_little(pytest.MonkeyPatch())
    said: dict[str, float] = {}

    def first_told(done: float, what: str) -> None:
        said.setdefault(what, done)

    counted: list[int] = []
    found = [
        bench(
            [DENSE, DILATED],
            OPTIONS,
            progress=first_told,
            finished=lambda results: counted.append(len(results)),
        )
    ]
    weak = Options(
        device="cpu", ranks=(2,), repeats=1, scaling="weak", errors=False, exchange="ring"
    )
    found.append(bench([DILATED], weak))

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    unbacked = dataclasses.replace(DENSE, backend="cudnn")
    found.append(bench([unbacked], dataclasses.replace(OPTIONS, ranks=(2,), baselines=())))
    contenders.dilated_attention = out_of_memory  # type: ignore[attr-defined]
    found.append(bench([DENSE], dataclasses.replace(OPTIONS, ranks=(1, 3), baselines=())))
    module = ring.context_parallel_module(BASELINE)
    site = Site(group=dist.new_group(), size=world_size, rank=rank, device=torch.device("cpu"))
    dealt = []
    for workload in (
        dataclasses.replace(DENSE, seq_len=48),
        dataclasses.replace(DENSE, seq_len=48, is_causal=False),
    ):
        arguments = module, workload, site, "alltoall"
        with ring.in_context_parallel(*arguments):
            dealt.append(torch.nn.functional.scaled_dot_product_attention.__name__)
        with pytest.raises(KeyError), ring.in_context_parallel(*arguments):
            raise KeyError
        dealt.append(torch.nn.functional.scaled_dot_product_attention.__name__)
    return found, said, dealt, counted


@pytest.fixture(scope="module")
def world():
    return run_ranks(_measure, max(SIZES))


@pytest.fixture(scope="module")
def results(world):
    return world[0][0][0]


def timings(result):
    assert result.status == "ok", (result.contender, result.reason)
    assert result.forward is not None
    assert result.forward_backward is not None
    return result.forward, result.forward_backward


def test_every_rank_knows_every_result(world):
    (everything, said, _, counted), *others = world
    assert all(other[0] == everything for other in others)
    assert [len(other[1]) for other in others] == [0, 0]
    assert said[f"{DENSE} on 2 ranks"] == 1
    assert len(said) == 2 * len(SIZES)
    assert counted == list(range(2, 2 * len(said) + 1, 2))  # ours and a baseline each time
    assert not any(other[3] for other in others)


def test_ours_is_right_on_every_size(results):
    assert [(r.base, r.ranks, r.contender) for r in results] == [
        (case, size, name)
        for case in (DENSE, DILATED)
        for size in SIZES
        for name in (OURS, BASELINE)
    ]
    for result in results[::2]:
        forward, forward_backward = timings(result)
        assert result.errors.out < FLOAT32
        assert result.errors.gradients < FLOAT32
        assert result.errors.twin.seq_len == result.workload.seq_len
        for timing, passes in ((forward, 1), (forward_backward, 3.5)):
            assert len(timing.flops_by_rank) == result.ranks
            assert sum(timing.flops_by_rank) == pytest.approx(passes * result.workload.flops())
            assert len(timing.times_ms) == 2
            assert timing.calls == 1
            assert timing.matmul_size == 64
            assert len(timing.matmul_tflops) == result.ranks
            assert timing.fraction > 0
            communication = timing.communication
            assert (communication is None) == (result.ranks == 1)
            if communication is not None:
                assert communication.bytes_match
                assert len(communication.sent_bytes) == result.ranks
                assert sum(communication.sent_bytes) > 0
                assert len(communication.exposed_ms) == len(communication.shares) == result.ranks
                assert all(ms > 0 for ms in communication.exposed_ms)
                assert all(0 < share < 1 for share in communication.shares)
            memory = timing.memory
            assert memory.peak is None
            assert memory.outbox == 0  # there are no copies
            deal = SequenceLayout.zigzag if result.workload.is_causal else SequenceLayout.contiguous
            rows = deal(result.workload.seq_len, result.ranks).local_length(memory.rank)
            assert memory.query * result.workload.seq_len == result.workload.query_bytes * rows
            assert memory.out == memory.query
            assert (memory.buffers > 0) == (result.ranks > 1)
        assert forward.memory.gradients == forward.memory.dout == 0
        assert forward_backward.memory.dout == forward_backward.memory.query


def test_speed_up_is_over_one_rank_of_the_same_case(results):
    one, three = results[0], results[4]
    for backward in (False, True):
        beside = compare(three, results, backward)
        ratio = one.timing(backward).median_ms / three.timing(backward).median_ms
        assert beside.speed_up == pytest.approx(ratio)
        assert beside.rate_to_one == pytest.approx(ratio / 3)
        assert compare(one, results, backward).speed_up == 1
        assert beside.memory_to_one is None  # no peak on the CPU
        assert beside.ours_to_this is None
    assert compare(three, [three], True).speed_up is None


def test_a_refused_baseline_is_a_row(results):
    for result in results[1::2]:
        assert result.status == "refused"
        assert result.forward is None
        assert result.errors is None
    assert results[1].reason == f"{BASELINE} runs on cuda, the inputs are on cpu"
    assert "computes the dense pattern (document, 1); got (16, 1)" in results[-1].reason
    assert any(f"{BASELINE}: refused" in line for line in notes(results))


def test_what_is_written(results, tmp_path):
    path = write_json(tmp_path, results, {"seed": 0}, ["rda", "bench"])
    document = json.loads(path.read_text())
    assert set(document) == {"command", "environment", "results"}
    found = document["results"][4]
    assert (found["ranks"], found["scaling"], found["contender"]) == (3, "strong", OURS)
    assert found["forward"]["communication"]["bytes_match"] is True
    assert len(found["forward_backward"]["times_ms"]) == 2
    assert {"speed_up", "rate_to_one", "tflops_per_rank", "fraction_of_matmul"} <= set(
        found["derived"]["forward"]
    )
    assert plot(tmp_path, results).read_bytes().startswith(b"\x89PNG")
    assert len(tables(results)) == 2
    assert bytes_match(results)
    wrong = dataclasses.replace(results[4].forward.communication, bytes_match=False)
    forward = dataclasses.replace(results[4].forward, communication=wrong)
    changed = [dataclasses.replace(results[4], forward=forward)]
    assert not bytes_match(changed)
    assert any("planned" in line for line in notes(changed))


def test_weak_scaling_lengthens_the_case(world):
    (result,) = world[0][0][1]
    assert result.base == DILATED
    assert result.workload.seq_len == 2 * DILATED.seq_len
    assert result.errors is None
    assert timings(result)[1].communication.bytes_match


def test_what_all_ranks_cannot_do_is_a_row(world):
    (refused,) = world[0][0][2]
    assert refused.status == "refused"
    assert "it runs on cuda" in refused.reason
    for result in world[0][0][3]:
        assert (result.status, result.reason) == ("out of memory", "CUDA out of memory")


def test_context_parallel_deals_as_expected_and_cleans_up(world):
    for _, _, dealt, _ in world:
        assert dealt == ["inner_fn", "scaled_dot_product_attention"] * 2


@pytest.mark.parametrize(
    ("name", "change", "size", "reason"),
    [
        (BASELINE, {"seq_len": 258}, 2, "a multiple of 4 on 2 ranks; got 258"),
        (BASELINE, {"seq_len": 257, "is_causal": False}, 2, "a multiple of 2 on 2 ranks; got 257"),
        (BASELINE, {"num_kv_heads": 2}, 2, "no grouped queries; got 4 heads and 2 KV heads"),
        (BASELINE, {"dtype": "float32"}, 2, "takes float16, bfloat16; got float32"),
        ("ring-flash-attn:zigzag", {}, 2, "needs the package ring-flash-attn"),
        ("ulysses", {}, 2, "baseline must be one of 'sdpa'"),
    ],
)
def test_baselines_refuse(name, change, size, reason):
    workload = dataclasses.replace(DENSE, **{"dtype": "bfloat16", **change})
    with pytest.raises(ValueError, match=reason):
        contender(name, workload, Site(size=size, device=torch.device("cuda")))


def test_messages_are_compared_with_ours_on_one_rank(results):
    one, three = results[0], dataclasses.replace(results[4], contender=MESSAGES)
    ratio = one.forward.median_ms / three.forward.median_ms
    assert compare(three, [*results, three], False).speed_up == pytest.approx(ratio)
    with pytest.raises(ValueError, match="ours:messages needs several ranks: on one it is ours"):
        contender(MESSAGES, DENSE, Site(device=torch.device("cuda")))


def test_comparing_with_messages_is_for_gpus():
    with pytest.raises(ValueError, match="ours:messages runs on cuda, the inputs are on cpu"):
        contender("ours:messages", DILATED, Site(size=2, device=torch.device("cpu")))


def test_layouts():
    def dealt(layout, is_causal):
        workload = dataclasses.replace(DENSE, is_causal=is_causal)
        site = Site(size=3, device=torch.device("cpu"))
        return contender(OURS, workload, site, layout=layout).layout

    contiguous = SequenceLayout.contiguous(257, 3)
    zigzag = SequenceLayout.zigzag(257, 3)
    assert dealt("auto", True) == dealt("zigzag", False) == zigzag
    assert dealt("auto", False) == dealt("contiguous", True) == contiguous


def test_waits_are_timed_and_the_rest_is_the_exchange_itself(monkeypatch):
    now = [0.0]

    def passes(ms):
        now[0] += ms / 1e3

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow:
        rank, world_size, sent_bytes, extra = 0, 2, 7, "more"

        def start(self, send, receive):
            return self

        def wait(self):
            passes(20)

        def maximum(self, values, device):
            passes(10)
            return list(values)

    timed = TimedExchange(Slow(), torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(2):
        timed.start(None, None).wait()
        passes(100)  # of compute
    assert timed.maximum([3], torch.device("cpu")) == [3]
    assert (timed.sent_bytes, timed.extra) == (7, "more")
    waits = timed.take()
    assert tuple(waits) == pytest.approx((40, 10))
    assert timed.take() == (0, 0)
    stop = timed.stopwatch()  # the compute waits for a stream that waits for a transfer
    passes(20)
    stop()
    assert tuple(timed.take()) == pytest.approx((20, 0))


def _late_by_turns(rank, _):
    """Milliseconds that a rank waits to agree, if the other is late; in calls after the first."""
    world = dist.group.WORLD
    assert world is not None
    ends = TimedExchange(ProcessGroupExchange(world), torch.device("cpu"))
    query, key, value = torch.randn(3, 1, 64, 4, 16).unbind(0)
    found = []
    for number in range(4):
        if rank == number % 2:
            time.sleep(0.3)
        dilated_attention(query, key, value, DilatedPattern([16, None], [1, 4]), group=ends)
        waits = ends.take()
        if number and rank != number % 2:
            found.append(waits.agreement)
    return found


def test_ranks_that_wait_to_agree_say_so_in_every_call():
    for found in run_ranks(_late_by_turns, 2):
        assert found
        assert all(ms > 100 for ms in found), found


def test_memory_adds_up():
    memory = RankMemory(
        rank=1, query=8, key=4, value=4, dout=8, out=8, lse=2, buffers=3, gradients=16, peak=40,
        outbox=7,
    )  # fmt: skip
    assert (memory.inputs, memory.temporaries, memory.total) == (24, 11, 64)
    unknown = dataclasses.replace(memory, lse=None, buffers=None)
    assert unknown.temporaries == 16
    less = dataclasses.replace(memory, rank=0, peak=39)
    assert heaviest([less, memory]).rank == 1


def _one_fails():
    """Rank 1 fails in its first call; rank 0 waits for it there."""
    measure_little(pytest.MonkeyPatch())
    team.GRACE = timedelta(seconds=1)

    def broken(*args, **kwargs):
        raise AssertionError("a bug")

    if dist.get_rank() == 1:
        contenders.dilated_attention = broken  # type: ignore[attr-defined]
    bench([DENSE], dataclasses.replace(OPTIONS, ranks=(2,)))


def test_one_rank_that_fails_ends_the_run(tmp_path):
    with pytest.raises(RankError, match=r"^rank 1 failed: AssertionError: a bug \(see .*\)$"):
        launch(_one_fails, 2, device="cpu", out=tmp_path)
    assert "in broken" in (tmp_path / ERROR_NAME).read_text()  # the traceback


def _one_does_not_come():
    """Rank 1 has something else to do until it is stopped."""
    if dist.get_rank() == 1:
        Event().wait()
    dist.barrier()


def test_ranks_wait_as_long_as_they_are_told(tmp_path):
    with pytest.raises(RankError, match=r"^rank 0 failed: "):
        launch(_one_does_not_come, 2, device="cpu", out=tmp_path, timeout=1)


def _one_computes_nan():
    measure_little(pytest.MonkeyPatch())
    attend = dilated_attention

    def broken(*args, **kwargs):
        return attend(*args, **kwargs) * torch.nan

    if dist.get_rank() == 1:
        contenders.dilated_attention = broken  # type: ignore[attr-defined]
    return [
        (found.status, found.reason)
        for found in bench([DENSE], dataclasses.replace(OPTIONS, ranks=(2,)))
    ]


def test_what_is_not_finite_is_a_failure(tmp_path):
    ours, _ = launch(_one_computes_nan, 2, device="cpu", out=tmp_path).value
    assert ours == ("failed", "rank 1: ArithmeticError: ours computed what is not finite")


def test_the_command(tmp_path):
    arguments = (
        "bench --device=cpu --ranks=1,2 --segment-lengths=32,all --dilation-rates=1,3 "
        "--seq-len=201 --num-heads=3 --head-dim=8 --repeats=1 --causal "
        f"--baseline={BASELINE} --out={tmp_path}"
    )
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 0, done.output
    assert "median" in done.output
    assert re.search(r"sent (B|KiB)  plan", done.output)
    assert "WRONG" not in done.output
    document = json.loads((tmp_path / report.JSON_NAME).read_text())
    assert [found["ranks"] for found in document["results"]] == [1, 1, 2, 2]
    assert all(found["errors"]["out"] < FLOAT32 for found in document["results"][::2])
    assert document["command"][0] == "rda"
    assert "seed" in document["environment"]
    assert (tmp_path / SCALING_NAME).stat().st_size > 0


def test_a_rank_that_failed_is_one_line_and_exit_code_1(monkeypatch, tmp_path):
    def gone(*args, **kwargs):
        raise RankError("rank 1 failed: a bug")

    monkeypatch.setattr(command, "launch", gone)
    done = CliRunner().invoke(app, ["bench", "--device=cpu", "--ranks=2", f"--out={tmp_path}"])
    assert done.exit_code == 1
    assert done.stderr == "error: rank 1 failed: a bug\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks=2 --sample-ms=-1", "sample_ms must be from 0 to 600,000, got -1.0"),
        ("--ranks=0", "ranks must be >= 1, got 0"),
        ("--ranks=2,x", "--ranks must be a whole number; got 'x'"),
        ("--ranks=2 --scaling=linear", "scaling must be one of 'strong', 'weak'; got 'linear'"),
        ("--ranks=2 --layout=ring", "layout must be one of 'auto', 'contiguous', 'zigzag'"),
        ("--ranks=2 --exchange=tree", "exchange must be one of 'auto', 'ring', 'gather'"),
        ("--ranks=2 --baseline=ulysses", "--baseline has no 'ulysses'; allowed: sdpa"),
        ("--ranks=2 --cuda-graph", "cuda_graph needs one rank"),
        ("--ranks=2 --repeats=0", "repeats must be >= 1, got 0"),
        ("--ranks=2 --seconds=0", "seconds must be > 0 and <= 2,592,000 seconds, got 0.0"),
    ],
)
def test_bad_options_are_one_line(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["bench", f"--out={tmp_path}", *arguments.split()])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_on_cuda(tmp_path):
    workloads = [
        dataclasses.replace(DENSE, seq_len=4096, head_dim=64, dtype="bfloat16"),
        dataclasses.replace(DILATED, seq_len=4099, head_dim=64, dtype="bfloat16"),
    ]
    baselines = ("cp:allgather", "cp:alltoall", "ours:messages")
    options = Options(device="cuda", ranks=(1, 2), repeats=3, baselines=baselines)
    found = launch(bench, 2, workloads, options, device="cuda", out=tmp_path).value
    for result in found:
        if result.base == workloads[1] and result.contender.startswith("cp:"):
            continue
        if result.ranks == 1 and result.contender == "ours:messages":
            assert result.status == "refused"
            continue
        for timing in timings(result):
            assert timing.memory.peak > 0
            assert len(timing.matmul_tflops) == result.ranks
            assert all(map(math.isfinite, timing.matmul_tflops))
            assert timing.communication is None or timing.communication.bytes_match
        assert result.errors.out < 1e-2
        assert result.errors.gradients < 2e-2
    # Two ranks hold half of the inputs and results each. What a call takes besides does not shrink
    # with shards as short as these: the test below is of long ones.
    one, two = (found[number].timing(True).memory for number in (0, 1 + len(baselines)))
    assert (found[0].ranks, found[1 + len(baselines)].ranks) == (1, 2)
    for name in ("query", "key", "value", "dout", "out", "lse", "gradients"):
        assert getattr(one, name) == 2 * getattr(two, name) > 0, name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_long_sequences_halve_memory_on_cuda(tmp_path):
    """Long enough for a ring to take some heads at a time."""
    workload = dataclasses.replace(
        DENSE, seq_len=65_536, num_heads=16, head_dim=128, dtype="bfloat16"
    )
    options = Options(device="cuda", ranks=(1, 2), repeats=3, errors=False)
    found = launch(bench, 2, [workload], options, device="cuda", out=tmp_path).value
    for backward, most in ((False, 0.62), (True, 0.59)):  # 0.594 and 0.566 on H200s
        ratio = compare(found[1], found, backward).memory_to_one
        assert ratio is not None
        assert ratio < most
        one, two = (result.timing(backward).memory.outbox for result in found)
        assert one == 0 < two < 40 << 20
