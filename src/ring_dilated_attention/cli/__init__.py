"""The `rda` command. Each command reads its options and calls one room of the package.

torch is imported inside the commands, so that ``rda --help`` is fast. To add a command, write a
function decorated with ``@app.command()`` in a module of this package, with the options of `common`
where they fit, and import that module here: the help lists commands in the order of the imports.
"""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "matplotlib")

try:
    from . import plan, simulate, verify  # isort: skip  # in the order of the help
    from .common import app
except ModuleNotFoundError as error:
    if error.name not in _EXTRA:
        raise
    sys.exit('rda needs typer and rich: pip install "ring-dilated-attention[cli]"')

__all__ = ["app", "main", "plan", "simulate", "verify"]


def main() -> None:
    """Entry point of `rda`."""
    try:
        app(prog_name="rda")
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(f'rda needs {error.name}: pip install "ring-dilated-attention[cli]"')
