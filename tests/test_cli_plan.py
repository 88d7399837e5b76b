"""`rda plan` and `rda verify`."""

import pytest
from typer.testing import CliRunner

from ring_dilated_attention import verify_command
from ring_dilated_attention.cli import app
from ring_dilated_attention.verify import TENSORS, Outcome


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def rda(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_plan_of_a_billion_tokens_on_4096_ranks():
    done = rda(
        "plan",
        "--length=1073741824",
        "--ranks=4096",
        "--segment-lengths=2048,4096,8192,16384,32768,all",
        "--dilation-rates=1,2,4,6,12,65536",
        "--rank=17",
    )
    assert done.exit_code == 0, done.output
    assert "1,073,741,824 positions on 4096 ranks" in done.output
    assert "384.0 MiB" in done.output  # query, key, value and out of one rank


def test_plan_lists_tiles_and_proves_itself():
    done = rda(
        "plan",
        "--length=100",
        "--ranks=3",
        "--segment-lengths=16,64",
        "--dilation-rates=1,3",
        "--heads=4",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length=0"], "length must be >= 1, got 0"),
        (["--length=8", "--layout=spiral"], "layout must be one of 'contiguous', 'zigzag'"),
        (["--length=8", "--dtype=int8"], "dtype must be one of 'bfloat16', 'float16'"),
        (["--length=8", "--segment-lengths=4"], "one value each per branch"),
        (["--length=8", "--dilation-rates=1,x"], "need ints separated by commas; got '1,x'"),
        (["--length=8", "--rank=3"], "rank must lie in [0, 1), got 3"),
        (["--length=8", "--heads=6", "--kv-heads=4"], "multiple of kv_heads; got 6 and 4"),
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
    assert "inputs of seed " in done.output
    assert "all within bounds" in done.output


def test_verify_fails_when_something_is_wrong(monkeypatch):
    def wrong(function, world_size, cases, *, backend):
        squares = dict.fromkeys(TENSORS, (1.0, 1.0, 0.0))
        return [[Outcome(squares=squares) for _ in cases]]

    monkeypatch.setattr(verify_command, "run_ranks", wrong)
    done = rda("verify", "--ranks=1", "--all", "--seed=7")
    assert done.exit_code == 1
    assert "OUT OF BOUNDS" in done.output
    assert "n = 53, seed 7" in done.output


def test_verify_refuses_what_it_cannot_run():
    assert "ranks must be >= 1, got 0" in rda("verify", "--ranks=0").output
    assert "device must be one of 'cpu', 'cuda'" in rda("verify", "--device=tpu").output
