"""One option of a command: its name, what it means, and how its value is read from text.

A value is text on the command line, and text, a number, a boolean or a list in a TOML file. Both
are read by the same function, without torch, so that a bad one is refused at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..pattern import check_choice, check_positive_float, in_brief

Reader: TypeAlias = Callable[[str, str], Any]
"""(text, what errors call the option) to a value; raises a `ValueError`."""

UNITS = {"": 1, "K": 2**10, "M": 2**20}
"""Of numbers of positions: 256K is 262,144, 1M is 1,048,576."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option that takes a value.

    Attributes:
        name: without dashes in front: ``seq-len``.
        help: what it means, as sentences.
        panel: the group that the help shows it in.
        metavar: what the help calls its value.
        read: reads its value from text.
        default: the value where none is given.
        shown: the default in words; empty: as it is written.
        choices: all allowed values, for completion; empty: any.
        is_list: whether it takes values separated by commas; ``several`` makes such an option.
        is_repeated: whether it is given once for each of its values, which may contain commas.
        is_required: whether a command line without it, and without a file that has it, is refused.
        toml: types that it may have in a TOML file.
    """

    name: str
    help: str
    panel: str
    metavar: str
    read: Reader
    default: Any = None
    shown: str = ""
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_repeated: bool = False
    is_required: bool = False
    toml: tuple[type, ...] = (str,)

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return f"--{self.name}"

    @property
    def text(self) -> str:
        """The help, and the default."""
        shown = self.shown or ("" if self.default is None else str(self.default))
        return f"{self.help} Required." if self.is_required else _with_default(self.help, shown)

    def but(self, default: Any = None, *, shown: str = "") -> Option:
        """The same option with another default."""
        return replace(self, default=default, shown=shown)

    def meaning(self, help_text: str) -> Option:
        """The same option with the help of a command that takes more of its values, or fewer."""
        return replace(self, help=help_text)

    @property
    def several(self) -> Option:
        """The same option for a command that takes several values, separated by commas."""
        default = None if self.default is None else (self.default,)
        shown = self.shown or ("" if self.default is None else str(self.default))
        read = list_of(self.read)
        return replace(self, read=read, default=default, shown=shown, is_list=True)

    def value(self, given: Any, where: str) -> Any:
        """The value of what was given, on the command line or in a file.

        Args:
            given: text, or a list of texts where the option is repeated.
            where: what errors call the option.

        Raises:
            ValueError: it is not allowed.
        """
        if self.is_repeated:
            return tuple(self.read(one, where) for one in given)
        return self.read(given, where)

    def from_toml(self, given: Any, where: str) -> Any:
        """The same for a value of a TOML file, which is text, a number, a boolean or a list.

        Args:
            given: the value.
            where: what errors call the option.

        Raises:
            ValueError: it is not allowed.
        """
        texts = [self._as_text(one, where) for one in self._as_list(given)]
        return self.value(texts if self.is_repeated else ",".join(texts), where)

    def _as_list(self, given: Any) -> list[Any]:
        return given if isinstance(given, list) and (self.is_list or self.is_repeated) else [given]

    def _as_text(self, given: Any, where: str) -> str:
        if type(given) not in self.toml:
            kinds = " or ".join(dict.fromkeys(_KINDS[kind] for kind in self.toml))
            listed = ", or a list" if self.is_list or self.is_repeated else ""
            raise ValueError(f"{where} must be {kinds}{listed}; got {toml_in_brief(given)}")
        return str(given)


@dataclass(frozen=True, kw_only=True)
class Flag(Option):
    """An option that is on or off: ``--causal`` or ``--no-causal``.

    Attributes:
        has_no: whether there is ``--no-...``.
    """

    metavar: str = ""
    read: Reader = lambda text, where: text == "True"
    default: bool | None = False
    has_no: bool = False
    toml: tuple[type, ...] = (bool,)

    @property
    def text(self) -> str:
        """The help, and the default where it may be switched off."""
        shown = self.shown or (self.flag if self.default else f"--no-{self.name}")
        return _with_default(self.help, shown if self.has_no else "")


@dataclass(frozen=True, kw_only=True)
class Argument(Option):
    """A value that is given by its place, right after the command, and not in a file."""

    is_required: bool = True

    @property
    def flag(self) -> str:
        """What errors and the help call it."""
        return self.name.upper()

    @property
    def text(self) -> str:
        """The help."""
        return self.help


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def toml_in_brief(given: Any) -> str:
    """A value of a TOML file as it is written there, for a message of one line."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "a table"
    return in_brief(given)


def _with_default(text: str, shown: str) -> str:
    return f"{text} Default: {shown}." if shown else text


def _brief(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."


def text(given: str, where: str) -> str:
    """Any text."""
    return given


def path(given: str, where: str) -> Path:
    """A path, which may not be empty: that would be the current folder, which ``.`` says."""
    return Path(path_text(given, where))


def path_text(given: str, where: str) -> str:
    """A path as text, for what takes other texts, too."""
    if not given:
        raise ValueError(f"{where} must not be empty; for the current folder, write .")
    return given


def one_of(choices: Sequence[str]) -> Reader:
    """Reads one of these names."""

    def read(given: str, where: str) -> str:
        check_choice(where, given, choices)
        return given

    return read


def integer(low: int) -> Reader:
    """Reads a whole number that is at least `low`."""

    def read(given: str, where: str) -> int:
        try:
            number = int(given)
        except ValueError:
            raise ValueError(f"{where} must be a whole number; got {_brief(given)}") from None
        if number < low:
            raise ValueError(f"{where} must be >= {low}, got {in_brief(number)}")
        return number

    return read


def number(given: str, where: str) -> float:
    """Any number."""
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"{where} must be a number; got {_brief(given)}") from None


def number_above_0(given: str, where: str) -> float:
    """A finite number above 0."""
    return check_positive_float(where, number(given, where))


def number_from_0(given: str, where: str) -> float:
    """A finite number that is not negative."""
    found = number(given, where)
    if not 0 <= found < math.inf:
        raise ValueError(f"{where} must be finite and >= 0, got {found}")
    return found


def positions_from(low: int) -> Reader:
    """Reads a number of positions that is at least `low`: ``8192``, ``256K`` or ``1M``."""

    def read(given: str, where: str) -> int:
        found = re.fullmatch(r"([+-]?\d{1,4000})([KM]?)", given.strip())
        if found is None:
            raise ValueError(
                f"{where} must be a whole number such as 8192, 256K or 1M; got {_brief(given)}"
            )
        count = int(found[1]) * UNITS[found[2]]
        if count < low:
            raise ValueError(f"{where} must be >= {low}, got {in_brief(count)}")
        return count

    return read


positions = positions_from(1)


def positions_or_all(given: str, where: str) -> int | None:
    """A number of positions, or ``all`` (None)."""
    return None if given.strip() == "all" else positions(given, where)


def list_of(read: Reader) -> Reader:
    """Reads values separated by commas."""

    def read_list(given: str, where: str) -> tuple[Any, ...]:
        return tuple(read(part.strip(), where) for part in given.split(","))

    return read_list
