"""What a rank's end of a group offers (`Exchange`), and the calls in which it is used.

A group's calls follow one order, which is the same on every rank. `Calls` numbers them, refuses a
second thread in the middle of one, and sees to it that the ranks have agreed on a call before its
first row moves and before it returns. A rank that cannot go on tells the others.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

Message: TypeAlias = tuple[int, torch.Tensor]
"""A contiguous tensor, and the rank that it is sent to or received from."""


def untraced(function: F) -> F:
    """A function that torch.compile runs as it is.

    It would trace an operator's implementation where it has left a graph before the call, and fail
    at the first kernel, or at the first thing of torch.distributed that it does not know.

    Args:
        function: of positional arguments.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*arguments: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # importing it takes a second
            return function(*arguments)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments)

    return run  # type: ignore[return-value]


class Call(NamedTuple):
    """The identity of a call within its group.

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


class ExchangeError(RuntimeError):
    """The ranks of a group cannot go on together.

    One of them is missing, has failed in the middle of a call, or is in another call than the rest.
    """


class LostPeerError(ExchangeError):
    """A wait for other ranks has failed.

    Args:
        peers: the ranks waited for; empty: any of the group.
        why: what torch.distributed said.
    """

    def __init__(self, peers: Sequence[int], why: str = "") -> None:
        who = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}" if peers else "a rank"
        super().__init__(f"{who} did not answer" + (f": {why}" if why else ""))


class Connection(Protocol):
    """A rank's connection to its group, by which it says that it has left."""

    def leave(self, why: str) -> None:
        """Make the others' waits for this rank fail; the first rank's reason is kept for them."""

    def reason(self) -> str | None:
        """Why the first rank has left, if one did and has said so."""


class Scope:
    """A call under way on this rank, from its first agreement until its last wait.

    Attributes:
        call: its identity.
        in_step: whether an exception that leaves it now leaves it on every rank. All of them may
            then go on with their next call.
    """

    def __init__(self, calls: Calls, call: Call) -> None:
        self.call, self.in_step = call, False
        self._calls = calls

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._calls.leave(self, error)


class Calls:
    """One rank's calls of a group.

    Args:
        rank: this rank.
        world_size: number of ranks.
        connection: to the others.
        main: the thread that calls need not name; None: the main thread of the process.

    Attributes:
        rank: this rank.
        number: how many have begun.
        scope: the call under way; None: none is.
        failure: what has ended the group; None: nothing, as far as this rank knows.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connection: Connection,
        main: threading.Thread | None = None,
    ) -> None:
        self.rank, self.number = rank, 0
        self.scope: Scope | None = None
        self.failure: str | None = None
        self._world_size, self._connection = world_size, connection
        self._main = main or threading.main_thread()
        self._inside: dict[int, threading.Thread] = {}  # 0: who is in a call
        self._agreement: Callable[[], object] | None = None

    def enter(self, name: str, part: str, of: int = 0) -> Scope:
        """Begin a call; use the result in a ``with`` statement.

        Args:
            name: the function or module that was called.
            part: what of it, ``"forward"``, ``"backward"`` or ``"inputs"``.
            of: the number of the forward that a backward belongs to, else 0.

        Raises:
            ExchangeError: a rank has failed in an earlier call, or two threads of this rank use the
                group.
        """
        if self.failure is not None:
            raise ExchangeError(
                f"this group of {self._world_size} ranks cannot be used any more: {self.failure}; "
                "start the ranks again, or make a new group without those that are missing"
            )
        thread = threading.current_thread()
        other = self._inside.setdefault(0, thread)  # in one step: another may do the same
        if other is not thread or self.scope is not None:
            raise self._failed_by_threads(other, thread, name)
        self.number += 1
        # Backward, and forward again for a checkpoint, may run in a thread of autograd's.
        is_users = torch._C._current_graph_task_id() < 0
        is_named = is_users and thread is not self._main
        self.scope = Scope(self, Call(self.number, name, part, of, thread.name if is_named else ""))
        return self.scope

    def _failed_by_threads(
        self, other: threading.Thread, thread: threading.Thread, name: str
    ) -> ExchangeError:
        text = (
            f"on rank {self.rank}, threads {_name(other)} and {_name(thread)} both use a group of "
            f"{self._world_size} ranks (the second one in {name}), so that their calls are in no "
            "order; give each a group (torch.distributed.new_group), and a CUDA stream, of its own"
        )
        self._fail(text)
        return ExchangeError(text)

    def agree_later(self, agreement: Callable[[], object]) -> None:
        """Put off the agreement on this call until before its first row moves, or else its end."""
        self._agreement = agreement

    def before_rows(self) -> None:
        """Wait for the agreement on the call under way, if that is still to be done."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement()

    def leave(self, scope: Scope, error: BaseException | None) -> None:
        """End a call, and the group where this rank alone cannot go on.

        Raises:
            ExchangeError: in place of `error`, where that is only what the others' faults led to.
        """
        found = error
        try:
            if error is None or isinstance(error, Exception):
                # Also where this rank fails alone: others may be about to wait for its answer.
                self.before_rows()
        except Exception as late:
            found = late
        finally:
            self._agreement = self.scope = None
            self._inside.clear()
        if found is None:
            return
        if not scope.in_step:
            is_lost = isinstance(found, LostPeerError)
            text = (is_lost and self._connection.reason()) or str(found)
            if not is_lost:
                what = " ".join(str(found).split())[:200]
                text = f"rank {self.rank} failed in {scope.call}: {type(found).__name__}: {what}"
            self._fail(text)
            if is_lost:
                raise ExchangeError(f"{text}; this is rank {self.rank} in {scope.call}") from found
        if found is not error:
            raise found

    def _fail(self, text: str) -> None:
        if self.failure is None:
            self.failure = text
            self._connection.leave(text)


