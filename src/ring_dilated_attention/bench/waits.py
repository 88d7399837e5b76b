"""What a call of ours sends, and how long its compute waits for other ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..exchange import Exchange, Pending
from . import measure
from .result import Communication
from .team import Team
from .turns import Turn, sample

SAMPLES = 3
"""Samples in which the waits are timed."""


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
        return _TimedWait(pending, self._device, self._stream, self._transfers)

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

    @property
    def show(self) -> Callable[[Sequence[int], torch.device], Any]:
        """As the exchange's own, if it has one; the wait is timed as the agreement."""
        begin = self._ends.show  # type: ignore[attr-defined]

        def show(values: Sequence[int], device: torch.device) -> Any:
            shown = begin(values, device)
            if shown is None:
                return None
            return _TimedWait(shown, self._device, self._stream, self._agreement)

        return show

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


class _TimedWait:
    """What can be waited for, a transfer or an agreement, with the time that this takes."""

    def __init__(
        self,
        waited: Any,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        found: list[Callable[[], float]],
    ) -> None:
        self._waited, self._device, self._stream, self._found = waited, device, stream, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._waited, name)

    def wait(self) -> Any:
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            return self._waited.wait()
        stop = _stopwatch(self._device)
        result = self._waited.wait()
        self._found.append(stop())
        return result


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


def measure_communication(
    turn: Turn, timed: TimedExchange, team: Team, calls: int, expected: int
) -> Communication:
    """What this rank waits and sends, in samples of their own: the clocks may cost time.

    Args:
        turn: ours, over `timed`.
        timed: the exchange.
        team: the ranks; every one makes this call.
        calls: of a sample.
        expected: bytes that the plan says this rank sends in a call.
    """
    turn.call(0)
    measure.synchronize(team.device)
    timed.take()
    before = timed.sent_bytes
    steps, waits = [], []
    for _ in range(SAMPLES):
        steps.append(sample(turn, team, calls)())
        waits.append(timed.take())
    sent, rest = divmod(timed.sent_bytes - before, calls * SAMPLES)
    exposed = [wait.transfers / calls for wait in waits]
    shares = [ms / step for ms, step in zip(exposed, steps, strict=True)]
    return Communication(
        exposed_ms=(statistics.median(exposed),),
        shares=(statistics.median(shares),),
        agreement_ms=statistics.median(wait.agreement / calls for wait in waits),
        sent_bytes=(sent,),
        planned_bytes=(expected,),
        bytes_match=sent == expected and rest == 0,
    )


def combined(by_rank: Sequence[Communication]) -> Communication:
    """The communication of all ranks as one, from that of each rank."""
    return Communication(
        exposed_ms=tuple(found.exposed_ms[0] for found in by_rank),
        shares=tuple(found.shares[0] for found in by_rank),
        agreement_ms=max(found.agreement_ms for found in by_rank),
        sent_bytes=tuple(found.sent_bytes[0] for found in by_rank),
        planned_bytes=tuple(found.planned_bytes[0] for found in by_rank),
        bytes_match=all(found.bytes_match for found in by_rank),
    )
