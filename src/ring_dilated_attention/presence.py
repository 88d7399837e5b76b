"""Whether the processes of ranks on other hosts still run: the port that each listens on tells.

torch.distributed does not always tell: gloo waits out its timeout for the rest of a message whose
sender has ended. A system closes the ports of a process as it ends, however it ends, and keeps
those of one that is stopped or busy.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize

import torch.distributed as dist

_CONNECT_S = 5.0
"""The first connection to a rank that is there may take so long."""
_MOST_WAITING = 4096
"""Connections to a port; nobody accepts them."""

_of_this_process: WeakSet[Presence] = WeakSet()
"""What a process that is forked, such as a worker that loads data, must close: it may live on."""


class Presence:
    """A port of this rank, and connections to those of others.

    Args:
        listener: of this rank, open for as long as this object lives.
        addresses: of all ranks, by rank: IP address and port.

    Attributes:
        forget: closes all ports and connections of this object in this process.
    """

    def __init__(self, listener: socket.socket, addresses: list[tuple[str, int]]) -> None:
        self._listener, self._addresses = listener, addresses
        self._connections: dict[int, socket.socket] = {}
        self._gone_since: dict[int, float] = {}
        self.forget = finalize(self, _close, listener, self._connections)
        _of_this_process.add(self)

    def gone_since(self, rank: int) -> float | None:
        """When it was found that a rank's process has ended (`time.monotonic`); None: it was not.

        It does not wait, so finding that takes a few calls, some time apart.
        """
        if rank not in self._gone_since and self._is_closed(rank):
            self._gone_since[rank] = time.monotonic()
        return self._gone_since.get(rank)

    def _is_closed(self, rank: int) -> bool:
        connection = self._connections.get(rank)
        found = errno.EPIPE if connection is None else _state(connection)
        if found not in (0, errno.ECONNREFUSED):
            # There was no connection, or something broke it: a new one tells.
            if connection is not None:
                connection.close()
            connection = self._connections[rank] = _socket(self._addresses[rank])
            connection.setblocking(False)
            found = connection.connect_ex(self._addresses[rank])
        if found == errno.ECONNREFUSED:
            self._connections.pop(rank).close()
        return found == errno.ECONNREFUSED

    def reach(self, rank: int) -> str:
        """Connect to a rank that is there; returns why that fails, or ""."""
        connection = self._connections[rank] = _socket(self._addresses[rank])
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(self._addresses[rank])
        except OSError as error:
            return str(error)
        connection.setblocking(False)
        return ""


def _close(listener: socket.socket, connections: dict[int, socket.socket]) -> None:
    for one in (listener, *connections.values()):
        one.close()


def _socket(address: tuple[str, int]) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)


def _state(connection: socket.socket) -> int:
    """0: connected, or not yet; else the error that ended it."""
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        return error
    try:
        return 0 if connection.recv(1, socket.MSG_PEEK) else errno.EPIPE
    except BlockingIOError:
        return 0  # or not connected yet
    except OSError as raised:
        return raised.errno or errno.EPIPE


def make_presence(
    rank: int, world_size: int, store: dist.Store, share: Callable[[Any], list[Any]]
) -> Presence | None:
    """The presence of a rank; None, with a warning, if ranks do not reach each other's ports.

    All ranks of the group make this call. Each connects to the next one.

    Args:
        rank: this rank.
        world_size: number of ranks.
        store: in which the ranks have met: the network that leads there is the one to listen on.
        share: every rank's value, by rank: a collective.
    """
    listener, failure = None, ""
    try:
        listener = _listen(store)
    except OSError as error:
        failure = f"rank {rank} cannot listen: {error}"
    addresses = share(listener and listener.getsockname()[:2])
    presence = None if listener is None else Presence(listener, addresses)
    if presence is not None and all(addresses):
        other = (rank + 1) % world_size
        if reason := presence.reach(other):
            failure = f"rank {rank} does not reach rank {other} at {addresses[other]}: {reason}"
    failures = [one for one in share(failure) if one]
    if failures:
        if presence is not None:
            presence.forget()
        warnings.warn(
            "ranks cannot tell whether the process of another one has ended, so some waits for a "
            f"rank that has may last until the timeout: {'; '.join(failures)}",
            stacklevel=2,
        )
        return None
    return presence


def _listen(store: dist.Store) -> socket.socket:
    """A port of the network that leads to the host of a store, or else of this host's name."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = socket.gethostname(), 1
    if isinstance(store, dist.TCPStore):
        host, port = store.host, store.port
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family, backlog=_MOST_WAITING)


def _forget_all() -> None:
    for presence in list(_of_this_process):
        presence.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)
