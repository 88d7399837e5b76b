"""What the commands of `rda` share: the app, errors as one line, and lists of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

Timeout = Annotated[
    float,
    typer.Option("--timeout", help="Seconds that a rank waits for another before it raises."),
]
"""How long ranks wait; its default is `limits.RANK_TIMEOUT`."""

MOST_CHARACTERS = 300
"""Of a line that says what is wrong."""

RUNS = Path("runs")
"""Folder of the runs that are told no other."""

_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it


class _OneLineErrors(typer.core.TyperGroup):
    """Says in one line what is wrong with a command line; without arguments, shows the help."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _UsageError as error:
            typer.echo(_one_line(f"error: {error.format_message()}"), err=True)
            sys.exit(2)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code)


app = typer.Typer(
    cls=_OneLineErrors,
    help="Exact ring dilated attention: train on sharded sequences, verify, and look at plans.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _app() -> None:
    """Keep commands named even while there is only one."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Show an error as one line: exit code 2 for bad input, 1 for a failed run.

    `ValueError`, `TypeError`, `OSError` and numbers or sizes beyond what the machine takes are bad
    input. Anything else that is not a
    `TrainingError` is a bug of the program and keeps its traceback.
    """
    from ..train import TrainingError

    try:
        yield
    except (ValueError, TypeError, OSError, OverflowError, MemoryError) as error:
        fail(error, 2)
    except TrainingError as error:
        fail(error, 2 if error.bad_input else 1)


def fail(error: Exception | str, code: int) -> NoReturn:
    """Say what is wrong in one line, and end with an exit code."""
    text = str(error) or type(error).__name__
    typer.echo(_one_line(f"error: {text}"), err=True)
    raise typer.Exit(code)


def _one_line(text: str) -> str:
    """The text in a line of `MOST_CHARACTERS`: what is in the middle of a longer one goes."""
    text = " ".join(text.split())
    if len(text) <= MOST_CHARACTERS:
        return text
    gap, end = " ... ", MOST_CHARACTERS // 3
    return text[: MOST_CHARACTERS - len(gap) - end] + gap + text[-end:]


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
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(f"need ints separated by commas; got {shown!r}") from None
