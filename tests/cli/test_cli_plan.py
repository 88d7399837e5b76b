"""`rda plan` and `rda verify`."""

import io
import json
import re
import sys
import threading
from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.changed_messages import count_bytes
from support.strategies import layouts, patterns
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, plan_attention
from ring_dilated_attention.checks import TENSORS, Outcome
from ring_dilated_attention.cli import app, main
from ring_dilated_attention.cli import run_verify as verify_command
from ring_dilated_attention.cli.plan_tables import RowBytes, row_bytes
from ring_dilated_attention.engine import compute, kernel_calls
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import costs
from ring_dilated_attention.tiles import TileInputs


def rda(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_zero_keys_of_a_named_pattern():
    for flags in ([], ["--zero-keys"]):
        done = rda("plan", "--seq-len=53", "--ranks=2", "--pattern=gigapath", "--json=-", *flags)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["options"]["zero_keys"] is bool(flags)


def test_plan_of_a_billion_tokens_on_4096_ranks():
    done = rda(
        "plan",
        "--seq-len=1073741824",
        "--ranks=4096",
        "--segment-lengths=2048,4096,8192,16384,32768,all",
        "--dilation-rates=1,2,4,6,12,65536",
        "--show-ranks=17",
    )
    assert done.exit_code == 0, done.output
    assert "1,073,741,824 positions on 4,096 ranks" in done.output
    held = _row_under("query MiB", done.output)
    assert held[:5] == ["17", *["384.0"] * 4]  # query, key, value and out of one rank


def test_plan_lists_tiles_and_proves_itself():
    done = rda(
        "plan",
        "--seq-len=100",
        "--ranks=3",
        "--segment-lengths=16,64",
        "--dilation-rates=1,3",
        "--num-heads=4",
        "--head-dim=8",
        "--dtype=float32",
        "--causal",
        "--layout=zigzag",
        "--tiles",
        "--check",
    )
    assert done.exit_code == 0, done.output
    assert "exchange: ring" in done.output
    assert "Messages of rank 2" in done.output
    assert "proven: every (branch, head, query, visible key) is computed once" in done.output


def test_plan_lists_the_tiles_of_one_rank_which_has_no_messages():
    done = rda("plan", "--seq-len=64", "--ranks=1", "--tiles")
    assert done.exit_code == 0, done.output
    assert "Messages of rank 0" in done.output


def test_output_that_cannot_be_encoded_is_replaced(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["rda", "plan", "--seq-len", "64", "--ranks", "2"])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    stdout.seek(0)
    assert "Memory per rank" in stdout.read()


def test_plan_says_which_rows_are_copied():
    options = [
        "--seq-len=1000",
        "--ranks=1",
        "--segment-lengths=100,all",
        "--dilation-rates=1,2",
        "--num-heads=4",
    ]
    done = rda("plan", *options, "--num-kv-heads=2", "--head-dim=8", "--dtype=float32")
    assert done.exit_code == 0, done.output
    # Query, key and value: 4 + 2 + 2 rows of 32 bytes a position and branch, half of them at rate 2
    assert _row_under("read in place KiB", done.output) == ["0", "375", *["0"] * 3]
    # Per member of the 2 query heads of a KV head one call a tile; both offsets make one tile.
    assert _row_under("FLOP", done.output)[2:6] == ["2", "4", "0", "0"]
    done = rda("plan", *options, "--ranks=2", "--show-ranks=1", "--head-dim=8", "--dtype=float32")
    # No segment of the first branch crosses ranks. Of the second, 250 rows of each of 4 heads do: K
    # and V of 32 bytes each, and their gradients; with as many own rows they are put side by side.
    assert _row_under("packed to send KiB", done.output)[2:] == ["62.5", "125.0", "62.5"]


def test_plan_says_how_even_the_work_is():
    options = ["--seq-len=1200", "--ranks=4", "--num-heads=2", "--dilation-rates=1"]
    done = rda("plan", *options, "--segment-lengths=all", "--causal", "--layout=contiguous")
    assert done.exit_code == 0, done.output
    # Of 16 squares of 300 x 300 pairs the last rank has 3.5, the mean is 2.
    assert "rank 3 computes the most, 1.749 times the mean" in done.output
    assert "maximum speed-up on 4 ranks: 2.3" in done.output
    assert "(layout zigzag: 1.000 times the mean)" in done.output
    assert _row_under("FLOP / mean", done.output)[-1] == "0.251"
    done = rda("plan", *options, "--segment-lengths=all", "--causal")
    assert "1.000 times the mean; maximum speed-up on 4 ranks: 4.0" in done.output
    assert "(layout zigzag:" not in done.output
    assert "(layout zigzag:" not in rda("plan", *options, "--segment-lengths=all").output
    assert "one rank computes everything" in rda("plan", "--seq-len=9", "--ranks=1").output


@settings(max_examples=200)
@given(patterns(), layouts(max_length=150), st.booleans(), st.integers(1, 5), st.data())
def test_operations_counted_without_a_plan_are_the_plan_s(pattern, layout, is_causal, heads, data):
    borders = data.draw(st.sets(st.integers(1, layout.length)))
    plan = plan_attention(
        pattern,
        layout,
        is_causal=is_causal,
        num_heads=2 * heads,
        num_kv_heads=heads,
        documents=sorted({0, layout.length, *borders}),
    )
    size = costs.TensorSize(batch=2, head_dim=3, element_size=4)
    work = costs.flops_by_rank(plan, size)
    assert work == [costs.flops(plan.rank(rank), size) for rank in range(layout.world_size)]
    found = costs.balance(work)
    assert 1 <= found.imbalance <= layout.world_size
    assert work[found.largest_rank] == max(work)


def _row_under(header, output):
    """The words of the first row of a table, found by words of its header."""
    lines = output.splitlines()
    return lines[2 + next(i for i, line in enumerate(lines) if header in line)].split()


@pytest.mark.parametrize(
    ("pattern", "layout", "is_causal"),
    [
        (DilatedPattern([48, 100, None], [1, 3, 4]), SequenceLayout.zigzag(257, 3), True),
        (DilatedPattern([16, 64], [2, 5], head_offsets="blocked"), [200, 7, 50], False),
        (DilatedPattern([50, None], [1, 2], head_branches="split"), [100, 0, 157], False),
    ],
)
def test_plan_counts_what_a_call_does(monkeypatch, pattern, layout, is_causal):
    """Kernel calls, rows read in place and rows copied, against those of real calls."""
    if isinstance(layout, list):
        borders = pairwise(accumulate(layout, initial=0))
        layout = SequenceLayout([[(a, b)] if b > a else [] for a, b in borders])
    heads, kv_heads, batch = 6, 3, 2
    mine = threading.local()  # of each rank, which is a thread

    def inputs(q, k, v, is_causal, scale, memo):
        mine.counts["calls"] += 1
        for x in (q, k, v):
            if x.untyped_storage().data_ptr() in mine.storages:
                mine.counts["in place"] += x.nbytes
        return TileInputs(q, k, v, is_causal, scale, memo)

    def count(what, nbytes):
        mine.counts[what] += nbytes

    monkeypatch.setattr(compute, "TileInputs", inputs)
    count_bytes(monkeypatch, count)

    def rank(ends):
        length = layout.local_length(ends.rank)
        tensors = [torch.randn(batch, length, h, 8) for h in (heads, kv_heads, kv_heads)]
        mine.counts = Counter[str]()
        mine.storages = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        query, key, value = leaves = [x.requires_grad_() for x in tensors]
        out = dilated_attention(
            query, key, value, pattern, is_causal=is_causal, group=ends, layout=layout
        )
        forward = mine.counts.copy()
        torch.autograd.grad(out.sum(), leaves)
        return forward, mine.counts["returned"]

    found = run_loopback(layout.world_size, rank)
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads, num_kv_heads=kv_heads
    )
    size = costs.TensorSize(batch=batch, head_dim=8, element_size=4)
    for index, (forward, returned) in enumerate(found):
        planned = plan.rank(index)
        local, remote = planned.groups(gathers=plan.gathers)
        assert forward["calls"] == kernel_calls((*local, *remote), planned, batch)
        # A kernel call computes one of the query heads of a KV head; the next reads its keys again.
        keys = sum(group.keys_read for group in local)
        again = size.key_value_bytes(keys) * (heads // kv_heads - 1)
        read = RowBytes(forward["in place"] - again, forward["packed"], forward["spread"], returned)
        assert read == row_bytes(planned, size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len=0"], "--seq-len must be >= 1, got 0"),
        (
            ["--seq-len=8", "--layout=spiral"],
            "--layout must be one of 'auto', 'contiguous', 'zigzag'",
        ),
        (["--seq-len=8", "--dtype=int8"], "--dtype must be one of bf16, fp16"),
        (
            ["--seq-len=8", "--segment-lengths=4", "--dilation-rates=1,2"],
            "one value each per branch",
        ),
        (
            ["--seq-len=8", "--dilation-rates=1,x"],
            "--dilation-rates must be a whole number; got 'x'",
        ),
        (["--seq-len=8", "--show-ranks=4"], "must name ranks from 0 to 3, of 4; got 4"),
        (
            ["--seq-len=8", "--num-heads=6", "--num-kv-heads=4"],
            "multiple of num_kv_heads; got 6 and 4",
        ),
    ],
)
def test_bad_plans_are_one_line(arguments, message):
    done = rda("plan", *arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_verify_passes_and_counts_bytes():
    done = rda("verify", "--ranks=2")
    assert done.exit_code == 0, done.output
    assert "2 ranks: largest error relative to float64" in done.output
    assert "seed " in done.output
    assert "all within bounds" in done.output


def test_verify_fails_when_something_is_wrong(monkeypatch):
    def wrong(function, world_size, cases, *, backend, timeout, wait_timeout, told):
        assert wait_timeout == 5 < timeout
        squares = dict.fromkeys(TENSORS, (1.0, 1.0, 0.0))
        return [[Outcome(squares=squares) for _ in cases]]

    monkeypatch.setattr(verify_command, "run_ranks", wrong)
    done = rda("verify", "--ranks=1", "--every-case", "--seed=7", "--timeout=5")
    assert done.exit_code == 1
    assert "OUT OF BOUNDS" in done.output
    assert re.search(r"float64 +53 +7 +WRONG ", done.output)


def test_verify_refuses_what_it_cannot_run():
    assert "--ranks must be >= 1, got 0" in rda("verify", "--ranks=0").output
    assert "--device must be one of 'auto', 'cpu', 'cuda'" in rda("verify", "--device=tpu").output


def test_verify_says_in_one_line_which_rank_failed(monkeypatch):
    def failing(*arguments, **options):
        raise RuntimeError("rank 1 failed:\nTraceback ...\nRuntimeError: rank 0 is missing\n")

    monkeypatch.setattr(verify_command, "run_ranks", failing)
    done = rda("verify", "--ranks=2")
    assert done.exit_code == 1
    assert done.stderr == "error: rank 1 failed: RuntimeError: rank 0 is missing\n"
