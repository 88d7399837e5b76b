"""`rda train` and `rda sample` as a user runs them: real processes, signals, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.launched import run_program
from typer.testing import CliRunner

from ring_dilated_attention.checks import host_memory
from ring_dilated_attention.cli import app
from ring_dilated_attention.nn import LongNet
from ring_dilated_attention.train import checkpoint, launch, run_folder
from ring_dilated_attention.train.curve import CURVE

RDA = (sys.executable, "-m", "ring_dilated_attention.cli")
SMALL = (
    "--device=cpu",
    "--seq-len=64",
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
    # A process that ends by a fault says where all of its threads were.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **changes}


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
    deadline = time.monotonic() + 200
    while sum(line["kind"] == "step" for line in run_folder.read_log(run)) < count:
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
        r"step 4/4: .*[\d.]+ bits/byte, [\d,]+ tokens/s, [\d.]+ .iB per rank", result.stdout
    )
    assert "done: " in result.stdout
    assert f"rda sample --checkpoint {out}" in result.stdout
    assert (out / CURVE).stat().st_size > 5000
    # Options not given are the run's own, and one rank goes on with what two left.
    code, output = invoke("train", "--resume", "--out", out, "--steps=6")
    assert code == 0, output
    assert checkpoint.newest(out).step == 6
    assert checkpoint.newest(out).config.seq_len == 64
    code, output = invoke("sample", "--checkpoint", out, "--prompt=line 1", "--max-new-tokens=5")
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
    last = run_folder.read_log(out)[-1]["step"]
    assert f"stopped after step {last}; go on with: rda train --resume --out {out}" in output
    found = checkpoint.newest(out)
    assert found.step == last
    assert (out / CURVE).exists()
    code, output = invoke("train", "--resume", "--out", out, f"--steps={last + 2}")
    assert code == 0, output
    assert [line["step"] for line in run_folder.read_log(out) if line["kind"] == "step"] == [
        *range(1, last + 3)
    ]


def test_the_death_of_the_launcher_stops_the_ranks(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    steps = ("--steps=100000", "--eval-every=100000", "--save-every=100000")
    with started(
        "train", "--out", out, "--data", text, "--ranks=2", *steps, *SMALL, cwd=tmp_path
    ) as process:
        wait_for_steps(out, 1)
        leftovers = set(Path(tempfile.gettempdir()).glob("rda-*"))
        process.kill()
        process.wait()
        deadline = time.monotonic() + 200
        while not checkpoint.usable(out) or (out / run_folder.LOCK).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert checkpoint.newest(out).step >= 1
    assert not leftovers


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
    assert (code, output) == (2, "error: torchrun started 2 ranks; leave out --ranks, got 3\n")


def test_the_base_preset_cut_down_trains_on_two_ranks(text: Path, tmp_path: Path) -> None:
    """All of it but its size: bfloat16, chunks, kept attention, a branch of the whole sequence."""
    out = tmp_path / "run"
    program = tmp_path / "rda.py"
    program.write_text("from ring_dilated_attention.cli import main\nmain()\n")
    arguments = [
        *("train", "--preset=longnet-base", f"--out={out}", f"--data={text}"),
        *("--steps=12", "--chunk-rows=10", "--segment-lengths=8,all", "--dilation-rates=1,2"),
        *(option for option in SMALL if not option.startswith(("--seg", "--dil"))),
    ]
    done = run_program(program, arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    config = checkpoint.newest(out).config
    assert (config.activation_checkpoint, config.chunk_rows) == ("keep_attention", 10)
    assert (config.dtype, config.steps) == ("bfloat16", 12)
    steps = [line for line in run_folder.read_log(out) if line["kind"] == "step"]
    assert steps[-1]["bits_per_byte"] < steps[0]["bits_per_byte"]
    assert all(line["tokens_per_second"] > 0 < line["peak_memory_bytes"] for line in steps)


def test_the_base_preset_needs_long_texts(text: Path, tmp_path: Path) -> None:
    code, output = invoke(
        *("train", "--preset=longnet-base", "--device=cpu", "--data", text),
        *(
            "--out",
            tmp_path / "run",
            "--activation-checkpoint-blocks=12",
        ),  # so that memory is no matter
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
        (lambda _: ["--data="], "--data must not be empty; for the current folder, write ."),
        (lambda _: ["--out="], "--out must not be empty"),
        (lambda _: ["--tokenizer="], "--tokenizer must not be empty"),
        (lambda _: ["--init-from="], "--init-from must not be empty"),
        (make_empty, "there is no text to train on in {folder}/empty"),
        (lambda _: ["--seq-len=10000"], "need 10001 bytes of training text"),
        (lambda _: ["--seq-len=2000"], "need 2001 bytes of held-out text"),
        (make_run, "{folder}/run is not an empty folder"),
        (lambda _: ["--resume"], "there is no checkpoint in {folder}/run"),
        (lambda _: ["--ranks=0"], "--ranks must be >= 1, got 0"),
        (lambda _: ["--ranks=3", "--sequence-ranks=2"], "must divide the number of ranks, 3"),
        (lambda _: ["--ranks=4", "--sequence-ranks=1"], "got batch_size 2"),
        (lambda _: ["--layout=striped"], "--layout must be one of 'auto', 'contiguous', 'zigzag'"),
        (lambda _: ["--exchange=quick"], "--exchange must be one of 'auto', 'ring', 'gather'"),
        (lambda _: ["--backend=quick"], "--backend must be one of 'auto'"),
        (
            lambda _: ["--preset=huge"],
            "--preset must be one of 'small', 'longnet-base'; got 'huge'",
        ),
        (
            lambda _: ["--activation-checkpoint=some"],
            "--activation-checkpoint must be one of 'none', 'full'",
        ),
        (lambda _: ["--chunk-rows=0"], "--chunk-rows must be >= 1, got 0"),
        (lambda _: ["--heldout-fraction=0"], "heldout_fraction must be > 0 and <= 0.5, got 0.0"),
        (lambda _: ["--resume", "--preset=small"], "resumed keeps its own options; got preset"),
        (
            lambda _: ["--segment-lengths=8,x"],
            "--segment-lengths must be a whole number such as 8192, 256K or 1M; got 'x'",
        ),
        (lambda _: ["--segment-lengths=8"], "one value each per branch"),
        (lambda _: ["--num-heads=3"], "num_heads must divide embed_dim 16; got 3"),
        (lambda _: ["--learning-rate=-1"], "learning_rate must be > 0, got -1.0"),
        (lambda _: ["--steps=0"], "--steps must be >= 1, got 0"),
        (lambda _: ["--steps=x"], "--steps must be a whole number; got 'x'"),
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
    def no_ranks(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_ranks", no_ranks)
    arguments = make_arguments(tmp_path)
    if not any("--data" in argument for argument in arguments):
        arguments.append(f"--data={text}")
    code, output = invoke(
        "train", "--out", tmp_path / "run", *SMALL, f"--ranks={ranks}", *arguments
    )
    assert code == 2, output
    assert message.format(folder=tmp_path) in " ".join(output.replace("│", " ").split())
    assert output.startswith("error: ")
    assert output.count("\n") == 1
    assert not (tmp_path / "run" / checkpoint.FOLDER).exists()


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "fifo")
    return f"--data={folder / 'fifo'}"


def sparse(folder: Path) -> str:
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 40)
    return f"--data={folder / 'sparse'}"


def not_utf8(folder: Path) -> str:
    """A run whose log is no text, to be resumed."""
    out = folder / "run"
    code, output = invoke("train", "--out", out, "--data", folder / "text.txt", "--steps=1", *SMALL)
    assert code == 0, output
    (out / run_folder.LOG).write_bytes(b"\xff\xfe\n")
    return "--resume --steps=2"


HUGE = 1 << 62
BAD_TRAIN = [
    (fifo, "cannot read {folder}/fifo: it is neither a regular file nor a folder"),
    ("--data=/dev/zero", "cannot read /dev/zero: it is neither a regular file nor a folder"),
    (sparse, "{folder}/sparse has 1,099.5 GB, and reading it takes 2,199.0 GB; this machine has"),
    ("--data=a\0b", "cannot read 'a\\x00b': embedded null byte"),
    (f"--data={'y' * 5000}", "cannot read yyy"),
    (not_utf8, "{folder}/run/log.jsonl is not UTF-8: invalid start byte at byte 0"),
    ("--out=/dev/null", "/dev/null is not an empty folder: go on with it by --resume, or"),
    ("--out={folder}/text.txt/run", "Not a directory: {folder}/text.txt/run"),
    (f"--out={'x' * 5000}", "File name too long: xxx"),
    ("--resume --out=/nowhere", "there is no checkpoint in /nowhere"),
    (f"--preset={'z' * 5000}", "--preset must be one of 'small', 'longnet-base'; got 'zzz"),
    (f"--embed-dim={1 << 40}", "embed_dim must be at most 16777216, got 1099511627776"),
    (f"--embed-dim={1 << 70}", "embed_dim must be at most 16777216, got 1180591620717411303424"),
    (f"--embed-dim={10**4000}", "embed_dim must be at most 16777216, got an int of 13288 bits"),
    (
        f"--embed-dim={1 << 20}",
        "GB for Python and torch; this machine has {memory}: lower --num-layers",
    ),
    (f"--batch-size={HUGE}", "this machine has {memory}: lower --batch-size or --seq-len"),
    (f"--seq-len={HUGE}", "has {memory}: lower --batch-size or --seq-len"),
    (f"--num-layers={HUGE}", "num_layers must be at most 16777216, got 4611686018427387904"),
    (f"--num-layers={1 << 24}", "lower --num-layers, --embed-dim or --ffn-dim"),
    (f"--ffn-dim={HUGE}", "ffn_dim must be at most 16777216, got 4611686018427387904"),
    (f"--num-heads={HUGE}", "num_heads must be at most 16777216, got 4611686018427387904"),
    (f"--seed={1 << 64}", "--seed must be from 0 to 4611686018427387903, got 18446744073709551616"),
    ("--seed=-1", "--seed must be >= 0, got -1"),
    ("--ranks=1000000", "for 1000000 ranks: "),
    (f"--ranks={HUGE}", "this machine has {memory}: lower --ranks"),
    ("--ranks=-1", "--ranks must be >= 1, got -1"),
    ("--timeout=0", "timeout must be finite and above 0; got 0.0"),
    ("--timeout=-3", "timeout must be finite and above 0; got -3.0"),
    ("--timeout=nan", "timeout must be finite and above 0; got nan"),
    ("--timeout=1e300", "timeout must be > 0 and <= 2,592,000 seconds, got 1e+300"),
    ("--learning-rate=nan", "learning_rate must be > 0, got nan"),
    ("--learning-rate=inf", "learning_rate must be > 0, got inf"),
    ("--final-learning-rate=2", "final_learning_rate must be >= 0 and <= 1, got 2.0"),
    ("--beta1=1", "beta1 must be below 1, got 1.0"),
    ("--beta2=-1", "beta2 must be >= 0 and <= 1, got -1.0"),
    ("--weight-decay=nan", "weight_decay must be >= 0, got nan"),
    ("--max-grad-norm=0", "max_grad_norm must be > 0, got 0.0"),
    (f"--steps={10**30}", "steps must be below 2**63, got 1000000000000000000000000"),
    ("--warmup-steps=-1", "--warmup-steps must be >= 0, got -1"),
    (f"--warmup-steps={10**400}", "warmup_steps must be at most 9007199254740992, got an int of"),
    ("--eval-every=0", "--eval-every must be >= 1, got 0"),
    ("--eval-windows=0", "--eval-windows must be >= 1, got 0"),
    ("--save-every=-7", "--save-every must be >= 1, got -7"),
    ("--keep=0", "--keep must be >= 1, got 0"),
    (
        "--segment-lengths=",
        "--segment-lengths must be a whole number such as 8192, 256K or 1M; got ''",
    ),
    ("--segment-lengths=0,8", "--segment-lengths must be >= 1, got 0"),
    ("--dilation-rates=1,0", "--dilation-rates must be >= 1, got 0"),
    ("--dilation-rates=1.5,2", "--dilation-rates must be a whole number; got '1.5'"),
    (f"--segment-lengths={','.join(['8'] * 10_000)}", "one value each per branch"),
    ("--head-offsets=x", "--head-offsets must be one of 'interleaved', 'blocked'; got 'x'"),
    ("--head-branches=x", "--head-branches must be one of 'all', 'split'; got 'x'"),
    ("--num-kv-heads=3", "num_kv_heads must divide num_heads 2; got 3"),
    ("--embed-dim=18", "rotary positions need an even head_dim; got 9"),
    ("--rope-theta=nan", "rope_theta must be finite and above 0; got nan"),
    ("--device=tpu", "--device must be one of 'auto', 'cpu', 'cuda'; got 'tpu'"),
    ("--dtype=int8", "--dtype must be one of bf16, fp16, fp32, fp64 (or torch's names"),
    ("--dtype=fp16", "dtype must be one of 'float32', 'bfloat16'; got 'float16'"),
    (
        "--activation-checkpoint-blocks=3",
        "checkpoint_blocks above 1 needs checkpoint 'keep_attention'",
    ),
    ("--sequence-ranks=3", "sequence_ranks must divide the number of ranks, 1; got 3"),
    ("--heldout-fraction=0.0001", "need 65 bytes of held-out text"),
]


def assert_one_line(result: Any, began: float, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert time.monotonic() - began < 10  # these take tenths of a second
    error = result.stderr
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) <= 300
    assert message in error


@pytest.mark.parametrize(
    ("argument", "message"), BAD_TRAIN, ids=[str(i) for i in range(len(BAD_TRAIN))]
)
def test_a_bad_command_line_is_one_line(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: str | Callable[[Path], str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start_ranks", None)
    made = argument if isinstance(argument, str) else argument(tmp_path)
    arguments = ["train", *SMALL, *made.replace("{folder}", str(tmp_path)).split(" ")]
    for option in (f"--data={text}", f"--out={tmp_path / 'run'}", "--steps=1"):
        if option.partition("=")[0] not in made:
            arguments.append(option)
    began = time.monotonic()
    result = CliRunner().invoke(app, arguments)
    have = f"{(host_memory() or 0) / 1e9:,.1f} GB"
    assert_one_line(result, began, message.format(folder=tmp_path, memory=have))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompt=", "the prompt must have at least one byte; got an empty one"),
        ("--prompt=x --checkpoint=/nowhere", "there is no checkpoint in /nowhere"),
        ("--prompt=x --checkpoint=/dev/zero", "there is no checkpoint in /dev/zero"),
        (f"--prompt=x --checkpoint={'q' * 5000}", "File name too long: qqq"),
        ("--prompt=x", "there is no run with a checkpoint in runs"),
        ("--prompt=x --checkpoint=. --max-new-tokens=0", "--max-new-tokens must be >= 1, got 0"),
        ("--prompt=x --checkpoint=. --max-new-tokens=-5", "--max-new-tokens must be >= 1, got -5"),
        (
            "--prompt=x --checkpoint=. --temperature=nan",
            "--temperature must be finite and >= 0",
        ),
        (
            "--prompt=x --checkpoint=. --temperature=-1",
            "--temperature must be finite and >= 0",
        ),
        ("--prompt=x --checkpoint=. --seed=-1", "--seed must be >= 0, got -1"),
        (
            f"--prompt=x --checkpoint=. --seed={1 << 70}",
            "--seed must be from 0 to 4611686018427387903, got",
        ),
    ],
)
def test_a_bad_command_line_of_sampling_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments == "--prompt=":
        arguments += " --checkpoint=."
    began = time.monotonic()
    assert_one_line(CliRunner().invoke(app, ["sample", *arguments.split(" ")]), began, message)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the local ranks that a launcher has started."""
    found = {}
    for tasks in Path(f"/proc/{process.pid}/task").iterdir():
        for child in (tasks / "children").read_text().split():
            for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = int(child)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("ranks", "number", "victim", "more"),
    [
        (2, signal.SIGKILL, 0, "--sequence-ranks=2"),
        (3, signal.SIGSTOP, 0, "--sequence-ranks=3"),
        (2, signal.SIGSTOP, 1, "--sequence-ranks=1"),  # training's own collectives alone
    ],
)
def test_a_lost_rank_ends_the_run_and_is_named(
    text: Path, tmp_path: Path, ranks: int, number: signal.Signals, victim: int, more: str
) -> None:
    out = tmp_path / "run"
    steps = ("--steps=100000", "--eval-every=100000", "--save-every=100000", "--timeout=6")
    with started(
        "train", "--out", out, "--data", text, f"--ranks={ranks}", more, *steps, *SMALL,
        cwd=tmp_path,
    ) as process:  # fmt: skip
        wait_for_steps(out, 3)
        found = ranks_of(process)
        assert sorted(found) == list(range(ranks))
        os.kill(found[victim], number)
        # Alone on two cores this takes 3 s, or a second more than the timeout.
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert not NOISE.search(output), output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(error) <= 300
    if number == signal.SIGKILL:
        assert error.startswith(f"error: rank {victim} was killed by SIGKILL")
    else:
        stopped = f"rank {victim} is stopped, as by SIGSTOP (process {found[victim]})"
        assert error.startswith(f"error: {stopped}")
        assert re.search(r"step \d+, ", error)  # in which call
    assert not any(Path(f"/proc/{pid}").exists() for pid in found.values())
    assert (out / run_folder.LOG).exists()
    code, output = invoke("train", "--resume", "--out", out)  # the lock is gone with the run
    assert (code, output) == (2, f"error: there is no checkpoint in {out}\n")


