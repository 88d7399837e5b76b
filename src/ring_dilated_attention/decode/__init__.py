"""Generation: a KV cache that keeps what later positions can be shown, and attention to it.

`DilatedKVCache` is the cache of one layer, `cached_attention` attends from new positions to it.
`replicated_query_attention` is attention of a query that every rank holds whole to keys that are
sharded as they are.
"""

from .attend import cached_attention
from .cache import SHARD_BYTES, DilatedKVCache
from .replicated import replicated_query_attention

__all__ = [
    "SHARD_BYTES",
    "DilatedKVCache",
    "cached_attention",
    "replicated_query_attention",
]
