"""A step of generation in a CUDA graph: one launch, whatever the step is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .cache import DilatedKVCache, Lengths

_WARM_UPS = 3
"""Calls before the capture, as torch's documentation asks for: kernels are compiled in them."""


class CapturedStep:
    """A step that is captured in a CUDA graph once, and replayed for each new position.

    The positions are read from the caches' `lengths` on the device, so the same graph goes on while
    the caches grow. Capturing leaves the caches as they were: the rows that it writes are those of
    the next positions, which the first call writes over.

    Args:
        step: from new tokens (or whatever the model takes) to the result: calls `cached_attention`
            once for each cache, and waits for nothing on the host.
        example: a CUDA tensor like those that the step will be called with; its values go through
            the model, but stay nowhere.
        caches: all that the step adds to, on the device of `example`. Where `reserve` or `select`
            changes one of them, the step has to be captured again.

    Raises:
        ValueError: `example` or a cache is not on a CUDA device, ranks share a cache's rows, there
            is no cache or no room for a step, the step adds several positions and `max_rewind` of a
            cache is not at least one less, or it does not add to each cache once.
        RuntimeError: the step cannot be captured: it waits for the device, or the decoding kernels
            do not compute its attention, and others read positions on the host.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor], torch.Tensor],
        example: torch.Tensor,
        caches: Sequence[DilatedKVCache],
    ) -> None:
        self._caches = tuple(caches)
        self._step = step  # replays read the tensors that it holds
        _check(example, self._caches)
        self._input, self._count = example.clone(), 1
        before = [cache.known() for cache in self._caches]
        # torch's own choice for captures is a stream of the device that was current at the first.
        side = torch.cuda.Stream(example.device)  # type: ignore[no-untyped-call]
        own_casts = torch.autocast(  # of weights, in each step: cached ones go with their context
            "cuda",
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        with torch.no_grad(), torch.cuda.device(example.device), own_casts:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    step(self._input)
                    self._count = self._added(before)
                    self._take_back(before)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                    self._output = step(self._input)
            finally:
                self._take_back(before)
        self._captured = [_read_by_graphs(cache) for cache in self._caches]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replay the step.

        Args:
            tokens: of the shape and dtype of the example.

        Returns:
            What the step returned when it was captured: one tensor, which the next call overwrites.

        Raises:
            ValueError: `tokens` has another shape or dtype, a cache has no room for more positions,
                or has been given others, or more room, since the step was captured.
        """
        if tokens.shape != self._input.shape or tokens.dtype != self._input.dtype:
            raise ValueError(
                f"the step was captured for {self._input.dtype} of shape "
                f"{tuple(self._input.shape)}; got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        for cache, then in zip(self._caches, self._captured, strict=True):
            if any(x is not y for x, y in zip(_read_by_graphs(cache), then, strict=True)):
                raise ValueError(
                    "a cache has other tensors or more room than when the step was captured, as "
                    "reserve() and select() give it: capture the step again"
                )
            cache.check_room(self._count)
        for cache in self._caches:
            cache.advanced(self._count)
        self._input.copy_(tokens)
        self._graph.replay()
        return self._output

    def _added(self, before: list[Lengths]) -> int:
        """How many positions a step adds to each cache."""
        counts = {
            now - then
            for cache, lengths in zip(self._caches, before, strict=True)
            for now, then in zip(cache.known_lengths, lengths.known, strict=True)
        }
        count, least = max(counts), min(cache.plan.max_rewind for cache in self._caches)
        if counts == {count} and 0 < count <= least + 1:
            return count
        self._take_back(before)
        raise ValueError(
            "a step must add the same number of positions, one at least, to every cache once; got "
            f"{sorted(counts)}. It is taken back when it has been captured: caches need "
            f"max_rewind={max(count - 1, 0)} at least; got {least}"
        )

    def _take_back(self, before: list[Lengths]) -> None:
        for cache, lengths in zip(self._caches, before, strict=True):
            cache.set_known(lengths, self._count)


def _read_by_graphs(cache: DilatedKVCache) -> tuple[Any, ...]:
    """The plan and tensors that a captured graph reads, whatever the cache is given later."""
    return cache.plan, cache.keys, cache.values, cache.lengths


def _check(example: torch.Tensor, caches: Sequence[DilatedKVCache]) -> None:
    """Raise unless a step with these can be captured."""
    if not caches:
        raise ValueError("there must be one cache at least that the step adds to; got none")
    for cache in caches:
        device = cache.keys.device
        if device.type != "cuda" or device != example.device:
            raise ValueError(
                "a CUDA graph needs example and caches on one CUDA device; got example on "
                f"{example.device} and a cache on {device}"
            )
        if cache.is_sharded:
            raise ValueError(
                f"{cache.plan.shards} ranks share the rows of a cache: they agree on every call, "
                "which a replay would skip. Make the caches with sharded=False, or call the step "
                "as it is"
            )
