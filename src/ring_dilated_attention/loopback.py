"""An `Exchange` between threads of one process, for tests and simulation."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from .exchange import Pending

T = TypeVar("T")


class LoopbackError(RuntimeError):
    """Another rank of the loopback world failed, so this one cannot go on."""


class _LoopbackWorld:
    """What the ranks of a loopback share: a letter box per (sender, receiver, number)."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.shared: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)
        self._letters: dict[tuple[int, int, int], Future[_Letter]] = {}
        self._lock = threading.Lock()
        self._failed = False

    def letter(self, sender: int, receiver: int, number: int) -> Future[_Letter]:
        """The transfer number `number` from `sender` to `receiver`; either may ask first."""
        with self._lock:
            letter = self._letters.setdefault((sender, receiver, number), Future())
            if self._failed and not letter.done():
                letter.set_exception(LoopbackError("another rank failed"))
            return letter

    def fail(self) -> None:
        """Wake every rank that waits for another."""
        self.barrier.abort()
        with self._lock:
            self._failed = True
            for letter in self._letters.values():
                if not letter.done():
                    letter.set_exception(LoopbackError("another rank failed"))

    def discard(self, sender: int, receiver: int, number: int) -> None:
        """Forget a transfer that has been received."""
        with self._lock:
            del self._letters[sender, receiver, number]


class _Letter(NamedTuple):
    """What was sent; on CUDA also when it is there: who waits may be on another stream."""

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


class _Nothing:
    """A transfer that receives nothing."""

    def wait(self) -> None:
        pass


class _LoopbackReceipt:
    def __init__(
        self, world: _LoopbackWorld, key: tuple[int, int, int], into: torch.Tensor
    ) -> None:
        self._world, self._key, self._into = world, key, into
        self._letter = world.letter(*key)

    def wait(self) -> None:
        letter = self._letter.result()
        sent = letter.tensor
        self._world.discard(*self._key)
        assert sent.shape == self._into.shape, f"{sent.shape} sent, {self._into.shape} expected"
        assert sent.dtype == self._into.dtype, f"{sent.dtype} sent, {self._into.dtype} expected"
        letter.read(self._into)


class LoopbackExchange:
    """An `Exchange` between threads of one process; made by `run_loopback`."""

    def __init__(self, world: _LoopbackWorld, rank: int) -> None:
        self.rank, self.world_size, self.sent_bytes = rank, world.world_size, 0
        self._world = world
        self._sent, self._received = Counter[int](), Counter[int]()

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is not None:
            peer, tensor = send
            self.sent_bytes += tensor.nbytes
            letter = self._world.letter(self.rank, peer, self._sent[peer])
            if not letter.done():  # done: the world has failed
                letter.set_result(_Letter.of(tensor))
            self._sent[peer] += 1
        if receive is None:
            return _Nothing()
        peer, into = receive
        key = peer, self.rank, self._received[peer]
        self._received[peer] += 1
        return _LoopbackReceipt(self._world, key, into)

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        return [max(column) for column in zip(*self.share(list(values)), strict=True)]

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        try:
            self._world.shared[self.rank] = value
            self._world.barrier.wait()
            values = list(self._world.shared)
            self._world.barrier.wait()
        except threading.BrokenBarrierError:
            raise LoopbackError("another rank failed") from None
        return values

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Exchange.gather`."""
        self.sent_bytes += (self.world_size - 1) * tensor.nbytes
        shared = self.share(tensor.clone())  # what nobody writes to: others may still read it
        assert len({(x.shape, x.dtype) for x in shared}) == 1, f"{[x.shape for x in shared]} differ"
        return [x.clone() for x in shared]


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
        try:
            # On CUDA, all threads share one backward thread; ranks that wait for each other in
            # backward must each have their own.
            with torch.autograd.set_multithreading_enabled(False):
                return function(LoopbackExchange(world, rank))
        except BaseException:
            world.fail()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(call, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, LoopbackError):
            raise error
    return [future.result() for future in futures]
