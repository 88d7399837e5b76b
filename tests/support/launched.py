"""Ranks with the environment that torchrun would give them, without its imports for each."""

import importlib.util
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_dilated_attention.checks.ranks import forked_context as forked_context

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_SECONDS = 200


def as_by_torchrun(rank: int, world_size: int) -> None:
    """Set what torchrun would; the process group is there already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ended(NamedTuple):
    """How the ranks of a program have ended.

    Attributes:
        returncode: 0, or that of the first rank that failed.
        stdout: what all ranks printed, one after another.
        stderr: likewise.
    """

    returncode: int
    stdout: str
    stderr: str


def exit_codes(processes: Sequence[Any], seconds: float) -> list[int | None]:
    """Start processes; kill one that takes longer than that after those before it have ended."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        process.kill()  # no effect on one that has ended
        process.join()
    return [process.exitcode for process in processes]


def run_program(
    program: Path, arguments: Sequence[str], ranks: int, path: Sequence[Path] = ()
) -> Ended:
    """Run a program on ranks that find each other as those of torchrun do.

    Args:
        program: a file of Python.
        arguments: of its command line.
        ranks: how many; 0: one process that no launcher has started.
        path: folders to import from before all others.
    """
    context = forked_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), *map(str, arguments)]
        processes = [
            context.Process(
                target=_program, args=(rank, ranks, environment, folder, command, list(path))
            )
            for rank in range(ranks or 1)
        ]
        codes = exit_codes(processes, MOST_SECONDS)
        said = [
            "".join(Path(folder, f"{name}{rank}").read_text() for rank in range(ranks or 1))
            for name in ("out", "err")
        ]
    return Ended(next((code for code in codes if code), 0), *said)


def _program(
    rank: int,
    world_size: int,
    environment: dict[str, str],
    folder: str,
    command: list[str],
    path: list[Path],
) -> None:
    os.environ.clear()
    os.environ |= environment
    if world_size:
        as_by_torchrun(rank, world_size)
        os.environ["MASTER_PORT"] = environment["MASTER_PORT"]
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, f"{name}{rank}"), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.path[:0] = [str(Path(command[0]).parent), *map(str, path)]
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
