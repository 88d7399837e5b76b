"""Attention of one new position to the caches of all layers of a model, for one row of the batch.

A step of decoding on a CPU takes the time of its operations, each a few microseconds, more than
that of their arithmetic. So what the layers of a step have in common is worked out once for all of
them, and their queries, scores and results lie in the same memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ..tiles import Backend
from .cache import DilatedKVCache
from .one_position import DeviceStep, steps_ahead
from .products import Products, select_for_one_position, takes_products, views_of
from .slots import are_together, both_of

_AHEAD = 64
"""Positions whose steps are worked out together."""


class RowAttention:
    """Attention of a model's layers, step by step: one new position of one row of the batch.

    A step is `begin`, then for each layer writing `query` and `key_value` and calling `attend`, and
    `finish`, which counts the position: of a step that ends before, the caches know nothing.

    Args:
        caches: of all layers: of one plan, holding the same positions, as `fits` allows them.
        query: (1, kv_heads, group, head_dim), contiguous, which the caller writes to: times the
            factor on the scores.
        key_value: keys of all KV heads and values behind them, (1, 2 * kv_heads, head_dim), which
            the caller writes to.
        out: like `query`, where its memory begins: `attend` writes to it what it has found.
    """

    def __init__(
        self,
        caches: Sequence[DilatedKVCache],
        query: torch.Tensor,
        key_value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._caches = tuple(caches)
        self._query, self._key_value = query, key_value
        self._out = out
        self._held: tuple[torch.Tensor, ...] = ()
        self._first, self._steps = 0, list[DeviceStep]()

    @staticmethod
    def fits(cache: DilatedKVCache, backend: Backend) -> bool:
        """Whether this computes attention to such a cache, where `backend` is asked for."""
        batch, _, head_dim = cache.keys.shape
        device, dtype = cache.keys.device, cache.keys.dtype
        if cache.is_sharded or device.type != "cpu":
            return False
        selection = select_for_one_position(backend, device, dtype, head_dim, batch)
        return takes_products(selection, batch, dtype)

    def begin(self) -> None:
        """Work out what the layers have in common.

        Raises:
            ValueError: there is no room for one more position.
        """
        self._caches[0].check_room(1)
        number = self._caches[0].known_lengths[0] - self._first
        held = tuple(cache.keys for cache in self._caches)
        # Caches may have been reserved, or taken back, since the last step.
        is_new = len(held) != len(self._held) or any(map(operator.is_not, held, self._held))
        if is_new or not 0 <= number < len(self._steps):
            with torch.inference_mode(False), torch.no_grad():  # for steps in any mode
                if is_new:
                    self._clear()
                self._plan_ahead()
            number = 0
        self._products.begin(number)
        self._sources, self._targets = self._steps[number].sources, self._steps[number].targets

    def _clear(self) -> None:
        """Products read rows that hold nothing, and do not show them: these must be finite."""
        for cache in self._caches:
            if not are_together(cache.keys, cache.values):
                _, cache.keys, cache.values = cache.slots.copy()
            lengths = cache.known()
            cache.slots.clear_rest(lengths.known[0], lengths.longest[0])
        self._held = tuple(cache.keys for cache in self._caches)
        self._both = [*map(both_of, self._held)]

    def _plan_ahead(self) -> None:
        cache = self._caches[0]
        first, steps = cache.known_lengths[0], steps_ahead(cache, _AHEAD)
        layers = [(cache.keys, cache.values) for cache in self._caches]
        query, keys = self._query, cache.keys
        of = query.shape, int(query.storage_offset()), keys.stride(1)
        views = views_of([step.planned for step in steps], *of)
        self._products = Products(query, self._out, views, layers)
        self._first, self._steps = first, steps

    def attend(self, layer: int) -> None:
        """Write a layer's key and value to its cache, and what its query sees there to `out`."""
        new = self._key_value.index_select(1, self._sources)
        self._both[layer].index_copy_(1, self._targets, new)
        self._products.attend(layer)

    def finish(self) -> None:
        """Count the position, in all caches."""
        for cache in self._caches:
            cache.advanced(1)
            cache.lengths.add_(1)
