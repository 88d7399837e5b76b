"""A command of `rda`: a function whose parameters are options.

`command` makes one. Its function is called with values that have been read and checked, from the
command line, a file (``--config``) or the defaults, in this order. The function does the heavy
imports, so that help and errors of options need none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import typer
import typer.core

from .common import HELP_NAMES, app, reported_errors, without_kinds
from .config_file import merged, values_from
from .option import Argument, Flag, Option
from .options import CONFIG

F = TypeVar("F", bound=Callable[..., None])


Check: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Takes the values on the command line, and those with a file's, by names of options."""


class Example(NamedTuple):
    """An example of the help: what it does, and the command line, of several lines if it is long.

    Lines are shown as they are, indented by 2.
    """

    text: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command takes.

    Attributes:
        options: by their names, in the order of the help.
        examples: of its help.
        check: raises a `ValueError` for options that would be ignored; see `command`.
    """

    options: Mapping[str, Option]
    examples: tuple[Example, ...]
    check: Check | None = None


COMMANDS: dict[str, Command] = {}
"""By name, in the order of the help."""


class _WithExamples(typer.core.TyperCommand):
    """Shows examples below the options."""

    def get_params(self, ctx: Any) -> Any:
        return without_kinds(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        formatter.write("Examples:\n")
        for example in COMMANDS[self.name or ""].examples:
            line = example.line.replace("\n", "\n  ")
            formatter.write(f"\n  # {example.text}\n  {line}\n")


def command(*examples: Example, check: Check | None = None) -> Callable[[F], F]:
    """Make a command of `rda` of a function.

    Each parameter of the function is annotated ``Annotated[type, option]`` with an `Option`, whose
    name is the parameter's with dashes where that does not differ on purpose. The first paragraphs
    of the docstring are the help. Errors of the function are reported as one line.

    Args:
        examples: shown in the help; `rda` takes them as they are.
        check: raises a `ValueError` for options on the command line that would be ignored.
    """

    def register(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        by_parameter: dict[str, Option] = {
            name: hints[name].__metadata__[0] for name in inspect.signature(function).parameters
        }
        options = {option.name: option for option in by_parameter.values()}
        name = function.__name__
        COMMANDS[name] = Command(options=options, examples=examples, check=check)

        def run(**given: Any) -> None:
            with reported_errors():
                values = values_of(name, given)
                function(**{key: values[option.name] for key, option in by_parameter.items()})

        _imitate(run, function, [CONFIG, *options.values()])
        app.command(name, cls=_WithExamples, context_settings=HELP_NAMES)(run)
        return function

    return register


def values_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option of a command.

    Args:
        name: of the command.
        given: by parameter, what the command line says; None: nothing.
    """
    options = COMMANDS[name].options
    on_line: dict[str, Any] = {}
    for option in (CONFIG, *options.values()):
        text = given[_parameter(option)]
        if text not in (None, [], ()):
            is_flag = isinstance(option, Flag)
            on_line[option.name] = option.value(str(text) if is_flag else text, option.flag)
    path = on_line.pop(CONFIG.name, None)
    every = {command: known.options for command, known in COMMANDS.items()}
    levels = [on_line, *([] if path is None else values_from(path, name, every))]
    found = merged(levels)
    for option in options.values():
        if option.is_required and option.name not in found:
            raise ValueError(f"{name} needs {option.flag}: {_allowed(option)}")
    check = COMMANDS[name].check
    if check is not None:
        check(on_line, found)
    return {key: found.get(key, option.default) for key, option in options.items()}


def _allowed(option: Option) -> str:
    """What an option takes, for an error of one line."""
    if option.choices:
        return f"one of {', '.join(option.choices)}"
    return option.help[:1].lower() + option.help[1:].rstrip(".")


def _parameter(option: Option) -> str:
    return option.name.replace("-", "_")


def _imitate(
    run: Callable[..., None], function: Callable[..., None], options: Sequence[Option]
) -> None:
    """Give `run` the name, the help and the parameters that typer looks at."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(x.split()) for x in paragraphs)
    run.__name__ = function.__name__
    parameters = [
        inspect.Parameter(
            _parameter(option),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_kind(option), _typer_option(option)],
        )
        for option in options
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {x.name: x.annotation for x in parameters}


def _kind(option: Option) -> Any:
    if isinstance(option, Flag):
        return bool | None
    return list[str] | None if option.is_repeated else str | None


def _typer_option(option: Option) -> Any:
    if isinstance(option, Argument):
        return typer.Argument(help=option.text, metavar=option.flag, show_default=False)
    flags = option.flag
    if isinstance(option, Flag) and option.has_no:
        flags += f"/--no-{option.name}"
    choices = option.choices
    return typer.Option(
        flags,
        help=option.text,
        metavar=option.metavar,
        show_default=False,
        rich_help_panel=None if option.panel == CONFIG.panel else option.panel,
        autocompletion=(lambda incomplete: [x for x in choices if x.startswith(incomplete)])
        if choices
        else None,
    )
