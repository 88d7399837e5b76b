"""Runs the program of one rank on tensors.

`executor` runs the actions of a program, `transfer` packs and spreads messages, `compute` computes
groups of tiles, into sums that `accumulate` adds up on a side stream, and `own_rows` a rank's own
rows over several branches at once. `blocks` are zero-copy views, `device_tables` index tables.
"""

from . import compute
from .accumulate import Accumulator, autocast_dtype, kernels_on, merge_, row_sums
from .blocks import readable, readable_in_backward
from .compute import BACKWARD_WORKSPACE, TileCall, merge_sink, merge_zero_keys
from .device_tables import TABLES
from .executor import RingCall, ring_backward, ring_forward, ring_received
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
    "merge_sink",
    "merge_zero_keys",
    "readable",
    "readable_in_backward",
    "ring_backward",
    "ring_forward",
    "ring_received",
    "row_sums",
    "rows_of_heads",
]
