"""What attention maps cost: a forward of a GigaPath-shaped encoder with and without them.

    python benchmarks/attention_maps.py --tiles 1500,10000,45680 --out maps.json

12 layers of 768, 16 heads of 48, GigaPath's pattern with its zero keys, autocast, no gradients.
Maps are received, from_cls and rollout of all layers. A slide of so many tiles is a sequence of one
position more.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import in_a_row, join, leave, write

from ring_dilated_attention.bench import peak_bytes
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig


def main(
    tiles: Annotated[str, typer.Option(help="of a slide, by commas")] = "10000",
    repeats: int = 12,
    layers: int = 12,
    dtype: Annotated[str, typer.Option(help="of autocast")] = "float16",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time both at each size, in turns."""
    ranks, found = join(), []
    device = ranks.device
    config = SlideEncoderConfig(num_layers=layers, head_offsets="blocked", zero_keys=True)
    encoder = SlideEncoder(config).to(device)
    for count in map(int, tiles.split(",")):
        features = torch.randn(1, count, config.in_dim, device=device)
        coordinates = torch.randint(0, 100_000, (1, count, 2), device=device)

        def forward(maps: bool, given: Any = (features, coordinates)) -> None:
            with torch.no_grad(), torch.autocast(device.type, getattr(torch, dtype)):
                encoder(*given, maps=maps)

        calls = {"forward": lambda: forward(False), "with maps": lambda: forward(True)}
        row: dict[str, Any] = {"tiles": count, **in_a_row(calls, 1, ranks, repeats=repeats)}
        row["maps_ms"] = row["with maps"]["median_ms"] - row["forward"]["median_ms"]
        row["peak_bytes"] = {name: peak_bytes(device, call) for name, call in calls.items()}
        found.append(row)
        print(json.dumps(row), flush=True)
    write(out, device, found)
    leave()


if __name__ == "__main__":
    typer.run(main)
