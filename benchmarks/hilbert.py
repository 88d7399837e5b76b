"""How far segments of a slide extend: along a Hilbert curve, and by rows.

    python benchmarks/hilbert.py                       # a made-up slide, a few seconds
    python benchmarks/hilbert.py --slide FILE          # "coordinates" (tiles, 2) by torch.save

Writes a figure and a table next to it; `--tile-size` is how many units of a coordinate make a tile.
"""

from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import torch
import typer

from ring_dilated_attention.nn import hilbert_order

mpl.use("Agg")
from matplotlib import pyplot as plt

SEGMENTS = (256, 1024, 5792)
SHOWN = 1024


def made_up_tissue(tiles: int) -> torch.Tensor:
    """Grid coordinates (tiles, 2) of three pieces of tissue with ragged edges and holes."""
    generator = torch.Generator().manual_seed(0)
    side = int((3.2 * tiles) ** 0.5)
    y, x = torch.meshgrid(torch.arange(side) / side, torch.arange(side) / side, indexing="ij")
    noise = torch.nn.functional.interpolate(
        torch.randn(1, 1, 24, 24, generator=generator), (side, side), mode="bicubic"
    )[0, 0]
    pieces = [(0.27, 0.3, 0.24, 0.19), (0.72, 0.36, 0.17, 0.27), (0.42, 0.76, 0.3, 0.15)]
    inside = torch.stack([((x - a) / c) ** 2 + ((y - b) / d) ** 2 for a, b, c, d in pieces])
    height = inside.amin(0) + 0.3 * noise  # tissue is where this is low
    lowest = height.flatten().argsort(stable=True)[:tiles].sort().values
    return torch.stack([lowest % side, lowest // side], 1)  # x, y


def diagonals(coordinates: torch.Tensor, length: int) -> torch.Tensor:
    """The diagonal of the bounding box of every segment of `length` tiles, in tiles."""
    boxes = [part.amax(0) - part.amin(0) + 1 for part in coordinates.split(length)]
    return torch.stack(boxes).double().norm(dim=1)


def draw(orders: dict[str, torch.Tensor], file: Path) -> None:
    """One picture an order: segments of `SHOWN` tiles in colours, one of them in black."""
    figure, axes = plt.subplots(1, len(orders), figsize=(6 * len(orders), 6), layout="constrained")
    for axis, (name, coordinates) in zip(axes, orders.items(), strict=True):
        segment = torch.arange(len(coordinates)) // SHOWN
        axis.scatter(*coordinates.T, c=segment * 7 % 20, cmap="tab20", s=0.6, marker="s")
        one = coordinates[segment == segment[-1] // 2]
        axis.scatter(*one.T, c="black", s=0.8, marker="s")
        mean = diagonals(coordinates, SHOWN).mean()
        axis.set_title(f"{name}: segments of {SHOWN:,} tiles are {mean:.0f} tiles across")
        axis.set_aspect("equal")
        axis.invert_yaxis()
        axis.set_axis_off()
    figure.savefig(file, dpi=110)


def main(
    slide: Annotated[Path | None, typer.Option(help="a file of torch.save")] = None,
    tile_size: float = 256.0,
    tiles: Annotated[int, typer.Option(help="of a made-up slide")] = 45_680,
    out: Annotated[Path, typer.Option(help="without suffix")] = Path("hilbert"),
) -> None:
    """Order the tiles both ways; write what comes of it."""
    places = made_up_tissue(tiles)
    what = f"{tiles:,} tiles of made-up tissue: three ragged pieces with holes"
    if slide is not None:
        found = torch.load(slide, map_location="cpu", weights_only=True)["coordinates"]
        places = (found / tile_size).floor().long()
        what = f"{len(places):,} tiles of {slide.name}"
    x, y = places.T
    by_rows = (y * (int(x.max()) + 1) + x).argsort(stable=True)
    orders = {"By rows": places[by_rows], "Hilbert": places[hilbert_order(places)]}
    image = out.with_suffix(".png")
    draw(orders, image)
    lines = [
        "# Hilbert order of slide tiles",
        "",
        f"`python benchmarks/hilbert.py`: {what}, {int(x.max() - x.min()) + 1} x "
        f"{int(y.max() - y.min()) + 1} tiles in all. Diagonals of the bounding boxes of segments, "
        "in tiles, in raster order and in Hilbert order (`hilbert_order`), and of a square of as "
        "many tiles.",
        "",
        "| segment | by rows: mean, largest | Hilbert: mean, largest | square | mean ratio |",
        "|---|---|---|---|---|",
    ]
    for length in SEGMENTS:
        rows, curve = (diagonals(x, length) for x in orders.values())
        lines.append(
            f"| {length:,} | {rows.mean():.1f}, {rows.max():.1f} "
            f"| {curve.mean():.1f}, {curve.max():.1f} | {(2 * length) ** 0.5:.1f} "
            f"| {rows.mean() / curve.mean():.2f} |"
        )
    lines += ["", f"![{what}]({image.name})", ""]
    text = "\n".join(lines)
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
