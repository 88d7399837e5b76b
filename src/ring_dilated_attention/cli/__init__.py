"""The `rda` command. Each command reads its options and calls one function of the package.

Heavy imports happen inside the commands, so that ``rda --help`` is fast. To add a command, write a
function decorated with ``@command(...)`` in a module of this package, whose parameters are options
(`option`, `options`), and import that module here: commands are listed in the order of the imports.
"""

from __future__ import annotations

import os
import sys

from . import verify, plan, draw, bench  # isort: skip  # in the order of the help
from .common import app
from .streams import flush, mend_standard_streams

__all__ = ["app", "bench", "draw", "main", "plan", "verify"]


def main() -> None:
    """Entry point of `rda`.

    A rank that torchrun has started leaves without the end of Python: threads of torch.distributed
    that are not quite done would need Python then, and end the process by SIGABRT.
    """
    mend_standard_streams()
    try:
        app(prog_name="rda")
    except SystemExit as end:
        if "RANK" not in os.environ:
            raise
        flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
