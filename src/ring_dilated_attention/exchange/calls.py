"""The calls of a group: each has an identity, and a rank that cannot go on tells the others.

A group's calls follow one order, which is the same on every rank. `Calls` numbers them, refuses a
second thread in the middle of one, and turns whatever ends a call on this rank alone into an error
on every rank. What the ranks let each other know travels by a `Roll`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from .caller import Caller

_MOST = 4096
"""Kinds that a group remembers: a kilobyte each at most."""


class Kinds:
    """Kinds of calls: the last ones, the same on all ranks, which add them in one order."""

    def __init__(self) -> None:
        self._kinds: dict[Any, None] = {}

    def __contains__(self, kind: Any) -> bool:
        return kind in self._kinds

    def add(self, kind: Any) -> None:
        """Add one, and drop the one that was added first of too many."""
        self._kinds[kind] = None
        if len(self._kinds) > _MOST:
            del self._kinds[next(iter(self._kinds))]

    def clear(self) -> None:
        """Forget all."""
        self._kinds.clear()


_MOST_TAG = 2**31 - 1


class Call(NamedTuple):
    """What tells a call from every other one of its group.

    Attributes:
        number: how many calls of the group this rank had begun, this one included.
        name: the function or module that was called.
        part: what of it: ``"forward"``, ``"backward"`` or ``"inputs"``.
        of: the number of the forward that a backward belongs to; 0 for the others.
        thread: the name of the thread that calls; empty in the main thread and in autograd's.
    """

    number: int
    name: str
    part: str
    of: int = 0
    thread: str = ""

    def __str__(self) -> str:
        part = f"{self.part} of call {self.of}" if self.of else self.part
        thread = f", thread {self.thread!r}" if self.thread else ""
        return f"call {self.number} ({self.name}, {part}{thread})"


class Finding(NamedTuple):
    """Which rank is at fault, and what is known of it, in words that name the rank."""

    rank: int
    text: str


class ExchangeError(RuntimeError):
    """The ranks of a group cannot go on together.

    One of them is missing, has failed in the middle of a call, or is in another call than the rest.
    """


class LostPeerError(ExchangeError):
    """A wait for other ranks ended without what it waited for; `Calls` finds out why.

    Args:
        peers: the ranks waited for; empty: any of the group.
        waited: seconds until the wait was given up; None: it failed before that.
    """

    def __init__(self, peers: Sequence[int], waited: float | None = None) -> None:
        who = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}" if peers else "a rank"
        after = "" if waited is None else f" within {waited:g} s"
        super().__init__(f"{who} did not answer{after}")
        self.peers, self.waited = tuple(peers), waited


class Roll(Protocol):
    """What a rank lets the others of its group know, and learns of them."""

    def begin(self, call: Call) -> None:
        """This rank begins a call."""

    def end(self) -> None:
        """This rank has left its call, with the others."""

    def waits_for(self, rank: int | None, *, on_stream: bool = False) -> None:
        """Note which rank this one waits for, on the host or a stream; None: it waits no longer."""

    def look(self, peers: Sequence[int]) -> None:
        """Raise a `LostPeerError` if waiting for these ranks is known to be in vain."""

    def fail(self, finding: Finding) -> None:
        """This rank leaves its call alone, and takes part in no other one of the group."""

    def failed(self) -> Finding | None:
        """What made a rank leave its call alone, if one did."""

    def explain(self, lost: LostPeerError) -> Finding:
        """Why a wait was in vain. A rank that only waits for another is not at fault."""


class Scope:
    """A call under way on this rank, from its first agreement until its last wait.

    Attributes:
        call: its identity.
        in_step: whether an exception that leaves it now leaves it on every rank.
    """

    def __init__(self, calls: Calls, call: Call) -> None:
        self.call, self.in_step = call, False
        self._calls = calls

    def identify(self, identity: int) -> None:
        """Have messages say which call they belong to, by a number that differs in others."""
        self._calls.tag = identity & _MOST_TAG

    def differ(self, why: str) -> None:
        """The ranks are in different calls, or differ in an argument, and all of them know.

        All raise now, and may go on with their next call, for which what is under way does not
        count.

        Args:
            why: what all ranks raise.
        """
        self.in_step = True
        self._calls.begin_anew(why)

    def __enter__(self) -> Scope:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._calls.leave(self, error)


class _Aside(Scope):
    """A call as a thread sees it that watches streams: the thread that calls is to be told."""

    def __init__(self, calls: Calls, scope: Scope, late: Agreement) -> None:
        super().__init__(calls, scope.call)
        self._scope, self._late = scope, late

    def differ(self, why: str) -> None:
        self._scope.in_step = True
        self._calls.begin_anew(why, self._late)


class Agreement(Protocol):
    """That all ranks are in a call, which is still to be found."""

    before_rows: bool
    """Whether it is waited for before a row of the call moves; else in the next call."""

    def is_done(self) -> bool:
        """Whether all ranks have been heard of; False where `before_rows`."""

    def __call__(self, scope: Scope) -> None:
        """Wait for all ranks, and raise unless they are in this call."""

    def failure(self, scope: Scope) -> Exception | None:
        """What the call raises, if that is known by now; for another thread than the one it is in.

        None where that thread is about to find it.
        """


class Calls:
    """One rank's calls of a group.

    Args:
        rank: this rank.
        world_size: number of ranks.
        roll: how the ranks know of each other.
        close: ends all transfers of this rank with the others, who wait for none of them any more.
        main: the thread that calls need not name; None: the main thread of the process.
        begin_anew: lets go of transfers under way, when all ranks know that they are in vain.
        stop: lets no transfer begin any more, and waits for one that is being begun.

    Attributes:
        rank: this rank.
        number: how many have begun.
        tag: what tells messages of the last one from those of others, in 31 bits.
        kinds: of the calls that all ranks have agreed on before.
        failure: what has ended the group; None: nothing, as far as this rank knows.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        roll: Roll,
        close: Callable[[], None] = lambda: None,
        main: threading.Thread | None = None,
        begin_anew: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = self.tag = 0
        self.kinds = Kinds()
        self._begin_anew, self._stop = begin_anew, stop
        self.rank, self._world_size = rank, world_size
        self._roll, self._close = roll, close
        self.failure: Finding | None = None
        self._main = main or threading.main_thread()
        self._caller = Caller(self._main)
        self._in_call: dict[int, tuple[threading.Thread]] = {}  # 0: who is; others are kept out
        self._scope: Scope | None = None  # of the last call
        self._late: Agreement | None = None

    def enter(self, name: str, part: str, of: int = 0) -> Scope:
        """Begin a call; use the result in a ``with`` statement.

        Args:
            name: the function or module that was called.
            part: what of it, ``"forward"``, ``"backward"`` or ``"inputs"``.
            of: the number of the forward that a backward belongs to, else 0.

        Raises:
            ExchangeError: a rank has failed in an earlier call, the ranks were in different calls
                before, or two threads of this rank use the group.
        """
        with self._caller.telling:  # not while another thread lets go of what was under way
            failure = self.failure or self._roll.failed()
        if failure is not None:
            self.failure = failure
            self._caller.has_said()  # be it in a thread of autograd's
            raise ExchangeError(
                f"this group of {self._world_size} ranks cannot be used any more: {failure.text}; "
                "start the ranks again, or make a new group without those that are missing"
            )
        if self._late is not None and self._scope is not None:
            self._take(name)
            with self._scope:  # what the last call has left undone
                self.agree_now()
        thread = self._take(name)
        self.number += 1
        # Backward, and forward again for a checkpoint, may run in a thread of autograd's.
        is_users = torch._C._current_graph_task_id() < 0
        if is_users:
            self._caller.thread = thread
        is_named = is_users and thread is not self._main
        call = Call(self.number, name, part, of, thread.name if is_named else "")
        self._roll.begin(call)
        self._scope = Scope(self, call)
        return self._scope

    def _take(self, name: str) -> threading.Thread:
        """Keep other threads out, until the scope that is entered now ends."""
        thread = threading.current_thread()
        taken = (thread,)
        found = self._in_call.setdefault(0, taken)  # at once: the thread may be told something
        if found is not taken:
            if found[0] is not self._caller.may_have_left:
                self._refuse(thread, found[0], name)
            self._in_call[0] = taken
        self._caller.may_have_left = None
        return thread

    def agree_later(self, agreement: Agreement) -> None:
        """Have the call under way agreed on later: in the next call at the latest."""
        self._late = agreement

    def agree_now(self) -> None:
        """Agree on the call under way, if that is still to be done."""
        with self._caller.telling:  # the thread that watches streams leaves it to this one now
            agreement, self._late = self._late, None
        if agreement is not None:
            assert self._scope is not None
            try:
                agreement(self._scope)
            except BaseException:
                self._caller.forget()  # this says it
                raise

    def before_rows(self) -> None:
        """Agree on the call under way if that comes before its rows, or need not be waited for."""
        if self._late is not None and self._late.before_rows:
            self.agree_now()
        self.look()

    def look(self) -> None:
        """Raise if the ranks are known to be in different calls; waits for none of them."""
        if self._late is not None and self._late.is_done():
            self.agree_now()

    def look_aside(self) -> bool:
        """Whether the ranks are known to be in different calls; the thread that calls is told.

        For a thread that watches streams.
        """
        late, scope = self._late, self._scope
        if late is None or scope is None:
            return False
        return late.failure(_Aside(self, scope, late)) is not None

    def begin_anew(self, why: str, late: Agreement | None = None) -> None:
        """Forget what was agreed on, and what is under way: all ranks do so at once.

        Args:
            why: what all ranks raise.
            late: what a watching thread has found it by; None: this thread calls, and raises it.
        """
        with self._caller.telling:
            if late is not None and late is self._late:  # else the thread that calls finds it, too
                self.interrupt(why, late)
            self.kinds.clear()
            self._begin_anew()  # last: a thread that waits for a stream goes on now

    def _refuse(self, thread: threading.Thread, other: threading.Thread, name: str) -> None:
        text = (
            f"on rank {self.rank}, threads {_name(other)} and {_name(thread)} both use a group of "
            f"{self._world_size} ranks (the second one in {name}), so that their calls are in no "
            "order; give each a group (torch.distributed.new_group), and a CUDA stream, of its own"
        )
        self.fail(Finding(self.rank, text))
        raise ExchangeError(text)

    def leave(self, scope: Scope, error: BaseException | None) -> None:
        """End a call: what `Scope` does as its ``with`` statement ends.

        Where ranks differ, or one is lost, whoever finds it ends transfers that this thread may be
        beginning. What they raise then is not what is wrong.
        """
        if error is None or isinstance(error, Exception):
            try:
                self.look()
            except BaseException as found:
                self._leave(scope, found)
                raise
        self._leave(scope, error)

    def _leave(self, scope: Scope, error: BaseException | None) -> None:
        """End a call, and the group where this rank alone cannot go on."""
        try:
            if error is None or scope.in_step:
                self._roll.end()
                return
            known, is_lost = self.failure, isinstance(error, LostPeerError)
            is_own = isinstance(error, Exception) and not isinstance(error, ExchangeError)
            if known and (is_lost or is_own):
                finding = known
            elif isinstance(error, LostPeerError):
                finding = self._roll.explain(error)
            else:
                finding = Finding(self.rank, f"rank {self.rank} failed in {scope.call}: "
                                  f"{type(error).__name__}: {_one_line(error)}")  # fmt: skip
            self.fail(finding)
            self._close()  # last: who loses a transfer with this rank asks why
        finally:
            self._caller.may_have_left = None
            self._in_call.clear()
        if finding is known or is_lost:
            self._caller.has_said()
            raise ExchangeError(
                f"{finding.text}; this is rank {self.rank} in {scope.call}"
            ) from error

    def fail(self, finding: Finding) -> bool:
        """Take part in no further call of the group, and tell the others why.

        Returns:
            Whether nothing of this rank has said so before.
        """
        if self.failure is not None:
            return False
        self.failure = finding
        self._roll.fail(finding)
        return True

    def interrupt(self, why: str, late: Agreement | None = None) -> None:
        """Raise an `ExchangeError` in the thread that calls, which has gone on to something else.

        Calls of this group have returned what their streams have yet to receive, and never will.

        Args:
            why: what has happened.
            late: what has failed, which the next call raises, unless this has come before.
        """
        self._stop()  # told in the midst of it, that thread would leave half a transfer behind

        def heard() -> None:
            if late is not None and self._late is late:
                self._late = None

        whose = f"rank {self.rank}, whose calls up to call {self.number} of the group of"
        text = f"{why}; this is {whose} {self._world_size} ranks have no valid results"
        self._caller.tell(ExchangeError, text, heard)


def _name(thread: threading.Thread) -> str:
    """Of a thread, for messages: those that Python did not start are autograd's."""
    return "one of autograd" if thread.name.startswith("Dummy-") else repr(thread.name)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:157]}..."
