"""A picture of a slide: a number of each tile, where the tile is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .style import LIGHT, Style, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_tiles(
    coordinates: npt.NDArray[Any],
    scores: npt.NDArray[Any],
    tile_size: float,
    *,
    title: str = "",
    note: str = "",
    thumbnail: tuple[npt.NDArray[Any], Any] | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw the tiles of a slide, coloured by their scores, with a colour bar.

    The colours span the scores but for the highest and the lowest hundredth. Of tiles in one cell
    of the grid the last is drawn.

    Args:
        coordinates: upper left corners, (tiles, 2), x to the right and y down.
        scores: (tiles,).
        tile_size: side of a tile in units of the coordinates.
        title: of the figure.
        note: below it, on what the colours mean.
        thumbnail: a picture to show through, (height, width, 3), and width and height of the slide.
        style: colours of the page.

    Returns:
        The axes of the picture, in a new figure.
    """
    from matplotlib.ticker import MaxNLocator

    cells = np.floor((coordinates - coordinates.min(0)) / tile_size).astype(np.int64)
    columns, rows = cells.max(0) + 1
    grid = np.full((rows, columns), np.nan)
    grid[cells[:, 1], cells[:, 0]] = scores
    (left, top), longest = coordinates.min(0), max(rows, columns)
    width, height = 1.6 + 5 * columns / longest, 1.2 + 5 * rows / longest
    figure = new_figure(style, width, height, title, note)
    axes: Axes = figure.add_subplot()
    low, high = np.percentile(scores, (1, 99))
    extent = (left, left + columns * tile_size, top + rows * tile_size, top)
    image = axes.imshow(grid, cmap="viridis", vmin=low, vmax=high, extent=extent)
    if thumbnail is not None:
        axes.imshow(thumbnail[0], extent=(0, *thumbnail[1], 0), zorder=-1)
        image.set_alpha(0.5)
        axes.axis(extent)
    dress(axes, style, spines=())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.8)
    bar.ax.tick_params(colors=style.muted, labelsize=8)
    return axes
