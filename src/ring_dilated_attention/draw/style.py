"""One look for every figure: a theme for light and one for dark pages, and a colour per system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
"""What `save` writes."""
MARGIN = 0.15
"""Inches around a sheet."""

_CHARACTERS = 11
"""Of a title in an inch, about."""
_DPI = 160
_HASH_SALT = "ring-dilated-attention"
"""With it, equal figures are equal files: matplotlib names parts of an SVG at random otherwise."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """Colours of a page, as ``#rrggbb``. No two of a tuple are told apart by red and green alone.

    Attributes:
        name: ``"light"`` or ``"dark"``.
        page: background.
        ink: text and lines that matter.
        muted: text and lines that do not.
        faint: grid lines, and cells in which nothing is visible.
        own: what a rank has or computes by itself.
        branches: from the first branch to the last, a ramp to interpolate.
        ranks: of ranks, repeated from the ninth on.
        systems: of implementations by what they are called in tables.
    """

    name: str
    page: str
    ink: str
    muted: str
    faint: str
    own: str
    branches: tuple[str, ...]
    ranks: tuple[str, ...]
    systems: dict[str, str]

    def branch_colors(self, count: int) -> list[str]:
        """A colour for each of `count` branches."""
        from matplotlib.colors import LinearSegmentedColormap, to_hex

        ramp = LinearSegmentedColormap.from_list("branches", list(self.branches))
        return [to_hex(ramp(i / max(count - 1, 1))) for i in range(count)]

    def rank_color(self, rank: int) -> str:
        """The colour of a rank."""
        return self.ranks[rank % len(self.ranks)]

    def heat(self) -> Any:
        """A colour map from `faint` to `ink`'s side of the branches' ramp, for amounts."""
        from matplotlib.colors import LinearSegmentedColormap

        ramp = [self.faint, *reversed(self.branches)]
        return LinearSegmentedColormap.from_list("heat", ramp)


LIGHT = Style(
    name="light",
    page="#ffffff",
    ink="#1b2530",
    muted="#5c6873",
    faint="#eceff2",
    own="#b3bcc5",
    branches=("#12406e", "#1f7fbf", "#45b5c4", "#a6dcb4"),
    ranks=(
        *("#d55e00", "#7b4fb5", "#e0a100", "#009e73"),
        *("#d6579b", "#3f8fd2", "#8c564b", "#5b6c8f"),
    ),
    systems={
        "ours": "#0b6fb8",
        "torchscale": "#d55e00",
        "cudnn": "#009e73",
        "flash-attn-4": "#7b4fb5",
        "context_parallel": "#c28a00",
    },
)
DARK = Style(
    name="dark",
    page="#0d1117",
    ink="#e8edf2",
    muted="#9aa6b2",
    faint="#1e2630",
    own="#596673",
    branches=("#e3f1ff", "#7cc0f5", "#2f93b8", "#27907a"),
    ranks=(
        *("#f5843a", "#a987e8", "#f2c14a", "#2fc59b"),
        *("#ee86bd", "#6fb4ee", "#bd8a7c", "#93a3c4"),
    ),
    systems={
        "ours": "#58aef5",
        "torchscale": "#f5843a",
        "cudnn": "#2fc59b",
        "flash-attn-4": "#b497ee",
        "context_parallel": "#f2c14a",
    },
)
STYLES = {style.name: style for style in (LIGHT, DARK)}


class Sheet:
    """A figure whose axes and texts are placed in inches from its top left corner.

    Fixed places, so that nothing overlaps and equal pictures are equal files.

    Args:
        style: its colours.
        width: inches.
        height: inches.
    """

    def __init__(self, style: Style, width: float, height: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.style, self.width, self.height = style, width, height
        self.figure: Figure = Figure(figsize=(width, height), facecolor=style.page)
        FigureCanvasAgg(self.figure)  # no global state of pyplot knows the figure

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Empty axes."""
        bottom = self.height - top - height
        return self.figure.add_axes(
            (left / self.width, bottom / self.height, width / self.width, height / self.height)
        )

    def text(self, left: float, top: float, text: str, **options: Any) -> None:
        """A text whose first line is centred on `top`."""
        look = {"fontsize": 9, "color": self.style.ink, "ha": "left", "va": "center"}
        self.figure.text(left / self.width, 1 - top / self.height, text, **{**look, **options})

    def title(self, text: str, below: str = "") -> None:
        """The title of the sheet, cut to one line, and a line below it."""
        most = int((self.width - 2 * MARGIN) * _CHARACTERS)
        text = text if len(text) <= most else f"{text[: most - 4]} ..."
        self.text(MARGIN, 0.22, text, fontsize=10)
        self.text(MARGIN, 0.43, below, fontsize=9, color=self.style.muted)

    def note(self, text: str, line: int = 0) -> None:
        """What is assumed or left out: a line at the bottom, or the `line`-th above it."""
        self.text(MARGIN, self.height - 0.18 - 0.2 * line, text, fontsize=8, color=self.style.muted)

    def key(
        self,
        left: float,
        top: float,
        colors: Sequence[str],
        words: Sequence[str],
        *,
        filled: bool = True,
    ) -> None:
        """What colours mean: a square and a text each, one below the other."""
        from matplotlib.patches import Rectangle

        side = 0.12
        for number, (color, text) in enumerate(zip(colors, words, strict=True)):
            middle = top + 0.2 * number
            corner = left / self.width, 1 - (middle + side / 2) / self.height
            square = Rectangle(
                corner, side / self.width, side / self.height, edgecolor=color, linewidth=0.9,
                facecolor=color if filled else "none", transform=self.figure.transFigure,
            )  # fmt: skip
            self.figure.add_artist(square)
            self.text(left + 0.22, middle, text, fontsize=8.5)


