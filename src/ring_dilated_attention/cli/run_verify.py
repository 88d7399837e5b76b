"""What `rda verify` does: the sweep on real ranks, and a table of what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

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
from ..terminal import (
    Column,
    Progress,
    Table,
    count_of,
    counts,
    make_console,
    numbers,
    show_table,
    texts,
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
) -> dict[str, Any]:
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
        The numbers, for JSON: ``"ok"``, whether every case is within bounds, ``"options"`` and
        ``"cases"``.

    Raises:
        TypeError, ValueError: a world size, the device, the seed or the timeout is not allowed.
        RuntimeError, TimeoutError: a rank failed, or did not answer.
    """
    console = console or make_console()
    device = device_type(device)
    for world_size in world_sizes:
        check_size("ranks", world_size, MOST_PROCESSES)
        if device == "cuda" and world_size > torch.cuda.device_count():
            raise ValueError(
                f"{world_size} ranks need a CUDA device each; there are {torch.cuda.device_count()}"
            )
    check_seed(seed)
    check_seconds("timeout", timeout)
    console.print(f"seed {seed}\n")
    cases = {
        world_size: [replace(case, device=device) for case in sweep(world_size, seed)]
        for world_size in world_sizes
    }
    documents: list[dict[str, Any]] = []
    done = 0
    total = sum(len(cases[world_size]) for world_size in world_sizes)
    with Progress("verify", total=total, unit="cases") as progress:
        for world_size in world_sizes:
            on = f"on {count_of(world_size, 'rank')}"
            progress.update(done, on)
            outcomes = combine(
                run_ranks(
                    run_cases,
                    world_size,
                    cases[world_size],
                    backend="nccl" if device == "cuda" else "gloo",
                    timeout=timeout + _SWEEP_S,
                    wait_timeout=timeout,
                    told=partial(_show, progress, done, on),
                )
            )
            done += len(outcomes)
            with progress.paused():
                show_table(console, table(world_size, cases[world_size], outcomes, every))
            documents += map(_document, cases[world_size], outcomes)
    right = all(document["ok"] for document in documents)
    console.print("all within bounds" if right else "[bold red]OUT OF BOUNDS[/bold red]")
    return {
        "ok": right,
        "options": {"ranks": list(world_sizes), "device": device, "seed": seed},
        "cases": documents,
    }


def _show(progress: Progress, before: int, on: str, done: int) -> None:
    progress.update(before + done, on)


def _passes(case: Case, outcome: Outcome) -> bool:
    return outcome.passes(case.dtype)


def _document(case: Case, outcome: Outcome) -> dict[str, Any]:
    """A case and what was found, for JSON."""
    return {
        "ok": _passes(case, outcome),
        "ranks": case.layout.world_size,
        "pattern": str(case.pattern),
        "dtype": name_of(case.dtype),
        "seq_len": case.layout.length,
        "seed": case.seed,
        "errors": {tensor: outcome.error(tensor) for tensor in TENSORS},
        "sent_bytes": outcome.sent_bytes,
        "planned_bytes": outcome.planned_bytes,
    }


def name_of(dtype: torch.dtype) -> str:
    """``"float32"`` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def table(
    world_size: int, cases: Sequence[Case], outcomes: Sequence[Outcome], every: bool
) -> Table:
    """What was found on a number of ranks: a row per pattern and dtype, or per case.

    Args:
        world_size: number of ranks.
        cases: what was computed.
        outcomes: of the cases, those of all ranks added up.
        every: whether each case has a row.
    """
    headings: dict[str, Callable[[str, list[Any]], Column]] = {"pattern": texts, "dtype": texts}
    if every:
        headings |= {"length": counts, "seed": lambda name, values: numbers(name, values, "d")}
    groups: dict[tuple[Any, ...], list[tuple[Case, Outcome]]] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        key = (str(case.pattern), name_of(case.dtype))
        more = (case.layout.length, case.seed) if every else ()
        groups.setdefault((*key, *more), []).append((case, outcome))
    found = sorted(groups.items())
    worst = [
        [max(outcome.error(tensor) for _, outcome in group) for _, group in found]
        for tensor in TENSORS
    ]
    right = [all(_passes(*pair) for pair in group) for _, group in found]
    return Table(
        title=f"{count_of(world_size, 'rank')}: largest error relative to float64",
        keys=[
            key_column(heading, [key[place] for key, _ in found])
            for place, (heading, key_column) in enumerate(headings.items())
        ],
        columns=[
            texts("", ["ok" if all_right else "WRONG" for all_right in right]),
            counts("cases", [len(group) for _, group in found]),
            *(
                numbers(tensor, errors, ".1e")
                for tensor, errors in zip(TENSORS, worst, strict=True)
            ),
            *(
                counts(heading, [sum(getattr(x, name) for _, x in group) for _, group in found])
                for heading, name in (
                    ("bytes sent", "sent_bytes"),
                    ("bytes planned", "planned_bytes"),
                )
            ),
        ],
    )
