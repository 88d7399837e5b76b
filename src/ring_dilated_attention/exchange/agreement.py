"""Make a bad call an error on every rank: no rank may be left waiting for one that raised."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .calls import Call, ExchangeError, LostPeerError, Scope
from .interface import Exchange, untraced


class Shared(NamedTuple):
    """Arguments that must be equal on all ranks.

    Attributes:
        words: each by its name, as messages show it.
        digest: of all of them, which is what ranks compare.
        kind: of those that tell a kind of calls: see `settle`.
        advice: what to do where ranks differ, for the message.
    """

    words: Mapping[str, Any]
    digest: bytes
    kind: bytes
    advice: str = ""

    @classmethod
    def of(
        cls, words: Mapping[str, Any], advice: str = "", counted: Mapping[str, Any] | None = None
    ) -> Shared:
        """Arguments by name; `counted` are those that go on from call to call of one kind."""
        kind = _digest(words)
        if counted is None:
            return cls(words, kind, kind, advice)
        words = {**words, **counted}
        return cls(words, _digest(words), kind, advice)


def _digest(words: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(repr(words).encode()).digest()


_NOTHING = Shared.of({})


def agree(
    name: str,
    ends: Exchange,
    shared: Mapping[str, Any] | None,
    failure: Exception | None,
    device: torch.device,
    advice: str = "",
) -> None:
    """A call of the group that does nothing but agree: see `settle`.

    Args:
        name: what was called, for the message.
        ends: this rank's end of the group.
        shared: the arguments that must be equal on all ranks, by name; None if this rank refused.
        failure: why this rank refused its arguments; None if it did not.
        device: where the tensors of the call are.
        advice: what to do where the arguments differ, for the message.

    Raises:
        Exception: see `settle`.
    """
    if ends.world_size > 1:
        _agree_with_others(name, ends, shared, failure, device, advice)
        return
    with ends.calls.enter(name, "inputs") as scope:  # which torch.compile traces
        settle(scope, ends, device, None, failure)


@untraced
def _agree_with_others(
    name: str,
    ends: Exchange,
    shared: Mapping[str, Any] | None,
    failure: Exception | None,
    device: torch.device,
    advice: str,
) -> None:
    """`agree` on several ranks."""
    refuse_capture(name, ends, device)
    with ends.calls.enter(name, "inputs") as scope:
        settle(scope, ends, device, None if shared is None else Shared.of(shared, advice), failure)


def settle(
    scope: Scope,
    ends: Exchange,
    device: torch.device,
    shared: Shared | None = _NOTHING,
    failure: Exception | None = None,
    *,
    later: bool = False,
) -> None:
    """Raise on every rank unless all are in the same call, with the same arguments.

    On one host it is one small collective in shared memory, whatever the arguments: a rank that
    skipped it because it had seen its own arguments before could not tell that another rank's are
    new, and would go on without it. Between hosts that holds too, but a rank waits for the others
    in calls of a kind that is new to the group alone. In others it says which call it is in, and
    goes on; where ranks differ, all of them raise as soon as they know, which is in their next call
    at the latest, and in the call itself where they wait for rows.

    Args:
        scope: the call.
        ends: this rank's end of the group.
        device: where the tensors of the call are.
        shared: the arguments that must be equal on all ranks; None if this rank refused.
        failure: why this rank refused its arguments; None if it did not.
        later: whether this rank may go on until it needs the others, where all share a host: it
            shows which call it is in, and compares that of the others before it sends or receives
            the first row of the call. If there is none, ``calls.before_rows()`` does it at the end
            of the call, or else its next call.

    Raises:
        ValueError: other ranks refused their arguments, or ranks differ; the message names them.
        Exception: `failure`, on the ranks that have one.
        ExchangeError: the ranks are in different calls, or one of them is missing or has failed.
    """
    if ends.world_size > 1:
        numbers = _numbers(scope, shared, failure)
        scope.identify(numbers[0])
        show = getattr(ends, "show", None) if later and shared and failure is None else None
        shown = show and show(numbers, device)
        if shown is not None:
            ends.calls.agree_later(_Agreement(shown, shared))
            return
        _settle(scope, ends, device, numbers, shared, failure)
    if failure is not None:
        scope.in_step = True
        raise failure


def _settle(
    scope: Scope,
    ends: Exchange,
    device: torch.device,
    numbers: list[int],
    shared: Shared | None,
    failure: Exception | None,
) -> None:
    """`settle` on several ranks."""
    kind = scope.call.name, scope.call.part, device.type, shared and shared.kind
    known = shared is not None and failure is None and kind in ends.calls.kinds
    show = getattr(ends, "show_ahead", None)
    shown = show(numbers, device) if known and show else None
    if shown is not None:
        ends.calls.agree_later(_Agreement(shown, shared, shown.is_done))
        return
    _compare(scope, ends.maximum(numbers, device), ends.share, shared, failure)
    if failure is None:
        ends.calls.kinds.add(kind)


class _Shown(Protocol):
    """Numbers that this rank shows the others, and those that others show it."""

    def wait(self) -> list[int]:
        """The elementwise maximum over all ranks."""

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""


class _Agreement:
    """See `calls.Agreement`; it holds no `Exchange`, which it may outlive.

    Args:
        shown: this rank's `_numbers`.
        shared: the arguments that must be equal on all ranks.
        is_done: whether all ranks have been heard of; None: they are waited for before a row of
            the call moves.
    """

    def __init__(
        self, shown: _Shown, shared: Shared | None, is_done: Callable[[], bool] | None = None
    ) -> None:
        self.before_rows = is_done is None
        self._shown, self._shared, self._is_done = shown, shared, is_done
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._is_known = False

    def is_done(self) -> bool:
        return self._is_done is not None and self._is_done()

    def __call__(self, scope: Scope) -> None:
        with self._lock:
            self._find(scope)
        if self._error is not None:
            raise self._error

    def failure(self, scope: Scope) -> Exception | None:
        if not self.is_done() or not self._lock.acquire(blocking=False):
            return None
        try:
            self._find(scope)
        finally:
            self._lock.release()
        # A rank that is lost is the business of those who wait for it.
        return None if isinstance(self._error, LostPeerError) else self._error

    def _find(self, scope: Scope) -> None:
        if self._is_known:
            return
        self._is_known = True
        try:
            _compare(scope, self._shown.wait(), self._shown.share, self._shared, None)
        except (ExchangeError, ValueError) as error:
            self._error = error


def _numbers(scope: Scope, shared: Shared | None, failure: Exception | None) -> list[int]:
    """What is equal on all ranks where their calls are."""
    number, name, part, of, thread = scope.call
    text = f"{number} {of} {name} {part} {thread} ".encode()
    text += b"refused" if shared is None else shared.digest
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return [digest, -digest, int(failure is not None)]


def _compare(
    scope: Scope,
    found: list[int],
    share: Callable[[Any], list[Any]],
    shared: Shared | None,
    failure: Exception | None,
) -> None:
    """Raise unless all ranks' `_numbers`, of which `found` is the maximum, are the same."""
    largest, minus_smallest, failed = found[:3]
    if not failed and largest == -minus_smallest:
        return
    refusal = failure and f"{type(failure).__name__}: {failure}"
    everyone = share((scope.call, shared and shared.words, refusal))
    others = None if failed else _other_calls(everyone)
    error: Exception
    if others is not None:
        error = ExchangeError(others)
    else:
        advice = f". {shared.advice}" if shared and shared.advice and not failed else ""
        error = ValueError(f"{scope.call.name} {_disagreement(everyone)}{advice}")
    scope.differ(str(error))
    if others is not None or failure is None:
        raise error


