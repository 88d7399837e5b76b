"""Small objects that ranks pass on to each other over TCP: agreements that nobody has to wait for.

Ranks of several hosts have no memory in common. An agreement takes ceil(log2 p) steps: at step i a
rank sends all that it has heard of to the rank 2^i after it, and hears from the one 2^i before it;
after the last one it has heard of all. Frames are sent when what they depend on has come and
the rank looks. So an agreement that is begun with a call is complete by its end as a rule, and no
thread is needed for it. It uses no process group: callers' collectives are in an order of their
own.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, finalize

import torch.distributed as dist

from .calls import LostPeerError
from .presence import listen
from .waiter import LOOK_S

_CONNECT_S = 5.0
"""A connection to a rank that is there may take so long."""
_SPIN_S = 0.0003  # is waited without sleeping
_PAUSE_S = 0.0005  # is slept between looks at a connection that takes no more
_TOKEN_BYTES = 16
_HEAD = struct.Struct("!I")  # bytes of a frame
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sB")  # the token of who is connected to, and the step

_Merge: TypeAlias = Callable[[Any, Any], Any]
_of_this_process: WeakSet[Relay] = WeakSet()
"""What a process that is forked must close: it may live on."""


class Witness(Protocol):
    """What a relay tells and asks."""

    def look(self, peers: Sequence[int]) -> None:
        """See `calls.Roll`."""

    def seen(self) -> None:
        """All ranks have been heard of in an agreement."""


class Relay:
    """One rank's connections; every rank begins the same agreements, in the same order.

    Args:
        rank: this rank.
        world_size: number of ranks.
        after: connections to the ranks 1, 2, 4, ... after this one; the first is after the last.
        before: connections from the ranks 1, 2, 4, ... before this one.
        roll: what the ranks know of each other.

    Attributes:
        waits: how many agreements were waited for as soon as they had begun.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        after: Sequence[socket.socket],
        before: Sequence[socket.socket],
        roll: Witness,
    ) -> None:
        self._rank, self._world_size, self._roll = rank, world_size, roll
        self._after, self._before = after, before
        self._received = [bytearray() for _ in before]
        self._has_ended = [False] * len(before)
        self._lock = threading.Lock()  # a thread that watches streams looks, too
        self.waits = 0
        for connection in (*after, *before):
            connection.setblocking(False)
        self.forget = finalize(self, _close, after, before)
        _of_this_process.add(self)

    def show(self, values: Sequence[int], timeout: float) -> Passed:
        """Begin a `maximum`; nothing else is begun until it is complete."""
        return self._begin(list(values), _maximum, timeout)

    def maximum(self, values: Sequence[int], timeout: float) -> list[int]:
        """The elementwise maximum over all ranks of equally many numbers.

        Args:
            values: this rank's.
            timeout: seconds to wait for another rank.

        Raises:
            LostPeerError: a rank has gone or has failed, or did not come in time.
        """
        self.waits += 1
        found: list[int] = self.show(values, timeout).wait()
        return found

    def share(self, value: Any, timeout: float) -> list[Any]:
        """What every rank passes, by rank, as `maximum`: anything small that can be pickled."""
        self.waits += 1
        known = self._begin({self._rank: pickle.dumps(value)}, _union, timeout).wait()
        return [pickle.loads(known[rank]) for rank in range(self._world_size)]

    def _begin(self, value: Any, merge: _Merge, timeout: float) -> Passed:
        passed = Passed(self, value, merge, timeout)
        with self._lock:
            self._send(passed)
        return passed

    def advance(self, passed: Passed) -> bool:
        """Do what can be done of an agreement; whether it is complete."""
        with self._lock:
            while passed.step < len(self._before):
                frame = self._frame(passed.step)
                if frame is None:
                    return False
                passed.value = passed.merge(passed.value, pickle.loads(frame))
                passed.step += 1
                if passed.step < len(self._before):
                    self._send(passed)
                else:
                    self._roll.seen()
            return True

    def wait(self, passed: Passed) -> None:
        """Wait until an agreement is complete."""
        begun = time.monotonic()
        around = begun + LOOK_S
        while not self.advance(passed):
            now = time.monotonic()
            if now < begun + _SPIN_S:
                time.sleep(0)  # other threads of this process may go on
                continue
            if now > begun + passed.timeout:
                raise LostPeerError([], passed.timeout)
            if now >= around:
                around = now + LOOK_S
                self._roll.look([])
            step = passed.step
            if self._has_ended[step]:
                raise LostPeerError([(self._rank - (1 << step)) % self._world_size])
            poll = select.poll()
            poll.register(self._before[step], select.POLLIN)
            poll.poll(1e3 * min(LOOK_S, max(begun + passed.timeout - now, 0)))

    def _frame(self, step: int) -> bytes | None:
        """The next frame from the rank that is heard at a step, if it is there."""
        received = self._received[step]
        while True:
            if len(received) >= _HEAD.size:
                end = _HEAD.size + _HEAD.unpack_from(received)[0]
                if len(received) >= end:
                    frame = bytes(received[_HEAD.size : end])
                    del received[:end]
                    return frame
            if not self._receive(step):
                return None

    def _receive(self, step: int) -> bool:
        """Take what has come from the rank that is heard at a step; whether anything has."""
        if self._has_ended[step]:
            return False
        try:
            data = self._before[step].recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._has_ended[step] = not data
        self._received[step] += data
        return bool(data)

    def _send(self, passed: Passed) -> None:
        """Send what has been heard of, to the rank that hears this one at this step."""
        data = pickle.dumps(passed.value)
        rest = memoryview(_HEAD.pack(len(data)) + data)
        connection, deadline = self._after[passed.step], time.monotonic() + passed.timeout
        while rest:
            try:
                rest = rest[connection.send(rest) :]
            except BlockingIOError:  # it may be sending as much, and wait for others to read
                for step in range(len(self._before)):
                    self._receive(step)
                if time.monotonic() > deadline:
                    raise LostPeerError([], passed.timeout) from None
                time.sleep(_PAUSE_S)
            except OSError:  # it has gone, or its host has: who waits for it says so
                return


