"""Triton kernels: attention of many tiles in one launch, and what is added to rows in place.

`has_triton` says whether there is a Triton, `compiles_for` whether it runs on a device and
`runs_triton` whether it computes with a tensor; the rest needs one. `tiles_forward` and
`tiles_backward` compute tiles whose rows `build_cells` lays out, in blocks of which a
`LaunchConfig`, a `BackwardConfig` or `default_config` of a `Kernel` says how large they are.
`ranges_forward` and `ranges_backward` compute several branches at once, row by row; `launches_of`
says in how many launches, `build_programs` lays them out, and kernels read that by
`rows_of_program`.
`profile_of` says what constants that were tuned on an H200 are on a device (`DeviceProfile`), and
`rates_on` how fast the cost model takes it to be.
`begin_strips` computes a few queries against `Strips` of evenly spaced rows, which
`strips_of_cache` finds in a KV cache, and `Begun` writes `NewRows` into it when the result is asked
for; at most `MOST_NEW_ROWS`.
`NO_END` stands for the length of a segment without end.
`merge_rows`, `add_rows` and `row_sums` merge and add the results of tiles. `take_rows`,
`add_to_rows` and `sum_slots` copy, add and sum rows of K and V that are found by index.
`gelu_norm_forward` and `gelu_norm_backward` are the layer norm of a GELU of many rows, of at most
`MOST_GELU_WIDTH` elements.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .available import compiles_for, has_triton, runs_triton
from .cells import build_cells
from .device_profile import H200, DecodeTuning, DeviceProfile, profile_of, rates_on
from .own_programs import (
    MOST_BRANCHES,
    MOST_POSITIONS,
    MOST_STEP,
    Programs,
    build_programs,
    launches_of,
    step_of,
)
from .tuning import (
    MOST_GELU_WIDTH,
    MOST_NEW_ROWS,
    NO_END,
    BackwardConfig,
    Kernel,
    LaunchConfig,
    default_config,
)

if TYPE_CHECKING:
    from .backward import tiles_backward
    from .decode import Begun, NewRows, begin_strips
    from .decode_strips import Strips, strips_of_cache
    from .forward import tiles_forward
    from .gelu_norm import gelu_norm_backward, gelu_norm_forward
    from .own_backward import ranges_backward
    from .own_forward import ranges_forward, rows_of_program
    from .rows import add_rows, merge_rows, row_sums
    from .rows_by_index import add_to_rows, sum_slots, take_rows

__all__ = [
    "H200",
    "MOST_BRANCHES",
    "MOST_GELU_WIDTH",
    "MOST_NEW_ROWS",
    "MOST_POSITIONS",
    "MOST_STEP",
    "NO_END",
    "BackwardConfig",
    "Begun",
    "DecodeTuning",
    "DeviceProfile",
    "Kernel",
    "LaunchConfig",
    "NewRows",
    "Programs",
    "Strips",
    "add_rows",
    "add_to_rows",
    "begin_strips",
    "build_cells",
    "build_programs",
    "compiles_for",
    "default_config",
    "gelu_norm_backward",
    "gelu_norm_forward",
    "has_triton",
    "launches_of",
    "merge_rows",
    "profile_of",
    "ranges_backward",
    "ranges_forward",
    "rates_on",
    "row_sums",
    "rows_of_program",
    "runs_triton",
    "step_of",
    "strips_of_cache",
    "sum_slots",
    "take_rows",
    "tiles_backward",
    "tiles_forward",
]

_NEEDS_TRITON = {
    "NewRows": "decode",
    "Begun": "decode",
    "begin_strips": "decode",
    "Strips": "decode_strips",
    "strips_of_cache": "decode_strips",
    "tiles_backward": "backward",
    "tiles_forward": "forward",
    "gelu_norm_backward": "gelu_norm",
    "gelu_norm_forward": "gelu_norm",
    "ranges_backward": "own_backward",
    "ranges_forward": "own_forward",
    "rows_of_program": "own_forward",
    "add_rows": "rows",
    "merge_rows": "rows",
    "row_sums": "rows",
    "add_to_rows": "rows_by_index",
    "sum_slots": "rows_by_index",
    "take_rows": "rows_by_index",
}


def __getattr__(name: str) -> Any:
    """Import what needs Triton when it is asked for: the package works without."""
    if name not in _NEEDS_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_NEEDS_TRITON[name]}", __name__), name)
    globals()[name] = found  # every launch asks
    return found
