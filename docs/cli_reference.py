"""The reference page of `rda`, made of the commands and their options."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import typer

INTRODUCTION = """\
# Command line

Made from the commands themselves when the site is built, so it is what `rda COMMAND --help` says.

Exit codes: 0, done; 1, the run failed, or a check found a difference; 2, a mistake in the command
line or in the input. An error is one line on standard error that says what was given, what is
allowed, and what to do.
"""


def cli_reference() -> str:
    """The page, in Markdown."""
    from ring_dilated_attention.cli import app

    root: Any = typer.main.get_command(app)
    context = root.make_context("rda", ["--help"], resilient_parsing=True)
    parts = [INTRODUCTION, *_options(root, context)]
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        if not command.hidden:
            parts += [f"## rda {name}", _text(command.help)]
            parts += _options(command, command.context_class(command, info_name=f"rda {name}"))
            parts.append(_examples(command.epilog))
    return "\n\n".join(part for part in parts if part) + "\n"


def _options(command: Any, context: Any) -> list[str]:
    """A table of options for each panel of the help."""
    panels: dict[str, list[str]] = defaultdict(list)
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        panel = getattr(parameter, "rich_help_panel", None) or "Options"
        panels[panel].append(_row(parameter, context))
    head = "| option | value | default | meaning |\n|---|---|---|---|\n"
    return [f"**{panel}**\n\n{head}" + "\n".join(rows) for panel, rows in panels.items()]


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        names = parameter.human_readable_name
    else:
        names = ", ".join(map(_code, parameter.opts))
        if parameter.secondary_opts:
            names += " / " + ", ".join(map(_code, parameter.secondary_opts))
    # typer has its own way since 0.29, click's before.
    show_type = getattr(parameter, "display_type", None) or parameter.make_metavar
    metavar = parameter.metavar or show_type(context).strip("[]")
    if getattr(parameter, "is_flag", False):
        value = ""
    elif "|" in metavar:
        value = ", ".join(map(_code, metavar.split("|")))
    else:
        value = _cell(metavar)
    help, _, default = (getattr(parameter, "help", None) or "").rpartition(" Default: ")
    if not help:
        help, default = default, ""
    default = _cell(default.removesuffix(".")) if default else _default(parameter)
    return f"| {names} | {value} | {default} | {_cell(help)} |"


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return _cell(shown)
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default == () or default == [] or callable(default):
        return ""
    if getattr(parameter, "is_flag", False):
        names = parameter.opts if default else parameter.secondary_opts
        return _code(names[0]) if names else ""
    values = default if isinstance(default, list | tuple) else [default]
    return ", ".join(_code(getattr(value, "value", value)) for value in values)


def _text(text: str | None) -> str:
    """Help as Markdown, without the characters that tell typer not to join lines."""
    return inspect.cleandoc(text or "").replace("\b", "")


def _examples(epilog: str | None) -> str:
    """The end of the help: commands as a block, anything else as it is."""
    lines = [line.strip() for line in _text(epilog).splitlines() if line.strip()]
    commands = [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ")[:4] == "rda "]
    if not commands:
        return "\n\n".join(lines)
    others = [line for line in lines if line.removeprefix("$ ") not in commands]
    shown = "\n".join(f"$ {command}" for command in commands)
    return "\n\n".join([*others, f"```console\n{shown}\n```"])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: Any) -> str:
    return f"`{_cell(str(text))}`"
