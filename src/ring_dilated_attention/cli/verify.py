"""`rda verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .command import Example, command
from .common import fail
from .option import Flag

EVERY_CASE = Flag(
    name="every-case", panel=options.OUTPUT, help="A row per case, not per pattern and dtype."
)
RANKS = (1, 2, 3, 4)
NUMBERS_OF_RANKS = options.RANKS.several.but(RANKS, shown="1,2,3,4").meaning(
    "Numbers of ranks, each verified, as in 1,2,4."
)


@command(
    Example("Forward and backward on 1, 2, 3 and 4 ranks of this machine's CPU", "rda verify"),
    Example("On two GPUs, over NCCL", "rda verify --device cuda --ranks 2"),
    Example(
        "The same on other inputs, a row per case, and JSON",
        "rda verify --seed 7 --every-case --json cases.json",
    ),
)
def verify(
    ranks: Annotated[Sequence[int], NUMBERS_OF_RANKS],
    timeout: Annotated[float, options.TIMEOUT_],
    device: Annotated[str, options.DEVICE.but("cpu")],
    seed: Annotated[int, options.SEED],
    every_case: Annotated[bool, EVERY_CASE],
    json: Annotated[Path | None, options.JSON],
) -> None:
    """Compare forward and backward on real ranks with a brute-force reference.

    Prints errors relative to float64 and the bytes moved against the plan's. Exit code 1 if any
    case is out of bounds.
    """
    from .json_output import json_output
    from .run_verify import verify as run

    try:
        with json_output(json) as write:
            found = run(ranks, device=device, seed=seed, timeout=timeout, every=every_case)
            write(found)
    except (RuntimeError, TimeoutError) as error:
        first, *traceback = str(error).strip().splitlines()
        fail(" ".join([first, *traceback[-1:]]), 1)  # which rank, and why
    if not found["ok"]:
        raise typer.Exit(1)
