"""Numbers that ranks of one host show each other in shared memory: an agreement in microseconds.

Ranks agree on every call, and wait for it before the first row moves. A collective of gloo takes
0.5 ms or more for that, which is longer than launching the whole call. Each rank shows its state
there too: the call it is in, whom it waits for, and why it gave up, if it has.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, BinaryIO

from .calls import Call, Finding, LostPeerError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

MOST_VALUES = 509
"""Numbers that fit in a rank's row of a board."""

PREFIX = "ring-dilated-attention-"
"""Of the names under which this package shares something between processes."""

_ROW = MOST_VALUES + 3  # the number of the round, a hash, how many values, the values
_SPIN_S = 0.0003  # is waited without sleeping
_PAUSE_S = 0.00005  # is slept then, between looks
_LOOK_AROUND_S = 0.2  # after so long a wait, and again, it is made sure that the others are there
_CAUSE_S = 2.0  # so long a connection that broke may take to be explained
_TOKEN_BYTES = 16

# A rank's state: words, the name and part of its call, and why it failed.
_NUMBER, _OF, _IN_CALL, _WAITS_FOR, _STREAM_WAITS_FOR, _FAILED, _BLAMED, _WORDS = range(8)
_NAME_BYTES, _TEXT_BYTES = 64, 512
_STATE = _WORDS + (_NAME_BYTES + _TEXT_BYTES) // 8
_HEAD = 1  # whether any rank has failed


