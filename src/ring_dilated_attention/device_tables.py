"""Index tables on the device, kept while their plans live and calls come back to them.

Work of a few shapes makes its tables once. Work whose shapes change from call to call (slides,
documents) would leave those of hundreds of plans on the device: of more than a few megabytes, those
stay that recent calls have used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

KEPT_BYTES = 8 << 20
"""Tables of so many bytes in all are kept, however old, ..."""
KEPT_CALLS = 64
"""... and whatever they take those that so many calls before the present one have used: a step of a
model of half as many different layers makes its tables once."""
_ALLOCATION = 512
"""Bytes of which an allocation on a CUDA device is a multiple."""


class Tables(Protocol):
    """What is kept."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it reads on the device."""
        ...


T = TypeVar("T", bound=Tables)


@dataclass
class _Kept:
    tables: Any
    nbytes: int
    last_call: int = 0
    streams: set[int] = field(default_factory=set)  # that read it, by handle


def _nbytes(tables: Tables) -> int:
    """What they take on the device."""
    storages = {x.data_ptr(): x for x in (y.untyped_storage() for y in tables.tensors)}
    return sum(-(-x.nbytes() // _ALLOCATION) * _ALLOCATION for x in storages.values())


class DeviceTables:
    """Tables by who they are of and by key. Threads may share it."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, dict[Hashable, _Kept]] = WeakKeyDictionary()
        self._captured: dict[int, _Kept] = {}  # what CUDA graphs read whenever they are replayed
        self._calls = 0
        self._lock = Lock()
        self._elsewhere: tuple[int, ThreadPoolExecutor] | None = None  # of which process

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, but for what only CUDA graphs read."""
        return sum(kept.nbytes for tables in self._kept.values() for kept in tables.values())

    def start_call(self) -> None:
        """Count a call: of forward, or of backward. Now and then, drop what is long unused."""
        with self._lock:
            self._calls += 1
            if self._calls % KEPT_CALLS or self.nbytes <= KEPT_BYTES:
                return
            for tables in self._kept.values():
                for key, kept in list(tables.items()):
                    if kept.last_call < self._calls - KEPT_CALLS:
                        del tables[key]

    def get(self, owner: object, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """The tables of `owner` with this key, made if there are none.

        Args:
            owner: hashable; its tables go when it does.
            key: which of its tables.
            device: where they are.
            make: makes them, in a thread of its own: what a thread allocates while torch.compile
                warms up for a CUDA graph belongs to that graph's memory, which they outlive.
        """
        with self._lock:
            tables = self._kept.setdefault(owner, {})
            if key not in tables:
                made = self._make_elsewhere(make)
                tables[key] = _Kept(made, _nbytes(made))
            kept = tables[key]
            kept.last_call = self._calls
            if device.type == "cuda":
                self._note_stream(kept, device)
            found: T = kept.tables
            return found

    def _make_elsewhere(self, make: Callable[[], T]) -> T:
        if self._elsewhere is None or self._elsewhere[0] != os.getpid():  # a fork has no threads
            self._elsewhere = os.getpid(), ThreadPoolExecutor(1, "device-tables")
        return self._elsewhere[1].submit(make).result()

    def _note_stream(self, kept: _Kept, device: torch.device) -> None:
        """See to it that tables outlive what is queued on the current stream, or captured."""
        if torch.cuda.is_current_stream_capturing():
            self._captured[id(kept)] = kept
            return
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream not in kept.streams:
            kept.streams.add(stream.cuda_stream)
            for tensor in kept.tables.tensors:
                tensor.record_stream(stream)


TABLES = DeviceTables()
"""Of all calls of this process."""
