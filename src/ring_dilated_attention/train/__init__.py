"""Training of the byte-level language model: `rda train` and `rda sample`.

`command` is what the CLI calls. `config` (options), `data` (bytes and windows), `memory` (what a
run needs at least), `comm` (ranks and collectives), `watch` (which rank is missing), `loop` (the
training loop), `checkpoint`, `lock` (one training in a folder), `log` (JSONL), `plot` (PNG),
`report` (what the user sees), `signals` (stopping), `launch` (local ranks), `errors`, `sample`
(continuing a prompt).
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
