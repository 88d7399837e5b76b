"""Training steps of a slide encoder on many slides of different lengths, each seen once, and again.

    python benchmarks/many_slides.py --device cuda --out many_slides.json
    python benchmarks/many_slides.py --device cpu --slides 6 --warm 3 --layers 1 --longest 300

12 layers of width 768, GigaPath's pattern, float16 autocast with loss scaling, fused AdamW. First
some other slides, on which compiled encoders are compiled; then slides of new lengths, then the
same slides a second time. Each pass is timed as a whole, without waiting for the device within.
"""

import json
import random
import resource
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer

from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig

SHORTEST = 1_000
MEDIAN = 8_000
SPREAD = 0.8
"""Of the logarithm of a length: two slides of three have 3,600 to 17,800 tiles."""


class Slides(NamedTuple):
    """How many slides, and of how many tiles at most."""

    warm: int
    new: int
    longest: int

    def lengths(self) -> tuple[list[int], list[int]]:
        """Tiles of the slides before, and of the new ones; no two are equally many."""
        dice, found = random.Random(0), dict[int, None]()
        shortest = min(SHORTEST, self.longest // 3)
        while len(found) < self.warm + self.new:
            drawn = round(dice.lognormvariate(0, SPREAD) * min(MEDIAN, self.longest // 2))
            if shortest <= drawn <= self.longest:
                found[drawn] = None
        drawn_all = list(found)
        return drawn_all[: self.warm], drawn_all[self.warm :]


class Training:
    """An encoder with a head, and what a step needs.

    Args:
        compiles: whether the encoder is compiled.
        layers: how many.
        device: where.
    """

    def __init__(self, *, compiles: bool, layers: int, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"
        torch.manual_seed(0)
        config = SlideEncoderConfig(num_layers=layers)
        self.encoder = SlideEncoder(config).to(device)
        if compiles:
            self.encoder.compile()
        self.head = torch.nn.Linear(config.embed_dim, 2).to(device)
        parameters = [*self.encoder.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=self.on_cuda)
        self.scaler = torch.amp.GradScaler(enabled=self.on_cuda)
        self.label = torch.ones(1, dtype=torch.long, device=device)
        self.in_dim = config.in_dim

    def step(self, tiles: int) -> None:
        """Train on a slide of random tiles."""
        features = torch.randn(1, tiles, self.in_dim, device=self.device)
        coordinates = torch.randint(0, 1000, (1, tiles, 2), device=self.device) * 256
        dtype = torch.float16 if self.on_cuda else torch.bfloat16
        with torch.autocast(self.device.type, dtype):
            logits = self.head(self.encoder(features, coordinates).cls[:, 0])
        self.scaler.scale(F.cross_entropy(logits.float(), self.label)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def steps(self, lengths: list[int]) -> float:
        """Seconds of a pass, until the device is idle."""
        begun = time.perf_counter()
        for tiles in lengths:
            self.step(tiles)
        if self.on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def memory(self) -> dict[str, float]:
        """Gigabytes: what tensors hold, what torch has taken of the device, the process's most."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        if not self.on_cuda:
            return {"host_most_gb": round(most, 3)}
        return {
            "allocated_gb": round(torch.cuda.memory_allocated() / 1e9, 3),
            "reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 3),
            "host_most_gb": round(most, 3),
        }


def main(
    device: str = "cuda",
    slides: Annotated[int, typer.Option(help="of new lengths")] = 200,
    warm: Annotated[int, typer.Option(help="other slides before them")] = 20,
    longest: Annotated[int, typer.Option(help="tiles of a slide at most")] = 40_000,
    layers: int = 12,
    cases: Annotated[str, typer.Option(help="some of plain, compiled")] = "plain,compiled",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Print the seconds of each pass, and the memory after it."""
    before, new = Slides(warm, slides, longest).lengths()
    found: list[dict[str, Any]] = []
    for case in cases.split(","):
        if case not in ("plain", "compiled"):
            raise typer.BadParameter(f"no case is called {case}")
        training = Training(compiles=case == "compiled", layers=layers, device=torch.device(device))
        row: dict[str, Any] = {"case": case, "slides": slides, "tiles": sum(new)}
        for name, lengths in (("warm", before), ("new", new), ("again", new), ("third", new)):
            row[name] = {"seconds": round(training.steps(lengths), 3), **training.memory()}
        row["more_for_new"] = round(row["new"]["seconds"] / row["again"]["seconds"] - 1, 4)
        found.append(row)
        print(json.dumps(row), flush=True)
        del training
    if out is not None:
        kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        about = {"device": kind, "torch": torch.__version__, "rows": found}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
