"""`rda train` and `rda sample` as a user runs them: real processes, signals, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ring_dilated_attention.cli import app
from ring_dilated_attention.nn import LongNetConfig
from ring_dilated_attention.train import checkpoint, launch, log, plot
from ring_dilated_attention.train.config import TrainConfig

RDA = (sys.executable, "-m", "ring_dilated_attention.cli")
SMALL = (
    "--device=cpu",
    "--sequence-length=64",
    "--batch-size=2",
    "--num-layers=1",
    "--embed-dim=16",
    "--num-heads=2",
    "--ffn-dim=16",
    "--segment-lengths=8,all",
    "--dilation-rates=1,2",
    "--eval-windows=2",
)
NOISE = re.compile(r"Traceback|Warning|[WE]\d{4} \d\d:")  # the last: torch's loggers


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a text, {i * i % 97}\n" for i in range(400)))
    return path


@contextmanager
def started(*arguments: Any, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*RDA, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def invoke(*arguments: Any) -> tuple[int, str]:
    """Run a command in this process: its exit code and all it printed."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def wait_for_steps(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(line["kind"] == "step" for line in log.read(run)) < count:
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.05)


def test_train_resume_and_sample_on_two_local_ranks(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = subprocess.run(
        [*RDA, "train", "--out", out, "--data", text, "--ranks=2", "--steps=4", *SMALL],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "2 ranks on cpu; sequences of 64 bytes" in result.stdout
    assert re.search(
        r"step 4/4: [\d.]+ bits/byte, [\d,]+ tokens/s, \d+ MiB per rank", result.stdout
    )
    assert "done: " in result.stdout
    assert f"rda sample --checkpoint {out}" in result.stdout
    assert (out / plot.NAME).stat().st_size > 5000
    # Options not given are the run's own, and one rank goes on with what two left.
    code, output = invoke("train", "--resume", "--out", out, "--steps=6")
    assert code == 0, output
    assert checkpoint.newest(out).step == 6
    assert checkpoint.newest(out).config.sequence_length == 64
    code, output = invoke("sample", "--checkpoint", out, "--prompt=line 1", "--bytes=5")
    assert code == 0, output
    assert output.startswith("line 1")
    assert len(output) > len("line 1\n")


@pytest.mark.parametrize(
    ("ranks", "number", "to_group"),
    [(1, signal.SIGINT, False), (2, signal.SIGINT, True), (2, signal.SIGTERM, False)],
)
def test_a_signal_leaves_a_usable_checkpoint(
    text: Path, tmp_path: Path, ranks: int, number: signal.Signals, to_group: bool
) -> None:
    out = tmp_path / "run"
    steps = ("--steps=100000", "--eval-every=100000", "--save-every=100000")
    with started(
        "train", "--out", out, "--data", text, f"--ranks={ranks}", *steps, *SMALL, cwd=tmp_path
    ) as process:
        wait_for_steps(out, 3)
        (os.killpg if to_group else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert not NOISE.search(output), output
    last = log.read(out)[-1]["step"]
    assert f"stopped after step {last}; go on with: rda train --resume --out {out}" in output
    found = checkpoint.newest(out)
    assert found.step == last
    assert (out / plot.NAME).exists()
    code, output = invoke("train", "--resume", "--out", out, f"--steps={last + 2}")
    assert code == 0, output
    assert [line["step"] for line in log.read(out) if line["kind"] == "step"] == [
        *range(1, last + 3)
    ]


def test_the_death_of_the_launcher_stops_the_ranks(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    steps = ("--steps=100000", "--eval-every=100000", "--save-every=100000")
    with started(
        "train", "--out", out, "--data", text, "--ranks=2", *steps, *SMALL, cwd=tmp_path
    ) as process:
        wait_for_steps(out, 1)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while not checkpoint.usable(out):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert checkpoint.newest(out).step >= 1


def test_a_failing_rank_is_one_message(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(
        "train", "--out", out, "--data", text, "--ranks=2", "--steps=9", "--learning-rate=1e38",
        "--weight-decay=1e4", *SMALL, cwd=tmp_path,
    ) as process:  # fmt: skip
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert not NOISE.search(output), output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.search(r"error: the loss of step \d is (nan|inf); a lower learning rate", error)
    assert not (out / "error.txt").exists()


def test_torchrun_starts_the_ranks(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "ring_dilated_attention.cli", "train"),
            *("--out", out, "--data", text, "--steps=3", "--sequence-ranks=1", *SMALL),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done: ") == 1
    assert "2 ranks in 2 sequence groups on cpu" in result.stdout
    assert checkpoint.newest(out).step == 3


def test_ranks_must_be_those_of_torchrun(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, output = invoke("train", "--out", tmp_path / "run", "--data", text, "--ranks=3", *SMALL)
    assert (code, output) == (2, "error: torchrun started 2 ranks; got ranks 3\n")


def test_the_base_preset_cut_down_trains_on_two_local_ranks(text: Path, tmp_path: Path) -> None:
    """All of it but its size: bfloat16, chunks, kept attention, a branch of the whole sequence."""
    out = tmp_path / "run"
    result = subprocess.run(
        [
            *(*RDA, "train", "--preset=longnet-base", "--out", out, "--data", text, "--ranks=2"),
            *("--steps=12", "--chunk-rows=10", "--segment-lengths=8,all", "--dilation-rates=1,2"),
            *(option for option in SMALL if not option.startswith(("--seg", "--dil"))),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    config = checkpoint.newest(out).config
    assert (config.checkpoint, config.chunk_rows) == ("keep_attention", 10)
    assert (config.precision, config.steps) == ("bfloat16", 12)
    steps = [line for line in log.read(out) if line["kind"] == "step"]
    assert steps[-1]["bits_per_byte"] < steps[0]["bits_per_byte"]
    assert all(line["tokens_per_second"] > 0 < line["peak_memory_bytes"] for line in steps)


def test_the_base_preset_needs_long_texts(text: Path, tmp_path: Path) -> None:
    code, output = invoke(
        "train", "--preset=longnet-base", "--device=cpu", "--data", text, "--out", tmp_path / "run"
    )
    assert code == 2
    assert "a sequence of 2097152 bytes and its labels need 2097153 bytes of training" in output


def make_empty(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return [f"--data={folder / 'empty'}"]


def make_run(folder: Path) -> list[str]:
    (folder / "run").mkdir()
    (folder / "run" / "log.jsonl").touch()
    return []


@pytest.mark.parametrize(
    ("make_arguments", "message"),
    [
        (lambda _: ["--data=/nowhere"], "cannot read /nowhere: No such file or directory"),
        (make_empty, "there is no text to train on in {folder}/empty"),
        (lambda _: ["--sequence-length=10000"], "need 10001 bytes of training text"),
        (lambda _: ["--sequence-length=2000"], "need 2001 bytes of held-out text"),
        (make_run, "{folder}/run is not an empty folder"),
        (lambda _: ["--resume"], "there is no checkpoint in {folder}/run"),
        (lambda _: ["--ranks=0"], "ranks must be >= 1, got 0"),
        (lambda _: ["--ranks=3", "--sequence-ranks=2"], "must divide the number of ranks, 3"),
        (lambda _: ["--ranks=4", "--sequence-ranks=1"], "got batch_size 2"),
        (lambda _: ["--layout=striped"], "layout must be one of 'contiguous', 'zigzag'"),
        (lambda _: ["--exchange=quick"], "exchange must be one of 'auto', 'ring', 'gather'"),
        (lambda _: ["--backend=quick"], "backend must be one of 'auto'"),
        (lambda _: ["--preset=huge"], "preset must be one of 'small', 'longnet-base'; got 'huge'"),
        (lambda _: ["--checkpoint=some"], "checkpoint must be one of 'none', 'full'"),
        (lambda _: ["--chunk-rows=0"], "chunk_rows must be >= 1, got 0"),
        (lambda _: ["--heldout-fraction=0"], "heldout_fraction must be > 0 and <= 0.5, got 0.0"),
        (lambda _: ["--resume", "--preset=small"], "resumed keeps its own options; got preset"),
        (lambda _: ["--segment-lengths=8,x"], "need ints separated by commas; got '8,x'"),
        (lambda _: ["--segment-lengths=8"], "one value each per branch"),
        (lambda _: ["--num-heads=3"], "num_heads must divide embed_dim 16; got 3"),
        (lambda _: ["--learning-rate=-1"], "learning_rate must be > 0, got -1.0"),
        (lambda _: ["--steps=0"], "steps must be >= 1, got 0"),
        (lambda _: ["--steps=x"], "--steps"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_input_is_one_line_before_any_rank_starts(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_arguments: Callable[[Path], list[str]],
    message: str,
    ranks: int,
) -> None:
    def no_ranks(*_: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "_launch", no_ranks)
    arguments = make_arguments(tmp_path)
    if not any("--data" in argument for argument in arguments):
        arguments.append(f"--data={text}")
    code, output = invoke(
        "train", "--out", tmp_path / "run", *SMALL, f"--ranks={ranks}", *arguments
    )
    assert code == 2, output
    assert message.format(folder=tmp_path) in " ".join(output.replace("│", " ").split())
    if message != "--steps":  # typer's own errors come in a box
        assert output.startswith("error: ")
        assert output.count("\n") == 1
    assert not (tmp_path / "run" / checkpoint.FOLDER).exists()


def test_resuming_another_model_names_the_fields(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, output = invoke("train", "--out", out, "--data", text, "--steps=1", *SMALL)
    assert code == 0, output
    for ranks in (1, 2):
        code, output = invoke(
            "train", "--resume", "--out", out, "--steps=3", "--num-layers=2", f"--ranks={ranks}"
        )
        assert code == 2
        assert output.endswith("holds another model: num_layers is 1 there and 2 here\n")


def test_sampling_bad_input(tmp_path: Path) -> None:
    code, output = invoke("sample", "--checkpoint", tmp_path, "--prompt=x")
    assert (code, output) == (2, f"error: there is no checkpoint in {tmp_path}\n")


def test_the_help_shows_the_defaults_of_the_config() -> None:
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    default_model = TrainConfig(out=Path("run")).model
    defaults.update({f.name: getattr(default_model, f.name) for f in fields(LongNetConfig)})
    in_words = {"data", "sequence_ranks", "num_kv_heads", "chunk_rows"}
    command_line = typer.main.get_command(app).get_command(None, "train")  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in command_line.params}
    assert set(options) - {"help"} == set(defaults) - {"model", "vocab_size", "norm_eps"} | {
        "resume",
        "ranks",
        "preset",
    }
    for name, parameter in options.items():
        if name in {"out", "resume", "ranks", "preset", "help"} | in_words:
            continue
        default = defaults[name]
        expected = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert parameter.show_default == expected, name
