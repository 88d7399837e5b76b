"""The reference page of `rda`, made of the commands and their options."""

from __future__ import annotations

import inspect
from typing import Any

import typer

INTRODUCTION = """\
# Command line

`rda COMMAND --help` says the same: `docs/pages.py` writes this page from the commands.

Exit codes: 0, done; 1, the run failed, or a check found a difference; 2, a mistake in the command
line or in the input. An error is one line on standard error that says what was given, what is
allowed, and what to do.
"""


def cli_reference() -> str:
    """The page, in Markdown."""
    from ring_dilated_attention.cli import app

    root: Any = typer.main.get_command(app)
    context = root.make_context("rda", ["--help"], resilient_parsing=True)
    parts = [INTRODUCTION]
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        rows = [_row(x) for x in command.params if "--help" not in x.opts]
        parts += [
            f"## rda {name}",
            *(_paragraph(text) for text in inspect.cleandoc(command.help).split("\n\n")),
            "| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows),
        ]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    """A paragraph of a command's help; command lines are code."""
    is_command = text.startswith(("rda ", "torchrun "))
    return f"```console\n$ {text}\n```" if is_command else " ".join(text.split())


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar]
    kind = f" {parameter.metavar}" if is_option and parameter.metavar else ""
    default = parameter.default
    if callable(default) or default is None or default is False:
        default = ""
    elif isinstance(default, list | tuple):
        default = ",".join(map(str, default))
    cells = ", ".join(f"`{name}{kind}`" for name in names), parameter.help, default
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
