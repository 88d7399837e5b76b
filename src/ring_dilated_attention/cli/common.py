"""What the commands of `rda` share: the app, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from .. import __version__
from .streams import flush, is_unread, to_nowhere

MOST_CHARACTERS = 300
"""Of a line that says what is wrong."""

RUNS = Path("runs")
"""Folder of the runs that are told no other."""

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it


class ListError(ValueError):
    """Bad input whose message ends with a list of all that is allowed, and is not cut."""


def without_kinds(options: Sequence[Any]) -> Any:
    """The same options; those that take no value have no metavar in the help."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


class _OneLineErrors(typer.core.TyperGroup):
    """Says in one line what is wrong with a command line; without arguments, shows the help."""

    def get_params(self, ctx: Any) -> Any:
        return without_kinds(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; there are {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

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
        except OSError as error:  # of the help or the version; commands report theirs
            code = _unwritten(error)
        except _UsageError as error:
            typer.echo(_one_line(f"error: {error.format_message()}"), err=True)
            sys.exit(2)
        except typer.Abort:
            sys.exit(1)
        try:
            flush()
        except OSError as error:
            code = _unwritten(error, code or 0)
        sys.exit(code)


def _unwritten(error: OSError, code: int = 0) -> int:
    """The exit code where standard output cannot be written; says so where nothing else failed."""
    if isinstance(error, BrokenPipeError) and is_unread():
        return code or 1
    to_nowhere(sys.stdout)
    if not code:
        text = f"error: cannot write standard output: {error.strerror or error}"
        typer.echo(_one_line(text), err=True)
    return code or 2


app = typer.Typer(
    cls=_OneLineErrors,
    help="Exact ring dilated attention: look at plans, verify, and measure.",
    context_settings=HELP_NAMES,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rda {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Keep commands named even while there is only one."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Show an error as one line: exit code 2 for bad input, 1 for a failed run.

    `ValueError`, `TypeError`, `OSError` and numbers or sizes beyond what the machine takes are bad
    input. Anything else is a bug of the program and keeps its traceback. Where nobody reads
    standard output any more, as behind ``| head``, the command ends with exit code 1 and no
    message.
    """
    try:
        yield
    except BrokenPipeError as error:
        if not is_unread():
            fail(error, 2)
        raise typer.Exit(1) from None
    except ListError as error:
        fail(error, 2, most=None)
    except (ValueError, TypeError, OSError, OverflowError, MemoryError) as error:
        fail(error, 2)


def fail(error: Exception | str, code: int, *, most: int | None = MOST_CHARACTERS) -> NoReturn:
    """Say what is wrong in one line, and end with an exit code.

    Args:
        error: what is wrong.
        code: the exit code.
        most: characters of the line; None: any number.
    """
    text = str(error) or type(error).__name__
    typer.echo(_one_line(f"error: {text}", most), err=True)
    raise typer.Exit(code)


def _one_line(text: str, most: int | None = MOST_CHARACTERS) -> str:
    """The text in a line of `most` characters: what is in the middle of a longer one goes."""
    text = " ".join(text.split())
    if most is None or len(text) <= most:
        return text
    gap, end = " ... ", most // 3
    return text[: most - len(gap) - end] + gap + text[-end:]
