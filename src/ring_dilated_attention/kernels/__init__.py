"""Triton kernels: attention of many tiles in one launch, and what is added to rows in place.

`has_triton` says whether there is a Triton, and `runs_triton` whether it computes with a tensor.
`profile_of` says what constants that were tuned on an H200 are on a device, `keep_few` bounds what
is kept of calls.

These need Triton, and are imported when they are asked for:

- `tiles_forward` and `tiles_backward` compute tiles whose rows `build_cells` lays out, in blocks of
  which a `LaunchConfig`, a `BackwardConfig` or `default_config` of a `Kernel` says how large they
  are;
- `ranges_forward` and `ranges_backward` compute several branches at once, row by row; a module
  that does not need Triton, `own_programs`, says in how many launches, and lays them out;
- `rows` merges and adds the results of tiles, copies, adds and sums rows of K and V that are found
  by index, and rotates those of query and key by their positions;
- `decode` computes a few queries against strips of evenly spaced rows, such as those of a KV cache;
- `gelu_norm` is the layer norm of a GELU, where `takes_rows` says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import own_programs
from .device_profile import (
    MOST_NEW_ROWS,
    BackwardConfig,
    Kernel,
    LaunchConfig,
    default_config,
    profile_of,
)
from .launch import has_triton, keep_few, runs_triton, takes_rows
from .own_programs import build_cells

if TYPE_CHECKING:
    from . import decode, gelu_norm, rows
    from .backward import ranges_backward, tiles_backward
    from .forward import ranges_forward, tiles_forward

__all__ = [
    "MOST_NEW_ROWS",
    "BackwardConfig",
    "Kernel",
    "LaunchConfig",
    "build_cells",
    "decode",
    "default_config",
    "gelu_norm",
    "has_triton",
    "keep_few",
    "own_programs",
    "profile_of",
    "ranges_backward",
    "ranges_forward",
    "rows",
    "runs_triton",
    "takes_rows",
    "tiles_backward",
    "tiles_forward",
]

_NEEDS_TRITON = {
    **{name: name for name in ("decode", "gelu_norm", "rows")},  # modules
    **dict.fromkeys(("tiles_backward", "ranges_backward"), "backward"),
    **dict.fromkeys(("tiles_forward", "ranges_forward"), "forward"),
}


def __getattr__(name: str) -> Any:
    """Import what needs Triton when it is asked for: the package works without."""
    if name not in _NEEDS_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_NEEDS_TRITON[name]}", __name__)
    found = globals()[name] = getattr(module, name, module)  # every launch asks
    return found
