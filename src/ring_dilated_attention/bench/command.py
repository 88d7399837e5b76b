"""What `rda bench` does: options to workloads, workloads to tables, JSON and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checks import check_memory, check_seed, host_memory
from ..terminal import Progress, make_console, show_table, show_text
from . import report
from .contenders import OURS
from .launch import is_first, launch
from .measure import device_type, resolve_device
from .options import Options
from .plots import plot
from .result import FAILED, OK, REFUSED, Result
from .run import bench
from .sweep import check_folder, sweep
from .workload import Workload

SPEED_S = 600.0
"""The remaining time is estimated from the speed of this many most recent seconds: parts of a
workload differ in speed many times over, so that fewer would mislead."""


def run_command(
    out: Path | None,
    *,
    runs: Path,
    command: Sequence[str],
    measuring: dict[str, Any],
    workloads: dict[str, Any],
    console: Console | None = None,
    write: Callable[[Mapping[str, Any]], None] | None = None,
) -> bool:
    """Measure a sweep, and print and write what was found.

    Args:
        out: folder for JSON and plot; None: a new one in `runs`, named after the time.
        runs: see `out`.
        command: the command line, for the JSON.
        measuring: fields of `Options` that differ from their defaults.
        workloads: arguments of `sweep`.
        console: where to print; None: standard output.
        write: given what the JSON file holds, refused workloads included.

    Returns:
        Whether this library computed something, failed nowhere, and sent the bytes of its plan.
        (Refusing, or running out of memory, in some workloads of a sweep is a finding.)

    Raises:
        TypeError, ValueError: an option is not allowed, or every workload is refused.
        OSError: the folder cannot be written.
        RankError: a rank failed where others went on.
    """
    options = Options(**measuring)
    check_seed(options.seed)
    kind, most = device_type(options.device), max(options.ranks)
    found = sweep(kind, **workloads)
    held = max(workload.query_bytes for workload in found)
    check_memory(
        held * (most if options.scaling == "weak" else 1),
        None if kind == "cuda" else host_memory(),  # there, too much is a finding of the sweep
        "the largest query of the benchmark",
    )
    out = out or runs / time.strftime("bench-%Y%m%d-%H%M%S")
    check_folder(out)
    value, first = launch(
        measure_and_write, most, found, options, out, command,
        device=options.device, out=out, timeout=options.timeout,
    )  # fmt: skip
    if not first:
        return True
    results, environment, path = value
    ours = [result for result in results if result.contender == OURS]
    statuses = {result.status for result in ours}
    if statuses != {REFUSED}:
        show(console or make_console(), results, environment, path)
    if write is not None:
        write(report.document(results, environment, command))
    if statuses == {REFUSED}:
        raise ValueError(ours[0].reason)
    return OK in statuses and FAILED not in statuses and report.bytes_match(results)


def measure_and_write(
    workloads: Sequence[Workload], options: Options, out: Path, command: Sequence[str]
) -> tuple[list[Result], dict[str, Any], Path]:
    """`bench`, the environment of this rank and the JSON file of both; for `launch`.

    The file is there as soon as there is a result: a long run that ends early leaves what it found.
    """
    environment = {**report.environment(resolve_device(options.device)), "seed": options.seed}

    def write(results: list[Result]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        report.write_json(out, results, environment, command)

    first = is_first()
    if first:
        show_text(make_console(), report.introduction(workloads, options))
    total = len(workloads) * len(set(options.ranks))
    with Progress("bench", total=total, unit="workloads", show=first, speed_s=SPEED_S) as progress:
        results = bench(workloads, options, progress=progress.update, finished=write)
    return results, environment, out / report.JSON_NAME


def show(
    console: Console, results: Sequence[Result], environment: dict[str, Any], path: Path
) -> None:
    """Print what was found, and plot it beside the JSON file `path`."""
    written = [path]
    if any(result.forward is not None for result in results):
        written.append(plot(path.parent, results))
    console.print()
    for name, value in environment.items():
        show_text(console, f"{name}: {value}")
    console.print()
    for table in (*report.tables(results), *report.memory_tables(results)):
        show_table(console, table)
    for line in (*report.legend(results), "", *report.notes(results)):
        show_text(console, line)
    for file in written:
        show_text(console, f"wrote {file}")