def dress(axes: Axes, style: Style, *, spines: Sequence[str] = ("left", "bottom")) -> None:
    """Give axes the colours of a style, and only some of their frame."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in spines)
        spine.set_color(style.muted)
        spine.set_linewidth(0.8)
    axes.tick_params(colors=style.muted, labelcolor=style.muted, labelsize=8, width=0.8, length=3)
    axes.tick_params(which="minor", length=0)
    axes.xaxis.label.set(color=style.ink, fontsize=9)
    axes.yaxis.label.set(color=style.ink, fontsize=9)
    axes.set_axisbelow(True)


def add_grid(axes: Axes, style: Style, axis: str = "y") -> None:
    """Thin lines behind the data."""
    axes.grid(axis=axis, which="major", color=style.faint, linewidth=1)  # type: ignore[arg-type]


def headline(axes: Axes, style: Style, title: str, below: str = "", *, lift: float = 0) -> None:
    """A bold title over axes, left-aligned, and an explanation under it.

    Args:
        axes: what it is about.
        style: colours.
        title: a few words.
        below: one line or several; empty: none.
        lift: points between the axes and the text that something else needs.
    """
    text: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "left",
    }
    lines = 1 + below.count("\n") if below else 0
    axes.annotate(
        title, (0, 1), xytext=(0, 8 + lift + 12.5 * lines), va="bottom", fontsize=10.5,
        fontweight="bold", color=style.ink, **text,
    )  # fmt: skip
    axes.annotate(
        below, (0, 1), xytext=(0, 6 + lift), va="bottom", fontsize=8.5, color=style.muted,
        linespacing=1.25, **text,
    )  # fmt: skip


def save(figure: Figure, path: Path, *, transparent: bool = False) -> Path:
    """Write a figure; equal figures give equal files.

    Args:
        figure: the figure.
        path: a name that ends in one of `FORMATS`.
        transparent: whether the page shows through.

    Raises:
        ValueError: the name ends otherwise.
        OSError: the file cannot be written.
    """
    import matplotlib

    check_format(path)
    options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
    page = {"facecolor": "none"} if transparent else {"facecolor": figure.get_facecolor()}
    with matplotlib.rc_context({"svg.hashsalt": _HASH_SALT, "svg.fonttype": "path"}):
        figure.savefig(path, dpi=_DPI, **page, **options)
    return path


def check_format(path: Path) -> None:
    """Find a bad path before the work.

    Raises:
        ValueError: the name ends in none of `FORMATS`.
        FileNotFoundError: its folder does not exist.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a picture must be named *.png or *.svg; got {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(path.parent)!r} to write {path.name!r} to"
        )
