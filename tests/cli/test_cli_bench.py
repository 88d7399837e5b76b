"""`rda bench`."""

import json

import pytest
from typer.testing import CliRunner

from ring_dilated_attention.cli.common import app

SMALL = "--device cpu --segment-lengths 16,64 --dilation-rates 1,4 --heads 2 --head-dim 8"


def run(line):
    return CliRunner().invoke(app, ["bench", *line.split()])


def test_bench_prints_tables_and_writes_json_and_a_picture(tmp_path):
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    line = f"{SMALL} --seq-len 100,1K --causal --baseline kernel,sdpa --repeats 3"
    done = run(f"{line} --json {found} --out {picture}")
    assert done.exit_code == 0, done.output
    results = json.loads(found.read_text())["results"]
    assert [x["workload"]["seq_len"] for x in results] == [100] * 6 + [1024] * 6
    assert all(x["samples_ms"] and x["workload"]["is_causal"] for x in results)
    assert "sdpa, 1 rank, forward+backward: takes" in done.output
    assert "memory of the rank that holds most" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_on_two_ranks():
    done = run(f"{SMALL} --seq-len 100 --ranks 1,2 --repeats 3 --json -")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [row["ranks"] for row in document["results"]] == [1, 1, 2, 2]
    assert document["results"][2]["derived"]["time_over_one_rank"] > 0


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--baseline nothing", 2, "baseline must be one of"),
        ("--device tpu", 2, "tpu"),
        ("--seq-len 0", 2, "0 is not from 1"),
        ("--ranks 0", 2, "0 is not from 1"),
        ("--heads 3 --kv-heads 2", 2, "multiple of"),
        ("--segment-lengths 16", 2, "--dilation-rates"),
        ("--repeats 0", 2, "repeats"),
        (f"{SMALL} --json /nowhere/found.json", 2, "cannot be written"),
    ],
)
def test_bench_bad_options(line, code, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = run(f"--device cpu {line}")
    assert done.exit_code == code, done.output
    assert message in done.output
