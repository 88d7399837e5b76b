"""Packs of slides in training beside torchscale's encoder one slide at a time, and attention maps.

    python benchmarks/slide_packs.py --torchscale /tmp/torchscale --out packs.json

The encoder of `slide_step.py`. First packs of equally large slides, four steps by the clock until
the device is idle; epochs of a cohort of 200, sizes log-normal around 6,000, from pinned memory, by
the clock over all, in packs of three sizes; last what maps of all layers add to a forward.
"""

import gc
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import in_a_row, join, kernels_of, leave, write
from slide_step import make, use

from ring_dilated_attention.bench import peak_bytes
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig
from ring_dilated_attention.nn.slides import PackedSlides, Slide, pack

PACKS = {1500: 11, 10_000: 2, 45_680: 1}  # slides by their tiles
SHARE = 4  # torchscale encodes every fourth slide of the cohort


def slides_of(sizes: list[int]) -> list[Slide]:
    """Slides of so many tiles; all share their features."""
    features, grid = torch.randn(max(sizes), 768).half(), torch.arange(max(sizes))
    places = 256 * torch.stack([grid % 250, grid // 250], 1)
    return [Slide(str(i), features[:n], places[:n]) for i, n in enumerate(sizes)]


def step_of(step: Callable[..., Any], slides: PackedSlides) -> Any:
    """A step on a pack; one graph is compiled for all packs, as borders are tensors."""
    packed = slides.to("cuda", non_blocking=True)
    borders, sizes = torch.tensor(packed.documents), torch.tensor(packed.tile_size)
    return step(packed.features, packed.coordinates, documents=borders, tile_size=sizes)


def epochs(calls: Sequence[Callable[[], Any]], count: int) -> dict[str, Any]:
    """Seconds of each pass over all calls, and the share of the last in which kernels run."""

    def one() -> float:
        gc.collect()  # what compiling left
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds = [one() for _ in range(count)]
    return {"seconds": seconds, "busy": kernels_of(one)["kernels_ms"] / 1e3 / seconds[-1]}


def maps_of(tiles: int, ranks: Any) -> dict[str, Any]:
    """A forward with and without maps, in turns: received, from_cls and rollout of all layers."""
    config = SlideEncoderConfig(in_dim=768, head_offsets="blocked", zero_keys=True)
    encoder = SlideEncoder(config).to("cuda")
    given = PackedSlides.of(slides_of([tiles])).to("cuda")

    def forward(maps: bool) -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            encoder(given.features, given.coordinates, maps=maps)

    calls = {name: partial(forward, name == "maps") for name in ("forward", "maps")}
    peaks = {name: peak_bytes(ranks.device, call) for name, call in calls.items()}
    return {"tiles": tiles, **in_a_row(calls, 1, ranks, repeats=12), "peak_bytes": peaks}


def main(
    torchscale: Annotated[Path, typer.Option(help="folder of a clone of microsoft/torchscale")],
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure everything; a line of each."""
    use(torchscale)
    ranks, found = join("cuda"), []
    kinds = ("torchscale", "SlideEncoder", "SlideEncoder compiled")
    steps = {kind: make(kind, layers=12) for kind in kinds}

    def alone(features: torch.Tensor) -> torch.Tensor:
        return steps["torchscale"](features.cuda(non_blocking=True).float())

    def note(**row: Any) -> None:
        found.append(row)
        print(json.dumps(row), flush=True)

    draw = random.Random(0).lognormvariate
    sizes = [min(60_000, max(500, int(draw(math.log(6000), 1.0)))) for _ in range(200)]
    slides = slides_of(sizes)
    each = [partial(alone, slide.features[None].pin_memory()) for slide in slides[::SHARE]]
    note(cohort=len(each), kind="torchscale", **epochs(each, 2))
    for tiles, count in PACKS.items():
        whole = PackedSlides.of(slides_of([tiles] * count)).to("cuda")
        calls = {kind: partial(step_of, steps[kind], whole) for kind in kinds[1:]}
        calls["torchscale"] = partial(steps["torchscale"], whole.features[:, :tiles].float())
        row = in_a_row(calls, 4, ranks, repeats=5)  # first, as it compiles
        kernels = {kind: kernels_of(call)["kernels_ms"] for kind, call in calls.items()}
        note(tiles=tiles, slides=count, kernels_ms=kernels, **row)
    for most_tiles in (16_384, 32_768, 65_536):
        packed = partial(step_of, steps["SlideEncoder compiled"])
        each = [partial(packed, x.pin_memory()) for x in pack(slides, most_tiles, buffer=32)]
        note(cohort=len(slides), most_tiles=most_tiles, packs=len(each), **epochs(each, 3))
    note(**maps_of(10_000, ranks))
    write(out, ranks.device, found)
    leave()


if __name__ == "__main__":
    typer.run(main)
