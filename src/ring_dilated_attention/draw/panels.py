"""The panels that figures are made of; each draws into axes that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..layout import SequenceLayout
from .mask import NOBODY, Bools, Grid, Ints, Shown, holders
from .schedule import Timeline
from .style import Style, add_grid, dress
from .words import in_units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_MOST_SQUARES = 80
"""A side of a mask up to which cells are squares set apart; of larger ones they are pixels."""
_GAP = 0.06
"""Between the edges of a cell and its square, in cells."""
MOST_LABELLED = 10
"""Ranks whose amounts are written into the squares of a matrix."""


def draw_branches(
    axes: Axes, style: Style, shown: Shown, grid: Grid, *, nested: bool = True
) -> None:
    """The mask of a head: a cell has the colours of the branches that show it.

    Args:
        axes: where to draw.
        style: colours.
        shown: what the head sees.
        grid: positions of the cells.
        nested: whether a cell that several branches show has all their colours, one in the other,
            where cells are large enough (`nests`); else it has that of the first of them.
    """
    cells = _Cells(axes, style, grid)
    colors = style.branch_colors(len(shown.branches))
    below = np.zeros(shown.branches.shape[1:], dtype=np.int64)  # branches drawn so far
    step = (0.5 - _GAP) / (int(shown.branches.sum(0).max(initial=1)) + 0.5)
    for color, seen in zip(colors, shown.branches, strict=True):
        for number in np.unique(below[seen]) if nested and nests(grid) else (0,):
            cells.fill(seen & (below == number), color, float(number) * step)
        below += seen
    cells.finish()


def nests(grid: Grid) -> bool:
    """Whether cells are large enough for the colours of several branches, one in the other."""
    return grid.count <= _MOST_SQUARES


def draw_senders(
    axes: Axes, style: Style, shown: Shown, grid: Grid, layout: SequenceLayout
) -> None:
    """The mask of a head by who holds the keys: neutral if the rank itself, else its colour.

    Args:
        axes: where to draw.
        style: colours.
        shown: what the head sees.
        grid: positions of the cells.
        layout: which rank holds which positions; ranks are marked along both axes.
    """
    cells, owner = _Cells(axes, style, grid), holders(layout, grid)
    for rank in np.unique(shown.sender):
        if rank == NOBODY:
            continue
        seen = shown.sender == rank
        own = seen & (owner[:, None] == rank)
        cells.fill(own, style.own)
        cells.fill(seen & ~own, style.rank_color(int(rank)))
    cells.finish()
    _mark_ranks(axes, style, grid, layout)


def _mark_ranks(axes: Axes, style: Style, grid: Grid, layout: SequenceLayout) -> None:
    """A strip of ranks along both axes, and lines between them."""
    side = grid.end - grid.start
    width = side * 0.035
    for piece in layout.pieces:
        low, high = max(piece.start, grid.start), min(piece.stop, grid.stop)
        if low >= high:
            continue
        color, edge = style.rank_color(piece.rank), grid.start - 1.35 * width
        axes.add_patch(_rectangle(edge, low, width, high - low, color))
        axes.add_patch(_rectangle(low, edge, high - low, width, color))
        label = f"rank {piece.rank}" if high - low > side * 0.15 else f"{piece.rank}"
        text: dict[str, Any] = {"color": style.ink, "fontsize": 8, "ha": "center", "va": "center"}
        if high - low > side * 0.03:
            axes.text(edge - 0.8 * width, (low + high) / 2, label, rotation=90, **text)
            axes.text((low + high) / 2, edge - 0.8 * width, label, **text)
        if low > grid.start:
            axes.axhline(low, color=style.ink, linewidth=0.7)
            axes.axvline(low, color=style.ink, linewidth=0.7)
    axes.tick_params(left=False, labelleft=False)
    axes.set_ylabel("query position", labelpad=33)


def _rectangle(x: float, y: float, width: float, height: float, color: str):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, color=color, linewidth=0, clip_on=False)


def draw_matrix(
    axes: Axes, style: Style, amounts: Ints, ranks: range, words: Sequence[str]
) -> None:
    """What each rank sends each other one.

    Args:
        axes: where to draw.
        style: colours.
        amounts: (ranks, ranks), from the first to the second.
        ranks: which they are.
        words: each amount as it is written, row by row; used for `MOST_LABELLED` ranks or fewer.
    """
    count = len(ranks)
    color_map = style.heat()
    most = max(int(amounts.max(initial=0)), 1)
    axes.imshow(amounts / most, cmap=color_map, vmin=0, vmax=1, interpolation="none")
    dress(axes, style, spines=())
    step = max(1, -(-count // MOST_LABELLED))
    places = list(range(0, count, step))
    axes.set_xticks(places, [str(ranks[i]) for i in places])
    axes.set_yticks(places, [str(ranks[i]) for i in places])
    axes.tick_params(length=0)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    if count > MOST_LABELLED:
        return
    for edge in range(count + 1):
        axes.axhline(edge - 0.5, color=style.page, linewidth=2)
        axes.axvline(edge - 0.5, color=style.page, linewidth=2)
    for (i, j), amount in np.ndenumerate(amounts):
        color = style.muted
        if amount:
            red, green, blue, _ = color_map(amount / most)
            bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
            color = "#10161d" if bright else "#ffffff"
        text = words[i * count + j] if i != j else ""
        axes.text(
            j, i, text, ha="center", va="center", fontsize=7.5 if count > 5 else 9, color=color
        )


def draw_work(axes: Axes, style: Style, flops: Sequence[int]) -> None:
    """FLOPs of each rank over the mean of all, which is a dashed line."""
    count, total = len(flops), sum(flops)
    of_mean = np.array(flops, dtype=np.float64) * count / max(total, 1)
    color = style.systems["ours"]
    if count <= 64:
        axes.bar(range(count), of_mean, width=0.72, color=color)
    else:
        edges = np.arange(count + 1) - 0.5
        axes.stairs(of_mean, edges, fill=True, color=color)
    axes.axhline(1, color=style.ink, linewidth=1.2, linestyle=(0, (4, 3)))
    dress(axes, style)
    add_grid(axes, style)
    axes.set_xlabel("rank")
    axes.set_xlim(-0.6, count - 0.4)
    if count <= 16:
        axes.set_xticks(range(count))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_timeline(axes: Axes, style: Style, found: Timeline) -> None:
    """What ranks do, each in a lane: computing above, and below it what its link receives.

    Waiting is an empty box; keys of other ranks have those ranks' colours.
    """
    name, factor = found.unit
    for item in found.activities:
        x, width = item.start * factor, (item.stop - item.start) * factor
        if item.kind == "receive":
            y, height = item.rank + 0.13, 0.2
        else:
            y, height = item.rank - 0.36, 0.46
        own = item.peer == item.rank
        color = style.own if own else style.rank_color(item.peer)
        patch = _rectangle(x, y, width, height, color)
        patch.set(edgecolor=style.page, linewidth=0.8)
        if item.kind == "wait":
            patch.set(facecolor="none", edgecolor=style.ink, linewidth=0.9)
        axes.add_patch(patch)
    dress(axes, style, spines=("bottom",))
    add_grid(axes, style, "x")
    axes.set_xlim(0, max(found.total * factor, 1e-12) * 1.01)
    axes.set_ylim(found.world_size - 0.4, -0.6)
    axes.set_yticks(range(found.world_size), [f"rank {rank}" for rank in range(found.world_size)])
    axes.tick_params(axis="y", length=0)
    for rank, label in enumerate(axes.get_yticklabels()):
        label.set(color=style.rank_color(rank), fontweight="bold", fontsize=9)
    axes.set_xlabel(f"{name} from the start of the call")


class _Cells:
    """The cells of a mask: squares while there are few, else pixels.

    Args:
        axes: where to draw.
        style: colours.
        grid: positions of the cells.
    """

    def __init__(self, axes: Axes, style: Style, grid: Grid) -> None:
        self._axes, self._grid = axes, grid
        self._pixels = np.zeros((grid.count, grid.count, 3), dtype=np.uint8)
        self._pixels[:] = _rgb(style.faint)
        dress(axes, style, spines=())
        if nests(grid):
            side = grid.end - grid.start
            axes.add_patch(_rectangle(grid.start, grid.start, side, side, style.faint))
        axes.set_xlim(grid.start, grid.end)
        axes.set_ylim(grid.end, grid.start)
        axes.set_xlabel("key position")
        axes.set_ylabel("query position")

    def fill(self, cells: Bools, color: str, inset: float = 0.0) -> None:
        """Colour cells, or only the part that is at least `inset` cells from their edges."""
        if not nests(self._grid):
            self._pixels[cells] = _rgb(color)
            return
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        q, k = np.nonzero(cells)
        low, high = _GAP + inset, 1 - _GAP - inset
        corners = np.array([(low, low), (high, low), (high, high), (low, high), (low, low)])
        places = np.stack([k, q], -1)[:, None, :] + corners
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
        if len(places):
            points = self._grid.start + places.reshape(-1, 2) * self._grid.size
            path = Path(points, np.tile(codes, len(places)))
            self._axes.add_patch(PathPatch(path, facecolor=color, linewidth=0))

    def finish(self) -> None:
        """Draw what is left, and the ticks."""
        grid = self._grid
        if not nests(grid):
            extent = (grid.start, grid.end, grid.end, grid.start)
            self._axes.imshow(self._pixels, extent=extent, interpolation="none")
        for axis in (self._axes.xaxis, self._axes.yaxis):
            mark_positions(axis, grid)


def mark_positions(axis: Axis, grid: Grid, most: int = 5) -> None:
    """Ticks at round numbers of positions: multiples of a power of two where cells are blocks.

    Args:
        axis: of positions.
        grid: positions of the cells.
        most: ticks.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    step = 1 << max((grid.end - grid.start - 1).bit_length() - most.bit_length() + 1, 0)
    blocks = range(-(-grid.start // step) * step, grid.end + 1, step)
    if grid.size == 1:
        axis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    else:
        axis.set_major_locator(FixedLocator(blocks))
    axis.set_major_formatter(FuncFormatter(lambda x, _: in_units(round(x))))


def _rgb(color: str) -> npt.NDArray[np.uint8]:
    digits = color.removeprefix("#")
    return np.array([int(digits[i : i + 2], 16) for i in (0, 2, 4)], dtype=np.uint8)
