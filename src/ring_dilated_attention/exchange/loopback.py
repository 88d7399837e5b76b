"""An `Exchange` between threads of one process, for tests and simulation."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from .agreement import Agreeing
from .interface import Calls, ExchangeError, LostPeerError, Message, Nothing, Pending

T = TypeVar("T")


class _Key(NamedTuple):
    """The identity of a message."""

    sender: int
    receiver: int
    call: int  # its number
    number: int  # of the message among those of the call from sender to receiver
    is_rows: bool  # else what `begin` shows


class _LoopbackWorld:
    """State shared by the ranks of a loopback: a letter box for each message."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.reason: str | None = None  # why the first rank has failed
        self._letters: dict[_Key, Future[Any]] = {}
        self._lock = threading.Lock()
        self._left: set[int] = set()  # ranks that send nothing any more

    def letter(self, key: _Key) -> Future[Any]:
        """The letter box of a message; sender or receiver may ask first."""
        with self._lock:
            letter = self._letters.setdefault(key, Future())
            if key.sender in self._left and not letter.done():
                letter.set_exception(LostPeerError([key.sender], "it has gone"))
            return letter

    def receive(self, key: _Key) -> Any:
        """Wait for a message, and forget it."""
        found = self.letter(key).result()
        with self._lock:
            del self._letters[key]
        return found

    def leave(self, rank: int, why: str | None) -> None:
        """Wake every rank that waits for this one, now or later."""
        with self._lock:
            self.reason = self.reason or why
            self._left.add(rank)
            for key, letter in self._letters.items():
                if key.sender == rank and not letter.done():
                    letter.set_exception(LostPeerError([rank], "it has gone"))


class _Letter(NamedTuple):
    """A sent tensor; on CUDA with an event, for a receiver on another stream to wait for."""

    tensor: torch.Tensor
    written: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Letter:
        """A copy of what is sent: the sender may go on writing to it."""
        copy = tensor.clone()
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        return cls(copy, None if stream is None else stream.record_event())

    def read(self, into: torch.Tensor) -> None:
        """Copy it to where it is wanted."""
        if self.written is not None:
            stream = torch.cuda.current_stream(into.device)
            stream.wait_event(self.written)
            self.tensor.record_stream(stream)
        into.copy_(self.tensor)


class _LoopbackReceipt:
    def __init__(self, world: _LoopbackWorld, key: _Key, into: torch.Tensor) -> None:
        self._world, self._key, self._into = world, key, into

    def wait(self) -> None:
        letter = self._world.receive(self._key)
        sent = letter.tensor
        assert sent.shape == self._into.shape, f"{sent.shape} sent, {self._into.shape} expected"
        assert sent.dtype == self._into.dtype, f"{sent.dtype} sent, {self._into.dtype} expected"
        letter.read(self._into)


class LoopbackExchange(Agreeing):
    """An `Exchange` between threads of one process; made by `run_loopback`."""

    def __init__(self, world: _LoopbackWorld, rank: int) -> None:
        self.rank, self.world_size, self.sent_bytes = rank, world.world_size, 0
        self.calls = Calls(rank, world.world_size, self, main=threading.current_thread())
        self._world = world
        self._numbered_call = 0
        self._numbers = Counter[tuple[int, int, bool]]()  # of messages of that call

    def _key(self, sender: int, receiver: int, *, is_rows: bool) -> _Key:
        """The next message of this call."""
        call = self.calls.number
        if call != self._numbered_call:
            self._numbered_call = call
            self._numbers.clear()
        self._numbers[sender, receiver, is_rows] += 1
        number = self._numbers[sender, receiver, is_rows]
        return _Key(sender, receiver, call, number, is_rows)

    def start(self, send: Message | None, receive: Message | None) -> Pending:
        """See `Exchange.start`."""
        self.calls.before_rows()
        if send is not None:
            peer, tensor = send
            self.sent_bytes += tensor.nbytes
            self._post(self._key(self.rank, peer, is_rows=True), _Letter.of(tensor))
        if receive is None:
            return Nothing()
        peer, into = receive
        return _LoopbackReceipt(self._world, self._key(peer, self.rank, is_rows=True), into)

    def leave(self, why: str) -> None:
        """See `Connection`."""
        self._world.leave(self.rank, why)

    def reason(self) -> str | None:
        """See `Connection`."""
        return self._world.reason

    def _post(self, key: _Key, content: Any) -> None:
        letter = self._world.letter(key)
        if not letter.done():  # done: this rank has left
            letter.set_result(content)

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for other in others:
            self._post(self._key(self.rank, other, is_rows=False), (number, data))
        keys = {other: self._key(other, self.rank, is_rows=False) for other in others}

        def wait() -> list[tuple[int, bytes]]:
            everyone = {other: self._world.receive(key) for other, key in keys.items()}
            return [everyone.get(rank, (number, data)) for rank in range(self.world_size)]

        return wait


def run_loopback(world_size: int, function: Callable[[LoopbackExchange], T]) -> list[T]:
    """Run every rank of a world inside this process, one thread a rank.

    Args:
        world_size: number of ranks.
        function: called once per rank with that rank's exchange, which it may pass on as the
            `group` of `dilated_attention`.

    Returns:
        What the calls returned, by rank. When one fails, the others are woken and its error raised.
    """
    world = _LoopbackWorld(world_size)

    def call(rank: int) -> T:
        failure = None
        try:
            # On CUDA, all threads share one backward thread; ranks that wait for each other in
            # backward must each have their own.
            with torch.autograd.set_multithreading_enabled(False):
                return function(LoopbackExchange(world, rank))
        except BaseException as error:
            failure = f"rank {rank} failed: {type(error).__name__}: {error}"
            raise
        finally:
            world.leave(rank, failure)

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(call, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, ExchangeError):
            raise error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
