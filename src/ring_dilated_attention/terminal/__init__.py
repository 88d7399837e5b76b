"""What a terminal and a pipe are shown: tables with every number whole, and progress.

`make_console` is where to print, `Table` and its columns what, and `show_table` prints it: a table
that is wider than the console is split into parts that repeat its key columns, and nothing is ever
cut. `show_text` prints a sentence, and `json_text` makes JSON of a document. `Progress` shows how
far a command is, on standard error, and `streamed` does so below a text that grows. In a terminal,
lines have the terminal's width; in a pipe they are as long as they need to be, unless ``COLUMNS``
says otherwise. There are no colours in a pipe, and none where ``NO_COLOR`` is set.
"""

from .console import make_console
from .json_text import json_text
from .numbers import (
    BYTES,
    FLOP,
    FLOP_PER_S,
    SECONDS,
    Units,
    count_of,
    in_bytes,
    in_flop,
    in_seconds,
)
from .progress import Progress, streamed
from .tables import Column, Table, amounts, counts, numbers, show_table, show_text, texts

__all__ = [
    "BYTES",
    "FLOP",
    "FLOP_PER_S",
    "SECONDS",
    "Column",
    "Progress",
    "Table",
    "Units",
    "amounts",
    "count_of",
    "counts",
    "in_bytes",
    "in_flop",
    "in_seconds",
    "json_text",
    "make_console",
    "numbers",
    "show_table",
    "show_text",
    "streamed",
    "texts",
]