def _name(thread: threading.Thread) -> str:
    """Name of a thread for messages; threads that Python did not start are autograd's."""
    return "one of autograd" if thread.name.startswith("Dummy-") else repr(thread.name)


class _OfOneRank(Calls):
    """Calls of a single rank: no other has to make them in the same order, so none is counted."""

    def __init__(self) -> None:
        self.number = 0

    def enter(self, name: str, part: str, of: int = 0) -> Scope:
        return Scope(self, Call(0, name, part, of))

    def before_rows(self) -> None:
        pass

    def leave(self, scope: Scope, error: BaseException | None) -> None:
        pass


ALONE: Any = _OfOneRank()
"""The calls of a world of one rank."""


class Pending(Protocol):
    """A started transfer."""

    def wait(self) -> None:
        """Return when the received tensor may be read and the sent one reused."""


class Nothing:
    """A transfer of nothing."""

    def wait(self) -> None:
        """See `Pending.wait`."""


class Exchange(Protocol):
    """One rank's end of a group of ranks.

    Attributes:
        rank: this rank, in [0, world_size).
        world_size: number of ranks.
        sent_bytes: bytes that `start` has sent so far.
        calls: the calls of the group: transfers and agreements are part of one.

    It may have a `prepare` too, which makes what rows on a device travel by, when all ranks have
    agreed on a call.

    Whatever waits for a rank that has ended, has failed, or does not come in time raises a
    `LostPeerError`, which `Calls` explains.
    """

    rank: int
    world_size: int
    sent_bytes: int

    @property
    def calls(self) -> Calls:
        """See above."""

    def start(self, send: Message | None, receive: Message | None) -> Pending:
        """Begin sending a contiguous tensor to a rank, and receiving one from a rank.

        Between two ranks, transfers pair up in the order in which both start them.
        """

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """Show all ranks a number (int64) and some bytes; what is returned waits for theirs.

        All ranks call this in the same order. Nothing waits for what their devices have to compute.
        """

    def share(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank: a collective of small values that JSON has."""


@untraced
def all_gather(
    ends: Exchange, tensor: torch.Tensor, shapes: Sequence[Sequence[int]] | None = None
) -> list[torch.Tensor]:
    """Every rank's tensor, by rank, inside of a call.

    Args:
        ends: this rank's end of the group.
        tensor: this rank's; dtype and kind of device are the same on all ranks.
        shapes: of every rank's tensor; None: that of this rank's.

    Returns:
        One tensor for each rank, which the caller may write to. A rank sends its own to each other.
    """
    tensor, ranks = tensor.contiguous(), ends.world_size
    everyone = [tensor.new_empty(shapes[r] if shapes else tensor.shape) for r in range(ranks)]
    everyone[ends.rank].copy_(tensor)
    pending = []
    for step in range(1, ranks):
        to, source = (ends.rank + step) % ranks, (ends.rank - step) % ranks
        into = everyone[source]
        send = (to, tensor) if tensor.numel() else None
        pending.append(ends.start(send, (source, into) if into.numel() else None))
    for one in pending:
        one.wait()
    return everyone


class SoloExchange:
    """A world of one rank: as a `group`, says that this process holds the whole sequence."""

    rank = 0
    world_size = 1
    sent_bytes = 0
    calls = ALONE

    def start(self, send: Message | None, receive: Message | None) -> Pending:
        """See `Exchange.start`; there is nobody to send to."""
        raise AssertionError("a single rank has no peer")

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        return lambda: [(number, data)]

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        return [value]
