"""How long a rank's compute waits for others: an `Exchange` that times the waits of another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from ..exchange import Exchange, Pending
from ..lanes import lane_streams


class Waits(NamedTuple):
    """Milliseconds that a rank waited since it was last asked.

    Attributes:
        transfers: for rows of other ranks.
        agreement: for the collective in which the ranks compare their calls.
    """

    transfers: float
    agreement: float


class Wait(NamedTuple):
    """A wait of the compute of one call.

    Attributes:
        lane: which lane waited (`lanes`), from 1; 0: the call itself.
        begin: milliseconds from some time on.
        end: likewise.
    """

    lane: int
    begin: float
    end: float


def time_without_work(waits: Iterable[Wait]) -> float:
    """Milliseconds of a call in which it waited, or all lanes in which it waited did.

    A lane has nothing to do from the end of its last wait on.
    """
    own, lanes = 0.0, dict[int, list[Wait]]()
    for wait in waits:
        if wait.lane:
            lanes.setdefault(wait.lane, []).append(wait)
        else:
            own += wait.end - wait.begin
    ends = {lane: max(wait.end for wait in found) for lane, found in lanes.items()}
    idle = [
        *chain(*lanes.values()),
        *(Wait(lane, end, max(ends.values())) for lane, end in ends.items()),
    ]
    times = sorted({time for wait in idle for time in (wait.begin, wait.end)})
    return own + sum(
        end - begin
        for begin, end in pairwise(times)
        if {wait.lane for wait in idle if wait.begin <= begin and end <= wait.end} == set(lanes)
    )


_Stamp: TypeAlias = "torch.cuda.Event | float"


class TimedExchange:
    """Another exchange, with the time that the compute spends waiting for it.

    On CUDA events are recorded before and after each wait of the stream that was current when this
    was made, and of those of lanes, be it for a transfer or for another stream that waits for one:
    what lies between is time in which it had nothing to compute. On the CPU it is the clock's time.
    Whatever else the exchange has is its own.

    Args:
        ends: the exchange.
        device: where the tensors are.
    """

    def __init__(self, ends: Exchange, device: torch.device) -> None:
        self.rank, self.world_size = ends.rank, ends.world_size
        self._ends, self._device = ends, device
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            main = torch.cuda.current_stream(device)
            self._streams = [main, *lane_streams(main.device)]
        self._calls: list[list[tuple[int, _Stamp, _Stamp]]] = [[]]
        self._agreement: list[tuple[_Stamp, _Stamp]] = []

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
        return _TimedPending(self._ends.start(send, receive), self)

    def stopwatch(self) -> Callable[[], None]:
        """See `Exchange`."""
        lane = self._lane()
        if lane is None:
            return lambda: None
        begin = self._stamp()
        return lambda: self._calls[-1].append((lane, begin, self._stamp()))

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`; timed as the agreement, with which a call begins."""
        begin = self._stamp()
        found = self._ends.maximum(values, device)
        self._agreement.append((begin, self._stamp()))
        self._calls.append([])
        return found

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        return self._ends.share(value)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Exchange.gather`; not timed, it computes nothing meanwhile."""
        return self._ends.gather(tensor)

    def take(self) -> Waits:
        """What was waited since the last `take`; the device must be idle."""
        transfers = 0.0
        for call in self._calls:
            waits = (
                Wait(lane, *(_milliseconds(call[0][1], x) for x in stamps))
                for lane, *stamps in call
            )
            transfers += time_without_work(waits)
        agreement = sum(_milliseconds(*stamps) for stamps in self._agreement)
        self._calls = [[]]
        self._agreement.clear()
        return Waits(transfers, agreement)

    def _lane(self) -> int | None:
        """Which lane the current stream is; 0: the call's; None: of those that compute none."""
        if not self._streams:
            return 0
        current = torch.cuda.current_stream(self._device)
        return self._streams.index(current) if current in self._streams else None

    def _stamp(self) -> _Stamp:
        if not self._streams:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _TimedPending:
    def __init__(self, pending: Pending, timed: TimedExchange) -> None:
        self._pending, self._timed = pending, timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self) -> None:
        stop = self._timed.stopwatch()
        self._pending.wait()
        stop()


def _milliseconds(begin: _Stamp, end: _Stamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return (end - begin) * 1e3
    return float(begin.elapsed_time(end))
