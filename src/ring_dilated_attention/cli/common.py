"""What the commands of `rda` share: the app, errors as one line, and lists of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

RUNS = Path("runs")
"""Folder of the runs that are told no other."""

app = typer.Typer(
    help="Exact ring dilated attention: train on sharded sequences, verify, and look at plans.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _app() -> None:
    """Keep commands named even while there is only one."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Show an error as one line: exit code 2 for bad input, 1 for a failed run.

    `ValueError`, `TypeError` and `OSError` are bad input. Anything else that is not a
    `TrainingError` is a bug of the program and keeps its traceback.
    """
    from ..train.errors import TrainingError

    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        fail(error, 2)
    except TrainingError as error:
        fail(error, 2 if error.bad_input else 1)


def fail(error: Exception, code: int) -> NoReturn:
    """Say what is wrong in one line, and end with an exit code."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)


def lengths_of(text: str) -> tuple[int | None, ...]:
    """Parse segment lengths: ``256,1024,all`` (``all``: the whole sequence)."""
    return tuple(None if part.strip() == "all" else _int(part, text) for part in text.split(","))


def ints_of(text: str) -> tuple[int, ...]:
    """Parse rates, or numbers of ranks: ``1,2,4``."""
    return tuple(_int(part, text) for part in text.split(","))


def documents_of(text: str | None) -> tuple[int, ...] | None:
    """Parse the borders of documents: ``0,100,250``."""
    return None if text is None else ints_of(text)


def _int(part: str, text: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise ValueError(f"need ints separated by commas; got {text!r}") from None
