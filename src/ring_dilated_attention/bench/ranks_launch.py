"""Run a function on ranks of this host: processes that are started here, or torchrun's."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from ..checks import MOST_PROCESSES, RANK_TIMEOUT, check_size
from ..pattern import check_choice
from .measure import DEVICES
from .ranks_team import RankError

ERROR_NAME = "error.txt"
"""File in the folder of a run with the traceback of the rank that failed."""

_FOUND, _STORE = "found", "store"
_BAD_INPUT, _FAILED = 2, 1  # exit codes


class Answer(NamedTuple):
    """What a function returned.

    Attributes:
        value: on rank 0; None on torchrun's other ranks.
        first: whether this process speaks for the run: all but torchrun's other ranks do.
    """

    value: Any
    first: bool


def under_torchrun() -> bool:
    """Whether the environment says that this process is a rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    device: str,
    out: Path,
    timeout: float = RANK_TIMEOUT,
) -> Answer:
    """Call a function on every rank; on torchrun's ranks if this process is one of them.

    torch.distributed is initialised there: gloo, and NCCL for tensors on CUDA, a device per rank.

    Args:
        function: can be pickled (it is defined at the top of a module).
        ranks: number of ranks; torchrun's may be more.
        arguments: of the function; can be pickled.
        device: one of `measure.DEVICES`.
        out: folder for `ERROR_NAME`, should a rank fail.
        timeout: seconds that a rank waits for another.

    Raises:
        ValueError: there are too few devices, or torchrun's ranks are too few; or a rank raised a
            `ValueError` or `TypeError`.
        RankError: a rank failed otherwise; the others have been stopped.
    """
    kind = _kind(device)
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if ranks > size:
            raise ValueError(f"torchrun started {size} ranks; got ranks {ranks}")
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        with _joined(kind, local_rank, timeout=timedelta(seconds=timeout)):
            value = function(*arguments)
        first = os.environ["RANK"] == "0"
        return Answer(value if first else None, first)
    check_size("ranks", ranks, MOST_PROCESSES)
    if kind == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(
            f"{ranks} ranks need a CUDA device each; there are {torch.cuda.device_count()}"
        )
    with tempfile.TemporaryDirectory(prefix="rda-bench-") as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _worker,
            args=(ranks, folder, kind, timeout, function, arguments),
            nprocs=ranks,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        logging.getLogger(start_processes.__module__).setLevel(logging.ERROR)  # one line is enough
        try:
            while not context.join():
                pass
        except ProcessException as error:
            raise _error_of(Path(folder), error, out) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return Answer(pickle.loads(Path(folder, _FOUND).read_bytes()), True)


def _kind(device: str) -> str:
    """``"cpu"`` or ``"cuda"``; asks for no device, which would take memory of the first one."""
    check_choice("device", device, DEVICES)
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("device='cuda' needs a CUDA device; there is none")
    return "cuda" if available and device != "cpu" else "cpu"


@contextmanager
def _joined(kind: str, local_rank: int, **rendezvous: Any) -> Iterator[None]:
    """Inside, torch.distributed is initialised, and this rank's device is the current one.

    The default group is not bound to the device (`device_id`): where it is, `new_group` has ranks
    that are not in a new gloo group take part in a split of NCCL's communicator, and wait there.
    """
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", **rendezvous)
    else:
        dist.init_process_group("gloo", **rendezvous)
    yield
    dist.destroy_process_group()  # not after an error: NCCL would wait for the other ranks


def _worker(
    rank: int,
    ranks: int,
    folder: str,
    kind: str,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """A rank that `launch` has started."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // ranks))
    try:
        store = dist.FileStore(str(Path(folder, _STORE)), ranks)
        waits = timedelta(seconds=timeout)
        with _joined(kind, rank, timeout=waits, store=store, rank=rank, world_size=ranks):
            value = function(*arguments)
            if rank == 0:
                Path(folder, _FOUND).write_bytes(pickle.dumps(value))
    except Exception as error:
        failure = {
            "time": time.time(),
            "rank": rank,
            "kind": type(error).__name__,
            "message": str(error),
            "bad_input": isinstance(error, ValueError | TypeError),
            "traceback": traceback.format_exc(),
        }
        _error_file(Path(folder), rank).write_text(json.dumps(failure))
        sys.stdout.flush()
        sys.stderr.flush()
        # Leaving in the orderly way would wait for ranks that wait for this one.
        os._exit(_BAD_INPUT if failure["bad_input"] else _FAILED)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _error_of(folder: Path, error: Exception, out: Path) -> Exception:
    """One line for the user, of the rank that failed first; the traceback goes to a file."""
    failures = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if not failures:
        return RankError(str(error).strip().splitlines()[0])
    first = min(failures, key=lambda failure: float(failure["time"]))
    line = (str(first["message"]).strip().splitlines() or [""])[0]
    if first["bad_input"]:
        return ValueError(line)
    out.mkdir(parents=True, exist_ok=True)
    (out / ERROR_NAME).write_text(first["traceback"])
    kind = "" if first["kind"] == RankError.__name__ else f"{first['kind']}: "
    return RankError(f"rank {first['rank']} failed: {kind}{line} (see {out / ERROR_NAME})")


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
