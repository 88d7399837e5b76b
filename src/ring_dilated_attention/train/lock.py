"""One training at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from .errors import os_error_text

NAME = ".lock"


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
            raise ValueError(f"{run} is not an empty folder; resume it or choose another")
        if resume and not run.exists():
            raise ValueError(f"there is no checkpoint in {run}")
        self._run = run
        self._path = run / NAME
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        if self._made:
            with suppress(OSError):
                self._run.rmdir()  # nothing came of the run
        os.close(self._descriptor)


def check_free(run: Path) -> None:
    """Raise a `ValueError` if the folder of a new run holds anything but its lock."""
    if run.exists() and any(path.name != NAME for path in run.iterdir()):
        raise ValueError(f"{run} is not an empty folder; resume it or choose another")
