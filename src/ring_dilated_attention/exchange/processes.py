"""Which process each rank of a group is, told before the group's first call.

A group of NCCL has no connections until its first collective, so nobody notices that a rank has
ended before that. On one host the system knows: each rank leaves its process id in the store.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .notices import Notices

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
