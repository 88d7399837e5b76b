"""What a KV cache keeps of a head, and how it grows with the text: a figure, and characters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..plan import AttentionPlan, costs, plan_cache
from ..terminal import count_of, in_bytes
from .kept import (
    Growth,
    KeptCells,
    cache_end,
    growth,
    kept_cells,
    kept_rows,
    lengths_around,
    longest_segment,
    rows_of,
)
from .mask import Grid
from .panels import mark_positions
from .style import LIGHT, Sheet, Style, add_grid, dress, headline
from .words import in_units, kv_head_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LANES = 24
"""Branches that a picture of a cache has room for."""
_MOST_CELLS, _MOST_SQUARES = 240, 80
"""Columns of a figure; and up to which they are squares set apart, and not runs."""
_GAP = 0.06
"""Between the edges of a cell and its square, in cells."""
_LANE = 0.3
"""Inches."""
_LABEL = 0.1
"""Between the names of two lines, of the height of their axes."""
_MOST_TICKS = 10
_WIDTH = 80
_MOST_BARS = 8
_DROPPED, _KEPT, _AHEAD = "░", "█", "·"


@dataclass(frozen=True)
class HeadCache:
    """The cache of a head after a text.

    Attributes:
        plan: of the text; of several documents the last one goes on.
        head: a query head.
        window: positions to draw; None: all, and those that come next.

    Raises:
        ValueError: there is no such head, there are too many branches, or the window is not in
            the picture.
    """

    plan: AttentionPlan
    head: int
    window: range | None = None

    def __post_init__(self) -> None:
        count = len(self.plan.pattern.branches)
        if count > MOST_LANES:
            raise ValueError(
                f"the cache of at most {MOST_LANES} branches can be drawn; the pattern has "
                f"{count:,}"
            )
        kv_head_of(self.plan, self.head)
        self.grid(1)

    @property
    def kv_head(self) -> int:
        """Whose rows they are."""
        return kv_head_of(self.plan, self.head)

    @property
    def length(self) -> int:
        """Positions so far."""
        first, stop = self.plan.documents[-2:]
        return stop - first

    def grid(self, most: int) -> Grid:
        """Cells of the picture: at most this number of columns."""
        end = cache_end(self.plan.pattern, self.length)
        return Grid.of(end, most, self.window, called="where the picture ends")

    def cells(self, grid: Grid) -> KeptCells:
        """What is kept."""
        plan = self.plan
        return kept_cells(plan.pattern, plan.num_kv_heads, self.kv_head, self.length, grid)

    def growth(self) -> Growth:
        """Rows for shorter and for longer texts."""
        plan = self.plan
        lengths = lengths_around(plan.pattern, self.length)
        return growth(plan.pattern, plan.num_kv_heads, self.kv_head, lengths)

    @property
    def rows(self) -> int:
        """Rows that a cache for the text has."""
        plan = self.plan
        return rows_of(plan.pattern, plan.num_kv_heads, self.kv_head, self.length)

    @property
    def kept(self) -> int:
        """Rows that a later position can still be shown."""
        plan = self.plan
        return kept_rows(plan.pattern, plan.num_kv_heads, self.kv_head, self.length)

    def in_words(self) -> str:
        """Whose cache it is."""
        kv_head = "" if self.kv_head == self.head else f" (KV head {self.kv_head})"
        last = ", the last document" if len(self.plan.documents) > 2 else ""
        length = count_of(self.length, "position")
        return f"KV cache of head {self.head}{kv_head} after {length}{last}"

    @property
    def _rows_at_most(self) -> int:
        """Rows that a cache has when all segments but the whole document have ended."""
        plan = self.plan
        most = longest_segment(plan.pattern) + 1
        return rows_of(plan.pattern, plan.num_kv_heads, self.kv_head, most)

    def kept_in_words(self) -> str:
        """How many rows are kept."""
        if not self.kept:
            if not self._rows_at_most:
                return "no row: no branch shows the head any key"
            return "no row just now: its next one begins a segment in every branch"
        return f"{count_of(self.kept, 'row')}; a cache of all rows has {self.length:,}"

    def growth_in_words(self) -> str:
        """Whether the cache grows."""
        pattern, heads = self.plan.pattern, self.plan.num_kv_heads
        rates = [
            branch.dilation_rate
            for index, branch in enumerate(pattern.branches)
            if branch.segment_length is None
            and any(head == self.kv_head for head, _ in pattern.heads(index, heads))
        ]
        if not rates:
            longest, rows = longest_segment(pattern), count_of(self._rows_at_most, "row")
            return f"{rows} for any text beyond {longest:,} positions"
        rows_of_n = " + ".join("n" if rate == 1 else f"n / {rate:,}" for rate in rates)
        return f"branches of the whole document keep {rows_of_n} rows of n positions"

    def bytes_in_words(self, size: costs.TensorSize) -> str:
        """Bytes of all heads of a layer."""
        plan = self.plan
        whole = plan_cache(plan.pattern, plan.num_kv_heads, self.length)
        own = whole.nbytes(size.batch, size.head_dim, size.element_size)
        every = size.key_value_bytes(self.length * plan.num_kv_heads)
        return (
            f"{count_of(plan.num_kv_heads, 'KV head')} of {size.head_dim}, batch {size.batch}: "
            f"{in_bytes(own)} per layer; all rows: {in_bytes(every)}"
        )


def cache_figure(
    plan: AttentionPlan,
    size: costs.TensorSize,
    head: int = 0,
    *,
    window: range | None = None,
    style: Style = LIGHT,
) -> Figure:
    """Draw which rows a KV cache keeps after a text, and how it grows with the text.

    Args:
        plan: of the text, at least one position; of several documents the last one goes on. How it
            is sharded makes no difference, nor whether it is causal: generation always is.
        size: what turns rows into bytes.
        head: the query head whose rows are drawn.
        window: positions to draw, the last few of which may lie behind the text; None: all.
        style: colours.

    Raises:
        ValueError: there is no such head, there are more than `MOST_LANES` branches, or the window
            reaches beyond the picture.
    """
    cache = HeadCache(plan, head, window)
    grid = cache.grid(_MOST_CELLS)
    lanes = _LANE * len(plan.pattern.branches)
    sheet = Sheet(style, 9.6, lanes + 5.5)
    sheet.title(str(plan.pattern), cache.in_words())
    axes = sheet.axes(1.6, 1.35, 7.7, lanes)
    draw_kept(axes, style, cache, grid)
    headline(axes, style, "Kept for later positions", cache.kept_in_words(), lift=12)
    kept_key(sheet, 1.6, lanes + 1.9)
    axes = sheet.axes(1.6, lanes + 2.9, 6.8, 1.8)
    draw_growth(axes, style, {"this cache": cache.growth()}, cache.length)
    headline(axes, style, "Rows of the head in memory", cache.growth_in_words())
    block = "" if grid.size == 1 else ", kept if one of its rows is"
    sheet.note(f"1 cell = {count_of(grid.size, 'position')}{block}. {cache.bytes_in_words(size)}.")
    return sheet.figure


def kept_key(sheet: Sheet, left: float, top: float) -> None:
    """What the squares of `draw_kept` mean."""
    style = sheet.style
    color = style.branch_colors(2)[0]
    sheet.key(left, top, [color], ["kept"])
    sheet.key(left + 0.8, top, [style.own], ["dropped: no later position is shown it"])
    sheet.key(
        left + 3.75, top, [color], ["to come: is shown the kept rows of its branch"], filled=False
    )


def draw_kept(axes: Axes, style: Style, cache: HeadCache, grid: Grid) -> None:
    """Which rows are kept, a lane for each branch, and the next position.

    Args:
        axes: where to draw.
        style: colours.
        cache: of a head.
        grid: positions of the cells.
    """
    branches, cells = cache.plan.pattern.branches, cache.cells(grid)
    colors = style.branch_colors(len(branches))
    dress(axes, style, spines=())
    for lane, color in enumerate(colors):
        dropped, kept, ahead = (found[lane] for found in cells)
        band = lane + 0.12, 0.76
        axes.broken_barh([(grid.start, grid.end - grid.start)], band, color=style.faint)
        for found, face, edge in (
            (dropped & ~kept & ~ahead, style.own, "none"),
            (ahead & ~kept, "none", color),
            (kept, color, "none"),
        ):
            axes.broken_barh(list(_bars(found, grid)), band, facecolor=face, edgecolor=edge)
    axes.axvline(cache.length, color=style.ink, linewidth=1.2)
    axes.set_xlim(grid.start, grid.end)
    axes.set_ylim(len(branches), 0)
    axes.set_yticks([lane + 0.5 for lane in range(len(branches))], list(map(str, branches)))
    axes.tick_params(axis="y", length=0, labelcolor=style.ink)
    mark_positions(axes.xaxis, grid, _MOST_TICKS)
    axes.set_xlabel("position", labelpad=1)
    if grid.start <= cache.length <= grid.end:
        is_left = cache.length - grid.start > 0.7 * (grid.end - grid.start)
        axes.annotate(
            f"next position: {cache.length:,}", (cache.length, 0),
            xytext=(-4 if is_left else 4, 4), textcoords="offset points",
            ha="right" if is_left else "left", fontsize=8.5, color=style.ink,
        )  # fmt: skip


def _bars(found: Sequence[bool], grid: Grid) -> Iterator[tuple[float, float]]:
    """(start, width) of what is set: squares set apart, or runs where there are many cells."""
    is_squares = grid.count <= _MOST_SQUARES
    gap = _GAP if is_squares else 0.0
    runs = groupby(range(grid.count), key=lambda cell: (bool(found[cell]), is_squares and cell))
    for (is_set, _), run in runs:
        if is_set:
            cells = list(run)
            start = grid.start + (cells[0] + gap) * grid.size
            yield start, (len(cells) - 2 * gap) * grid.size


class _Line(NamedTuple):
    """Rows by lengths, and how they are drawn."""

    name: str
    rows: Sequence[int]
    color: str
    look: str


def draw_growth(
    axes: Axes, style: Style, caches: Mapping[str, Growth], length: int | None = None
) -> None:
    """Rows of a head against the length of the text, beside those of a cache of all rows.

    Args:
        axes: where to draw; names of lines stand to the right of it.
        style: colours.
        caches: rows by lengths, the same ones, by what the cache is called.
        length: of a text that is marked; None: none.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    lengths = next(iter(caches.values())).lengths
    lines = [_Line("all rows", lengths, style.muted, "dashed")]
    for (name, found), color in zip(
        caches.items(), [style.systems["ours"], *style.ranks], strict=False
    ):
        lines.append(_Line(name, found.rows, color, "solid"))
    dress(axes, style)
    add_grid(axes, style)
    low = max(min(line.rows[0] for line in lines), 1)  # a head may see nothing
    high = max(line.rows[-1] for line in lines)
    least, place = _LABEL * np.log2(4 * high / low), 0.0  # between two names
    for line in sorted(lines, key=lambda line: line.rows[-1]):
        axes.plot(lengths, line.rows, color=line.color, linewidth=2, linestyle=line.look)
        place = max(float(np.log2(max(line.rows[-1], low))), place)
        axes.annotate(
            line.name, (lengths[-1], 2**place), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=9, color=line.color, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        place += least
    if length is not None:
        axes.axvline(length, color=style.ink, linewidth=1.2)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _: in_units(round(x))))
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(low / 2, 2 * high)
    axes.set_xlabel("positions of the text", labelpad=1)
    axes.set_ylabel("rows of a head")


