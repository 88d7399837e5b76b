"""Training of the byte-level language model: `rda train` and `rda sample`.

`command` is the commands: `train`, and `sample_bytes` and `decoded`, which continue a prompt.
`config` has the options, `data` the bytes and windows, `loop` the training loop, `ranks` the ranks
and their collectives, `launch` starts local ranks, and `errors` finds out which one is missing
(`TrainingError`; `one_line` of any error). `run_folder` is the folder of a run, its lock, log and
curve; `checkpoint` and `checked_files` write what a run goes on from. `newest_run` finds the newest
run in a folder.
"""

from .checkpoint import newest_run
from .command import decoded, sample_bytes, train
from .errors import TrainingError, one_line

__all__ = [
    "TrainingError",
    "decoded",
    "newest_run",
    "one_line",
    "sample_bytes",
    "train",
]
