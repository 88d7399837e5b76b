"""Generation: a KV cache that keeps what later positions can be shown, and attention to it.

`DilatedKVCache` is the cache of one layer, `cached_attention` attends from new positions to it, and
`CapturedStep` replays a model's step of them as a CUDA graph, which the decoding kernels have to
compute: `steps_by_kernel` says whether they do. The layers of a model share a `Step`.
`replicated_query_attention` is attention of a query that every rank holds whole to sharded keys.
"""

from .attend import Step, cached_attention, steps_by_kernel
from .cache import DeepOnly, DilatedKVCache, Lengths
from .captured import CapturedStep
from .replicated import replicated_query_attention

__all__ = [
    "CapturedStep",
    "DeepOnly",
    "DilatedKVCache",
    "Lengths",
    "Step",
    "cached_attention",
    "replicated_query_attention",
    "steps_by_kernel",
]
