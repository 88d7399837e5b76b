"""Speed and memory of `dilated_attention` on one rank or several, beside baselines.

`bench` measures each `Workload` as `Settings` say, this library (`OURS`) and some of `BASELINES` in
turns, and returns a `Result` for forward and for forward+backward of each. `report` shows results;
`document` keeps them as JSON, with the device and versions of `environment`.

`take_turns` times any calls by the same rules (see `run`), and `peak_bytes` measures their
memory.
"""

from .contenders import BASELINES
from .result import OURS, Result, Workload, document, environment, report
from .run import Settings, bench, peak_bytes, take_turns

__all__ = [
    "BASELINES",
    "OURS",
    "Result",
    "Settings",
    "Workload",
    "bench",
    "document",
    "environment",
    "peak_bytes",
    "report",
    "take_turns",
]
