"""`rda simulate`."""

import json

import pytest
from support.changed_messages import lose_returned_gradients
from support.wrong_bytes import send_a_byte_more
from typer.testing import CliRunner

from ring_dilated_attention.cli import app

OPTIONS = ["--segment-lengths=16,50,all", "--dilation-rates=1,3,4", "--head-dim=8"]


def rda(*arguments):
    return CliRunner().invoke(app, ["simulate", "--device=cpu", *arguments])


def row(output, first, title):
    """The words of a table's row, by its first word."""
    table = output[output.index(title) :].splitlines()
    return next(line.split() for line in table if line.split()[:1] == [first])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_reports_every_rank(layout):
    done = rda("--seq-len=101", "--ranks=7", "--causal", f"--layout={layout}", *OPTIONS)
    assert done.exit_code == 0, done.output
    assert f"101 positions on 7 ranks ({layout}), 12 heads of 8" in done.output
    assert ", seed " in done.output
    assert done.output.rstrip().endswith("memory, bytes and messages match the plan")
    for rank in map(str, range(7)):
        assert row(done.output, rank, "Compute")[0] == rank
    assert row(done.output, "sum", "Compute")[1] == "101"
    *_, sent, planned = row(done.output, "sum", "Exchange")
    assert sent == planned != "0"


@pytest.mark.parametrize(
    "options",
    [
        ["--seq-len=5", "--ranks=11", "--pattern=dense", "--causal"],  # ranks that hold nothing
        ["--seq-len=1", "--ranks=3", "--pattern=longvit", "--dtype=bfloat16"],
        ["--seq-len=97", "--ranks=1"],
        ["--seq-len=53", "--ranks=5", "--pattern=gigapath", "--num-heads=6", "--num-kv-heads=2"],
        ["--seq-len=53", "--ranks=2", "--exchange=gather", "--backend=eager", "--batch-size=2"],
        ["--seq-len=53", "--ranks=3", "--no-backward", "--head-branches=split", "--dtype=float64"],
    ],
)
def test_corners(options):
    done = rda(*options, "--head-dim=8", "--seed=3")
    assert done.exit_code == 0, done.output
    assert ", seed 3" in done.output


def test_json_on_standard_output_is_alone_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = rda("--seq-len=53", "--ranks=2", "--json=-", *OPTIONS)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"]
    assert "53 positions on 2 ranks" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "zero_keys"), [([], False), (["--zero-keys"], True)])
def test_zero_keys_of_a_named_pattern(flags, zero_keys):
    """What the weights of Prov-GigaPath expect."""
    done = rda("--seq-len=53", "--ranks=2", "--pattern=gigapath", "--json=-", *flags)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["options"]["zero_keys"] is zero_keys


def test_json_holds_everything(tmp_path):
    file = tmp_path / "found.json"
    done = rda(
        "--seq-len=101",
        "--ranks=3",
        "--causal",
        "--layout=contiguous",
        f"--json={file}",
        "--seed=5",
        *OPTIONS,
    )
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["ok"]
    assert found["problems"] == []
    assert found["options"]["seed"] == 5
    assert [x["positions"] for x in found["ranks"]] == [34, 34, 33]
    assert found["balance"]["imbalance"] == max(x["of_mean"] for x in found["ranks"])
    assert found["speed_up_bound"] == 3 / found["balance"]["imbalance"]
    for x in found["ranks"]:
        assert x["forward"]["counted"] == x["forward"]["planned"]
    assert set(found["errors"]) == {"out", "lse", "dquery", "dkey", "dvalue"}


def test_many_ranks_show_a_few_and_the_extremes():
    arguments = [
        "--seq-len=200",
        "--ranks=20",
        "--causal",
        "--pattern=dense",
        "--num-heads=1",
        "--layout=contiguous",
    ]
    done = rda(*arguments, "--head-dim=4")
    assert done.exit_code == 0, done.output
    assert row(done.output, "19", "Compute")[4] == "1.945"  # the last computes the most
    assert len(done.output.splitlines()) < 3 * 20
    done = rda(*arguments, "--head-dim=4", "--show-ranks=all")
    for rank in map(str, range(20)):
        assert row(done.output, rank, "Compute")[1] == "10"


def test_a_plan_with_other_bytes_is_exit_code_1(monkeypatch, tmp_path):
    send_a_byte_more(monkeypatch, range(9))
    file = tmp_path / "found.json"
    done = rda("--seq-len=101", "--ranks=9", f"--json={file}", *OPTIONS)
    assert done.exit_code == 1
    assert "WRONG rank 0, forward: planned Transfers(sent=" in done.output
    assert "and 10 more problems\n" in done.output
    assert not json.loads(file.read_text())["ok"]


def test_wrong_results_are_exit_code_1(monkeypatch):
    lose_returned_gradients(monkeypatch)
    done = rda("--seq-len=101", "--ranks=2", *OPTIONS)
    assert done.exit_code == 1
    assert "WRONG dkey: relative error" in done.output
    assert "ok:" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len=0"], "--seq-len must be >= 1, got 0"),
        (["--seq-len=8", "--ranks=0"], "--ranks must be >= 1, got 0"),
        (
            ["--seq-len=8", "--layout=spiral"],
            "--layout must be one of 'auto', 'contiguous', 'zigzag'",
        ),
        (["--seq-len=8", "--dtype=int8"], "--dtype must be one of bf16, fp16"),
        (["--seq-len=8", "--pattern=plaid"], "--pattern must be one of 'longnet'"),
        (
            ["--seq-len=8", "--segment-lengths=4"],
            "--segment-lengths and --dilation-rates go together",
        ),
        (
            ["--seq-len=8", *OPTIONS, "--pattern=dense"],
            "give --pattern or --segment-lengths, not both",
        ),
        (
            ["--seq-len=8", "--num-heads=6", "--num-kv-heads=4"],
            "multiple of num_kv_heads; got 6 and 4",
        ),
        (["--seq-len=8", "--head-dim=0"], "--head-dim must be >= 1, got 0"),
        (["--seq-len=8", "--exchange=bus"], "--exchange must be one of 'auto', 'ring', 'gather'"),
        (["--seq-len=8", "--device=tpu"], "--device must be one of 'auto', 'cpu', 'cuda'"),
        (["--seq-len=8", "--json=/no/such/folder/file"], "No such file or directory"),
    ],
)
def test_bad_options_are_one_line(arguments, message):
    done = rda(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1
