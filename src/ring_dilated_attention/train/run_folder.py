"""The folder of a run: its lock and log; and what is shown while it grows."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..terminal import Progress, in_bytes, in_seconds, make_console, show_text
from .errors import os_error_text
from .scalars import Scalars

LOCK = ".lock"


class RunLock:
    """Hold the folder of a run, which is made if need be; a context manager.

    The system's ``flock`` on a file of the folder is what counts, and it ends with the process that
    holds it, however that ends: a lock is never stale. The file says who holds it. It is removed
    when the lock is given back; one that a killed process has left behind is taken over.

    NFS (since Linux 2.6.12), and others that pass ``flock`` on, lock between hosts. Where a mount
    keeps locks local (NFS with ``local_lock``), trainings of two hosts do not see each other. A
    file system without locks is an error.

    Args:
        run: folder of the run.
        resume: whether the run goes on: then the folder is not made.

    Raises:
        ValueError: a training holds it; the message says which one. Or it is not a folder, there is
            none to resume, or the file system cannot lock.
        OSError: the folder cannot be written.
    """

    def __init__(self, run: Path, *, resume: bool) -> None:
        if run.exists() and not run.is_dir():
            raise ValueError(_not_empty(run))
        if resume and not run.exists():
            raise ValueError(f"there is no checkpoint in {run}: no such folder")
        self._run = run
        self._path = run / LOCK
        self._made = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock()
                if self._is_current():
                    break
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # its last holder has removed the file: make another
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, owner.encode())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"{self._run} cannot be locked against a second training: "
                    f"{os_error_text(error)}; choose a folder on another file system"
                ) from error
            owner = os.pread(self._descriptor, 200, 0).decode(errors="replace")
            raise ValueError(
                f"{self._run} is in use by a training, {owner or 'which has just begun'}; wait for "
                "it, or choose another folder"
            ) from error

    def _is_current(self) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._descriptor)
        return (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        if self._made:
            with suppress(OSError):
                self._run.rmdir()  # nothing came of the run
        os.close(self._descriptor)


def _not_empty(run: Path) -> str:
    return f"{run} is not an empty folder: go on with it by --resume, or choose another by --out"


def check_free(run: Path, allowed: Sequence[str] = ()) -> None:
    """Raise a `ValueError` if the folder of a new run holds anything but its lock and `allowed`."""
    if run.exists() and any(path.name not in (LOCK, *allowed) for path in run.iterdir()):
        raise ValueError(_not_empty(run))


LOG = "log.jsonl"


class RunLog:
    """Appends to the log of a run; a context manager.

    Every line has a ``kind``: ``config`` (the options, at every start), ``step`` and ``eval``; the
    last two have a ``step``, the number of steps done. All have a ``time``, in seconds since 1970.

    Args:
        run: folder of the run.
        start: number of steps done; lines of later steps, of a run that went on past its last
            checkpoint, are dropped.
        tensorboard: whether to write the same as events of TensorBoard (`scalars`).

    Raises:
        ValueError: the existing log is damaged.
        OSError: the log cannot be written.
    """

    def __init__(self, run: Path, *, start: int, tensorboard: bool = False) -> None:
        run.mkdir(parents=True, exist_ok=True)
        path = run / LOG
        kept = [line for line in read_log(run) if line.get("step", 0) <= start] if start else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, path)
        self._file = path.open("a")
        self._scalars = Scalars(run, kept) if tensorboard else None

    def write(self, kind: str, **values: Any) -> None:
        """Append a line, and hand it to the system at once."""
        line = {"kind": kind, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._scalars is not None:
            self._scalars.add(line)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._scalars is not None:
            self._scalars.close()


def read_log(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that a crash cut short is left out.

    Raises:
        ValueError: it is not UTF-8, or another line is not a JSON object.
    """
    path = run / LOG
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    parsed = []
    for number, line in enumerate(lines[:-1], start=1):  # a whole line ends in a newline
        try:
            parsed.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(parsed[-1], dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
    return parsed


class Report:
    """Shows progress on rank 0 and nothing elsewhere; a context manager.

    In a terminal it is a bar on standard error, and elsewhere a line on standard output now and
    then: the log of a run. Other lines are on standard output.

    Args:
        steps: number of steps of the whole run.
        start: number of steps done.
        show: whether this is the rank that shows anything.
        unread: called once, when nobody reads standard output any more, as behind ``| head``; what
            is shown later is dropped.
    """

    def __init__(
        self,
        *,
        steps: int,
        start: int,
        show: bool,
        unread: Callable[[], None] = lambda: None,
    ) -> None:
        self._console = make_console()
        self._show, self._every, self._unread = show, max(steps // 20, 1), unread
        self._steps, self._start = steps, start
        self._began = time.monotonic()
        self._progress = Progress(
            "train", total=steps, unit="steps", start=start, bar_only=True, show=show
        )

    def step(self, step: int, found: Mapping[str, float]) -> None:
        """Show a finished step.

        Args:
            step: number of steps done.
            found: its `loss` (nats per token) and `bits_per_byte` in training, `tokens_per_second`
                over all ranks, and `peak_memory_bytes` of the rank with the most.
        """
        text = (
            f"loss {found['loss']:.3f}, {found['bits_per_byte']:.3f} bits/byte, "
            f"{found['tokens_per_second']:,.0f} tokens/s, "
            f"{in_bytes(int(found['peak_memory_bytes']))} per rank"
        )
        self._progress.update(step, text)
        last = step == self._steps
        if not self._progress.is_bar and (last or step % self._every == 0):
            per_step = (time.monotonic() - self._began) / (step - self._start)
            left = in_seconds(round(per_step * (self._steps - step)))
            self.line(f"step {step:,}/{self._steps:,}: {text}{'' if last else f', {left} left'}")

    def line(self, text: str) -> None:
        """Show a line of text, above the bar if there is one."""
        if self._show:
            with self._progress.paused():
                try:
                    show_text(self._console, text)
                except (BrokenPipeError, SystemExit):  # the latter is what rich makes of it
                    self._show = False
                    self._unread()

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
