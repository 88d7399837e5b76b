"""`rda verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..checks import RANK_TIMEOUT
from .common import Timeout, app, fail, reported_errors


@app.command()
def verify(
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="World size to check; may be repeated.", show_default="1 2 3 4"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU a rank).")] = "cpu",
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs.", show_default="a fresh one")
    ] = None,
    timeout: Timeout = RANK_TIMEOUT,
    every: Annotated[bool, typer.Option("--all", help="A row per case, not per pattern.")] = False,
) -> None:
    """Compare forward and backward on real ranks with a brute-force reference.

    Prints errors relative to float64 and the bytes moved against the plan's. Exit code 1 if any
    case is out of bounds.
    """
    with reported_errors():
        from .run_verify import verify as run

        try:
            right = run(
                ranks or [1, 2, 3, 4], device=device, seed=seed, timeout=timeout, every=every
            )
        except (RuntimeError, TimeoutError) as error:
            first, *traceback = str(error).strip().splitlines()
            fail(" ".join([first, *traceback[-1:]]), 1)  # which rank, and why
        if not right:
            raise typer.Exit(1)
