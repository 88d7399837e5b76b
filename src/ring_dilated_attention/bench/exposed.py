"""How long a rank's compute waits for others: an `Exchange` that times the waits of another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..exchange import Exchange, Pending


class Waits(NamedTuple):
    """Milliseconds that a rank waited since it was last asked.

    Attributes:
        transfers: for rows of other ranks.
        agreement: for the collective in which the ranks compare their calls.
    """

    transfers: float
    agreement: float


class TimedExchange:
    """Another exchange, with the time that the compute spends waiting for it.

    On CUDA events are recorded before and after each wait of the stream that was current when this
    was made, be it for a transfer or for another stream that waits for one: what lies between is
    time in which it had nothing to compute. On the CPU it is the clock's time. Whatever else the
    exchange has is its own.

    Args:
        ends: the exchange.
        device: where the tensors are.
    """

    def __init__(self, ends: Exchange, device: torch.device) -> None:
        self.rank, self.world_size = ends.rank, ends.world_size
        self._ends, self._device = ends, device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._transfers: list[Callable[[], float]] = []
        self._agreement: list[Callable[[], float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ends, name)

    @property
    def sent_bytes(self) -> int:
        """See `Exchange`."""
        return self._ends.sent_bytes

    @sent_bytes.setter
    def sent_bytes(self, value: int) -> None:
        self._ends.sent_bytes = value

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`; the wait is timed."""
        pending = self._ends.start(send, receive)
        return _TimedPending(pending, self._device, self._stream, self._transfers)

    def stopwatch(self) -> Callable[[], None]:
        """See `Exchange`."""
        stop = _stopwatch(self._device)
        return lambda: self._transfers.append(stop())

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`; timed as the agreement."""
        stop = _stopwatch(self._device)
        found = self._ends.maximum(values, device)
        self._agreement.append(stop())
        return found

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        return self._ends.share(value)

    def take(self) -> Waits:
        """What was waited since the last `take`; the device must be idle."""
        waits = Waits(
            sum(elapsed() for elapsed in self._transfers),
            sum(elapsed() for elapsed in self._agreement),
        )
        self._transfers.clear()
        self._agreement.clear()
        return waits


class _TimedPending:
    def __init__(
        self,
        pending: Pending,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        found: list[Callable[[], float]],
    ) -> None:
        self._pending, self._device, self._stream, self._found = pending, device, stream, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self) -> None:
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            self._pending.wait()
            return
        stop = _stopwatch(self._device)
        self._pending.wait()
        self._found.append(stop())


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start a clock; calling the result stops it and gives a function that tells milliseconds."""
    if device.type != "cuda":
        started = time.perf_counter()

        def stop_clock() -> Callable[[], float]:
            taken = (time.perf_counter() - started) * 1e3
            return lambda: taken

        return stop_clock
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()

    def stop_events() -> Callable[[], float]:
        stop.record()
        return lambda: float(start.elapsed_time(stop))

    return stop_events
