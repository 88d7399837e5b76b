"""The `rda` command. Each command reads its options and calls one room of the package.

torch is imported inside the commands, so that ``rda --help`` is fast. To add a command, write a
function decorated with ``@app.command()`` in a module of this package, with the options of `common`
where they fit, and import that module here: the help lists commands in the order of the imports.
"""

from __future__ import annotations

import sys


def _end_without_extra(error: ModuleNotFoundError) -> None:
    """End with one line where a package of the extra `cli` is missing."""
    missing = (error.name or "").partition(".")[0]
    if missing in ("typer", "rich", "matplotlib", "h5py"):
        sys.exit(f'rda needs {missing}: pip install "ring-dilated-attention[cli]"')


try:
    from . import slides, plan, draw, run  # isort: skip  # in the order of the help
    from . import common
    from .common import app
except ModuleNotFoundError as error:
    _end_without_extra(error)
    raise

__all__ = ["app", "common", "draw", "main", "plan", "run", "slides"]


def main() -> None:
    """Entry point of `rda`."""
    try:
        app(prog_name="rda")
    except ModuleNotFoundError as error:
        _end_without_extra(error)
        raise
