"""Speed, memory and error of `dilated_attention` on one device, beside what else users could run.

`bench` times cases; `rda bench` (`command.py`) is it with options, a table, JSON and a plot.
"""

from .case import Case
from .patterns import NAMES, named_case
from .result import Result
from .run import bench

__all__ = ["NAMES", "Case", "Result", "bench", "named_case"]
