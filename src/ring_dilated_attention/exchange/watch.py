"""Looks after transfers of CUDA streams, which no host waits for, so that they end.

A stream that waits for rows of a process which has gone would wait for good, and with it whoever
waits for the stream. A `Watch` finds such transfers, says so in the thread that made the call, and
lets the streams go on.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from .calls import Calls, Finding, LostPeerError, Roll
from .cuda_driver import query_while_capturing

LOOK_S = 0.25
"""Between two looks at what is under way."""
STUCK_S = 0.5
"""A transfer that could begin so long ago, and has not ended, may wait for a rank that has gone."""


class UnderWay(NamedTuple):
    """A transfer of this rank's streams.

    Attributes:
        may_begin: whether all has been computed that it waits for on this rank.
        is_done: whether it has ended.
        peers: the ranks that it waits for.
    """

    may_begin: Callable[[], bool]
    is_done: Callable[[], bool]
    peers: tuple[int, ...]


class Watch:
    """Watches the transfers of one rank of a group, in a thread of its own.

    Args:
        calls: of the group.
        roll: what the ranks know of each other.
        release: lets all streams go on that wait for another rank, until the function that it is
            given says that they are done. What they receive is worthless.
        timeout: seconds that a transfer may wait for a rank that is alive.
        prepare: called once in the watching thread.
    """

    def __init__(
        self,
        calls: Calls,
        roll: Roll,
        release: Callable[[Callable[[], bool]], None],
        timeout: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._under_way: deque[UnderWay] = deque()
        end = threading.Event()
        round_ = _Round(calls, roll, release, timeout, self._under_way, end.is_set)
        thread = threading.Thread(
            target=_run, args=(round_, prepare, end), daemon=True, name="ring-dilated-attention"
        )
        self._finish = weakref.finalize(self, _end, end, thread)
        thread.start()

    def end(self) -> None:
        """Watch no more."""
        self._finish()

    def add(self, transfer: UnderWay) -> None:
        """Watch a transfer; those of a rank end in the order in which they are added."""
        self._under_way.append(transfer)


def prepare_to_watch(device: torch.device) -> None:
    """Let a thread ask for events of a device, also while another one captures a CUDA graph."""
    torch.cuda.set_device(device)
    query_while_capturing()


def _run(round_: _Round, prepare: Callable[[], None], end: threading.Event) -> None:
    prepare()
    while not end.wait(LOOK_S):
        try:
            goes_on = round_.look()
        except Exception as error:  # such as a system that has no more sockets
            goes_on = False
            round_.give_up(error)
        if not goes_on:
            return
    round_.leave()


def _end(end: threading.Event, thread: threading.Thread) -> None:
    end.set()
    if thread is not threading.current_thread():
        thread.join(2)  # it must not be inside of CUDA's driver when the process leaves


class _Round:
    """What a watch does again and again; holds no reference to it, so that it can end."""

    def __init__(
        self,
        calls: Calls,
        roll: Roll,
        release: Callable[[Callable[[], bool]], None],
        timeout: float,
        under_way: deque[UnderWay],
        has_ended: Callable[[], bool],
    ) -> None:
        self._calls, self._roll, self._release = calls, roll, release
        self._timeout, self._under_way, self._has_ended = timeout, under_way, has_ended
        self._head: UnderWay | None = None
        self._since: float | None = None

    def look(self) -> bool:
        """Look once; return whether to go on."""
        if self._calls.look_aside():
            return False  # whoever found that has let the streams go on
        while self._under_way and self._under_way[0].is_done():
            self._under_way.popleft()
        if not self._under_way:
            self._is_not_stuck()
            return True
        lost = self._lost(self._under_way[0])
        if lost is None:
            return True
        finding = self._roll.failed() or self._roll.explain(lost)
        if not self._has_ended():  # meanwhile: whoever has ended it says why
            self._end_group(finding)
        return False

    def give_up(self, error: Exception) -> None:
        """End the group: nobody would find a rank that is lost any more."""
        if not self._has_ended():
            rank, what = self._calls.rank, f"{type(error).__name__}: {error}"
            self._end_group(Finding(rank, f"rank {rank} cannot watch its transfers: {what}"))

    def leave(self) -> None:
        """Nobody looks any more: streams that wait in vain, such as when Python ends, go on."""
        if self._calls.failure is not None and not self._all_done():
            self._let_go()

    def _end_group(self, finding: Finding) -> None:
        if self._calls.fail(finding):  # else a thread of this rank knows, and says it
            self._calls.interrupt(finding.text)
        self._let_go()

    def _let_go(self) -> None:
        # Streams that go on may send what is not theirs to send. Who still waits for them must
        # have seen by then that this rank has failed.
        time.sleep(3 * LOOK_S)
        self._release(self._all_done)

    def _lost(self, head: UnderWay) -> LostPeerError | None:
        if self._roll.failed() is not None:
            return LostPeerError(head.peers)
        if head is not self._head or not head.may_begin():
            self._is_not_stuck()
            self._head = head
            return None
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < STUCK_S:
            return None
        self._roll.waits_for(head.peers[0], on_stream=True)
        try:
            self._roll.look(head.peers)
        except LostPeerError as lost:
            return lost
        if now - self._since > self._timeout:
            return LostPeerError(head.peers, self._timeout)
        return None

    def _is_not_stuck(self) -> None:
        self._head = None
        if self._since is not None:
            self._since = None
            self._roll.waits_for(None, on_stream=True)

    def _all_done(self) -> bool:
        return all(transfer.is_done() for transfer in list(self._under_way))


T = TypeVar("T")

_WAIT_S = 2.0
"""A transfer takes less to begin, except where the device's queue is full."""


class Gate:
    """Transfers are begun by its `begin`, until it has been shut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shut = False

    def begin(self, transfer: Callable[[], T]) -> T:
        """What a function returns that begins a transfer.

        Raises:
            LostPeerError: the gate has been shut; whoever did so knows why.
        """
        with self._lock:  # by itself: an error that a thread is told may come in any function
            if self._is_shut:
                raise LostPeerError([])
            return transfer()

    def shut(self) -> None:
        """Let no transfer begin any more, and wait for one that is being begun."""
        self._is_shut = True
        if self._lock.acquire(timeout=_WAIT_S):
            self._lock.release()
