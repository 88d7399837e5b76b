"""``--json``: one document, with the numbers of the tables."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.changed_messages import lose_returned_gradients
from support.small_ceilings import measure_little
from typer.testing import CliRunner

from ring_dilated_attention.bench import given_workload
from ring_dilated_attention.checks import TENSORS, Outcome
from ring_dilated_attention.cli import app, run_verify
from ring_dilated_attention.cli.sharded import Sharded
from ring_dilated_attention.plan import costs
from ring_dilated_attention.terminal import json_text

BRANCHES = "--segment-lengths=16,50,all --dilation-rates=1,3,4 --num-heads=4 --head-dim=8"
CALLS = ("tiles", "kernel_calls")
LINES = {
    "plan": f"plan --seq-len=101 --ranks=3 --tiles --check {BRANCHES}",
    "decode": f"plan --decode --seq-len=101 --ranks=3 {BRANCHES}",
    "simulate": f"simulate --device=cpu --seq-len=101 --ranks=3 {BRANCHES}",
    "verify": "verify --ranks=1",
    "bench": f"bench --device=cpu --seq-len=33 --ranks=1,2 --repeats=1 --no-errors {BRANCHES}",
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    measure_little(monkeypatch)


def rda(line, *more):
    return CliRunner().invoke(app, [*line.split(), *more])


def found(line, tmp_path):
    """What a command prints, and its document."""
    file = tmp_path / "found.json"
    done = rda(line, f"--json={file}")
    assert done.exit_code == 0, done.output
    assert f"wrote {file}" in done.stdout.splitlines()
    return done.stdout, json.loads(file.read_text())


def rows(output, title):
    """The rows of the first table with a title, as words; without totals."""
    lines = output[output.index(title) :].splitlines()[3:]
    ends = (x for x, line in enumerate(lines) if not line or line.startswith("─"))
    return [line.split() for line in lines[: next(ends)]]


def number(cell):
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("name", ["plan", "decode", "simulate"])
def test_standard_output_holds_the_document_alone(name):
    done = rda(LINES[name], "--json=-")
    assert done.exit_code == 0, done.output
    assert done.stdout == json_text(json.loads(done.stdout))
    assert "───" in done.stderr


MEASURING_LITTLE = """
import pytest
from support.small_ceilings import measure_little
from ring_dilated_attention.cli import main
measure_little(pytest.MonkeyPatch())
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verify", "bench"])
def test_a_pipe_holds_the_document_and_nothing_else(name, tmp_path):
    """Of the ranks that `bench` starts neither, whose libraries write without Python."""
    words = [*LINES[name].split(), "--json=-", *(["--out=found"] if name == "bench" else [])]
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURING_LITTLE, *words],
        capture_output=True, text=True, timeout=250, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert done.stdout == json_text(document)
    assert "───" in done.stderr  # tables
    if name == "bench":
        assert done.stdout == (tmp_path / "found" / "results.json").read_text()


def test_a_plan_has_the_numbers_of_its_tables(tmp_path):
    output, document = found(LINES["plan"], tmp_path)
    assert document["proven"]
    assert document["options"]["segment_lengths"] == [16, 50, None]
    plan = Sharded(
        workload=given_workload(
            None, [16, 50, None], [1, 3, 4], seq_len=101, num_heads=4, head_dim=8
        ),
        ranks=3, most_ranks=3, layout_name="auto", documents=None,
    ).plan  # fmt: skip
    size = costs.TensorSize(batch=1, head_dim=8, element_size=2)
    compute, exchange = rows(output, "Compute per call"), rows(output, "Exchange per call")
    assert [x["rank"] for x in document["ranks"]] == [0, 1, 2] == [int(x[0]) for x in compute]
    for x, cells, moved in zip(document["ranks"], compute, exchange, strict=True):
        rank = plan.rank(x["rank"])
        calls = [f"{where}_{what}" for where in ("local", "remote") for what in CALLS]
        assert [x[name] for name in ("positions", *calls, "tile_groups")] == list(
            map(number, cells[1:7])
        )
        assert f"{x['of_mean']:.3f}" == cells[-1]
        assert [x["rows_received"], x["rows_sent"]] == list(map(number, moved[1:3]))
        assert x["traffic_bytes"] == vars(costs.traffic(rank, size))
        assert x["memory_bytes"]["total"] == costs.memory(rank, size).total
        assert len(x["tiles"]) == x["local_tiles"] + x["remote_tiles"]
        sent = [y for y in x["messages"] if y["direction"] == "send"]
        assert len(sent) == x["forward_messages"] == number(moved[-1])
        assert sum(y["key_value_bytes"] for y in sent) == x["traffic_bytes"]["forward_sent"]
    assert document["totals"] == {
        "positions": 101,
        "flops": sum(x["flops"] for x in document["ranks"]),
    }
    assert document["exchange"] in output


def test_a_plan_of_many_ranks_has_those_shown(tmp_path):
    line = "plan --seq-len=64K --ranks=4096 --num-heads=1 --head-dim=8 --show-ranks=17,4000"
    _, document = found(line, tmp_path)
    assert [x["rank"] for x in document["ranks"]] == [17, 4000]
    assert "tiles" not in document["ranks"][0]
    assert not document["proven"]
    assert document["balance"]["world_size"] == 4096
    assert document["totals"]["flops"] > sum(x["flops"] for x in document["ranks"])


