"""The log of a run as events of TensorBoard."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"

TAGS: Mapping[str, Mapping[str, str]] = {
    "step": {
        "loss": "loss/training (nats per token)",
        "bits_per_byte": "bits per byte/training",
        "learning_rate": "optimizer/learning rate",
        "gradient_norm": "optimizer/gradient norm",
        "tokens_per_second": "speed/tokens per second",
        "peak_memory_bytes": "memory/peak bytes per rank",
    },
    "eval": {
        "loss": "loss/held out (nats per token)",
        "bits_per_byte": "bits per byte/held out",
    },
}
"""Names of the curves, by the kind of a line of the log and its key."""


def check_installed() -> None:
    """Raise a `ValueError` that says what to install, unless TensorBoard is there."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs the tensorboard package: "
            "pip install 'ring-dilated-attention[tensorboard]'"
        )


class Scalars:
    """Writes lines of the log to ``tensorboard/`` in the folder of the run.

    The log is what counts: events are written anew from it at every start, so that a run that is
    resumed goes on with the same curves, without a step twice, whether or not it wrote events
    before.

    Args:
        run: folder of the run.
        lines: of its log so far.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, run: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run / FOLDER
        if folder.exists():
            shutil.rmtree(folder)
        # A TensorBoard that is looking on forgets what it has read from step 0 on.
        self._writer: Any = SummaryWriter(str(folder), purge_step=0)
        for line in lines:
            self.add(line)
        self._writer.flush()

    def add(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line of the log that have a curve in `TAGS`."""
        for key, tag in TAGS.get(line["kind"], {}).items():
            if key in line:  # earlier versions logged less
                self._writer.add_scalar(tag, line[key], line["step"], walltime=line.get("time"))

    def close(self) -> None:
        """Write what is left to the disk."""
        self._writer.close()
