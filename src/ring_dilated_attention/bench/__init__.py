"""Speed, memory and error of `dilated_attention` on one device, beside what else users could run.

`bench` times cases; `rda bench` (`command.py`) is it with options, a table, JSON and a plot.
"""

from .case import Case
from .command import run_anywhere
from .measure import memory_of, resolve_device
from .patterns import NAMES, named_case, named_pattern
from .ranks_team import RankError
from .result import Result
from .run import bench
from .sweep import sweep

__all__ = [
    "NAMES",
    "Case",
    "RankError",
    "Result",
    "bench",
    "memory_of",
    "named_case",
    "named_pattern",
    "resolve_device",
    "run_anywhere",
    "sweep",
]