FAULTY = """
import os, time
from ring_dilated_attention.nn import LongNet
from ring_dilated_attention.train import launch
loss, calls = LongNet.loss, []
def faulty(*arguments, **options):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        {fault}
    return loss(*arguments, **options)
LongNet.loss = faulty
launch.worker()
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise RuntimeError('boom')", r"rank 1 failed: RuntimeError: boom \(traceback in .*\)"),
        (
            "time.sleep(1000)",  # neither dead nor stopped
            r"rank 1: no answer within 6 s; rank 0 waited in step 3, the sum of gradients; the "
            "last that rank 1 began: step 3, forward and backward",
        ),
    ],
    ids=["error", "sleep"],
)
def test_a_fault_of_one_rank_is_told_as_its_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setattr(launch, "WORKER", FAULTY.format(fault=fault))
    out = tmp_path / "run"
    code, output = invoke(
        *("train", "--out", out, "--data", text, "--ranks=2", "--steps=9", "--timeout=6"),
        *("--sequence-ranks=1", *SMALL),
    )
    assert code == 1
    assert re.fullmatch(rf"error: {message}\n", output), output
    if "raise" in fault:
        assert "in faulty\n" in (out / "error.txt").read_text()


def test_an_error_without_a_message_is_told_by_its_kind(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank, in this process; several report theirs in the same words."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(LongNet, "loss", no_memory)
    out = tmp_path / "run"
    code, output = invoke("train", "--out", out, "--data", text, "--steps=9", *SMALL)
    assert code == 1
    assert output.endswith(f"\nerror: MemoryError: (traceback in {out / 'error.txt'})\n")
    assert "in no_memory\n" in (out / "error.txt").read_text()


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


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--seq-len=0", 2)])
def test_a_rank_of_torchrun_leaves_before_python_ends(option: str, code: int) -> None:
    """Threads of torch.distributed may be in the middle of something then."""
    script = (
        "import atexit, sys; atexit.register(print, 'Python ends'); "
        f"sys.argv = ['rda', 'plan', {option!r}]; "
        "from ring_dilated_attention.cli import main; main()"
    )
    ranks: list[dict[str, str]] = [{}, {"RANK": "0"}]
    for rank in ranks:
        ended = subprocess.run(
            [sys.executable, "-c", script], env=environment(**rank), capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stderr
        assert ("Python ends" in ended.stdout) is (not rank)
        assert ended.stdout + ended.stderr  # what it had to say was written
