"""The interface `Exchange`, its implementation for one rank, and `untraced` functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from .calls import Call, Calls, Scope

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
