"""What `rda bench` does: options to cases, cases to a table, JSON and a picture."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checks import check_memory, check_seed
from . import ranks_command, report
from .measure import memory_of, resolve_device
from .peers import OURS
from .result import FAILED, OK, REFUSED
from .run import bench
from .sweep import check_folder, sweep

LEGEND = (
    "TFLOP/s: useful work only, backward counts 2.5 times forward; peak: memory over the inputs, "
    "in multiples of query; error: of out, and the largest of a gradient; ours/peer: of TFLOP/s"
)
WIDTH = 130
"""Characters of a line at least, where the output is no terminal."""

DEFAULT_REPEATS = 20


def run_anywhere(
    out: Path | None,
    *,
    ranks: Sequence[int] | None,
    scaling: str | None,
    layout: str | None,
    exchange: str | None,
    timeout: float | None,
    repeats: int | None,
    sample_ms: float | None,
    cuda_graph: bool,
    device: str,
    peers: Sequence[str],
    seconds: float,
    errors: bool,
    **options: Any,
) -> bool:
    """`run` on one device; on ranks, where sizes are given, `ranks_command.run`.

    Args:
        out: see `run`.
        ranks: sizes to measure; None: one device.
        scaling: of ranks, see `RanksOptions`; None: its default.
        layout: of ranks, see `RanksOptions`; None: its default.
        exchange: of ranks, see `RanksOptions`; None: its default.
        timeout: of ranks, see `RanksOptions`; None: its default.
        repeats: see `bench` and `RanksOptions`; None: the default there.
        sample_ms: of ranks, see `RanksOptions`; None: its default.
        cuda_graph: see `bench`; not with ranks.
        device: one of `measure.DEVICES`.
        peers: see `bench` and `RanksOptions`.
        seconds: see `bench` and `RanksOptions`.
        errors: see `bench` and `RanksOptions`.
        options: see `run`.

    Returns:
        See `run` and `ranks_command.run`.

    Raises:
        TypeError, ValueError: an option is not allowed, or the only case is refused.
        OSError: the folder cannot be written.
        RankError: a rank failed where others went on.
    """
    of_ranks = {
        "scaling": scaling,
        "layout": layout,
        "exchange": exchange,
        "timeout": timeout,
        "sample_ms": sample_ms,
    }
    given = {name: value for name, value in of_ranks.items() if value is not None}
    common: dict[str, Any] = {"device": device, "seconds": seconds, "errors": errors}
    if ranks is None:
        if given:
            named = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(
                f"scaling, layout, exchange, timeout and sample_ms need ranks; got {named}"
            )
        timed = DEFAULT_REPEATS if repeats is None else repeats
        return run(out, peers=peers, repeats=timed, cuda_graph=cuda_graph, **common, **options)
    if cuda_graph:
        raise ValueError("CUDA graphs are timed on one device; got cuda_graph with ranks")
    measuring = {**common, **given, "peers": tuple(dict.fromkeys(peers))}
    if repeats is not None:
        measuring["repeats"] = repeats
    return ranks_command.run(out, ranks=ranks, measuring=measuring, **options)


def run(
    out: Path | None,
    *,
    runs: Path,
    device: str,
    peers: Sequence[str],
    repeats: int,
    seconds: float,
    cuda_graph: bool,
    errors: bool,
    seed: int | None,
    command: Sequence[str],
    console: Console | None = None,
    **options: Any,
) -> bool:
    """Run a sweep and print and write what it found.

    Args:
        out: folder for JSON and plot; None: a new one in `runs`, named after the time.
        runs: see `out`.
        device: one of `measure.DEVICES`.
        peers: see `bench`.
        repeats: see `bench`.
        seconds: see `bench`.
        cuda_graph: see `bench`.
        errors: see `bench`.
        seed: of the inputs; None: a fresh one, which is printed.
        command: the command line, for the JSON.
        console: where to print; None: standard output.
        options: see `sweep`.

    Returns:
        Whether this library computed something, and failed nowhere. (Refusing, or running out of
        memory, in some cases of a sweep is a finding.)

    Raises:
        TypeError, ValueError: an option is not allowed, or the only case is refused.
        OSError: the folder cannot be written.
    """
    console = console or Console()
    on = resolve_device(device)
    cases = sweep(on.type, **options)
    check_memory(
        max(case.query_bytes for case in cases),
        None if on.type == "cuda" else memory_of(on),  # there, too much is a finding of the sweep
        "the largest query of the benchmark",
    )
    check_seed(seed)
    if seed is None:
        seed = secrets.randbelow(10**9)
    out = out or runs / time.strftime("bench-%Y%m%d-%H%M%S")
    check_folder(out)
    environment = {**report.environment(on), "seed": seed}
    for name, value in environment.items():
        console.print(f"{name}: {value}", highlight=False)
    results = bench(
        cases,
        peers=peers,
        device=device,
        repeats=repeats,
        seconds=seconds,
        cuda_graph=cuda_graph,
        errors=errors,
        seed=seed,
        progress=lambda case: console.print(f"[dim]{case}[/dim]", highlight=False),
    )
    written = [report.write_json(out, results, environment, command)]
    ours = [result for result in results if result.contender == OURS]
    if len(ours) == 1 and ours[0].status == REFUSED:
        raise ValueError(ours[0].reason)
    if any(result.forward is not None for result in results):
        written.append(report.plot(out, results))
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(LEGEND)
    for table in report.tables(results):
        console.print(table)
    for line in report.notes(results):
        console.print(line, highlight=False, markup=False)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False)
    statuses = {result.status for result in ours}
    return OK in statuses and FAILED not in statuses
