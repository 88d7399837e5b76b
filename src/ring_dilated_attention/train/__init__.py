"""The language model, on bytes or on a tokenizer's tokens: `rda train`, `sample` and `export`.

`command` is `rda train` (`train`), `sampling` is `rda sample` (`sample_bytes` and `decoded`, which
continue a prompt). `config` has the options and presets of them (`preset_options`), `memory` what
they need, `prepare` all that comes before the first step; `data` the text and its windows,
`tokenizer` and `tokens` the same in tokens; `loop` the training loop, `ranks` the ranks and their
collectives, `launch` starts local ranks, and `errors` finds out which one is missing
(`TrainingError`; `one_line` of any error).

In the folder of a run, `run_folder` writes its lock and log, `curve` and `scalars` draw that log,
`run_toml` keeps the options; `saving` writes checkpoints, and `checkpoint` and `checked_files` read
them. `newest_run` finds the newest run in a folder. `plain_weights` writes and reads weights alone
(`export`), and `init_from` begins a run with them.
"""

from .checkpoint import newest_run
from .command import make_config, train
from .config import PRESETS, TrainConfig, preset_options
from .errors import TrainingError, one_line
from .plain_weights import export_newest
from .sampling import decoded, sample_bytes

__all__ = [
    "PRESETS",
    "TrainConfig",
    "TrainingError",
    "decoded",
    "export_newest",
    "make_config",
    "newest_run",
    "one_line",
    "preset_options",
    "sample_bytes",
    "train",
]
