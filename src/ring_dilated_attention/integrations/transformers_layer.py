"""A layer of a `DilatedCache`, as transformers wants one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..decode import DilatedKVCache

_THROUGH_THE_CACHE = "a layer of a DilatedCache is updated by DilatedCache.update"


class DilatedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer's part of a `DilatedCache`, which does what concerns them all.

    Attributes:
        kv: the rows that later positions can be shown; None before the first prompt.
    """

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.kv: DilatedKVCache | None = None

    @property
    def is_croppable(self) -> bool:
        """Whether positions can be taken back."""
        return self.kv is not None and self.kv.plan.max_rewind > 0

    def get_seq_length(self) -> int:
        """Positions of the longest row; `DilatedCache.get_seq_length` counts padding too."""
        return max(self.kv.known_lengths) if self.kv else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, first key) that a mask would have to cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refused; `DilatedCache` makes `kv` when a prompt comes."""
        raise NotImplementedError(_THROUGH_THE_CACHE)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused."""
        raise NotImplementedError(_THROUGH_THE_CACHE)

    def offload(self) -> None:
        """Refused."""
        raise NotImplementedError("a DilatedCache is small and stays on its device: no offloading")

    prefetch = offload
