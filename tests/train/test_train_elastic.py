"""`rda train --restartable` under torchrun's restarts, with as many ranks and with fewer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from support.launched import run_program
from test_cli_train import SMALL, environment, invoke
from torch import Tensor

from ring_dilated_attention.train import checkpoint
from ring_dilated_attention.train.attempt import store_of_attempt

STEPS, SAVE_EVERY, SOON = 60, 10, 60.0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a text, {i * i % 97}\n" for i in range(400)))
    return path


def options(text: Path, out: Path) -> list[str]:
    given = {"out": out, "data": text, "steps": STEPS, "save-every": SAVE_EVERY}
    return [*(f"--{name}={value}" for name, value in given.items()), *SMALL]


@contextmanager
def torchrun(*given: str, command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent, whose output goes to a file; ended with all of its processes."""
    module = ("-m", "ring_dilated_attention.cli", "train", "--restartable")
    with log.open("wb") as output:
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *given, *module, *command],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield agent
    finally:
        for process in [*workers(agent), agent.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()


def workers(agent: subprocess.Popen[bytes]) -> list[int]:
    """The processes of an agent's ranks, the last started last."""
    found = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text() if (
        agent.poll() is None
    ) else ""  # fmt: skip
    return sorted(map(int, found.split()))


def until(true: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def has_saved(out: Path, step: int) -> bool:
    return any(checkpoint.step_of(path) >= step for path in checkpoint.usable(out))


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks in /proc")
def test_a_rank_that_is_killed(text: Path, tmp_path: Path) -> None:
    """The ranks start again and go on: the weights are those of a run that nothing has stopped."""
    out, whole, log = tmp_path / "run", tmp_path / "whole", tmp_path / "log.txt"
    with torchrun(
        "--nproc-per-node=2", "--max-restarts=2", "--standalone",
        command=options(text, out), log=log,
    ) as agent:  # fmt: skip
        until(lambda: has_saved(out, 2 * SAVE_EVERY), log)
        os.kill(workers(agent)[-1], signal.SIGKILL)
        assert agent.wait(SOON) == 0, log.read_text()
    told = log.read_text()
    assert told.count("resumed from step") == 1, told
    program = tmp_path / "rda.py"
    program.write_text("from ring_dilated_attention.cli import main\nmain()\n")
    done = run_program(program, ["train", "--restartable", *options(text, whole)], ranks=2)
    assert done.returncode == 0, done.stderr
    found, expected = (weights(run) for run in (out, whole))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def weights(run: Path) -> dict[str, Tensor]:
    newest = checkpoint.newest(run)
    assert newest.step == STEPS
    return {
        name: tensor
        for file in sorted(newest.path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks in /proc")
def test_a_host_that_vanishes(text: Path, tmp_path: Path) -> None:
    """Of two agents one is gone with its rank: the other goes on alone from the last checkpoint."""
    out, log = tmp_path / "run", tmp_path / "log.txt"
    conf = "is_host=false,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{store.port}", f"--rdzv-conf={conf}",
    )  # fmt: skip
    command = options(text, out)
    with ExitStack() as stack:
        first = stack.enter_context(torchrun(*given, command=command, log=log))
        other = stack.enter_context(torchrun(*given, command=command, log=tmp_path / "other.txt"))
        until(lambda: has_saved(out, 2 * SAVE_EVERY), log)
        gone = workers(other)
        other.kill()
        for process in gone:
            os.kill(process, signal.SIGKILL)
        assert first.wait(2 * SOON) == 0, log.read_text()
    told = log.read_text()
    ranks = [line["ranks"] for line in _lines(out) if line["kind"] == "config"]
    assert ranks[0] == 2, told
    assert ranks[-1] == 1, told
    assert checkpoint.newest(out).step == STEPS
    steps = [line["step"] for line in _lines(out) if line["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))


def _lines(run: Path) -> list[dict[str, object]]:
    from ring_dilated_attention.train.run_folder import read_log

    return read_log(run)


def test_what_was_left_before_the_first_checkpoint(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "log.jsonl").write_text('{"kind": "step", "step": 1}\n')
    (out / "run.toml").write_text("")
    command = ("train", f"--out={out}", f"--data={text}", "--steps=2", *SMALL)
    code, output = invoke(*command)
    assert (code, "is not an empty folder" in output) == (2, True)
    code, output = invoke(*command, "--restartable")
    assert code == 0, output
    assert checkpoint.newest(out).step == 2
    code, output = invoke(*command, "--restartable")
    assert (code, output) == (0, f"done before: {out} has all of its 2 steps\n")
    code, output = invoke(*command, "--restartable", "--steps=3", "--preset=small")
    assert code == 0, output
    assert "resumed from step 2" in output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    code, output = invoke("train", f"--out={tmp_path / 'other'}", f"--data={text}", "--restartable")
    assert (code, "is not an empty folder" in output) == (2, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--restartable", "--restartable needs --out"),
        ("--restartable --resume --out=run", "--resume refuses to begin: leave out one of them"),
    ],
)
def test_what_is_refused(line: str, message: str) -> None:
    code, output = invoke("train", *line.split())
    assert code == 2
    assert message in output


def test_a_store_that_an_earlier_attempt_has_written_to() -> None:
    """Each attempt finds its own part, though keys of those before it are there."""
    store = dist.HashStore()
    for attempt in range(3):
        found: dict[int, dist.Store] = {}

        def join(rank: int, found: dict[int, dist.Store] = found) -> None:
            found[rank] = store_of_attempt(store, rank, 3, 20)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for number in range(3):
            threads[(number + attempt) % 3].start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert not any(part.check(["listens at"]) for part in found.values())
        found[0].set("listens at", str(attempt))
        assert {found[rank].get("listens at") for rank in (1, 2)} == {str(attempt).encode()}


def test_ranks_that_do_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have not come within 0.1 s"):
        store_of_attempt(dist.HashStore(), 0, 3, 0.1)