def refuse_capture(name: str, ends: Exchange, device: torch.device) -> None:
    """Raise a `RuntimeError` where one of several ranks is capturing a CUDA graph.

    The others are not told: they would have to be by a collective, which cannot be captured either.
    """
    several = ends.world_size > 1 and device.type == "cuda"
    if several and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} on {ends.world_size} ranks cannot be captured in a CUDA graph: ranks agree on "
            "every call, which a replay would skip; call it outside of the graph"
        )


def _other_calls(everyone: list[tuple[Call, Mapping[str, Any] | None, str | None]]) -> str | None:
    """Which rank is in which call; None if all are in the same one."""
    ranks: dict[Call, list[int]] = {}
    for rank, (call, *_) in enumerate(everyone):
        ranks.setdefault(call, []).append(rank)
    if len(ranks) == 1:
        return None
    found = "; ".join(f"{_ranks(who)} in {call}" for call, who in ranks.items())
    return (
        f"ranks are in different calls, so none of them was computed: {found}. Every rank must "
        "make the same calls in the same order, backward included, and from the same thread"
    )


def _disagreement(everyone: list[tuple[Call, Mapping[str, Any] | None, str | None]]) -> str:
    """Say which ranks refused their arguments, or which arguments differ between ranks."""
    refused = [f"rank {rank}: {why}" for rank, (_, _, why) in enumerate(everyone) if why]
    if refused:
        return f"was refused on other ranks: {'; '.join(refused)}"
    calls = [shared or {} for _, shared, _ in everyone]
    differences = []
    for name in dict.fromkeys(name for shared in calls for name in shared):
        ranks: dict[str, list[int]] = {}
        for rank, shared in enumerate(calls):
            ranks.setdefault(str(shared.get(name, "not given")), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {_ranks(who)}" for value, who in ranks.items())
            differences.append(f"{name} is {values}")
    if not differences:
        orders = [f"{', '.join(shared)} on rank {rank}" for rank, shared in enumerate(calls)]
        differences.append(f"they are in another order, {'; '.join(orders)}")
    return f"was called with different arguments on different ranks: {'; '.join(differences)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