class Board:
    """One rank's view of the board.

    Every rank has two rows, used in turns: who writes a row again knows that all have read it,
    because they have written theirs of the round between. A row counts if it holds the hash of what
    it should be, so it does not matter in which order other processors see it written. A rank
    holds a lock on a byte of the file for as long as it lives; whoever can take that knows that the
    rank has gone.

    Args:
        file: of shared memory, open for reading and writing; it begins with `nbytes` of zeros.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, file: BinaryIO, rank: int, world_size: int) -> None:
        self._file = file  # closing it would give the lock back
        self._rank, self._world_size = rank, world_size
        self._bytes = memoryview(mmap.mmap(file.fileno(), self.nbytes(world_size)))
        self._words = self._bytes.cast("q")
        self._rounds = 0
        self._own_state = self._state(rank)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Bytes of the board of this number of ranks."""
        return (_HEAD + world_size * (2 * _ROW + _STATE)) * 8

    def exchange(self, values: Sequence[int], timeout: float) -> list[Sequence[int]]:
        """What every rank passes to its call of this method, by rank.

        Args:
            values: up to `MOST_VALUES` numbers (int64).
            timeout: seconds to wait for another rank.

        Raises:
            LostPeerError: a rank has gone or has failed, or did not come in time.
        """
        self._show(values)
        return self._read_all(values, timeout)

    def maximum(self, values: Sequence[int], timeout: float) -> list[int]:
        """The elementwise maximum over all ranks of equally many numbers, any count of them."""
        if len(values) <= MOST_VALUES:
            return _maximum(self.exchange(values, timeout))
        return [
            value
            for first in range(0, len(values), MOST_VALUES)
            for value in _maximum(self.exchange(values[first : first + MOST_VALUES], timeout))
        ]

    def show(self, values: Sequence[int], timeout: float) -> Shown:
        """Begin a `maximum`; nothing else is exchanged until its result is waited for."""
        self._show(values)
        return Shown(self, values, timeout)

    def _show(self, values: Sequence[int]) -> None:
        self._rounds += 1
        start = self._row(self._rank)
        words = self._words
        for i, value in enumerate(values, start + 3):
            words[i] = value
        words[start + 2] = len(values)
        words[start + 1] = self._hash(values)
        words[start] = self._rounds

    def _read_all(self, values: Sequence[int], timeout: float) -> list[Sequence[int]]:
        return [
            values if rank == self._rank else self._read(rank, timeout)
            for rank in range(self._world_size)
        ]

    def share(self, value: Any, timeout: float) -> list[Any]:
        """What every rank passes, by rank, as `exchange`: anything that can be pickled."""
        data = pickle.dumps(value)
        sizes = [size for (size,) in self.exchange([len(data)], timeout)]
        data += bytes(-len(data) % 8)
        words = memoryview(data).cast("q").tolist()
        received: list[list[int]] = [[] for _ in range(self._world_size)]
        for first in range(0, -(-max(sizes) // 8), MOST_VALUES):
            shown = self.exchange(words[first : first + MOST_VALUES], timeout)
            for known, more in zip(received, shown, strict=True):
                known.extend(more)
        return [pickle.loads(struct.pack(f"={len(known)}q", *known)) for known in received]

    def _row(self, rank: int) -> int:
        return _HEAD + (2 * rank + self._rounds % 2) * _ROW

    def _hash(self, values: Sequence[int]) -> int:
        return hash((self._rounds, *values))

    def _read(self, rank: int, timeout: float) -> Sequence[int]:
        found = self._look(rank)
        if found is not None:
            return found
        begun = time.monotonic()
        while found is None and time.monotonic() < begun + _SPIN_S:
            time.sleep(0)  # other threads of this process may go on
            found = self._look(rank)
        if found is not None:
            return found
        self.waits_for(rank)
        around = begun + _LOOK_AROUND_S
        while found is None:
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            lost = bool(self._words[0]) or (now >= around and self.has_gone(rank))
            if now >= around:
                around = now + _LOOK_AROUND_S
            found = self._look(rank)  # what it wrote before it went counts
            if found is None and lost:
                raise LostPeerError([rank])
            if found is None and now > begun + timeout:
                raise LostPeerError([rank], timeout)
        self.waits_for(None)
        return found

    def _look(self, rank: int) -> Sequence[int] | None:
        """What a rank shows in this round, if it does yet."""
        start, words = self._row(rank), self._words
        if words[start] != self._rounds:
            return None
        values = words[start + 3 : start + 3 + words[start + 2]].tolist()
        return values if words[start + 1] == self._hash(values) else None

    def has_gone(self, rank: int) -> bool:
        """Whether the process of a rank has ended."""
        if rank == self._rank:
            return False  # a process does not see its own locks
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def _state(self, rank: int) -> int:
        return _HEAD + self._world_size * 2 * _ROW + rank * _STATE

    def begin(self, call: Call) -> None:
        """See `calls.Roll`."""
        state, words = self._own_state, self._words
        words[state + _NUMBER] = call.number
        words[state + _OF] = call.of
        words[state + _IN_CALL] = 1
        at = (state + _WORDS) * 8
        self._bytes[at : at + _NAME_BYTES] = _padded(call.name, call.part)

    def end(self) -> None:
        """See `calls.Roll`."""
        self._words[self._own_state + _IN_CALL] = 0

    def look(self, peers: Sequence[int]) -> None:
        """See `calls.Roll`."""
        for end in map(self._end_of_chain, peers):
            if self._failure_of(end) or self.has_gone(end):
                raise LostPeerError([end])

    def waits_for(self, rank: int | None, *, on_stream: bool = False) -> None:
        """Show whom this rank waits for, on the host or on a stream of its device; None: nobody."""
        word = _STREAM_WAITS_FOR if on_stream else _WAITS_FOR
        self._words[self._state(self._rank) + word] = 0 if rank is None else rank + 1

    def fail(self, finding: Finding) -> None:
        """See `calls.Roll`."""
        state = self._state(self._rank)
        text = finding.text.encode()[:_TEXT_BYTES]
        at = (state + _WORDS) * 8 + _NAME_BYTES
        self._bytes[at : at + _TEXT_BYTES] = text.ljust(_TEXT_BYTES, b"\0")
        self._words[state + _BLAMED] = finding.rank
        self._words[state + _FAILED] = 1
        self._words[0] = 1

    def failed(self) -> Finding | None:
        """See `calls.Roll`."""
        if not self._words[0]:
            return None
        found = [one for rank in range(self._world_size) if (one := self._failure_of(rank))]
        return found[0] if found else None

    def _failure_of(self, rank: int) -> Finding | None:
        state = self._state(rank)
        if not self._words[state + _FAILED]:
            return None
        at = (state + _WORDS) * 8 + _NAME_BYTES
        text = bytes(self._bytes[at : at + _TEXT_BYTES]).rstrip(b"\0").decode(errors="ignore")
        return Finding(self._words[state + _BLAMED], text)

    def explain(self, lost: LostPeerError) -> Finding:
        """See `calls.Roll`."""
        peers = lost.peers or tuple(rank for rank in range(self._world_size) if rank != self._rank)
        deadline = time.monotonic() + (_CAUSE_S if lost.waited is None else 0)
        while True:
            ends = [self._end_of_chain(peer) for peer in peers]
            # Asked first: a rank may have gone because another one had failed.
            gone = [rank for rank in ends if self.has_gone(rank)]
            if found := next(filter(None, map(self._failure_of, ends)), None) or self.failed():
                return found
            if gone:
                return Finding(gone[0], f"rank {gone[0]} has gone; {self._last_call(gone[0])}")
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        rank = ends[0]
        what = "has broken its connection" if lost.waited is None else (
            f"did not answer within {lost.waited:g} s")  # fmt: skip
        return Finding(rank, f"rank {rank} {what}; {self._last_call(rank)}")

    def _end_of_chain(self, rank: int) -> int:
        """The rank that a rank waits for, or that this one waits for, and so on."""
        seen = {self._rank}
        while rank not in seen and not self._failure_of(rank) and not self.has_gone(rank):
            seen.add(rank)
            state = self._state(rank)
            other = self._words[state + _WAITS_FOR] or self._words[state + _STREAM_WAITS_FOR]
            if not other or other - 1 in seen:
                break
            rank = other - 1
        return rank

    def _last_call(self, rank: int) -> str:
        state = self._state(rank)
        number, of, in_call = self._words[state : state + 3].tolist()
        if not number:
            return "it has made no call of this group"
        at = (state + _WORDS) * 8
        name = bytes(self._bytes[at : at + _NAME_BYTES]).rstrip(b"\0").decode(errors="ignore")
        call = Call(number, *name.partition("\n")[::2], of=of)
        return f"its last call is {call}, which it has {'not ' * in_call}left"


class Shown:
    """Numbers that a rank shows on a board while it does something else.

    Args:
        board: the board.
        values: the numbers.
        timeout: seconds to wait for another rank.
    """

    def __init__(self, board: Board, values: Sequence[int], timeout: float) -> None:
        self._board, self._values, self._timeout = board, values, timeout

    def wait(self) -> list[int]:
        """The elementwise maximum over all ranks: see `Board.exchange`."""
        return _maximum(self._board._read_all(self._values, self._timeout))

    def share(self, value: Any) -> list[Any]:
        """See `Board.share`."""
        return self._board.share(value, self._timeout)


@lru_cache(maxsize=64)
def _padded(name: str, part: str) -> bytes:
    return f"{name}\n{part}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _maximum(rows: list[Sequence[int]]) -> list[int]:
    return [max(column) for column in zip(*rows, strict=True)]


def make_board(rank: int, world_size: int, share: Callable[[Any], list[Any]]) -> Board | None:
    """A board for the ranks of a group, all of which make this call; None where they can have none.

    It has no name in any folder, so nothing stays behind however its processes end.

    Args:
        rank: this rank.
        world_size: number of ranks.
        share: every rank's value, by rank: a collective.
    """
    file, place = None, None
    if rank == 0 and (file := create_file(Board.nbytes(world_size))):
        place = f"/proc/{os.getpid()}/fd/{file.fileno()}", token_of(file)
    place = share(place)[0]
    if place is None:
        return None
    board = None
    name, token = place
    with suppress(OSError):  # another host, or what looks like one
        if file is None and os.readlink(name).startswith(f"/memfd:{PREFIX}"):
            file = open(name, "r+b", buffering=0)  # noqa: SIM115
        if file is not None and token_of(file) == token:
            board = Board(file, rank, world_size)
    everyone_has = all(share(board is not None))
    return board if everyone_has else None


def create_file(nbytes: int) -> Any:
    """A file of zeros in memory, and a token at its end; None where there is none."""
    if fcntl is None or not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):  # the system refuses
        file = os.fdopen(os.memfd_create(f"{PREFIX}board"), "r+b", buffering=0)
        file.write(bytes(nbytes) + secrets.token_bytes(_TOKEN_BYTES))
        return file
    return None


def token_of(file: BinaryIO) -> bytes:
    """The token at the end of a board's file: a file of another host has another one."""
    file.seek(-_TOKEN_BYTES, os.SEEK_END)
    return file.read()