def test_a_simulation_has_the_numbers_of_its_tables(tmp_path):
    output, document = found(LINES["simulate"], tmp_path)
    assert document["ok"]
    assert document["options"]["seq_len"] == 101
    compute, exchange = rows(output, "Compute per rank"), rows(output, "Exchange as counted")
    for x, cells, moved in zip(document["ranks"], compute, exchange, strict=True):
        assert [x["rank"], x["positions"], x["kernel_calls"]] == list(map(number, cells[:3]))
        messages = [x[which]["counted"]["messages"] for which in ("forward", "backward")]
        assert messages == list(map(number, moved[2:4]))


def test_a_verification_has_the_numbers_of_its_table(tmp_path):
    output, document = found("verify --ranks=2", tmp_path)
    assert document["ok"]
    assert document["options"] == {"ranks": [2], "device": "cpu", "seed": 0}
    table = rows(output, "2 ranks: largest error")
    cases = document["cases"]
    assert sum(int(row[-8]) for row in table) == len(cases)
    for place, name in ((-2, "sent_bytes"), (-1, "planned_bytes")):
        assert sum(number(row[place]) for row in table) == sum(case[name] for case in cases) > 0
    for place, tensor in zip(range(-7, -2), TENSORS, strict=True):
        worst = max(case["errors"][tensor] for case in cases)
        assert f"{worst:.1e}" in [row[place] for row in table]
    by_kind = Counter((case["pattern"], case["dtype"]) for case in cases)
    assert sorted(by_kind.values()) == sorted(int(row[-8]) for row in table)


def test_a_benchmark_writes_its_results_to_another_file_too(tmp_path):
    folder = tmp_path / "results"
    _, document = found(f"{LINES['bench']} --ranks=1 --out={folder}", tmp_path)
    assert json.loads((folder / "results.json").read_text()) == document
    assert document["results"][0]["status"] == "ok"


@pytest.mark.parametrize("name", LINES)
def test_a_bad_path_is_one_line_and_nothing_is_started(name, tmp_path):
    for path, reason in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "found.json", "No such file or directory"),
        (Path("/proc/self/found.json"), "found.json"),  # root may write any folder but this
    ):
        done = rda(LINES[name], f"--json={path}")
        assert done.exit_code == 2
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout == ""


def test_a_simulation_that_is_wrong_is_written_and_is_exit_code_1(monkeypatch):
    lose_returned_gradients(monkeypatch)
    done = rda(LINES["simulate"], "--json=-")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert not document["ok"]
    assert document["problems"][0].startswith("dkey: relative error")
    assert "WRONG dkey" in done.stderr


def test_a_verification_that_is_wrong_is_written_and_is_exit_code_1(monkeypatch):
    def wrong(function, world_size, cases, **options):
        return [[Outcome(dict.fromkeys(TENSORS, (float("inf"), 1.0, 0.0))) for _ in cases]]

    monkeypatch.setattr(run_verify, "run_ranks", wrong)
    done = rda("verify --ranks=1 --json=-")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert not document["ok"]
    assert document["cases"][0]["errors"]["out"] is None  # JSON has no infinity
    assert "OUT OF BOUNDS" in done.stderr


def test_refused_workloads_are_written_and_are_exit_code_2(tmp_path):
    done = rda(f"bench --device=cpu --seq-len=9 --backend=cudnn --out={tmp_path} --json=-")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["results"][0]["status"] == "refused"
    assert "it runs on cuda" in done.stderr


def test_errors_leave_standard_output_empty(monkeypatch):
    done = rda("plan --seq-len=100000000 --ranks=3 --check --json=-")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "pairs of positions" in done.stderr


LIBRARIES = """
import ctypes, os, subprocess
from pathlib import Path
from ring_dilated_attention.cli.json_output import json_output
with json_output(Path("-")) as write:
    print("python")
    ctypes.CDLL(None).puts(b"buffered by C")
    os.write(1, b"a file descriptor\\n")
    subprocess.run(["echo", "a process"], check=True)
    write({"a": [1, float("nan")]})
    print("after")
print("then")
"""


def test_what_libraries_and_processes_print_goes_to_standard_error():
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # C's output too
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES], env=buffered, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    document, end = done.stdout.rsplit("}", 1)
    assert json.loads(document + "}") == {"a": [1, None]}
    assert end.split() == ["then"]
    printed = ["a file descriptor", "a process", "after", "buffered by C", "python"]
    assert sorted(done.stderr.splitlines()) == printed


@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        (">&-", "standard output is closed"),
        ("> /dev/full", "cannot write standard output: No space left on device"),
    ],
)
def test_standard_output_that_takes_nothing_is_one_line(shell, reason):
    line = f"{sys.executable} -m ring_dilated_attention.cli plan --seq-len=9 --json=- {shell}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    *_, last = done.stderr.splitlines()
    assert last == f"error: --json -: {reason}"


def test_json_of_what_it_cannot_write_is_refused():
    with pytest.raises(TypeError):
        json_text({"a": object()})
    assert json_text({"a": (1.5, float("-inf"), "x", None, True)}).endswith("}\n")
    assert json.loads(json_text({"a": {"b": (1, 2)}})) == {"a": {"b": [1, 2]}}
