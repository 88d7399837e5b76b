"""Where to print."""

from __future__ import annotations

import os

from rich.console import Console

UNLIMITED = 1_000_000
"""Characters of a line in a pipe: tables stay in one piece there, a line per row, so that they can
be searched, cut and compared by other programs."""


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error.

    In a terminal its width is the terminal's. Elsewhere it is ``COLUMNS`` where that is a number
    above 0, and otherwise unlimited. Colours follow the terminal and ``NO_COLOR``.

    Args:
        stderr: whether to print on standard error.
    """
    console = Console(stderr=stderr, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    if not console.is_terminal and not (columns.isdecimal() and int(columns)):
        console.width = UNLIMITED
    return console
