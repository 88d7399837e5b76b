"""Index tables on the device, kept while their plans live and calls come back to them.

Work of a few shapes makes its tables once. Work whose shapes change from call to call (slides,
documents) would leave those of hundreds of plans on the device: of more than a few megabytes, those
stay that recent calls have used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

KEPT_BYTES = 8 << 20
"""Bytes of tables that may be kept, however old."""
KEPT_CALLS = 64
"""Calls after its last use for which a table is kept, whatever its size: those of a step of a model
of half as many layers."""

T = TypeVar("T")


@dataclass
class _Kept:
    tables: Any
    nbytes: int
    last_call: int
    streams: set[int] = field(default_factory=set)  # that read them, by handle


def may_be_of_graph(device: torch.device) -> bool:
    """Whether memory that this thread allocates now may belong to the pool of a CUDA graph.

    It does while a graph is captured, and while torch.compile warms up for one. Nobody can ask for
    the latter, so it is assumed of every call once the module that does it is loaded.
    """
    if "torch._inductor.cudagraph_trees" in sys.modules:
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _tensors_of(tables: Any) -> Iterable[torch.Tensor]:
    """The tensors of tables: their attribute `tensors`, or the tables are a tuple of them."""
    found: Iterable[torch.Tensor] = getattr(tables, "tensors", tables)
    return found


class DeviceTables:
    """Tables by who they are of and by key. Threads may share it.

    Attributes:
        calls: how many calls there were, forward or backward; who makes one counts it.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._kept: WeakKeyDictionary[Any, dict[Hashable, _Kept]] = WeakKeyDictionary()
        self._captured: dict[int, Any] = {}  # what CUDA graphs read whenever they are replayed
        self._lock = Lock()
        self._elsewhere: tuple[int, ThreadPoolExecutor] | None = None  # of which process
        self._copies: dict[torch.device, torch.cuda.Stream] = {}  # of that thread

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, but for what only CUDA graphs read."""
        return sum(kept.nbytes for _, _, kept in self._all())

    def _all(self) -> list[tuple[dict[Hashable, _Kept], Hashable, _Kept]]:
        return [(few, key, kept) for few in self._kept.values() for key, kept in few.items()]

    def get(self, owner: object, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """The tables of `owner` with this key, made if there are none.

        Args:
            owner: hashable; its tables go when it does.
            key: which of its tables.
            device: where they are.
            make: makes them; in a thread of its own where what the calling thread allocates may
                belong to the memory of a CUDA graph, which they outlive.
        """
        with self._lock:
            tables = self._kept.setdefault(owner, {})
            if key not in tables:
                # Another thread takes up to milliseconds to begin where others want its core.
                elsewhere = may_be_of_graph(device)
                made = (self._make_elsewhere if elsewhere else self._make)(make, device)
                tables[key] = _Kept(made, sum(x.nbytes for x in _tensors_of(made)), self.calls)
                self._drop()
            kept = tables[key]
            kept.last_call = self.calls
            if device.type == "cuda":
                self._note_stream(kept, device)
            found: T = kept.tables
            return found

    def _drop(self) -> None:
        """Drop tables that recent calls have not used, the oldest first, down to KEPT_BYTES."""
        excess = self.nbytes - KEPT_BYTES
        if excess <= 0:
            return
        for tables, key, kept in sorted(self._all(), key=lambda entry: entry[2].last_call):
            if excess <= 0 or kept.last_call >= self.calls - KEPT_CALLS:
                break
            del tables[key]
            excess -= kept.nbytes

    def _make_elsewhere(self, make: Callable[[], T], device: torch.device) -> T:
        if self._elsewhere is None or self._elsewhere[0] != os.getpid():  # a fork has no threads
            self._elsewhere = os.getpid(), ThreadPoolExecutor(1, "device-tables")
        return self._elsewhere[1].submit(self._make, make, device).result()

    def _make(self, make: Callable[[], T], device: torch.device) -> T:
        """Make tables on a stream of their own: their copies do not wait for queued kernels."""
        if device.type != "cuda":
            return make()
        if device not in self._copies:
            self._copies[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies[device]):
            made = make()
        self._copies[device].synchronize()
        return made

    def _note_stream(self, kept: _Kept, device: torch.device) -> None:
        """See to it that tables outlive what is queued on the current stream, or captured."""
        if torch.cuda.is_current_stream_capturing():
            self._captured[id(kept.tables)] = kept.tables
            return
        # Its handle, in a tenth of the time that `current_stream` takes to make an object of it.
        handle = torch._C._cuda_getCurrentRawStream(device.index)
        if handle not in kept.streams:
            kept.streams.add(handle)
            stream = torch.cuda.current_stream(device)
            for tensor in _tensors_of(kept.tables):
                tensor.record_stream(stream)


TABLES = DeviceTables()
"""The tables of all calls of this process."""
