"""What `rda verify` does: the sweep on real ranks, and a table of what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from ..bench import device_type
from ..checks import (
    MOST_PROCESSES,
    RANK_TIMEOUT,
    TENSORS,
    Case,
    Outcome,
    check_seconds,
    check_seed,
    check_size,
    combine,
    run_cases,
    run_ranks,
    sweep,
)

_SWEEP_S = 3600.0
"""Seconds for all cases on one number of ranks: about 20 on an idle machine."""


def verify(
    world_sizes: Sequence[int],
    *,
    device: str = "cpu",
    seed: int = 0,
    timeout: float = RANK_TIMEOUT,
    every: bool = False,
    console: Console | None = None,
) -> bool:
    """Run the sweep on each world size and print the errors and the bytes moved.

    Args:
        world_sizes: numbers of ranks; a process is spawned for each rank.
        device: ``"cpu"`` over gloo, ``"cuda"`` over NCCL with one GPU per rank, or ``"auto"``:
            CUDA where there is a device.
        seed: of the random inputs.
        timeout: seconds that a rank waits for another.
        every: print a row per case instead of one per pattern and dtype.
        console: where to print; None: standard output.

    Returns:
        Whether every case is within bounds.

    Raises:
        TypeError, ValueError: a world size, the device, the seed or the timeout is not allowed.
        RuntimeError, TimeoutError: a rank failed, or did not answer.
    """
    console = console or Console()
    device = device_type(device)
    for world_size in world_sizes:
        check_size("ranks", world_size, MOST_PROCESSES)
        if device == "cuda" and world_size > torch.cuda.device_count():
            raise ValueError(
                f"{world_size} ranks need a CUDA device each; there are {torch.cuda.device_count()}"
            )
    check_seed(seed)
    check_seconds("timeout", timeout)
    console.print(f"inputs of seed {seed}")
    right = True
    for world_size in world_sizes:
        cases = [replace(case, device=device) for case in sweep(world_size, seed)]
        backend = "nccl" if device == "cuda" else "gloo"
        outcomes = combine(
            run_ranks(
                run_cases,
                world_size,
                cases,
                backend=backend,
                timeout=timeout + _SWEEP_S,
                wait_timeout=timeout,
            )
        )
        console.print(_table(world_size, cases, outcomes, every))
        right &= all(map(_passes, cases, outcomes))
    console.print("all within bounds" if right else "[bold red]OUT OF BOUNDS[/bold red]")
    return right


def _passes(case: Case, outcome: Outcome) -> bool:
    return outcome.passes(case.dtype)


def _table(
    world_size: int, cases: Sequence[Case], outcomes: Sequence[Outcome], every: bool
) -> Table:
    groups: dict[str, list[tuple[Case, Outcome]]] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        name = f"{case.pattern}, {str(case.dtype).removeprefix('torch.')}"
        if every:
            name += f", n = {case.layout.length}, seed {case.seed}"
        groups.setdefault(name, []).append((case, outcome))
    table = Table(
        title=f"{world_size} rank{'s' * (world_size != 1)}: largest error relative to float64",
        title_justify="left",
    )
    table.add_column("pattern and dtype")
    for column in ("cases", *TENSORS, "bytes sent", "bytes planned", ""):
        table.add_column(column, justify="right")
    for name, group in sorted(groups.items()):
        errors = [max(outcome.error(tensor) for _, outcome in group) for tensor in TENSORS]
        table.add_row(
            name,
            str(len(group)),
            *(f"{error:.1e}" for error in errors),
            f"{sum(outcome.sent_bytes for _, outcome in group):,}",
            f"{sum(outcome.planned_bytes for _, outcome in group):,}",
            "ok" if all(_passes(*pair) for pair in group) else "[red]WRONG[/red]",
        )
    return table
