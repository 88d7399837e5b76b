"""Make a bad call an error on every rank: no rank may be left waiting for one that raised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from .interface import Call, Calls, Exchange, ExchangeError, Scope, untraced


class Shared(NamedTuple):
    """Arguments that must be equal on all ranks.

    Attributes:
        words: each by its name, as messages show it.
        digest: of all of them, which is what ranks compare.
        advice: what to do where ranks differ, for the message.
    """

    words: Mapping[str, Any]
    digest: bytes
    advice: str = ""

    @classmethod
    def of(cls, words: Mapping[str, Any], advice: str = "") -> Shared:
        """Arguments by name."""
        return cls(words, hashlib.blake2b(repr(words).encode()).digest(), advice)


_NOTHING = Shared.of({})
_REFUSED = -1
"""Shown in place of a digest, which is never negative, by a rank that refused its arguments."""


class together:  # noqa: N801
    """In its ``with`` block this rank may fail; at the end all ranks go on, or all of them raise.

    The one way to call what may raise on some ranks only: a rank that raised alone would leave the
    others waiting for it. Ranks must not wait for each other inside of the block.

        with together("unshard", ends, device) as agreed:
            check(tensor)
            agreed.on({"layout": layout})

    Args:
        where: the call under way; or the name of a function, for a call of its own that does
            nothing but agree.
        ends: this rank's end of the group.
        device: where the tensors of the call are; may be set inside of the block, too.
        later: see `settle`.
        advice: what to do where ranks differ, for the message.

    Attributes:
        shared: the arguments that must be equal on all ranks; None: none.
        device: see above.

    Raises:
        Exception: what the block has raised, on the ranks where it did; else see `settle`.
    """

    def __init__(
        self,
        where: Scope | str,
        ends: Exchange,
        device: torch.device,
        *,
        later: bool = False,
        advice: str = "",
    ) -> None:
        self.shared: Shared | None = None
        self.device = device
        self._where, self._ends, self._later, self._advice = where, ends, later, advice

    def on(self, words: Mapping[str, Any]) -> None:
        """Compare these arguments with those of the other ranks."""
        if self._ends.world_size > 1:
            self.shared = Shared.of(words, self._advice)

    def __enter__(self) -> together:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # such as KeyboardInterrupt: it is not waited for anybody
        shared = None if error is not None else self.shared or _NOTHING
        if isinstance(self._where, Scope):
            settle(self._where, self._ends, self.device, shared, error, later=self._later)
        else:
            agree(self._where, self._ends, shared, error, self.device)


def agree(
    name: str,
    ends: Exchange,
    shared: Mapping[str, Any] | Shared | None,
    failure: Exception | None,
    device: torch.device,
) -> None:
    """A call of the group that does nothing but agree: see `settle`.

    Args:
        name: what was called, for the message.
        ends: this rank's end of the group.
        shared: the arguments that must be equal on all ranks; None if this rank refused.
        failure: why this rank refused its arguments; None if it did not.
        device: where the tensors of the call are.

    Raises:
        Exception: see `settle`.
    """
    if ends.world_size > 1:
        words = shared if shared is None or isinstance(shared, Shared) else Shared.of(shared)
        _agree_with_others(name, ends, words, failure, device)
    elif failure is not None:
        raise failure


@untraced
def _agree_with_others(
    name: str,
    ends: Exchange,
    shared: Shared | None,
    failure: Exception | None,
    device: torch.device,
) -> None:
    refuse_capture(name, ends, device)
    with ends.calls.enter(name, "inputs") as scope:
        settle(scope, ends, device, shared, failure)


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

    It is one small collective, whatever the arguments: a rank that skipped it because it had seen
    its own arguments before could not tell that another rank's are new.

    Args:
        scope: the call.
        ends: this rank's end of the group.
        device: where the tensors of the call are.
        shared: the arguments that must be equal on all ranks; None if this rank refused.
        failure: why this rank refused its arguments; None if it did not.
        later: whether this rank may go on until it needs the others: it shows which call it is in,
            and compares that of the others before it sends or receives the first row of the call,
            or else before the call ends.

    Raises:
        ValueError: other ranks refused their arguments, or ranks differ; the message names them.
        Exception: `failure`, on the ranks that have one.
        ExchangeError: the ranks are in different calls, or one of them is missing or has failed.
    """
    if ends.world_size > 1:
        agreement = _begin(scope, ends, shared, failure, device)
        if later and failure is None:
            ends.calls.agree_later(agreement)
            return
        agreement()
    if failure is not None:
        scope.in_step = True
        raise failure


