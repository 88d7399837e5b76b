"""Runs the program of one rank on tensors.

`ring_forward` and `ring_backward` are a call (`RingCall`) on this rank: `executor` runs the actions
of its program, `transfer` packs and spreads messages. `compute` computes groups of tiles, which
have a `TileCall` in common, into sums that an `Accumulator` adds up on a side stream;
`BACKWARD_WORKSPACE` says how much backward allocates for it. `merge_` merges partial softmaxes,
`merge_zero_keys` those of keys that no rank holds. `readable` and `readable_in_backward` give
tensors whose tiles kernels can read in place, `kernel_calls` counts the calls of kernels that a
plan takes, `TABLES` keeps index tables on devices, `kernels_on` is where kernels are to run, and
`autocast_dtype` what autocast casts to.
"""

from . import compute, parts
from .accumulate import Accumulator, autocast_dtype, kernels_on, merge_
from .blocks import kernel_calls, readable, readable_in_backward
from .compute import merge_zero_keys
from .device_tables import TABLES
from .executor import RingCall, ring_backward, ring_forward
from .parts import BACKWARD_WORKSPACE, TileCall

__all__ = [
    "BACKWARD_WORKSPACE",
    "TABLES",
    "Accumulator",
    "RingCall",
    "TileCall",
    "autocast_dtype",
    "compute",
    "kernel_calls",
    "kernels_on",
    "merge_",
    "merge_zero_keys",
    "parts",
    "readable",
    "readable_in_backward",
    "ring_backward",
    "ring_forward",
]