def cache_text(
    plan: AttentionPlan,
    size: costs.TensorSize,
    head: int = 0,
    *,
    window: range | None = None,
    width: int = _WIDTH,
) -> list[str]:
    """Which rows a KV cache keeps, and how it grows with the text; see `cache_figure`."""
    cache = HeadCache(plan, head, window)
    names = [str(branch) for branch in plan.pattern.branches]
    left = max(map(len, names)) + 1
    grid = cache.grid(max(width - left, 1))
    cells = cache.cells(grid)
    lines = [
        f"{cache.in_words()}: {cache.kept_in_words()}.",
        f"{cache.bytes_in_words(size)}.",
        f"1 character = {count_of(grid.size, 'position')}: {_KEPT} kept, {_DROPPED} dropped (not "
        f"shown again), {_AHEAD} to come.",
    ]
    lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="   ")]
    lines.append("")
    for lane, name in enumerate(names):
        signs = "".join(
            _KEPT if kept else _AHEAD if ahead else _DROPPED if dropped else " "
            for dropped, kept, ahead in zip(*(found[lane].tolist() for found in cells), strict=True)
        )
        lines.append(f"{name:<{left}}{signs}".rstrip())
    if grid.start <= cache.length < grid.end:
        lines.append(_pointer(left + (cache.length - grid.start) // grid.size, cache, width))
    return [*lines, "", *_growth_lines(cache, width)]


def _pointer(column: int, cache: HeadCache, width: int) -> str:
    text = f"next position: {cache.length:,}"
    if column + 2 + len(text) <= width:
        return " " * column + f"^ {text}"
    return f"{text} ^".rjust(column + 1)


def _growth_lines(cache: HeadCache, width: int) -> Iterator[str]:
    """A line for some lengths, with bars on a logarithmic scale."""
    found = cache.growth()
    title = f"In memory: {cache.growth_in_words()}."
    yield from textwrap.wrap(title, width, subsequent_indent="   ")
    heading = f"{'positions':>12} {'this cache':>19}  "
    yield f"{heading}{_KEPT} this cache, {_DROPPED} all rows; logarithmic"
    pairs = list(zip(found.lengths, found.rows, strict=True))
    every = -(-len(pairs) // _MOST_BARS)
    most, room = max(found.lengths[-1], *found.rows), width - len(heading)
    for length, rows in pairs[(len(pairs) - 1) % every :: every]:
        own, dense = (round(np.log2(x + 1) / np.log2(most + 1) * room) for x in (rows, length))
        bar = _KEPT * own + _DROPPED * (dense - own)
        yield f"{in_units(length):>12} {rows:>19,}  {bar}"
