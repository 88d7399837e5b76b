"""Training steps of a slide encoder on many slides of different lengths, each seen once, and again.

    python benchmarks/many_slides.py --device cuda --out many_slides.json
    python benchmarks/many_slides.py --device cpu --slides 6 --warm 3 --layers 1 --longest 300

The encoder and the step of `slide_encoder.py`, on one process. First some other slides, on which
compiled encoders are compiled; then slides of new lengths, then the same slides three times more.
Each pass is timed as a whole, without waiting for the device within; the first one is compared with
the median of the others, which on slow hosts differ by more than a tenth.
"""

import json
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from slide_encoder import Training

SHORTEST = 1_000
MEDIAN = 8_000
SPREAD = 0.8
"""Of the logarithm of a length: two slides of three have 3,600 to 17,800 tiles."""
AGAIN = ("second", "third", "fourth")
"""Passes over slides that have been seen."""


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


def seconds(training: Training, lengths: list[int]) -> float:
    """Of a pass over slides of so many tiles, until the device is idle."""
    begun = time.perf_counter()
    for tiles in lengths:
        training.step(training.slide(tiles))
    if training.on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def memory(*, on_cuda: bool) -> dict[str, float]:
    """Gigabytes: what tensors hold, what torch has taken of the device, the process's most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if not on_cuda:
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
        training = Training(layers, device, compiles="encoder" if case == "compiled" else "")
        row: dict[str, Any] = {"case": case, "slides": slides, "tiles": sum(new)}
        for name in ("warm", "new", *AGAIN):
            taken = seconds(training, before if name == "warm" else new)
            row[name] = {"seconds": round(taken, 3), **memory(on_cuda=training.on_cuda)}
        again = statistics.median(row[name]["seconds"] for name in AGAIN)
        row["more_for_new"] = round(row["new"]["seconds"] / again - 1, 4)
        found.append(row)
        print(json.dumps(row), flush=True)
        del training
    if out is not None:
        kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        about = {"device": kind, "torch": torch.__version__, "rows": found}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
