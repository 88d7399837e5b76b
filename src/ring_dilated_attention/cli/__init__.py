"""The `rda` command. Each command reads its options and calls one function of the package.

Heavy imports happen inside the commands, so that ``rda --help`` is fast. To add a command, write a
function decorated with ``@command(...)`` in a module of this package, whose parameters are options
(`option`, `options`), and import that module here: commands are listed in the order of the imports.
"""

from __future__ import annotations

import io
import os
import sys

from . import train, export, verify, plan, draw, bench  # isort: skip  # in the order of the help
from .common import app

__all__ = ["app", "bench", "draw", "export", "main", "plan", "train", "verify"]


def main() -> None:
    """Entry point of `rda`.

    A rank that torchrun has started leaves without the end of Python: threads of torch.distributed
    that are not quite done would need Python then, and end the process by SIGABRT.
    """
    _replace_what_cannot_be_encoded()
    try:
        app(prog_name="rda")
    except SystemExit as end:
        if "RANK" not in os.environ:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _replace_what_cannot_be_encoded() -> None:
    """Print a question mark in place of a character that standard output has no code for."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
