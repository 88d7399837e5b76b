"""Runs the program of one rank on tensors.

`ring_forward` and `ring_backward` are a call (`RingCall`) on this rank: `executor` runs the actions
of its program, `transfer` packs and spreads messages. `compute` computes groups of tiles, which
have a `TileCall` in common, into sums that an `Accumulator` adds up on a side stream, and
`own_rows` a rank's own rows over several branches at once; `BACKWARD_WORKSPACE` says how much
backward allocates for tiles. `merge_` merges partial softmaxes, `merge_zero_keys` those of keys
that no rank holds. `readable` and `readable_in_backward` give tensors whose tiles kernels can read
in place, `TABLES` keeps index tables on devices, `kernels_on` is where kernels are to run, and
`autocast_dtype` what autocast casts to.
"""

from . import compute, own_rows
from .accumulate import Accumulator, autocast_dtype, kernels_on, merge_
from .blocks import readable, readable_in_backward
from .compute import BACKWARD_WORKSPACE, TileCall, merge_zero_keys
from .device_tables import TABLES
from .executor import RingCall, ring_backward, ring_forward
from .heads import HeadExchange, Peers, rows_of_heads

__all__ = [
    "BACKWARD_WORKSPACE",
    "TABLES",
    "Accumulator",
    "HeadExchange",
    "Peers",
    "RingCall",
    "TileCall",
    "autocast_dtype",
    "compute",
    "kernels_on",
    "merge_",
    "merge_zero_keys",
    "own_rows",
    "readable",
    "readable_in_backward",
    "ring_backward",
    "ring_forward",
    "rows_of_heads",
]
