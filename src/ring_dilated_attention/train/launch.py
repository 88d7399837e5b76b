"""Start local ranks with torch's elastic launcher, or run as one of torchrun's."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..pattern import check_positive_int
from .config import TrainConfig
from .errors import TrainingError
from .loop import Outcome, check_devices, check_run, run
from .signals import OnFirstSignal, StopRequest

# Until the loop takes over, a signal ends a rank without a traceback.
_WORKER = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from ring_dilated_attention.train.launch import worker; worker()"
)
_ERROR = "error.txt"


def under_torchrun() -> bool:
    """Whether the environment says that this process is a rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def train(config: TrainConfig, *, ranks: int | None = None, resume: bool = False) -> Outcome | None:
    """Run on `ranks` local ranks; on torchrun's ranks if this is one of them.

    Args:
        config: the options.
        ranks: number of local ranks; None means 1, or torchrun's number.
        resume: whether to go on from the newest checkpoint of ``config.out``.

    Returns:
        The outcome; None from torchrun's ranks other than 0.

    Raises:
        TypeError: `ranks` is not an int.
        ValueError: bad options, data or checkpoint, found before any rank starts where possible.
        OSError: the folder cannot be written.
        TrainingError: a rank failed.
    """
    if ranks is not None:
        check_positive_int("ranks", ranks)
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, size):
            raise ValueError(f"torchrun started {size} ranks; got ranks {ranks}")
        return _torchrun_rank(config, resume)
    if ranks in (None, 1):
        check_devices(config, 1)
        return run(config, resume=resume)
    assert ranks is not None
    check_devices(config, ranks)
    check_run(config, ranks, resume=resume)
    return _launch(config, ranks, resume)


def _torchrun_rank(config: TrainConfig, resume: bool) -> Outcome | None:
    outcome = run(config, resume=resume)
    return outcome if int(os.environ["RANK"]) == 0 else None


def _launch(config: TrainConfig, ranks: int, resume: bool) -> Outcome:
    # torch logs failures at length; they come back as ChildFailedError, and one line is enough.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic."):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="rda-train-") as folder:
        stop_file, outcome_file = Path(folder, "stop"), Path(folder, "outcome.json")
        job = {
            "config": json.loads(config.to_json()),
            "resume": resume,
            "stop_file": str(stop_file),
            "outcome_file": str(outcome_file),
            "parent": os.getpid(),
            "threads": None if "OMP_NUM_THREADS" in os.environ else max(1, _cores() // ranks),
        }
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"is_host": True},
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # The rest is OnFirstSignal's: the launcher would kill ranks that take long to stop.
            signals_to_handle="SIGQUIT",
        )
        with OnFirstSignal(stop_file.touch):
            try:
                elastic_launch(launch_config, sys.executable)("-c", _WORKER, json.dumps(job))
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                raise _error_of(rank, failure, config.out) from None
            except SignalException as error:
                raise TrainingError(str(error)) from None
        values = json.loads(outcome_file.read_text())
        return Outcome(**{**values, "checkpoint": Path(values["checkpoint"])})


def worker() -> None:
    """A rank that `train` has started; its job is the last argument, as JSON."""
    job = json.loads(sys.argv[-1])
    errors = get_error_handler()
    errors.initialize()
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    stop = StopRequest(stop_file=Path(job["stop_file"]), parent=job["parent"])
    try:
        outcome = run(TrainConfig.from_dict(job["config"]), resume=job["resume"], stop=stop)
    except Exception as error:  # the launcher shows it, in one line
        errors.record_exception(error)
        sys.exit(2 if isinstance(error, TypeError | ValueError) else 1)
    if int(os.environ["RANK"]) == 0:
        values = {**vars(outcome), "checkpoint": str(outcome.checkpoint)}
        Path(job["outcome_file"]).write_text(json.dumps(values))


def _error_of(rank: int, failure: ProcessFailure, out: Path) -> TrainingError:
    """One line for the user; the traceback, if there is one, goes to a file of the run."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return TrainingError(f"rank {rank} failed: {message}")
    text = str(message.get("message", "")).strip()
    bad_input = failure.exitcode == 2
    if bad_input:
        return TrainingError(text.partition(": ")[2] or text, bad_input=True)
    where = ""
    trace = message.get("extraInfo", {}).get("py_callstack")
    if trace and out.is_dir():
        (out / _ERROR).write_text(trace)
        where = f" (traceback in {out / _ERROR})"
    return TrainingError(f"rank {rank} failed: {text}{where}")


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
