"""The commands of `rda`: what they print, and how they end."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.changed_messages import lose_returned_gradients
from support.wrong_bytes import send_a_byte_more
from typer.testing import CliRunner

from ring_dilated_attention import SequenceLayout, checks, plan_attention
from ring_dilated_attention.checks import Outcome, RankError, doctor, key_counts
from ring_dilated_attention.cli import app, common
from ring_dilated_attention.cli.plan import closed_block
from ring_dilated_attention.named_patterns import NAMES, named
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan import check_plan, costs

TENSORS = ("out", "lse", "dquery", "dkey", "dvalue")

SMALL = "--segment-lengths=16,50,all --dilation-rates=1,3,4"
BENCH = "--segment-lengths=16,64 --dilation-rates=1,4 --heads=2 --head-dim=8 --seq-len=100"
BIG = 2**70  # no int64


def rda(line):
    return CliRunner().invoke(app, line.split())


RIGHT = [
    # command line, what it prints, and (behind "not") what it does not
    (
        "plan --seq-len=1M --ranks=8 --causal",
        "1,048,576 tokens, 12 heads of 64, bfloat16, causal, on 8 ranks (zigzag)",
        "nothing travels: every segment lies on one rank",
        "the work is even",
        "positions in different blocks of 32,768 never influence each other",
        "block; --pattern geometric continues LongNet's series until a segment spans the sequence",
    ),
    (
        "plan --pattern=geometric --seq-len=1M --ranks=8 --causal",
        "each rank receives",
        "not never influence",
    ),
    (
        "plan --segment-lengths=100 --dilation-rates=3 --seq-len=1000",
        "blocks of 100 never influence each other",
        "not --pattern geometric",
    ),
    (
        "plan --seq-len=1000 --segment-lengths=100,all --dilation-rates=1,10 --ranks=2 --tables",
        "each rank receives 150 KiB of keys and values from 1 other rank in forward, all at once",
        "Exchange: keys and values in forward",
        "Memory during forward",
        "not never influence",
        "not KV cache",
    ),
    (
        # Of 16 squares of 300 x 300 pairs the last rank has 3.5, the mean is 2.
        "plan --pattern=dense --seq-len=1200 --heads=2 --causal --layout=contiguous",
        "each rank receives 0 B to 900 KiB of keys and values from 0 to 3 other ranks",
        "rank 3 is the busiest: 1.75 times the mean",
        "4 ranks are at most 2.3 times as fast as one (--layout zigzag: 1.00 times the mean)",
        "a KV cache takes 1.17 MiB a layer, 100.0% of all keys and values",
    ),
    (
        "plan --seq-len=1G --ranks=4096 --segment-lengths=2048,all --dilation-rates=1,64K --tables",
        "1,073,741,824 tokens, 12 heads of 64, bfloat16, on 4,096 ranks",
        "each of 4 ranks shown receives",
        "384 MiB",  # query, key, value and out of a rank
    ),
    (
        "plan --seq-len=100 --ranks=3 --heads=4 --documents=0,30,31,100 --check " + SMALL,
        "3 documents",
        "proven: every (branch, head, query, visible key) is computed once",
    ),
    (
        "plan --hosts=2 --ranks=4 --seq-len=4096 --pattern=dense --heads=2 --causal",
        "predicted by a cost model, not measured: forward",
        "(2 hosts of 2 H200, 232 GB/s per GPU inside a host, 45 between hosts)",
        'exchange="auto" takes heads:2: forward and backward',
        "of 4 H200s, predicted by a cost model; ring",
    ),
    (
        "simulate --device=cpu --seq-len=101 --ranks=7 --causal --layout=zigzag " + SMALL,
        "101 tokens, 12 heads of 64, float32, causal, on 7 ranks (zigzag), on cpu",
        "results match one device; memory, bytes and messages match the plan",
        "error relative to one device: out",
        "largest",
    ),
    (
        "simulate --device=cpu --seq-len=53 --ranks=2 --exchange=gather --documents=0,9,53 "
        "--head-offsets=blocked --zero-keys " + SMALL,
        "2 documents",
        "results match",
    ),
    (
        f"bench --device=cpu {BENCH} --causal --baseline=kernel,sdpa --repeats=3",
        "sdpa, 1 rank, forward+backward: takes",
        "memory of the rank that holds most",
    ),
    ("verify --ranks=2 --seed=3", "72 cases within bounds, bytes as planned, seed 3"),
    ("--version", "rda "),
    ("", "Usage", "plan", "simulate", "verify"),
]


@pytest.mark.parametrize("line_and_words", RIGHT, ids=lambda x: x[0])
def test_commands_print(line_and_words):
    line, *words = line_and_words
    done = rda(line)
    assert done.exit_code == 0, done.output
    for text in words:
        if text.startswith("not "):
            assert text[4:] not in done.output
        else:
            assert text in done.output
    assert "…" not in done.output  # nothing is cut at 80 columns


LENGTHS = "'x' is not a number of positions such as 4096, 16K, 1M or 1G"
WRONG = [
    ("frob", "No such command 'frob'"),
    ("plan 5", "unexpected extra argument"),
    ("plan --no-such-option", "No such option: --no-such-option"),
    ("plan --seq-len", "Option '--seq-len' requires an argument"),
    ("plan --seq-len=x", f"Invalid value for '--seq-len': {LENGTHS}"),
    ("plan --seq-len=0", "'--seq-len': 0 is not from 1 to 281,474,976,710,656"),
    (f"plan --seq-len={BIG}", "is not from 1 to 281,474,976,710,656"),
    ("plan --heads=4 --kv-heads=3", "heads must be a multiple of kv_heads; got 4 and 3"),
    ("plan --layout=spiral", "'spiral' is not one of 'auto', 'contiguous', 'zigzag'"),
    ("plan --segment-lengths=4,8 --dilation-rates=1", "one value each per branch"),
    ("plan --segment-lengths=4", "got --segment-lengths alone"),
    (f"plan --pattern=dense {SMALL}", "give --pattern or --segment-lengths, not both"),
    (f"plan --segment-lengths={'4,' * 9999}4 --dilation-rates={'1,' * 9999}1", "at most 1000"),
    ("plan --documents=0,70,30,8192", "documents must rise from 0"),
    ("plan --hosts=3", "--ranks must be a multiple of --hosts; got 4 and 3"),
    ("plan --check", "more than 2,000,000: take a shorter --seq-len or fewer --heads"),
    ("plan --json=/no/such/folder/file", "cannot be written"),
    ("simulate --pattern=gigapath --zero-keys", "--pattern gigapath is the whole pattern"),
    ("simulate --head-offsets=blocked", "--pattern longnet is the whole pattern"),
    ("verify --ranks=1,x", "'x' is not a number"),
    ("bench --device=cpu --baseline=nothing", "baseline must be one of"),
    ("bench --device=cpu --heads=3 --kv-heads=2", "multiple of"),
    ("bench --device=cpu --repeats=0", "repeats"),
    ("draw foo", "'foo' is not one of"),
    ("draw --head=12", "head must lie in [0, 12), the query heads; got 12"),
    ("draw cache --out=a.pdf", "must be named *.png or *.svg; got 'a.pdf'"),
    ("draw cache --head=12 --out=a.svg", "kv_head must lie in [0, 12); got 12"),
    ("draw timeline --ranks=33 --out=a.svg", "at most 32 ranks; got 33"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_bad_command_lines_are_one_line_and_exit_code_2(line, message):
    done = rda(line)
    assert done.exit_code == 2, done.output
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ")
    assert message in said
    assert not done.stdout


def test_simulate_ends_with_1_where_bytes_or_results_differ(monkeypatch, tmp_path):
    file = tmp_path / "found.json"
    line = f"simulate --device=cpu --seq-len=101 --ranks=2 --json={file} {SMALL}"
    with monkeypatch.context() as patch:
        send_a_byte_more(patch, range(2))
        done = rda(line)
    assert done.exit_code == 1
    assert "error: rank 0, forward: planned Transfers(sent=" in done.stderr
    assert not json.loads(file.read_text())["ok"]
    lose_returned_gradients(monkeypatch)
    done = rda(line)
    assert done.exit_code == 1
    assert "dkey: relative error" in done.stderr
    assert "results match" not in done.stdout


def test_verify_ends_with_1_where_a_case_is_wrong_or_a_rank_fails(monkeypatch):
    def wrong(function, world_size, cases, *, wait_timeout, timeout, **options):
        assert wait_timeout == 5 < timeout
        squares = dict.fromkeys(TENSORS, (1.0, 1.0, 0.0))
        return [[Outcome(squares=squares) for _ in cases]]

    def failing(*arguments, **options):
        raise RankError("rank 1 failed:\nTraceback ...\nRuntimeError: rank 0 is missing\n")

    monkeypatch.setattr(checks, "run_ranks", wrong)
    done = rda("verify --ranks=1 --seed=7 --timeout=5")
    assert done.exit_code == 1
    assert "error: 72 of 72 cases are out of bounds; the first: ranks 1" in done.stderr
    assert "within bounds" not in done.stdout
    monkeypatch.setattr(checks, "run_ranks", failing)
    done = rda("verify --ranks=2")
    assert done.exit_code == 1
    assert done.stderr == "error: rank 1 failed: RuntimeError: rank 0 is missing\n"
    monkeypatch.setattr(checks, "run_ranks", None)
    assert isinstance(rda("verify --ranks=1").exception, TypeError)  # a bug keeps its traceback


def test_json_has_the_numbers_of_the_plan(tmp_path):
    file = tmp_path / "plan.json"
    line = f"plan --seq-len=101 --ranks=3 --heads=4 --head-dim=8 --causal {SMALL} --check"
    done = rda(f"{line} --hosts=3 --json={file}")
    assert done.exit_code == 0, done.output
    alone = rda(f"{line} --hosts=3 --json=-")
    document = json.loads(alone.stdout)
    assert document == json.loads(file.read_text())
    assert alone.stderr == done.stdout
    assert document["proven"]
    assert document["options"]["pattern"]["segment_lengths"] == [16, 50, None]
    assert all(f"- {words}\n" in done.stdout for words in document["verdict"])
    pattern = DilatedPattern([16, 50, None], [1, 3, 4])
    layout = SequenceLayout.zigzag(101, 3)
    plan = plan_attention(pattern, layout, is_causal=True, num_heads=4, num_kv_heads=4)
    size = costs.TensorSize(batch=1, head_dim=8, element_size=2)
    check_plan(plan)
    for rank, found in enumerate(document["ranks"]):
        own = plan.rank(rank)
        assert found["rank"] == rank
        assert found["positions"] == layout.local_length(rank)
        assert found["flops"] == costs.flops(own, size)
        assert found["traffic_bytes"] == asdict(costs.traffic(own, size))
        assert found["memory_bytes"]["total"] == costs.memory(own, size).total
        assert found["forward"]["across_bytes"] == found["traffic_bytes"]["forward_received"]


def test_json_of_simulate_verify_and_bench():
    def found(line):
        done = rda(f"{line} --json=-")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    simulated = found(f"simulate --device=cpu --seq-len=101 --ranks=3 {SMALL}")
    assert simulated["ok"]
    assert [x["positions"] for x in simulated["ranks"]] == [34, 34, 33]
    assert all(x["forward"]["counted"] == x["forward"]["planned"] for x in simulated["ranks"])
    verified = found("verify --ranks=1")
    assert verified["ok"]
    assert len(verified["cases"]) == 72
    assert set(verified["cases"][0]["errors"]) == set(TENSORS)
    line = f"bench --device=cpu {BENCH} --ranks=1,2 --repeats=3"
    measured = found(line)["results"]
    assert [row["ranks"] for row in measured] == [1, 1, 2, 2]
    assert all(row["samples_ms"] for row in measured)
    assert measured[2]["derived"]["time_over_one_rank"] > 0


@pytest.mark.parametrize("what", ["mask", "exchange", "work", "timeline", "cache"])
def test_draw_writes_pictures(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "--segment-lengths=8,16,all --dilation-rates=1,2,4 --causal --heads=4 --ranks=3"
    for file, out in ((f"{what}.svg", ""), ("other.svg", "--out=other.svg")):
        done = rda(f"draw {what} {options} --seq-len={50 + len(out)} {out}")
        assert (done.exit_code, done.output) == (0, f"wrote {file}\n")
    assert Path(f"{what}.svg").read_bytes() != Path("other.svg").read_bytes()


@pytest.mark.parametrize(("call", "exit_code"), [("ok: out 2e-07", 0), ("wrong: out 1e-02", 1)])
def test_doctor_prints_the_report_and_ends_with_1_if_a_call_is_wrong(
    monkeypatch, tmp_path, call, exit_code
):
    file = tmp_path / "found.json"
    report = {
        "Versions": {"torch": "2.13.0", "triton": "[red]" + "x" * 190},  # longer than a terminal
        doctor.COPIES: {"not tried": "fewer than two GPUs"},
        doctor.CALLS: {"cpu eager float32": call},
    }
    monkeypatch.setattr(doctor, "examine", lambda: report)
    done = rda(f"doctor --json={file}")
    assert done.exit_code == exit_code, done.output
    assert done.stdout == doctor.as_text(report)
    failures = doctor.failures(report)
    assert json.loads(file.read_text()) == {"failures": failures, **report}
    assert ("the first is cpu eager float32: wrong" in done.stderr) is bool(failures)


def test_json_writes_what_json_lacks_as_null(tmp_path):
    file = tmp_path / "x.json"
    common.write_json(file, {"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert json.loads(file.read_text()) == {"a": [None, 1.5], "b": {"c": None}}


def commands() -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    return {name: root.get_command(None, name) for name in root.list_commands(None)}


def test_commands_have_few_options_and_examples_that_they_take():
    for name, command in commands().items():
        options = [x for x in command.params if x.param_type_name == "option"]
        assert len([x for x in options if "--help" not in x.opts]) <= 15, name
        done = rda(f"{name} --help")
        assert done.exit_code == 0, done.output
        assert done.output == rda(f"{name} -h").output
        examples = [x.split() for x in command.help.split("\n\n") if x.startswith("rda ")]
        for _, own, *words in examples:
            assert own == name
            command.make_context(name, words)  # raises what it does not allow


def run_without(module, *arguments):
    program = f"import sys; sys.modules[{module!r}] = None\n"
    program += "from ring_dilated_attention.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )


def test_help_needs_no_torch_and_commands_need_the_extra():
    for arguments in ([], ["plan", "--help"], ["verify", "--help"], ["--version"]):
        done = run_without("torch", *arguments)
        assert done.returncode == 0, done.stderr
    for module in ("typer", "rich"):
        done = run_without(module, "--help")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.endswith('pip install "ring-dilated-attention[cli]"')


def test_a_reader_that_goes_away_ends_a_command_quietly():
    for arguments in (["plan", "--help"], ["plan", "--json=-"]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "ring_dilated_attention.cli", *arguments]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert done.returncode == 0
        assert "rror" not in done.stderr


def test_presets_are_the_published_patterns():
    rates = [1, 2, 4, 8, 16]
    published: dict[str, Any] = {"head_offsets": "blocked", "zero_keys": True}
    assert {name: named(name, 9000).pattern for name in NAMES} == {
        "longnet": DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
        "gigapath": DilatedPattern([1024, 5792, 32768, 185363, 1048576], rates, **published),
        "longvit": DilatedPattern([1024, 4096, 32768, 262144, 1048576], rates, **published),
        "dense": DilatedPattern.dense(),
        "geometric": DilatedPattern([2048, 4096, 8192, 16384], rates[:4]),
    }
    with pytest.raises(ValueError, match="'geometric' needs the length of the sequence"):
        named("geometric")


@pytest.mark.parametrize(
    ("lengths", "rates", "seq_len", "documents", "block"),
    [
        ([2, 4, 8], [1, 2, 2], 40, None, 8),
        ([4, 6], [1, 1], 40, None, 12),  # nothing crosses a multiple of both
        ([4, 6], [1, 1], 12, None, None),
        ([4, 6], [1, 1], 40, (0, 11, 40), 12),
        ([4, 6], [1, 1], 40, (0, 11, 22, 30, 40), None),
        ([4, None], [1, 3], 40, None, None),
    ],
)
def test_plan_says_which_positions_never_influence_each_other(
    lengths, rates, seq_len, documents, block
):
    pattern, layout = DilatedPattern(lengths, rates), SequenceLayout.contiguous(seq_len, 1)
    plan = plan_attention(pattern, layout, is_causal=True, documents=documents)
    assert closed_block(plan) == block
    seen = key_counts(pattern, seq_len, 2, documents=documents)[0].sum(0).double()
    after_many_layers = torch.matrix_power(seen + torch.eye(seq_len), 64) > 0
    for start, stop in pairwise(documents or (0, seq_len)):
        own = after_many_layers[start:stop, start:stop]
        if block is None:
            assert own.all()
        for end in range(block or seq_len, stop - start, block or seq_len):
            assert not own[:end, end:].any()
            assert own[:end, :end].any()
