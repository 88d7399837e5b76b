"""The `rda` command. Each command parses its options and calls one function of the package.

Heavy imports happen inside the commands, so that ``rda --help`` is fast. To add a command, write a
function decorated with ``@app.command()`` that does its work inside ``with reported_errors():``, in
a module of this package, and import that here: commands are listed in the order of the imports.
"""

from __future__ import annotations

import os
import sys

from . import train, verify, plan, draw, bench  # isort: skip  # in the order of the help
from .common import app

__all__ = ["app", "bench", "draw", "main", "plan", "train", "verify"]


def main() -> None:
    """Entry point of `rda`.

    A rank that torchrun has started leaves without the end of Python: threads of torch.distributed
    that are not quite done would need Python then, and end the process by SIGABRT.
    """
    try:
        app()
    except SystemExit as end:
        if "RANK" not in os.environ:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
