"""Which ranks share a host: a tuple with the host of each rank, numbered from 0."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .calls import ExchangeError


def own_host() -> str:
    """What processes have in common that can share memory, and pass each other files.

    Containers of one machine may not: those have processes, or a network, of their own.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    return socket.gethostname()


def checked_hosts(hosts: Sequence[int] | None, world_size: int) -> tuple[int, ...] | None:
    """What a caller says about the hosts; None: nothing.

    Raises:
        TypeError: they are no integers.
        ValueError: there is not one for each rank, or one is negative.
    """
    if hosts is None:
        return None
    what = f"hosts must be {world_size} integers >= 0, the host of each rank of the group"
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise TypeError(f"{what}; got {hosts!r}")
    if any(isinstance(host, bool) or not isinstance(host, int) for host in hosts):
        raise TypeError(f"{what}; got {list(hosts)!r}")
    if len(hosts) != world_size or min(hosts) < 0:
        raise ValueError(f"{what}; got {list(hosts)!r}")
    return numbered(hosts)


def numbered(hosts: Sequence[Any]) -> tuple[int, ...]:
    """The same, with hosts numbered in the order of their first ranks."""
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def agreed_hosts(told: Sequence[tuple[str, tuple[int, ...] | None]]) -> tuple[int, ...]:
    """The hosts of a group.

    Args:
        told: by every rank: its `own_host`, and what its caller says.

    Raises:
        ExchangeError: callers say different things.
    """
    given = {said for _, said in told}
    if len(given) > 1:
        found = "; ".join(
            f"{list(said) if said else None} on rank {rank}" for rank, (_, said) in enumerate(told)
        )
        raise ExchangeError(
            f"hosts of ProcessGroupExchange must be the same on all ranks; got {found}"
        )
    (said,) = given
    return numbered([name for name, _ in told]) if said is None else said


def ranks_of(hosts: Sequence[int], host: int) -> tuple[int, ...]:
    """The ranks of a host."""
    return tuple(rank for rank, each in enumerate(hosts) if each == host)
