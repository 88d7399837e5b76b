"""Speed, memory and error of `dilated_attention` on one rank or several, beside baselines.

`bench` measures each `Workload` by the rules of `Options`, and returns a `Result` for every
contender: `OURS`, and the baselines of `BASELINES`. `sweep` makes workloads from lists of values,
`named_workload` those of a named pattern, and `given_workload` that of a command. `DEVICES`,
`DTYPES` and `SCALINGS` are allowed values of options.

`run_command` is `rda bench`: options in, tables, JSON and a plot out. `launch` runs a function on
ranks, `measure_and_write` is what it does on each of them, and `show` prints and plots the results.
"""

from .command import measure_and_write, run_command, show
from .contenders import BASELINES, OURS
from .launch import launch
from .measure import DEVICES, device_type, memory_of, resolve_device
from .options import SCALINGS, Options
from .patterns import default_dtype, given_workload, named_workload
from .plots import plot
from .result import Result
from .run import bench
from .sweep import SEQ_LEN, sweep
from .workload import DTYPES, Workload

__all__ = [
    "BASELINES",
    "DEVICES",
    "DTYPES",
    "OURS",
    "SCALINGS",
    "SEQ_LEN",
    "Options",
    "Result",
    "Workload",
    "bench",
    "default_dtype",
    "device_type",
    "given_workload",
    "launch",
    "measure_and_write",
    "memory_of",
    "named_workload",
    "plot",
    "resolve_device",
    "run_command",
    "show",
    "sweep",
]
