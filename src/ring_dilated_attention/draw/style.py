"""One look for every figure: colours for light and dark pages, dressed axes, and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase


@dataclass(frozen=True, kw_only=True)
class Style:
    """Colours of a page, as ``#rrggbb``. No two of a tuple differ by red and green alone."""

    name: str  # "light" or "dark"
    page: str  # background
    ink: str  # text and lines that matter
    muted: str  # text and lines that do not
    faint: str  # grid lines, and cells in which nothing is visible
    own: str  # keys that a rank has itself
    branches: tuple[str, ...]  # from the first branch to the last, a ramp to interpolate
    ranks: tuple[str, ...]  # of ranks, repeated from the ninth on

    def branch_colors(self, count: int) -> list[str]:
        """A colour for each of `count` branches."""
        ramp = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in self.branches])
        places = np.linspace(0, len(ramp) - 1, count)
        mixed = (np.interp(places, range(len(ramp)), channel).round() for channel in ramp.T)
        return [f"#{int(r):02x}{int(g):02x}{int(b):02x}" for r, g, b in zip(*mixed, strict=True)]

    def rank_color(self, rank: int) -> str:
        """The colour of a rank."""
        return self.ranks[rank % len(self.ranks)]


LIGHT = Style(
    name="light",
    page="#ffffff",
    ink="#1b2530",
    muted="#5c6873",
    faint="#eceff2",
    own="#b3bcc5",
    branches=("#12406e", "#1f7fbf", "#45b5c4", "#a6dcb4"),
    ranks=("#d55e00", "#7b4fb5", "#e0a100", "#009e73", "#d6579b", "#3f8fd2", "#8c564b", "#5b6c8f"),
)
DARK = Style(
    name="dark",
    page="#0d1117",
    ink="#e8edf2",
    muted="#9aa6b2",
    faint="#1e2630",
    own="#596673",
    branches=("#e3f1ff", "#7cc0f5", "#2f93b8", "#27907a"),
    ranks=("#f5843a", "#a987e8", "#f2c14a", "#2fc59b", "#ee86bd", "#6fb4ee", "#bd8a7c", "#93a3c4"),
)
STYLES = {style.name: style for style in (LIGHT, DARK)}


def new_figure(
    style: Style, width: float, height: float, title: str = "", note: str = ""
) -> Figure:
    """Make an empty figure of `width` x `height` inches, with a title above and a note below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=style.page, layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=style.ink)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=style.muted)
    return figure


def dress(
    axes: Axes,
    style: Style,
    *,
    spines: Sequence[str] = ("left", "bottom"),
    grid: Literal["x", "y"] | None = None,
) -> None:
    """Give axes the colours of a style, some sides of a frame, and grid lines across an axis."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set(visible=side in spines, color=style.muted, linewidth=0.8)
    axes.tick_params(colors=style.muted, labelsize=8, width=0.8, length=3)
    axes.tick_params(which="minor", length=0)
    for axis, side in ((axes.xaxis, "bottom"), (axes.yaxis, "left")):
        axis.label.set(color=style.ink, fontsize=9)
        if side not in spines:
            axis.set_tick_params(length=0)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, which="major", color=style.faint, linewidth=1)


def set_titles(axes: Axes, style: Style, title: str, below: str = "", *, lift: float = 0) -> None:
    """Write a bold title over axes and an explanation under it, `lift` points above the axes."""
    lines = "\n" * (below.count("\n") + bool(below))  # both texts have one place: make room
    pad = 6 + lift
    axes.set_title(title + lines, loc="left", pad=pad, fontsize=10, weight="bold", color=style.ink)
    axes.set_title(below, x=0, ha="left", pad=pad, fontsize=8.5, color=style.muted)


def add_key(figure: Figure, style: Style, key: Iterable[tuple[str, str]], columns: int = 1) -> None:
    """List (words, colour) pairs at the bottom of a figure, in place of a note."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=color, label=words) for words, color in key],
        loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5,
        labelcolor=style.ink, handlelength=0.9, handleheight=0.9,
    )  # fmt: skip


def save(picture: Axes | FigureBase, path: Path, *, transparent: bool = False) -> None:
    """Write a figure, which its axes may stand for; equal figures give equal files.

    With `transparent` it has no background, and not that of its style.

    Raises:
        ValueError: the path is neither ``*.png`` nor ``*.svg``.
        OSError: the file cannot be written.
    """
    import matplotlib

    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a picture must be named *.png or *.svg; got {path.name!r}")
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    page = "none" if transparent else picture.figure.get_facecolor()
    # matplotlib names the parts of an SVG at random, unless it is told a salt
    with matplotlib.rc_context({"svg.hashsalt": "rda", "svg.fonttype": "path"}):
        picture.figure.savefig(path, dpi=160, facecolor=page, metadata=metadata)  # type: ignore[union-attr]
