"""Attention of one new position to the caches of all layers of a model, for one row of the batch.

A step of decoding on a CPU takes the time of its operations, each a few microseconds, more than
that of their arithmetic. So what the layers of a step have in common is worked out once for all of
them, and their queries, scores and results lie in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tiles import Backend
from .cache import DilatedKVCache
from .one_position import DeviceStep, steps_ahead
from .products import Products, Ready, select_for_one_position, takes_products

_AHEAD = 32
"""Positions whose steps are worked out together."""


class RowAttention:
    """Attention of a model's layers, step by step: one new position of one row of the batch.

    A step is `begin`, then for each layer writing `query`, `key` and `value` and calling `attend`,
    and `finish`, which counts the position: of a step that ends before, the caches know nothing.

    Args:
        caches: of all layers: of one plan, holding the same positions, as `fits` allows them.
        query: (1, kv_heads, group, head_dim), contiguous, which the caller writes to: times the
            factor on the scores.
        key: (1, kv_heads, head_dim), which the caller writes to.
        value: like `key`.
        out: like `query`, where its memory begins: `attend` writes to it what it has found.
    """

    def __init__(
        self,
        caches: Sequence[DilatedKVCache],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._caches = tuple(caches)
        self._query, self._key, self._value = query, key, value
        self._out = out
        self._steps: dict[int, tuple[DeviceStep, Ready]] = {}

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
        for cache in self._caches:
            cache.check_room(1)
        step, ready = self._step()
        self._products.begin(ready)
        self._sources, self._targets = step.sources, step.targets

    def _step(self) -> tuple[DeviceStep, Ready]:
        """Of the next position: also where caches were reserved, or taken back, since the last."""
        cache = self._caches[0]
        position = cache.known_lengths[0]
        found = self._steps.get(position)
        if found is None or found[0].plan is not cache.plan:
            with torch.inference_mode(False), torch.no_grad():  # for steps in any mode
                self._plan_ahead(position)
            found = self._steps[position]
        return found

    def _plan_ahead(self, position: int) -> None:
        steps = steps_ahead(self._caches[0], self._query, _AHEAD)
        most = max(step.planned.columns for step, _ in steps)
        self._products = Products(self._query, self._out, most)
        self._steps = {
            at: (step, self._products.ready(views, step.planned.columns))
            for at, (step, views) in enumerate(steps, position)
        }

    def attend(self, layer: int) -> None:
        """Write a layer's key and value to its cache, and what its query sees there to `out`."""
        cache = self._caches[layer]
        both = (cache.keys, self._key), (cache.values, self._value)
        for rows, new in both:
            rows.index_copy_(1, self._targets, new.index_select(1, self._sources))
        self._products.attend(cache.keys, cache.values)

    def finish(self) -> None:
        """Count the position, in all caches."""
        for cache in self._caches:
            cache.advanced(1)
        torch._foreach_add_([cache.lengths for cache in self._caches], 1)
