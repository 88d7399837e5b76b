"""`rda simulate`, `verify`, `bench` and `doctor`: what runs calls and says how they went."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..layout import resolve_layout
from ..named_patterns import DEFAULT_NAME, given_pattern
from ..units import count_of, in_bytes, in_seconds
from . import common
from .common import RunError, app, make_console, show_table, workload_of, write_json
from .plan import shown_ranks, work_in_words

if TYPE_CHECKING:
    from ..checks import Case, Outcome, Simulation

_SWEEP_S = 3600.0
"""Seconds for all cases of `verify` on one number of ranks: about 20 on an idle machine."""

# fmt: off
_SimulatedRanks = Annotated[int, common.option(  # each is a thread; plans take their square
    "--ranks", "Number of ranks.", common.integer(1, 512))]
_SeqLens = Annotated[Sequence[int], common.option(
    "--seq-len", "Positions of the whole sequence, one length after the other, as in 16K,64K.",
    common.list_of(common.integer(1, common.MOST_POSITIONS)))]
_Baselines = Annotated[Sequence[str], common.option(
    "--baseline", "Measured in turns with this library: kernel (alone, as many FLOPs), "
    "torchscale (gathers), sdpa (dense); on several GPUs context_parallel (dense).",
    common.list_of(str))]
# fmt: on


@app.command()
def simulate(
    pattern: common.PatternName = None,
    segment_lengths: common.SegmentLengths = None,
    dilation_rates: common.DilationRates = None,
    head_offsets: common.HeadOffsetsName = None,
    zero_keys: common.ZeroKeys = False,
    seq_len: common.SeqLen = 8192,
    ranks: _SimulatedRanks = 4,
    layout: common.LayoutName = "auto",
    causal: common.Causal = False,
    documents: common.Documents = None,
    heads: common.Heads = None,
    kv_heads: common.KVHeads = None,
    exchange: common.ExchangeName = "auto",
    device: common.DeviceName = "auto",
    json: common.Json = None,
) -> None:
    """Run every rank on one device, one at a time, and compare with one rank that has everything.

    Exit code 1 if results differ, or memory or bytes are not those of the plan.

    rda simulate --pattern gigapath --seq-len 45681 --ranks 16
    """
    from ..checks import Case
    from ..checks import simulate as run

    on = common.resolve_device(device)
    named = given_pattern(
        pattern,
        segment_lengths,
        dilation_rates,
        seq_len=seq_len,
        head_offsets=head_offsets,
        zero_keys=zero_keys,
    )
    work = workload_of(
        named,
        seq_len=seq_len,
        heads=heads,
        num_kv_heads=kv_heads,
        dtype="float32" if on == "cpu" else None,
        is_causal=causal,
        layout_name=resolve_layout(layout, ranks, is_causal=causal),
        documents=documents,
    )
    case = Case(
        pattern=work.pattern,
        layout=work.layout(ranks),
        num_heads=work.num_heads,
        num_kv_heads=work.kv_heads,
        head_dim=work.head_dim,
        is_causal=causal,
        documents=work.documents,
        dtype=work.torch_dtype,
        exchange=exchange,
        device=on,
    )
    console = make_console(json)
    console.print(f"{work}, on {count_of(ranks, 'rank')} ({work.layout_name}), on {on}\n")
    with common.working("simulate"):
        found = run(case)
    for words in (*_in_words(found), *work_in_words(work.plan(ranks), work.size)):
        console.print(f"- {words}", style="bold")
    console.print()
    rows = _simulated_rows(found, shown_ranks(ranks))
    show_table(console, "What each rank did, forward and backward", list(rows[0]), rows[1:])
    asked = {**asdict(work), "ranks": ranks}
    write_json(json, {"ok": found.ok, "options": asked, "device": on, **asdict(found)})
    if not found.ok:
        raise RunError("; ".join(found.problems[:3]))


def _in_words(found: Simulation) -> Sequence[str]:
    alone, slowest = sum(found.one_device), max(x.seconds for x in found.ranks)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.errors.items())
    right = "results match one device; memory, bytes and messages match the plan"
    return [
        right if found.ok else f"WRONG: {len(found.problems)} differences",
        f"error relative to one device: {errors}",
        f"one device takes {in_seconds(alone)}, the slowest rank {in_seconds(slowest)} "
        f"({alone / slowest:.1f} times as fast, transfers not counted)",
    ]


def _simulated_rows(found: Simulation, shown: Sequence[int]) -> list[list[Any]]:
    """The headings, a row for each rank that is shown, and one with the largest of all ranks."""
    columns: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "positions": (lambda x: x.positions, int),
        "of mean": (lambda x: x.of_mean, "{:.2f}".format),
        "peers": (lambda x: len(x.forward.counted.peers), int),
        "received": (lambda x: x.forward.counted.received, in_bytes),
        "sent back": (lambda x: x.backward.counted.sent if x.backward else 0, in_bytes),
        "memory": (lambda x: x.held_memory.total, in_bytes),
        "time": (lambda x: x.seconds, in_seconds),
    }
    rows = [
        [str(rank), *(text(get(found.ranks[rank])) for get, text in columns.values())]
        for rank in shown
    ]
    most = [text(max(map(get, found.ranks))) for get, text in columns.values()]
    return [["rank", *columns], *rows, ["largest", *most]]


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
        backend = "nccl" if on == "cuda" else "gloo"
        limits: dict[str, Any] = {"timeout": timeout + _SWEEP_S, "wait_timeout": timeout}
        with common.working(f"verify {len(cases)} cases on {count_of(number, 'rank')}"):
            try:
                found = run_ranks(run_cases, number, cases, backend=backend, **limits)
            except (RankError, TimeoutError) as error:
                first, *more = str(error).strip().splitlines()
                raise RunError(" ".join([first, *more[-1:]])) from None  # which rank, and why
        outcomes = combine(found)
        documents += [_document(*pair) for pair in zip(cases, outcomes, strict=True)]
        rows += _verified_rows(number, documents[-len(cases) :])
    wrong = [document for document in documents if not document["ok"]]
    total = count_of(len(documents), "case")
    console = make_console(json)
    if not wrong:
        console.print(f"{total} within bounds, bytes as planned, seed {seed}\n", style="bold")
    headings = ["ranks", "dtype", "cases", *documents[0]["errors"], "sent"]
    show_table(console, "Largest error relative to float64 by brute force", headings, rows)
    asked = {"ranks": list(ranks), "device": on, "seed": seed}
    write_json(json, {"ok": not wrong, "options": asked, "cases": documents})
    if wrong:
        first = ", ".join(f"{name} {value}" for name, value in wrong[0].items() if name != "ok")
        raise RunError(f"{len(wrong)} of {total} are out of bounds; the first: {first}")


def _verified_rows(ranks: int, documents: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
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


@app.command()
def bench(
    pattern: common.PatternName = None,
    segment_lengths: common.SegmentLengths = None,
    dilation_rates: common.DilationRates = None,
    seq_len: _SeqLens = (8192,),
    heads: common.Heads = None,
    kv_heads: common.KVHeads = None,
    head_dim: common.HeadDim = None,
    dtype: common.Dtype = None,
    causal: common.Causal = False,
    ranks: common.RankCounts = (1,),
    baseline: _Baselines = (),
    device: common.DeviceName = "auto",
    repeats: Annotated[int, typer.Option(help="Samples of each call.", min=1)] = 20,
    json: common.Json = None,
) -> None:
    """Measure time and memory of forward and forward+backward, beside baselines.

    Starts the ranks on this host, or runs on those of torchrun.

    rda bench --device cpu --seq-len 4K --heads 4 --baseline kernel,torchscale --repeats 3

    rda bench --ranks 1,4 --pattern dense --causal --seq-len 256K --baseline context_parallel
    """
    import torch

    from ..bench import Settings, document, environment, report
    from ..bench import bench as measure
    from ..checks import RankError

    on = common.resolve_device(device)
    workloads = [
        workload_of(
            given_pattern(pattern, segment_lengths, dilation_rates, seq_len=length),
            seq_len=length,
            heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype or ("float32" if on == "cpu" else None),
            is_causal=causal,
            name=(pattern or DEFAULT_NAME) if segment_lengths is None else "",
        )
        for length in seq_len
    ]
    settings = Settings(ranks=tuple(ranks), baselines=tuple(baseline), device=on, repeats=repeats)
    console = make_console(json)
    try:
        with common.working("bench") as status:
            results = measure(workloads, settings, progress=status.update)
    except RankError as error:
        raise RunError(str(error)) from None
    if os.environ.get("RANK", "0") != "0":  # of torchrun: rank 0 reports
        return
    about = environment(torch.device(on))
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    for part in report(results):
        if isinstance(part, str):
            console.print(part)
        else:
            console.print()
            show_table(console, *part)
    write_json(json, document(results, about, sys.argv[1:]))
    if all(result.reason for result in results):
        raise RunError("nothing was measured: the reasons are above")


@app.command()
def doctor(json: common.Json = None) -> None:
    """Print what a bug report needs: versions, GPUs, copies, kernels, small checked calls.

    What fails is a line of the report. Exit code 1 if a checked call or copy is wrong.
    """
    from ..checks import doctor as checks

    report = checks.examine()
    failures = checks.failures(report)
    make_console(json).print(checks.as_text(report), end="")
    write_json(json, {"failures": failures, **report})
    if failures:
        raise RunError(f"checks that failed: {len(failures)}; the first is {failures[0]}")
