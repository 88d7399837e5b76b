"""Tables that never cut a number: what does not fit beside it goes below, with the same keys."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from .numbers import Units, common_scale

GAP = 2
"""Spaces between columns."""

LEAST_TEXT = 12
"""Characters that a column of words keeps at least before its words go on the next line."""

STYLES = {"WRONG": "bold red", "ok": "green"}
"""Of cells that say so."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        heading: with the unit of its numbers; it may be shown on several lines.
        cells: a text per row; it may have several lines.
        is_text: whether cells are words, which are aligned to the left and may go on the next
            line; numbers are aligned to the right and stay on one.
    """

    heading: str
    cells: tuple[str, ...]
    is_text: bool = False

    @property
    def least(self) -> int:
        """Width of the longest cell, and of the longest word of the heading; 1 at least."""
        lines = [line for cell in self.cells for line in cell.split("\n")]
        return max([1, *map(len, (*lines, *self.heading.split()))])


def texts(heading: str, cells: Iterable[object]) -> Column:
    """A column of words."""
    return Column(heading=heading, cells=tuple(map(str, cells)), is_text=True)


def counts(heading: str, values: Iterable[int]) -> Column:
    """A column of whole numbers: ``1,048,576``."""
    return numbers(heading, values, ",d")


def numbers(heading: str, values: Iterable[float | None], form: str) -> Column:
    """A column of numbers in one format; None: an empty cell.

    Args:
        heading: with the unit.
        values: the numbers.
        form: a format specification, such as ``".3f"``.
    """
    cells = tuple("" if value is None else format(value, form) for value in values)
    return Column(heading=heading, cells=cells)


def amounts(named: Iterable[tuple[str, Sequence[float | None]]], units: Units) -> list[Column]:
    """Columns of quantities in one common unit, which each heading names: ``sent MiB``.

    Args:
        named: headings without the unit, and values in the basic unit; None: an empty cell.
        units: to choose from; the same for all of these columns, so that they can be compared.
    """
    named = list(named)
    known = [value for _, row in named for value in row if value is not None]
    scale = common_scale(known, units)

    def column(heading: str, row: Sequence[float | None]) -> Column:
        cells = tuple("" if value is None else scale.write(value) for value in row)
        return Column(heading=f"{heading} {scale.unit.name}".strip(), cells=cells)

    return [column(heading, row) for heading, row in named]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table to be shown.

    Attributes:
        title: what it shows.
        keys: columns that say what a row is about; parts of a table that is split repeat them.
        columns: what else there is.
        totals: rows at the end that a line sets apart.
        note: a line below; empty: none.
    """

    title: str
    keys: Sequence[Column]
    columns: Sequence[Column]
    totals: int = 0
    note: str = ""

    def parts(self, width: int) -> list[list[Column]]:
        """The columns, keys first, of the tables in which this one is shown at a width.

        There are as few parts as fit, of about the same width. Columns of words become narrower
        where they have to: key columns where they would take more than half of the width. What is
        wider than the width even so is there all the same, in lines that are longer.
        """
        if _width(everything := [*self.keys, *self.columns]) <= width:
            return [everything]
        needed = max((column.least for column in self.columns if not column.is_text), default=0)
        keys = _narrowed(self.keys, width - GAP - max(needed, width // 2))
        room = width - GAP - _width(keys)
        columns = [_narrowed([column], room)[0] for column in self.columns]
        parts = _packed(keys, columns, width)
        narrower = (_packed(keys, columns, limit) for limit in range(_width(keys), width))
        return next((found for found in narrower if len(found) == len(parts)), parts)

    def lines(self, width: int) -> list[Text]:
        """The lines of the table at a width."""
        parts = self.parts(width)
        lines: list[Text] = []
        for number, columns in enumerate(parts, start=1):
            title = self.title + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
            lines += [Text(line, style="bold") for line in _wrapped(title, width)]
            lines += _body(columns, width, self.totals)
            if number < len(parts):
                lines.append(Text())
        lines += [Text(line) for line in _wrapped(self.note, width)]
        return lines


def show_table(console: Console, table: Table) -> None:
    """Print a table and an empty line, whole, whatever the width of the console."""
    for line in (*table.lines(console.width), Text()):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def show_text(console: Console, text: str) -> None:
    """Print a sentence in lines of whole words, without markup; a longer word, as a path, is whole.

    An empty text is an empty line.
    """
    for line in _wrapped(text, console.width) or [""]:
        console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def _packed(keys: list[Column], columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Parts of keys and as many columns as fit, one at least."""
    parts: list[list[Column]] = []
    part = list(keys)
    for column in columns:
        if len(part) > len(keys) and _width([*part, column]) > width:
            parts.append(part)
            part = list(keys)
        part.append(column)
    return [*parts, part]


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _narrowed(wide: Sequence[Column], width: int) -> list[Column]:
    """Columns that fit a width if they can, words of the widest ones going on the next line."""
    columns = list(wide)
    while _width(columns) > width:
        widths = [column.least if column.is_text else 0 for column in columns]
        widest = widths.index(max(widths))
        column = columns[widest]
        least = max((len(word) for cell in column.cells for word in cell.split()), default=0)
        room = max(widths[widest] - (_width(columns) - width), least, LEAST_TEXT)
        if room >= widths[widest]:
            break  # words are longer than that
        cells = tuple("\n".join(_wrapped(cell, room)) for cell in column.cells)
        columns[widest] = replace(column, cells=cells)
    return columns


def _body(columns: Sequence[Column], width: int, totals: int) -> list[Text]:
    """Headings, a line, the rows."""
    widths = _widths(columns, width)
    headings = [_wrapped(c.heading, w) for c, w in zip(columns, widths, strict=True)]
    height = max(map(len, headings))
    lines = [
        _line([([""] * (height - len(h)) + h)[row] for h in headings], columns, widths)
        for row in range(height)
    ]
    rule = Text("─" * (sum(widths) + GAP * (len(widths) - 1)), style="dim")
    lines.append(rule)
    rows = list(zip(*(column.cells for column in columns), strict=True))
    for index, row in enumerate(rows):
        if totals and index == len(rows) - totals:
            lines.append(rule)
        cells = [cell.split("\n") for cell in row]
        for number in range(max(map(len, cells))):
            shown = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append(_line(shown, columns, widths))
    return lines


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Widths of columns: the least ones, and what is left goes to the tallest headings."""
    widths = [column.least for column in columns]
    spare = width - _width(columns)
    while True:
        heights = [
            len(_wrapped(column.heading, w)) for column, w in zip(columns, widths, strict=True)
        ]
        tallest = max(heights)
        for index, height in enumerate(heights):
            if height < tallest or height < 2:
                continue
            heading, now = columns[index].heading, widths[index]
            wider = next(
                w for w in range(now, len(heading) + 1) if len(_wrapped(heading, w)) < height
            )
            if wider - now > spare:
                return widths
            spare -= wider - now
            widths[index] = wider
        if tallest < 2:
            return widths


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Text:
    line = Text()
    for number, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        padded = cell.ljust(width) if column.is_text else cell.rjust(width)
        line.append(" " * GAP * (number > 0))
        line.append(padded, style=STYLES.get(cell, ""))
    line.rstrip()
    return line
