"""``--config run.toml``: the options of a command in a file.

A key is an option's name. At the top of the file it counts for every command that has the option;
in a table of a command's name, as in ``[train]``, for that command, over the same key at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .common import ListError
from .option import Argument, Option, toml_in_brief

_LISTS = frozenset({"segment-lengths", "dilation-rates"})
INSTEAD = {
    "pattern": _LISTS | {"head-offsets", "head-branches"},
    **dict.fromkeys(_LISTS, frozenset({"pattern"})),
}
"""Options that an option replaces at lower levels (the levels are command line, table, top of the
file): a named pattern has its own segments, head offsets and head branches, and segments replace a
name."""


def values_from(
    path: Path, command: str, commands: Mapping[str, Mapping[str, Option]]
) -> list[dict[str, Any]]:
    """Read the options of a command from a file.

    Args:
        path: the file.
        command: name of the command.
        commands: for every command its options, by their names.

    Returns:
        Values by option, of the command's table and of the top of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not TOML, has a key that is no option, or a value that is not allowed.
    """
    top = _parsed(path)
    everywhere = {
        name: option for options in commands.values() for name, option in _in_files(options).items()
    }
    tables = {key: top.pop(key) for key in commands if isinstance(top.get(key), dict)}
    for name, table in tables.items():
        _check_keys(table, _in_files(commands[name]), f"[{name}] of {path}")
    tabled = ", ".join(f"[{name}]" for name in commands)
    _check_keys(top, everywhere, str(path), f"; tables: {tabled}")
    own = _in_files(commands[command])
    table = tables.get(command, {})
    # What the table has takes the place of the top's, which may suit other commands alone.
    rest = {key: given for key, given in top.items() if key in own and key not in table}
    return [
        {key: own[key].from_toml(given, f"{key}{where}") for key, given in level.items()}
        for level, where in ((table, f" in [{command}] of {path}"), (rest, f" in {path}"))
    ]


def _in_files(options: Mapping[str, Option]) -> dict[str, Option]:
    return {name: x for name, x in options.items() if not isinstance(x, Argument)}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not TOML: {error}") from None
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(f"--config: cannot read {path}: {reason}") from None
    return found


def _check_keys(
    table: Mapping[str, Any], options: Mapping[str, Option], where: str, more: str = ""
) -> None:
    for key, value in table.items():
        if key in options:
            continue
        kind = "table" if isinstance(value, dict) else "key"
        raise ListError(
            f"there is no option for {kind} {toml_in_brief(key)} in {where}; "
            f"allowed: {', '.join(sorted(options))}{more}"
        )


def merged(levels: list[dict[str, Any]]) -> dict[str, Any]:
    """Values of several levels, the first of which counts most; see `INSTEAD`."""
    found: dict[str, Any] = {}
    for level in levels:
        hidden = frozenset[str]().union(*(INSTEAD.get(name, ()) for name in found))
        found = {**{k: v for k, v in level.items() if k not in hidden}, **found}
    return found
