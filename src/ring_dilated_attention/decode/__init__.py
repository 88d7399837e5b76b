"""Generation: a KV cache that keeps what later positions can be shown, and attention to it.

`DilatedKVCache` is the cache of one layer, `cached_attention` attends from new positions to it, and
`CapturedStep` replays a model's step of them as a CUDA graph, which the decoding kernels have to
compute: `steps_by_kernel` says whether they do. `attend_in_step` is attention of one
layer of a model, whose layers share a `Step`, and `RowAttention` that of all layers for one row.
`replicated_query_attention` is attention of a query that every rank holds whole to keys that are
sharded as they are.
"""

from .attend import attend_in_step, cached_attention
from .by_kernel import steps_by_kernel
from .cache import SHARD_BYTES, DilatedKVCache
from .captured import CapturedStep
from .lengths import Lengths
from .refusals import DeepOnly
from .replicated import replicated_query_attention
from .row_attention import RowAttention
from .step import Step

__all__ = [
    "SHARD_BYTES",
    "CapturedStep",
    "DeepOnly",
    "DilatedKVCache",
    "Lengths",
    "RowAttention",
    "Step",
    "attend_in_step",
    "cached_attention",
    "replicated_query_attention",
    "steps_by_kernel",
]
