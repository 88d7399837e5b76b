"""What `rda bench --ranks` does: options to cases, cases on ranks to tables, JSON and a picture."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..checks import MOST_PROCESSES, check_memory, check_seed, check_size, host_memory
from ..pattern import check_positive_int
from . import ranks_report, report
from .case import Case
from .measure import resolve_device
from .peers import OURS
from .ranks import measure_ranks
from .ranks_launch import launch
from .ranks_options import RanksOptions
from .ranks_result import RanksResult
from .result import FAILED, OK, REFUSED
from .sweep import check_folder, sweep

WIDTH = 190
"""Characters of a line at least, where the output is no terminal."""


def run(
    out: Path | None,
    *,
    runs: Path,
    ranks: Sequence[int],
    seed: int | None,
    command: Sequence[str],
    console: Console | None = None,
    measuring: dict[str, Any],
    **options: Any,
) -> bool:
    """Run a sweep on several ranks and print and write what was found.

    Args:
        out: folder for JSON and plot; None: a new one in `runs`, named after the time.
        runs: see `out`.
        ranks: sizes to measure; as many processes as the largest are started.
        seed: of the inputs; None: a fresh one, which is printed.
        command: the command line, for the JSON.
        console: where to print; None: standard output.
        measuring: fields of `RanksOptions`, but for the seed.
        options: see `sweep`.

    Returns:
        Whether this library computed something, failed nowhere, and sent the bytes of its plan.

    Raises:
        TypeError, ValueError: an option is not allowed, or every case is refused.
        OSError: the folder cannot be written.
        RankError: a rank failed where others went on.
    """
    console = console or Console()
    for size in ranks:
        check_positive_int("ranks", size)
    check_seed(seed)
    measured = RanksOptions(**measuring, seed=secrets.randbelow(10**9) if seed is None else seed)
    on_cuda = measured.device != "cpu" and torch.cuda.is_available()
    cases = sweep("cuda" if on_cuda else "cpu", **options)
    out = out or runs / time.strftime("bench-%Y%m%d-%H%M%S")
    check_size("ranks", max(ranks), MOST_PROCESSES)
    held = max(case.query_bytes for case in cases) * (
        max(ranks) if measured.scaling == "weak" else 1
    )
    check_memory(held, None if on_cuda else host_memory(), "the largest query of the benchmark")
    check_folder(out)
    value, first = launch(
        measure_and_write, max(ranks), cases, list(ranks), measured, out, command,
        device=measured.device, out=out, timeout=measured.timeout,
    )  # fmt: skip
    if not first:
        return True
    results, environment, path = value
    ours = [result for result in results if result.contender == OURS]
    statuses = {result.status for result in ours}
    if statuses == {REFUSED}:
        raise ValueError(ours[0].reason)
    show(console, results, environment, path)
    return OK in statuses and FAILED not in statuses and ranks_report.bytes_match(results)


def show(
    console: Console, results: Sequence[RanksResult], environment: dict[str, Any], path: Path
) -> None:
    """Print what was found, and plot it beside the JSON file `path`."""
    for name, found in environment.items():
        console.print(f"{name}: {found}", highlight=False)
    written = [path]
    if any(result.forward is not None for result in results):
        written.append(ranks_report.plot(path.parent, results))
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(ranks_report.LEGEND, highlight=False, markup=False)
    for table in (*ranks_report.tables(results), *ranks_report.memory_tables(results)):
        console.print(table)
    for line in ranks_report.notes(results):
        console.print(line, highlight=False, markup=False)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False)


def measure_and_write(
    cases: Sequence[Case],
    sizes: Sequence[int],
    options: RanksOptions,
    out: Path,
    command: Sequence[str],
) -> tuple[list[RanksResult], dict[str, Any], Path]:
    """`measure_ranks`, the environment of this rank and the JSON file of both; for `launch`.

    The file is there as soon as there is a result: a long run that ends early leaves what it found.
    """
    device = resolve_device(options.device)
    environment = {**report.environment(device), "seed": options.seed}
    if device.type == "cuda":
        environment["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]

    def write(results: list[RanksResult]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        ranks_report.write_json(out, results, environment, command)

    results = measure_ranks(cases, sizes, options, progress=_say, finished=write)
    return results, environment, out / report.JSON_NAME


def _say(text: str) -> None:
    print(text, flush=True)
