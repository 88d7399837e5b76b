"""Start local ranks, or run as one of torchrun's; tell what went wrong in one line."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checks import launched, threads_of_a_rank
from ..pattern import check_positive_int
from .config import TrainConfig
from .errors import LostRankError, TrainingError, one_line, os_error_text
from .loop import Outcome, check_devices, run
from .prepare import check_run
from .ranks import OnFirstSignal, StopRequest
from .run_folder import RunLock

# The launcher takes a terminal's Ctrl-C for all of its ranks.
WORKER = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from ring_dilated_attention.train.launch import worker; worker()"
)
_ERROR = "error.txt"
# Seconds that the other ranks have to end and to say why, once one has ended in failure. They find
# out what is missing for 1.5 s (`Watch`); all of them must have ended 5 s after a rank has died.
_GRACE = 3.0
_POLL = 0.05


def train(
    config: TrainConfig,
    *,
    ranks: int | None = None,
    resume: bool = False,
    restartable: bool = False,
) -> Outcome | None:
    """Run on `ranks` local ranks; on torchrun's ranks if this is one of them.

    Args:
        config: the options.
        ranks: number of local ranks; None means 1, or torchrun's number.
        resume: whether to go on from the newest checkpoint of ``config.out``.
        restartable: whether the folder may hold what a process has left that ended before its first
            checkpoint.

    Returns:
        The outcome; None from torchrun's ranks other than 0.

    Raises:
        TypeError: `ranks` is not an int.
        ValueError: bad options, data or checkpoint, found before any rank starts where possible; or
            another training holds the folder.
        OSError: the folder cannot be written.
        TrainingError: a rank failed. Of errors of the program the message names the file with the
            traceback.
    """
    if ranks is not None:
        check_positive_int("ranks", ranks)
    place = launched()
    if place is not None:
        if ranks not in (None, place.size):
            raise ValueError(f"torchrun started {place.size} ranks; leave out --ranks, got {ranks}")
        outcome = _run_here(config, resume, restartable)
        return outcome if place.rank == 0 else None
    if ranks in (None, 1):
        check_devices(config, 1)
        return _run_here(config, resume, restartable)
    assert ranks is not None
    check_devices(config, ranks)
    with RunLock(config.out, resume=resume):
        check_run(config, ranks, ranks, resume=resume, restartable=restartable)
    return start_ranks(config, ranks, resume=resume, restartable=restartable)


def _run_here(config: TrainConfig, resume: bool, restartable: bool) -> Outcome:
    try:
        return run(config, resume=resume, restartable=restartable)
    except (ValueError, TypeError, OSError, TrainingError):
        raise
    except Exception as error:
        report = _Report.of(error)
        raise TrainingError(f"{report.text}{_kept(report.trace, config.out)}") from error


@dataclass(frozen=True, kw_only=True)
class _Report:
    """Why a rank ended in failure.

    Attributes:
        text: one line.
        bad_input: whether input that the user gave was at fault.
        lost: whether another rank was missing.
        trace: the traceback of an error of the program; empty for others.
    """

    text: str
    bad_input: bool = False
    lost: bool = False
    trace: str = ""

    @classmethod
    def of(cls, error: Exception) -> _Report:
        if isinstance(error, TrainingError):
            return cls(
                text=one_line(error),
                bad_input=error.bad_input,
                lost=isinstance(error, LostRankError),
            )
        if isinstance(error, OSError):
            return cls(text=one_line(os_error_text(error)))
        if isinstance(error, ValueError | TypeError):
            return cls(text=one_line(error), bad_input=True)
        trace = "".join(traceback.format_exception(error))
        return cls(text=one_line(f"{type(error).__name__}: {error}")[:180], trace=trace)


def _kept(trace: str, out: Path) -> str:
    """Write a traceback to a file of the run; says where it is."""
    if not trace or not out.is_dir():
        return ""
    try:
        (out / _ERROR).write_text(trace)
    except OSError:  # such as a full disk, which may be what the error is about
        return ""
    return f" (traceback in {out / _ERROR})"


@dataclass(eq=False)
class _Rank:
    """A local rank: its process, and what has come through its pipe."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """What the rank has reported; empty if it has not."""
        try:
            message: dict[str, Any] = json.loads(self.received)
        except ValueError:
            return {}
        return message

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def report(self) -> _Report | None:
        error = self.message.get("error")
        return _Report(**error) if error else None


def start_ranks(
    config: TrainConfig, ranks: int, *, resume: bool = False, restartable: bool = False
) -> Outcome:
    """Start the ranks of a checked config, wait for them, and leave none behind.

    Nothing of this is on disk: ranks report through pipes, and the end of the launcher, whatever
    ends it, closes the pipe at which each of them looks for a request to stop.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin = {"resume": resume, "restartable": restartable}
    started: list[_Rank] = []

    def stop() -> None:
        for rank in started:
            assert rank.process.stdin is not None
            rank.process.stdin.close()

    with OnFirstSignal(stop), selectors.DefaultSelector() as selector:
        try:
            for number in range(ranks):
                started.append(_start(config, number, ranks, begin, store.port))
                selector.register(started[-1].pipe, selectors.EVENT_READ, started[-1])
            return _outcome_of(started, selector, config.out)
        finally:
            for rank in started:
                if rank.process.poll() is None:
                    rank.process.kill()
            for rank in started:
                rank.process.wait()
                assert rank.process.stdin is not None
                rank.process.stdin.close()
                os.close(rank.pipe)


