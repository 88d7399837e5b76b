"""Compiled kernels called again, without the Python in front of them that chose them.

flash-attn-4's functions check, choose and look up for 60 to 250 us a call, and then call one to
three compiled kernels. For tensors of the same shapes, strides and dtypes these are always the same
ones: they are noted once, and called again with other tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ..caches import keep_few

MOST_KEPT = 1024
"""Kinds of calls that are kept, at about 2 KB each."""


class _Call(NamedTuple):
    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Kept(NamedTuple):
    """Calls whose tensors are numbers: inputs first, then temporaries."""

    calls: tuple[_Call, ...]
    temporaries: tuple[torch.Size, ...]


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
        if kept is not None:
            self._again(kept, inputs)
            return
        first = inputs[0]
        key = options, first.device, first.dtype, *[(x.shape, x.stride()) for x in inputs]
        kept = self.kept.get(key)
        if kept is not None:
            if memo is not None:
                memo[self] = kept
            self._again(kept, inputs)
        elif key in self.kept:
            run(nullcontext())
        else:
            calls: list[_Call] = []
            run(self._noting(calls))
            keep_few(self.kept, key, lambda: self._as_kept(calls, inputs), MOST_KEPT)

    def _again(self, kept: _Kept, inputs: Sequence[torch.Tensor]) -> None:
        create = inputs[0].new_empty
        tensors = [*inputs, *[create(x, dtype=torch.float32) for x in kept.temporaries]]
        for kernel, arguments in kept.calls:
            kernel(*[tensors[x.number] if type(x) is _Place else x for x in arguments])

    @contextmanager
    def _noting(self, calls: list[_Call]) -> Iterator[None]:
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

    def _as_kept(self, calls: Sequence[_Call], inputs: Sequence[torch.Tensor]) -> _Kept | None:
        """What to call again; None where that may not be all there is to it."""
        places = {_identity(x): _Place(number) for number, x in enumerate(inputs)}
        unseen = set(places)
        temporaries: list[torch.Tensor] = []
        for number, call in enumerate(calls):
            for x in call.arguments:
                if not isinstance(x, torch.Tensor):
                    if isinstance(x, tuple) and any(isinstance(y, torch.Tensor) for y in x):
                        return None
                    continue
                unseen.discard(_identity(x))
                if _identity(x) in places:
                    continue
                fresh = x.dtype == torch.float32 and x.is_contiguous() and x._base is None
                if number or not self._allocates or not fresh:
                    return None  # a copy of an input, as likely as not
                places[_identity(x)] = _Place(len(inputs) + len(temporaries))
                temporaries.append(x)
        # Tensors at one address are not told apart.
        if unseen or len({x.data_ptr() for x in inputs}) < len(inputs):
            return None
        found = [_Call(kernel, tuple(map(partial(_place, places), x))) for kernel, x in calls]
        return _Kept(tuple(found), tuple(x.shape for x in temporaries))


def _place(places: dict[Hashable, _Place], argument: Any) -> Any:
    return places[_identity(argument)] if isinstance(argument, torch.Tensor) else argument


def _identity(x: torch.Tensor) -> Hashable:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


class _Noting:
    """A cache of compiled kernels that notes how one thread calls them."""

    def __init__(self, cache: Any, calls: list[_Call]) -> None:
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
            self._calls.append(_Call(kernel, arguments))
            return result

        return call
