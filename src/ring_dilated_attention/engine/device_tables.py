"""Index tables on the device, kept while their plans live and calls come back to them.

Work of a few shapes makes its tables once. Work whose shapes change from call to call (slides,
documents) would leave those of hundreds of plans on the device: of more than a few megabytes, those
stay that recent calls have come back to. Of the others only what was dropped and when is kept: a
table that is made again is one that calls come back to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

KEPT_BYTES = 8 << 20
"""Bytes of tables that may be kept, however old."""
_AFTER_DROP = 0.75
"""Of them, what is left of more: not every table that is made then makes another one go."""
KEPT_CALLS = 64
"""Calls after its last use for which a table is kept that several calls have used, whatever its
size. A step of a model of half as many different layers makes its tables once, large ones twice."""
_ALLOCATION = 512
"""Bytes of which an allocation on a CUDA device is a multiple."""


class Tables(Protocol):
    """A kept table."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it reads on the device."""
        ...


T = TypeVar("T", bound=Tables)


@dataclass
class _Kept:
    tables: Any
    nbytes: int
    last_call: int
    returns: bool  # whether more than one call has used them
    streams: set[int] = field(default_factory=set)  # that read them, by handle


def may_be_of_graph(device: torch.device) -> bool:
    """Whether what this thread allocates may belong to a CUDA graph's memory.

    It does while a graph is captured, and while torch.compile warms up for one.
    """
    if "torch._inductor.cudagraph_trees" in sys.modules:  # what warms up, or has done so
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _nbytes(tables: Tables) -> int:
    """Bytes on the device."""
    storages = {x.data_ptr(): x for x in (y.untyped_storage() for y in tables.tensors)}
    return sum(-(-x.nbytes() // _ALLOCATION) * _ALLOCATION for x in storages.values())


class DeviceTables:
    """Tables by who they are of and by key. Threads may share it."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, dict[Hashable, _Kept]] = WeakKeyDictionary()
        # Which call was the last to use what is not kept: a number for each table of a live plan.
        self._dropped: WeakKeyDictionary[Any, dict[Hashable, int]] = WeakKeyDictionary()
        self._captured: dict[int, Tables] = {}  # what CUDA graphs read whenever they are replayed
        self._calls = 0
        self._last_made = 0  # in which call
        self._room = -1  # bytes that may be made at least before any must go; -1: not known
        self._lock = Lock()
        self._elsewhere: tuple[int, ThreadPoolExecutor] | None = None  # of which process
        self._copies: dict[torch.device, torch.cuda.Stream] = {}  # of that thread

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, but for what only CUDA graphs read."""
        return sum(kept.nbytes for tables in self._kept.values() for kept in tables.values())

    def start_call(self) -> None:
        """Count a call: of forward, or of backward. Drop what is not worth its bytes."""
        with self._lock:
            self._calls += 1
            # What one call alone has used may go two calls later.
            if self._calls - self._last_made <= 2 or self._calls % KEPT_CALLS == 0:
                self._drop()

    def _drop(self) -> None:
        """Of more than KEPT_BYTES, drop what calls do not come back to, the oldest first."""
        if self._room >= 0:
            return
        held = self.nbytes
        self._room = KEPT_BYTES - held
        if self._room >= 0:
            return
        excess = held - int(_AFTER_DROP * KEPT_BYTES)
        unused = [
            (kept.last_call, owner, key, kept.nbytes)
            for owner, tables in self._kept.items()
            for key, kept in tables.items()
            if kept.last_call < self._calls - (KEPT_CALLS if kept.returns else 1)
        ]
        for last_call, owner, key, nbytes in sorted(unused, key=lambda entry: entry[0]):
            if excess <= 0:
                break
            del self._kept[owner][key]
            self._dropped.setdefault(owner, {})[key] = last_call
            excess -= nbytes
            self._room += nbytes

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
                dropped = self._dropped.get(owner, {}).pop(key, None)
                returns = dropped is not None and dropped >= self._calls - KEPT_CALLS
                tables[key] = _Kept(made, _nbytes(made), self._calls, returns)
                self._last_made = self._calls
                self._room -= tables[key].nbytes
            kept = tables[key]
            kept.returns = kept.returns or kept.last_call < self._calls
            kept.last_call = self._calls
            if device.type == "cuda":
                self._note_stream(kept, device)
            found: T = kept.tables
            return found

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
            for tensor in kept.tables.tensors:
                tensor.record_stream(stream)


TABLES = DeviceTables()
"""Of all calls of this process."""
