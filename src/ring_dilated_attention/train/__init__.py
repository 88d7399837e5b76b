"""Training of the byte-level language model: `rda train` and `rda sample`.

`train` is the command, `command` its file. `config` (options), `data` (bytes and windows), `memory`
(what a run needs at least), `comm` (ranks and collectives), `watch` (which rank is missing), `loop`
(the training loop), `checkpoint`, `checked_files` (its files), `lock` (one training in a folder),
`log` (JSONL), `plot` (PNG), `report` (what the user sees), `signals` (stopping), `launch` (local
ranks), `errors` (`TrainingError`; `one_line` of any error), `sample` (continuing a prompt:
`sample_bytes`, `decoded`). `newest_run` finds the newest run in a folder.
"""

from .checkpoint import newest_run
from .command import train
from .errors import TrainingError, one_line
from .sample import decoded, sample_bytes

__all__ = [
    "TrainingError",
    "decoded",
    "newest_run",
    "one_line",
    "sample_bytes",
    "train",
]
