"""Numbers that ranks of one host show each other in shared memory: an agreement in microseconds.

Ranks agree on every call, and wait for it before they launch anything. A collective of gloo takes
0.5 ms or more for that, which is longer than launching the whole call.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

MOST_VALUES = 510
"""So many numbers fit a rank's row of a board."""

FOLDER = "/dev/shm"
"""Memory that processes of a Linux host share; elsewhere there are no boards."""

PREFIX = "ring-dilated-attention-"
"""Of what this package makes there."""

_ROW = MOST_VALUES + 2  # the number of the call, a hash, the values
_SPIN_S = 0.0003  # is waited without sleeping
_PAUSE_S = 0.00005  # is slept then, between looks
_TOKEN_BYTES = 16
_LOOK_AROUND_S = 0.2  # after so long a wait, and again, it is made sure that the others are there


class Board:
    """One rank's view of the board.

    Every rank has two rows, used in turns: who writes a row again knows that all have read it,
    because they have written theirs of the call between. A row counts if it holds the hash of what
    it should be, so it does not matter in which order other processors see it written. A rank
    holds a lock on a byte of the file for as long as it lives; whoever can take that knows that the
    rank has gone.

    Args:
        file: of shared memory, open for reading and writing; it begins with `nbytes` of zeros.
        rank: this rank.
        world_size: number of ranks.
        timeout: how long to wait for another rank.
    """

    def __init__(self, file: BinaryIO, rank: int, world_size: int, timeout: timedelta) -> None:
        self._file = file  # closing it would give the lock back
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._words = memoryview(mmap.mmap(file.fileno(), self.nbytes(world_size))).cast("q")
        self._calls = 0
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Bytes of the board of so many ranks."""
        return world_size * 2 * _ROW * 8

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over all ranks of up to `MOST_VALUES` numbers (int64) each.

        Raises:
            RuntimeError: a rank has gone, or did not make its call in time.
        """
        self._calls += 1
        start = self._start(self._rank)
        for i, value in enumerate(values, start + 2):
            self._words[i] = value
        self._words[start + 1] = self._hash(values)
        self._words[start] = self._calls
        rows = [
            values if rank == self._rank else self._read(rank, len(values))
            for rank in range(self._world_size)
        ]
        return [max(column) for column in zip(*rows, strict=True)]

    def _start(self, rank: int) -> int:
        return (2 * rank + self._calls % 2) * _ROW

    def _hash(self, values: Sequence[int]) -> int:
        return hash((self._calls, *values))

    def _read(self, rank: int, count: int) -> Sequence[int]:
        found = self._look(rank, count)
        begun = time.monotonic()
        while found is None and time.monotonic() < begun + _SPIN_S:
            time.sleep(0)  # other threads of this process may go on
            found = self._look(rank, count)
        around = begun + _LOOK_AROUND_S
        while found is None:
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            has_gone = now >= around and self._has_gone(rank)
            if now >= around:
                around = now + _LOOK_AROUND_S
            found = self._look(rank, count)  # what it wrote before it went counts
            if found is None and has_gone:
                raise RuntimeError(f"rank {rank} has gone while rank {self._rank} waited for it")
            if found is None and now > begun + self._timeout.total_seconds():
                raise RuntimeError(
                    f"rank {rank} did not make the call for which rank {self._rank} waited "
                    f"{self._timeout}"
                )
        return found

    def _look(self, rank: int, count: int) -> Sequence[int] | None:
        """What a rank shows of this call, if it does yet."""
        start = self._start(rank)
        if self._words[start] != self._calls:
            return None
        values = self._words[start + 2 : start + 2 + count].tolist()
        return values if self._words[start + 1] == self._hash(values) else None

    def _has_gone(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def make_board(
    rank: int, world_size: int, share: Callable[[Any], list[Any]], timeout: timedelta
) -> Board | None:
    """A board for the ranks of a group, all of which make this call; None where they can have none.

    Args:
        rank: this rank.
        world_size: number of ranks.
        share: every rank's value, by rank: a collective.
        timeout: see `Board`.
    """
    file = _create(Board.nbytes(world_size)) if rank == 0 else None
    name, token = share(file and (file.name, _token(file)))[0] or ("", b"")
    if not name:
        return None
    board = None
    with suppress(OSError):  # another host, or what looks like one
        file = file or open(name, "r+b", buffering=0)  # noqa: SIM115
        if _token(file) == token:
            board = Board(file, rank, world_size, timeout)
    everyone_has = all(share(board is not None))
    if rank == 0:
        Path(name).unlink()  # it lives on until all have left it
    return board if everyone_has else None


def _create(nbytes: int) -> Any:
    """A file of zeros in shared memory, and a token at its end; None where there is none."""
    if fcntl is None or not Path(FOLDER).is_dir():
        return None
    with suppress(OSError):  # it is full, or not ours to write to
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115
            prefix=PREFIX, dir=FOLDER, buffering=0, delete=False
        )
        try:
            file.write(bytes(nbytes) + secrets.token_bytes(_TOKEN_BYTES))
        except OSError:
            Path(file.name).unlink()
            raise
        return file
    return None


def _token(file: BinaryIO) -> bytes:
    file.seek(-_TOKEN_BYTES, os.SEEK_END)
    return file.read()
