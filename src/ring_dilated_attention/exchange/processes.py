"""What ranks leave for each other in their store: notices, and which process each of them is.

A group of NCCL has no connections until its first collective, so nobody notices that a rank has
ended before that. On one host the system knows: each rank leaves its process id in the store.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .waiter import Waiter

T = TypeVar("T")

_ANSWER_S = 2.0
"""The store may take so long to answer; then it is not asked again."""


class Notices:
    """Texts in a store. The process that holds it may end or be stopped: nobody waits for it then.

    Args:
        store: of the group.

    Attributes:
        are_lost: whether the store has failed to answer; nothing is left or found any more.
        holder_has_ended: whether that was because its process has ended.
        silent_since: when it was first asked in vain (`time.monotonic`) while its process may still
            run; None: never.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.are_lost = self.holder_has_ended = False
        self.silent_since: float | None = None

    @cached_property
    def _waiter(self) -> Waiter:
        return Waiter()

    def leave(self, key: str, text: str = "") -> None:
        """Leave a text, which all ranks may read."""
        self._ask(lambda: self._store.set(key, text), None)

    def read(self, key: str) -> str | None:
        """A text that a rank has left; None: there is none yet."""
        store = self._store
        return self._ask(lambda: store.get(key).decode() if store.check([key]) else None, None)

    def remove(self, key: str) -> None:
        """Take a text away."""
        self._ask(lambda: self._store.delete_key(key), False)

    def _ask(self, function: Callable[[], T], otherwise: T) -> T:
        begun = time.monotonic()

        def look() -> None:
            if time.monotonic() > begun + _ANSWER_S:
                raise TimeoutError

        if not self.are_lost:
            try:
                return self._waiter.run(function, look)
            except (RuntimeError, TimeoutError) as error:
                self.are_lost = True
                self.holder_has_ended = isinstance(error, RuntimeError)
                self.silent_since = None if self.holder_has_ended else begun
        return otherwise


_announced: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups in whose store this process has left who it is."""


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The part of a group's store that this package uses."""
    return dist.PrefixStore("ring_dilated_attention", _get_process_group_store(group))


def announce(group: dist.ProcessGroup, rank: int) -> None:
    """Leave in the store of a group which process a rank of it is; once is enough."""
    if group in _announced:
        return
    _announced.add(group)
    begun = _begun(os.getpid())
    if begun:
        Notices(store_of(group)).leave(
            f"process/{rank}", json.dumps([own_host(), os.getpid(), begun])
        )


def own_host() -> str:
    """What processes have in common that can share memory, and pass each other files.

    Containers of one machine may not: those have processes, or a network, of their own.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    return socket.gethostname()


class Processes:
    """The processes of a group's other ranks, as far as they are on this host.

    Args:
        notices: of the group.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._own_host = own_host()
        self._known: dict[int, tuple[str, int, str]] = {}
        self._gone_since: dict[int, float] = {}

    def gone_since(self, rank: int) -> float | None:
        """When it was found that a rank's process has ended (`time.monotonic`); None: it was not.

        Nothing is found of a rank on another host, and of one that has not been announced.
        """
        if rank in self._gone_since:
            return self._gone_since[rank]
        if rank not in self._known:
            text = self._notices.read(f"process/{rank}")
            if text is None:
                return None
            self._known[rank] = tuple(json.loads(text))
        host, number, begun = self._known[rank]
        if host != self._own_host or _begun(number) == begun:
            return None
        return self._gone_since.setdefault(rank, time.monotonic())


def _begun(process: int) -> str:
    """When a process began, which no later one of the same number did; "" if it has ended."""
    with suppress(OSError):  # also where the system has no such files
        # The name, in parentheses, may hold anything; after it come the state and 18 numbers.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
