"""`rda verify`: random calls on real ranks, compared with brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..units import count_of, in_bytes
from . import common
from .common import RunError, app, make_console, progress, show_table, write_json

if TYPE_CHECKING:
    from ..checks import Case, Outcome

_SWEEP_S = 3600.0
"""Seconds for all cases on one number of ranks: about 20 on an idle machine."""


@app.command()
def verify(
    ranks: common.RankCounts = (1, 2, 3, 4),
    device: common.DeviceName = "cpu",
    seed: common.Seed = 0,
    timeout: common.Timeout = 600,
    json: common.Json = None,
) -> None:
    """Compare forward and backward on real ranks with brute force: gloo, or NCCL on GPUs.

    Exit code 1 if an error is out of bounds or other bytes travel than planned.

    rda verify --device cuda --ranks 2
    """
    import torch

    from ..checks import RankError, combine, run_cases, run_ranks, sweep

    on = common.resolve_device(device)
    if on == "cuda" and max(ranks) > torch.cuda.device_count():
        raise ValueError(
            f"{max(ranks)} ranks need a CUDA device each; there are {torch.cuda.device_count()}"
        )
    rows: list[list[Any]] = []
    documents: list[dict[str, Any]] = []
    for number in ranks:
        cases = [replace(case, device=on) for case in sweep(number, seed)]
        with progress(f"verify on {count_of(number, 'rank')}", len(cases)) as told:
            try:
                found = run_ranks(
                    run_cases,
                    number,
                    cases,
                    backend="nccl" if on == "cuda" else "gloo",
                    timeout=timeout + _SWEEP_S,
                    wait_timeout=timeout,
                    told=told,
                )
            except (RankError, TimeoutError) as error:
                first, *more = str(error).strip().splitlines()
                raise RunError(" ".join([first, *more[-1:]])) from None  # which rank, and why
        outcomes = combine(found)
        documents += [_document(*pair) for pair in zip(cases, outcomes, strict=True)]
        rows += _rows(number, documents[-len(cases) :])
    wrong = [document for document in documents if not document["ok"]]
    console = make_console(json)
    if not wrong:
        total = count_of(len(documents), "case")
        console.print(f"{total} within bounds, bytes as planned, seed {seed}\n", style="bold")
    headings = ["ranks", "dtype", "cases", *documents[0]["errors"], "sent"]
    show_table(console, "Largest error relative to float64 by brute force", headings, rows)
    asked = {"ranks": list(ranks), "device": on, "seed": seed}
    write_json(json, {"ok": not wrong, "options": asked, "cases": documents})
    if wrong:
        first = ", ".join(f"{name} {value}" for name, value in wrong[0].items() if name != "ok")
        total = count_of(len(documents), "case")
        raise RunError(f"{len(wrong)} of {total} are out of bounds; the first: {first}")


def _rows(ranks: int, documents: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """A row for each dtype: the largest errors of its cases."""
    for dtype in sorted({document["dtype"] for document in documents}):
        cases = [document for document in documents if document["dtype"] == dtype]
        errors = [max(case["errors"][tensor] for case in cases) for tensor in cases[0]["errors"]]
        sent = sum(case["sent_bytes"] for case in cases)
        yield [str(ranks), dtype, len(cases), *map("{:.1e}".format, errors), in_bytes(sent)]


def _document(case: Case, outcome: Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.passes(case.dtype),
        "ranks": case.layout.world_size,
        "pattern": str(case.pattern),
        "dtype": str(case.dtype).removeprefix("torch."),
        "seq_len": case.layout.length,
        "seed": case.seed,
        "errors": outcome.errors(),
        "sent_bytes": outcome.sent_bytes,
        "planned_bytes": outcome.planned_bytes,
    }