def _begin(
    scope: Scope,
    ends: Exchange,
    shared: Shared | None,
    failure: Exception | None,
    device: torch.device | None,
    data: bytes = b"",
) -> Callable[[], list[bytes]]:
    """Show the others which call this rank is in; what is returned compares it with theirs."""
    number = _REFUSED
    if failure is None:
        text = repr((scope.call, device and device.type)).encode()
        text += b"" if shared is None else shared.digest
        # In 56 bits: never negative as int64.
        number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return partial(_compare, scope, ends, shared, failure, device, ends.begin(number, data))


def _compare(
    scope: Scope,
    ends: Exchange,
    shared: Shared | None,
    failure: Exception | None,
    device: torch.device | None,
    found: Callable[[], list[tuple[int, bytes]]],
) -> list[bytes]:
    """The data of all ranks; raises unless all are in the same call, and none has refused."""
    everyone = found()
    numbers = {number for number, _ in everyone}
    if len(numbers) == 1 and _REFUSED not in numbers:
        prepare = getattr(ends, "prepare", None)
        if prepare is not None and device is not None:
            prepare(device)
        return [data for _, data in everyone]
    refusal = failure and f"{type(failure).__name__}: {failure}"
    said = json.dumps((scope.call, _in_words(shared, device), refusal)).encode()
    told = [json.loads(data) for _, data in ends.begin(0, said)()]
    stories: list[_Story] = [(Call(*call), words, refusal) for call, words, refusal in told]
    scope.in_step = True  # all ranks have found the same
    is_refused = any(refusal for *_, refusal in stories)
    others = None if is_refused else _other_calls(stories)  # a refusal may come before the call
    if others is not None:
        raise ExchangeError(others)
    if failure is None:
        advice = f". {shared.advice}" if shared and shared.advice and not is_refused else ""
        raise ValueError(f"{scope.call.name} {_disagreement(stories)}{advice}")
    return []


def _in_words(shared: Shared | None, device: torch.device | None) -> dict[str, str]:
    words = {} if shared is None else {name: str(value) for name, value in shared.words.items()}
    return words if device is None else {**words, "device": device.type}


class Agreeing:
    """`share` of an `Exchange` that has `begin`."""

    world_size: int
    begin: Callable[..., Callable[[], list[tuple[int, bytes]]]]
    calls: Any

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`; the ranks are in the same call, or all of them raise."""
        if self.world_size == 1:
            return [value]
        calls: Calls = self.calls
        calls.before_rows()
        scope = calls.scope or Scope(calls, Call(calls.number, "a collective", "between calls"))
        ends: Any = self
        said = json.dumps(value).encode()
        return [json.loads(data) for data in _begin(scope, ends, None, None, None, said)()]


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


_Story = tuple[Call, Mapping[str, str], str | None]
"""A rank's call, the arguments that must be equal, and why it refused them."""


def _other_calls(everyone: list[_Story]) -> str | None:
    """The message that says which rank is in which call; None if all are in the same one."""
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


def _disagreement(everyone: list[_Story]) -> str:
    """Say which ranks refused their arguments, or which arguments differ between ranks."""
    refused = [f"rank {rank}: {why}" for rank, (_, _, why) in enumerate(everyone) if why]
    if refused:
        return f"was refused on other ranks: {'; '.join(refused)}"
    calls = [shared for _, shared, _ in everyone]
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
