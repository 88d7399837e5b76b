"""Compiled kernels called again, without the Python in front of them that chose them.

flash-attn-4's functions check, choose and look up for 60 to 250 us a call, and then call one to
three compiled kernels. For tensors of the same shapes, strides and dtypes these are always the same
ones: they are noted once, and called again with other tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from ..kernels import keep_few

MOST_KEPT = 1024
"""Kinds of calls that are kept, at about 2 KB each."""


_Calls: TypeAlias = list[tuple[Callable[..., Any], Sequence[Any]]]
"""Kernels and their arguments."""


class _Kept(NamedTuple):
    """Calls with a `_Place` for each tensor: inputs first, then temporaries of these shapes."""

    calls: _Calls
    temporaries: list[torch.Size]


class _Place(NamedTuple):
    """A tensor among inputs and temporaries."""

    number: int


class Replay:
    """Calls of a function, each kind of which is noted once.

    Args:
        caches: objects whose attribute `compile_cache` maps to compiled kernels, through which the
            function finds every kernel that it calls; looked up when the function is first called.
        allocates: whether the function may allocate float32 temporaries, which its first kernel
            fills before others read them.

    Attributes:
        kept: the calls of each kind; None: those of this kind are not called again.
    """

    def __init__(self, caches: Callable[[], Sequence[Any]], *, allocates: bool) -> None:
        self._caches, self._allocates = caches, allocates
        self.kept: dict[Hashable, _Kept | None] = {}

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        options: Hashable,
        run: Callable[[AbstractContextManager[Any]], Any],
        memo: dict[Any, Any] | None = None,
    ) -> None:
        """Do what `run` does.

        Args:
            inputs: all tensors that `run` is given to read or to write, at distinct addresses; what
                differs in shape, stride, dtype or device is another kind of call.
            options: whatever else the call depends on.
            run: the call itself, inside of the context that it is given.
            memo: of the caller, who gives the same one for calls of one kind only: their kind then
                need not be worked out again. None: the caller has none.
        """
        kept = None if memo is None else memo.get(self)
        if kept is None:
            like = inputs[0].device, inputs[0].dtype
            key = options, *like, *[(x.shape, x.stride()) for x in inputs]
            if key not in self.kept:
                calls: _Calls = []
                run(self._noting(calls))
                keep_few(self.kept, key, lambda: self._as_kept(calls, inputs), MOST_KEPT)
                return
            kept = self.kept.get(key)
            if kept is None:
                run(nullcontext())
                return
            if memo is not None:
                memo[self] = kept
        made = [inputs[0].new_empty(x, dtype=torch.float32) for x in kept.temporaries]
        tensors = [*inputs, *made]
        for kernel, arguments in kept.calls:
            kernel(*[tensors[x.number] if type(x) is _Place else x for x in arguments])

    @contextmanager
    def _noting(self, calls: _Calls) -> Iterator[None]:
        """Note which kernels this thread calls, and with what."""
        owners = self._caches()
        caches = [owner.compile_cache for owner in owners]
        for owner, cache in zip(owners, caches, strict=True):
            owner.compile_cache = _Noting(cache, calls)
        try:
            yield
        finally:
            for owner, cache in zip(owners, caches, strict=True):
                owner.compile_cache = cache

    def _as_kept(self, calls: _Calls, inputs: Sequence[torch.Tensor]) -> _Kept | None:
        """What to call again; None where that may not be all there is to it."""
        places = {_identity(x): _Place(number) for number, x in enumerate(inputs)}
        kept, used = _Kept([], []), set()
        for kernel, arguments in calls:
            given: list[Any] = []
            for x in arguments:
                if isinstance(x, tuple) and any(isinstance(y, torch.Tensor) for y in x):
                    return None
                if not isinstance(x, torch.Tensor):
                    given.append(x)
                    continue
                if _identity(x) not in places:
                    fresh = x.dtype == torch.float32 and x.is_contiguous() and x._base is None
                    if kept.calls or not self._allocates or not fresh:
                        return None  # a copy of an input, as likely as not
                    places[_identity(x)] = _Place(len(inputs) + len(kept.temporaries))
                    kept.temporaries.append(x.shape)
                given.append(places[_identity(x)])
                used.add(given[-1])
            kept.calls.append((kernel, given))
        # Tensors at one address are not told apart; and what no kernel was given, something else
        # may have read or written.
        apart = len({x.data_ptr() for x in inputs}) == len(inputs)
        return kept if apart and len(used) == len(places) else None


def _identity(x: torch.Tensor) -> Hashable:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


class _Noting:
    """A cache of compiled kernels that notes how one thread calls them."""

    def __init__(self, cache: Any, calls: _Calls) -> None:
        self._cache, self._calls, self._thread = cache, calls, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def __setitem__(self, key: Hashable, kernel: Any) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Hashable) -> Any:
        kernel = self._cache[key]
        if threading.get_ident() != self._thread:
            return kernel

        def call(*arguments: Any) -> Any:
            result = kernel(*arguments)
            self._calls.append((kernel, arguments))
            return result

        return call