def _start(
    config: TrainConfig, number: int, ranks: int, begin: dict[str, bool], port: int
) -> _Rank:
    receive, send = os.pipe()
    job = {"config": json.loads(config.to_json()), "begin": begin, "report": send}
    threads = threads_of_a_rank(ranks)
    if threads is not None:
        job["threads"] = threads
    environment = {
        # A broken connection is told in one line; torch would add some of its own.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank holds the store that they meet in
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(job)],
            stdin=subprocess.PIPE,
            pass_fds=(send,),
            env=environment,
        )
    except BaseException:
        os.close(receive)
        raise
    finally:
        os.close(send)
    return _Rank(number=number, process=process, pipe=receive)


def _outcome_of(ranks: list[_Rank], selector: selectors.BaseSelector, out: Path) -> Outcome:
    """Wait until all ranks have ended well, or one has failed and the others have had their say."""
    deadline = None
    while not all(rank.ended and rank.process.poll() is not None for rank in ranks):
        for key, _ in selector.select(_POLL):
            data = os.read(key.fd, 1 << 16)
            key.data.received += data
            if not data:
                key.data.ended = True
                selector.unregister(key.fd)
        if deadline is None and any(rank.failed for rank in ranks):
            deadline = time.monotonic() + _GRACE
        if deadline is not None:
            running = [rank for rank in ranks if rank.process.poll() is None]
            if time.monotonic() > deadline or (running and all(map(_is_stopped, running))):
                break
        if not selector.get_map():
            time.sleep(_POLL)
    if any(rank.process.poll() != 0 for rank in ranks):
        raise _error_of(ranks, out)
    values = ranks[0].message["outcome"]
    return Outcome(**{**values, "checkpoint": Path(values["checkpoint"])})


def _error_of(ranks: list[_Rank], out: Path) -> TrainingError:
    """One line for the user: first what has happened to a rank, then what others have seen."""
    lost = [rank.report.text for rank in ranks if rank.report and rank.report.lost]
    seen = f"; {lost[0]}" if lost else ""
    for rank in ranks:
        if rank.failed and rank.report is None:
            code = rank.process.returncode
            how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
            return TrainingError(one_line(f"rank {rank.number} {how}{seen}"))
    for rank in ranks:
        report = rank.report
        if report is not None and not report.lost:
            if report.trace:
                where = _kept(report.trace, out)
                return TrainingError(f"rank {rank.number} failed: {report.text}{where}")
            return TrainingError(report.text, bad_input=report.bad_input)
    for rank in ranks:
        if rank.process.poll() is None and _is_stopped(rank):
            text = f"rank {rank.number} is stopped, as by SIGSTOP (process {rank.process.pid})"
            return TrainingError(one_line(f"{text}{seen}"))
    return TrainingError(lost[0])


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name


def _is_stopped(rank: _Rank) -> bool:
    """Whether a rank's process is stopped; False where the system does not tell."""
    try:
        status = Path(f"/proc/{rank.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def worker() -> None:
    """A rank that `train` has started; its job is the last argument, as JSON."""
    job = json.loads(sys.argv[-1])
    if "threads" in job:
        torch.set_num_threads(job["threads"])
    code, message = 0, {}
    try:
        config = TrainConfig.from_dict(job["config"])
        outcome = run(config, **job["begin"], stop=StopRequest(sys.stdin.fileno()))
        message["outcome"] = {**vars(outcome), "checkpoint": str(outcome.checkpoint)}
    except Exception as error:
        report = _Report.of(error)
        code, message["error"] = (2 if report.bad_input else 1), vars(report)
    try:
        with os.fdopen(job["report"], "w") as pipe:
            json.dump(message, pipe)
    except BrokenPipeError:  # the launcher is gone
        pass
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more, or there is none
            if stream is not None:
                stream.flush()
    # Tearing down NCCL may wait for a rank that is gone; and as Python ends, threads of
    # torch.distributed that are not quite done would end the process by SIGABRT.
    os._exit(code)