class Passed:
    """An agreement under way: see `Relay`."""

    def __init__(self, relay: Relay, value: Any, merge: _Merge, timeout: float) -> None:
        self._relay, self.timeout = relay, timeout
        self.value, self.merge, self.step = value, merge, 0

    def is_done(self) -> bool:
        """Whether all ranks have been heard of."""
        return self._relay.advance(self)

    def wait(self) -> Any:
        """What came of it; see `Relay.maximum`."""
        self._relay.wait(self)
        return self.value

    def share(self, value: Any) -> list[Any]:
        """See `Relay.share`."""
        return self._relay.share(value, self.timeout)


def _maximum(one: list[int], other: list[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


def _union(one: dict[int, bytes], other: dict[int, bytes]) -> dict[int, bytes]:
    return {**one, **other}


def make_relay(
    rank: int,
    world_size: int,
    store: dist.Store,
    share: Callable[[Any], list[Any]],
    roll: Witness,
) -> Relay | None:
    """The relay of a rank; None, with a warning, if ranks do not reach each other's ports.

    All ranks of the group make this call.

    Args:
        rank: this rank.
        world_size: number of ranks.
        store: in which the ranks have met: the network that leads there is the one to listen on.
        share: every rank's value, by rank: a collective.
        roll: see `Relay`.
    """
    listener, failure, token = None, "", secrets.token_bytes(_TOKEN_BYTES)
    try:
        listener = listen(store)
    except OSError as error:
        failure = f"rank {rank} cannot listen: {error}"
    places = share(listener and (listener.getsockname()[:2], token))
    after: list[socket.socket] = []
    before: dict[int, socket.socket] = {}
    if listener is not None and all(places):
        try:
            for step in range((world_size - 1).bit_length()):
                address, wanted = places[(rank + (1 << step)) % world_size]
                after.append(socket.create_connection(address, _CONNECT_S))
                after[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                after[-1].sendall(_HELLO.pack(wanted, step))
            before = accepted(listener, token, len(after))
        except OSError as error:
            failure = f"rank {rank} does not reach the ranks after it, or is not reached: {error}"
    if listener is not None:
        listener.close()
    failures = [one for one in share(failure) if one]
    if failures:
        _close(after, list(before.values()))
        warnings.warn(
            "ranks cannot connect to each other's ports, so they wait for each other in every "
            f"call, in a collective of torch.distributed: {'; '.join(failures)}",
            stacklevel=2,
        )
        return None
    return Relay(rank, world_size, after, [before[step] for step in range(len(after))], roll)


def accepted(listener: socket.socket, token: bytes, count: int) -> dict[int, socket.socket]:
    """Connections from ranks, by step; those that do not send the token are closed."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + 2 * _CONNECT_S
    while len(found) < count:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_S)
        known, step = _hello(connection)
        if secrets.compare_digest(known, token) and step < count:
            found[step] = connection
        else:
            connection.close()
    return found


def _hello(connection: socket.socket) -> tuple[bytes, int]:
    """The token that is known to who has connected, and the step that the connection is for."""
    data = b""
    with suppress(TimeoutError):
        while len(data) < _HELLO.size and (more := connection.recv(_HELLO.size - len(data))):
            data += more
    token, step = _HELLO.unpack(data.ljust(_HELLO.size, b"\0"))
    return token, step


def _close(*connections: Sequence[socket.socket]) -> None:
    for connection in chain(*connections):
        connection.close()


def _forget_all() -> None:
    for relay in list(_of_this_process):
        relay.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)
