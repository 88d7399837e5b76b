"""Whether the processes of ranks on other hosts still run: the port that each listens on tells.

torch.distributed does not always tell: gloo waits out its timeout for the rest of a message whose
sender has ended. A system closes the ports of a process as it ends, however it ends, and keeps
those of one that is stopped or busy. A rank that gives up tells why to those that are connected.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet, finalize

import torch.distributed as dist

_CONNECT_S = 5.0
"""The first connection to a rank that is there may take so long."""
_MOST_WAITING = 4096
"""Connections to a port that nobody has accepted: that is done when there is something to tell."""
_MOST_CONNECTED = 16
"""Other ranks that a rank connects to from the start; to more when it waits for them."""

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
        self._listener = listener
        listener.setblocking(False)
        self._others = [_Other((host, port)) for host, port in addresses]
        self._listening: list[socket.socket] = []
        self._told = b""
        self._lock = threading.Lock()  # a thread that watches streams asks, too
        self.forget = finalize(self, _close, listener, self._others, self._listening)
        _of_this_process.add(self)

    def gone_since(self, rank: int) -> float | None:
        """When it was found that a rank's process has ended (`time.monotonic`); None: it was not.

        It does not wait, so finding that takes a few calls, some time apart.
        """
        with self._lock:
            self._others[rank].look()
            return self._others[rank].gone_since

    def said(self, rank: int) -> dict[str, str]:
        """What a rank has told those that are connected to it, by key. It does not wait for it."""
        with self._lock:
            self._others[rank].look()
            return dict(self._others[rank].said)

    def tell(self, key: str, text: str) -> None:
        """Tell something to all ranks that are connected to this one."""
        line = json.dumps([key, text]).encode() + b"\n"
        with self._lock:
            for one in self._listening:
                _send(one, line)
            self._told += line
            with suppress(OSError):  # BlockingIOError: there are no more
                while True:
                    connection, _ = self._listener.accept()
                    self._listening.append(connection)
                    _send(connection, self._told)

    def is_known(self, rank: int) -> bool:
        """Whether a connection to a rank has been made, or tried."""
        return self._others[rank].is_known

    def reach(self, rank: int) -> str:
        """Connect to a rank that is there; returns why that fails, or ""."""
        return self._others[rank].connect(_CONNECT_S)


class _Other:
    """What is known of the process of a rank.

    Attributes:
        is_known: whether a connection has been made, or tried.
        said: what it has told, by key.
        gone_since: when it was found that it has ended.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._received = b""
        self.is_known = False
        self.said: dict[str, str] = {}
        self.gone_since: float | None = None

    def connect(self, seconds: float) -> str:
        """Connect within `seconds` (0: at some later time); returns why that fails, or ""."""
        self.close()
        self.is_known = True
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._connection = socket.socket(family)
        self._connection.settimeout(seconds)
        try:
            self._connection.connect(self._address)
        except BlockingIOError:
            return ""
        except OSError as error:
            self._note(error.errno)
            return str(error)
        self._connection.setblocking(False)
        return ""

    def look(self) -> None:
        """Look whether there is news, without waiting for it."""
        if self.gone_since is not None:
            return
        error = errno.ENOTCONN if self._connection is None else self._receive(self._connection)
        if error and not self._note(error):
            self.connect(0)  # there was no connection, or something broke it: a new one tells

    def _note(self, error: int | None) -> bool:
        """Whether an error says that the process has ended; any other may have other reasons."""
        if error != errno.ECONNREFUSED:
            return False
        self.gone_since = time.monotonic()
        self.close()
        return True

    def _receive(self, connection: socket.socket) -> int:
        """Receive what has come; returns the error that ended the connection, or 0."""
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return error
        try:
            while data := connection.recv(4096):
                *lines, self._received = (self._received + data).split(b"\n")
                self.said.update(json.loads(line) for line in lines)
        except BlockingIOError:  # also if it is not connected yet
            return 0
        except OSError as raised:
            return raised.errno or errno.EPIPE
        return errno.EPIPE

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # whoever was connected has gone
        connection.sendall(data)


def _close(listener: socket.socket, others: list[_Other], listening: list[socket.socket]) -> None:
    for connection in (listener, *listening):
        connection.close()
    for other in others:
        other.close()


def make_presence(
    rank: int, world_size: int, store: dist.Store, share: Callable[[Any], list[Any]]
) -> Presence | None:
    """The presence of a rank; None, with a warning, if ranks do not reach each other's ports.

    All ranks of the group make this call. Each connects to others, beginning with the next one.

    Args:
        rank: this rank.
        world_size: number of ranks.
        store: in which the ranks have met: the network that leads there is the one to listen on.
        share: every rank's value, by rank: a collective.
    """
    listener, failure = None, ""
    try:
        listener = listen(store)
    except OSError as error:
        failure = f"rank {rank} cannot listen: {error}"
    addresses = share(listener and listener.getsockname()[:2])
    presence = None
    if listener is not None and not all(addresses):
        listener.close()
    elif listener is not None:
        presence = Presence(listener, addresses)
        for step in range(1, min(world_size, _MOST_CONNECTED + 1)):
            other = (rank + step) % world_size
            if reason := presence.reach(other):
                failure = f"rank {rank} does not reach rank {other} at {addresses[other]}: {reason}"
                break
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


def listen(store: dist.Store) -> socket.socket:
    """A port of this host in the network that leads to the host of a store."""
    own = own_address(store)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    return socket.create_server((own, 0), family=family, backlog=_MOST_WAITING)


def own_address(store: dist.Store) -> str:
    """This host's IP address in the network that leads to the host of a store.

    Of a store without one, such as a file: in the network that this host's own name leads to.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = socket.gethostname(), 1
    if isinstance(store, dist.TCPStore):
        host, port = store.host, store.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except socket.gaierror:  # nobody else can know this host by its name, or it has none
        found = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_DGRAM)
    family, kind, *_, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        own: str = probe.getsockname()[0]
    return own


def _forget_all() -> None:
    for presence in list(_of_this_process):
        presence.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)
