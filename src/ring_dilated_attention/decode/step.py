"""What the layers of one step of a model share."""

from __future__ import annotations

import torch

from .. import kernels
from .cache import DilatedKVCache


class Step:
    """What the layers of one step share: which rows of their caches the new positions see."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] | None = None
        self._strips: kernels.decode.Strips | None = None

    def strips(
        self, cache: DilatedKVCache, branches: torch.Tensor, count: int
    ) -> kernels.decode.Strips:
        """Of `count` new positions of a cache: found on the device once for equal caches.

        Args:
            cache: without the new positions.
            branches: its plan as a table; see `kernels.decode.strips_of_cache`.
            count: new positions.
        """
        plan = cache.plan
        of = plan, cache.known_lengths, cache.shard, cache.keys.device, count
        if self._strips is None or self._of != of:
            self._of, self._strips = of, kernels.decode.strips_of_cache(
                cache.lengths,
                branches,
                plan.num_kv_heads,
                count,
                shard=cache.shard,
                shards=plan.shards,
                max_length=plan.max_length,
            )  # fmt: skip
        return self._strips
