"""Tiles: attention of one block of queries to one block of keys, on local tensors.

A tile knows nothing of ranks, patterns or positions. `select_backend` picks who computes it,
`backend_named` finds one of them by its name.
"""

from .backend import (
    ALIGNMENT,
    TileBackend,
    TileGradients,
    TileInputs,
    reads_aligned_rows,
    reads_separate_rows,
    wants_same_bits,
)
from .sdpa import accumulate_dtype
from .select import (
    BACKENDS,
    Backend,
    Limits,
    Selection,
    backend_named,
    limits_on,
    select_backend,
    table_refusal,
)

__all__ = [
    "ALIGNMENT",
    "BACKENDS",
    "Backend",
    "Limits",
    "Selection",
    "TileBackend",
    "TileGradients",
    "TileInputs",
    "accumulate_dtype",
    "backend_named",
    "limits_on",
    "reads_aligned_rows",
    "reads_separate_rows",
    "select_backend",
    "table_refusal",
    "wants_same_bits",
]
