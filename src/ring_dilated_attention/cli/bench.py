"""`rda bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import RUNS, app, fail, ints_of, lengths_of, reported_errors


@app.command()
def bench(
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            help="longnet, gigapath, longvit or dense; may be repeated, as may all that "
            "describes a workload: every combination is measured.",
            show_default="longnet",
        ),
    ] = None,
    segment_lengths: Annotated[
        str | None,
        typer.Option(help="Of one more pattern: one per branch; all: the whole sequence."),
    ] = None,
    dilation_rates: Annotated[str | None, typer.Option(help="Its rates, one per branch.")] = None,
    head_offsets: Annotated[
        str | None,
        typer.Option(
            help="interleaved or blocked, of all patterns.", show_default="the pattern's own"
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Positions of the sequence.", show_default="8192 (CPU), 65536 (CUDA)"),
    ] = None,
    heads: Annotated[
        list[int] | None, typer.Option(help="Query heads.", show_default="the pattern's own, or 12")
    ] = None,
    kv_heads: Annotated[
        list[int] | None, typer.Option(help="KV heads.", show_default="as many as heads")
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(help="Elements of a row of a head.", show_default="the pattern's own, or 64"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences in the batch.", show_default="1")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="bfloat16, float16, float32 or float64.",
            show_default="float32 (CPU), the pattern's own, or bfloat16",
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Queries see no later keys; with --no-causal: both.")
    ] = False,
    no_causal: Annotated[
        bool, typer.Option("--no-causal", help="Queries see all keys: the default.")
    ] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Which kernels compute.", show_default="auto")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="What else to run, in turn with it: sdpa (dense), torchscale (gathers), kernel "
            "(attention on contiguous segments), flash4 (dense); name:KERNEL forces the kernel "
            "inside (cudnn, flash, ...). On several ranks: cp:allgather, cp:alltoall (torch's "
            "context_parallel), ring-flash-attn:zigzag, ours:messages (rows travel by NCCL). "
            "May be repeated."
        ),
    ] = None,
    ranks: Annotated[
        list[str] | None,
        typer.Option(
            help="How many ranks of this host to measure on: 4, or 1,2,4 to compare them in one "
            "run; may be repeated. Under torchrun its ranks are used.",
            show_default="1",
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            help="strong: --length is that of the whole sequence; weak: of each rank's shard.",
            show_default="strong",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="contiguous, zigzag, or auto: zigzag for causal workloads on several ranks.",
            show_default="auto",
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(help="How remote rows travel: auto, ring or gather.", show_default="auto"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a rank waits for another before it raises.",
            show_default="600",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Samples of forward, and of forward+backward (see --sample-ms).",
            show_default="20",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(help="Time for one contender's samples of a kind; at least 3 are taken."),
    ] = 10.0,
    sample_ms: Annotated[
        float | None,
        typer.Option(
            help="A sample is as many back-to-back calls as take so long.",
            show_default="300 for several ranks on CUDA, otherwise one call",
        ),
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Time replays of CUDA graphs too, on one rank.")
    ] = False,
    errors: Annotated[
        bool, typer.Option(help="Compare a small twin of each workload with float64.")
    ] = True,
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs.", show_default="a fresh one")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.json and tflops.png (scaling.png for several ranks).",
            show_default="runs/bench-TIME",
        ),
    ] = None,
) -> None:
    """Measure speed, memory and error, beside what else could compute the same.

    On one rank, or with --ranks on several. Exit code 1 if this library failed in a workload,
    computed none, or sent other bytes than its plan; 2 if every workload is refused.
    """
    with reported_errors():
        from ..bench import run_command
        from ..checks import RankError

        measuring = {
            "ranks": None if ranks is None else tuple(n for text in ranks for n in ints_of(text)),
            "scaling": scaling,
            "baselines": tuple(baseline or ()),
            "layout": layout,
            "exchange": exchange,
            "device": device,
            "repeats": repeats,
            "seconds": seconds,
            "sample_ms": sample_ms,
            "cuda_graph": cuda_graph,
            "errors": errors,
            "timeout": timeout,
        }
        workloads = {
            "patterns": pattern,
            "segment_lengths": None if segment_lengths is None else lengths_of(segment_lengths),
            "dilation_rates": None if dilation_rates is None else ints_of(dilation_rates),
            "head_offsets": head_offsets,
            "lengths": length,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dims": head_dim,
            "batches": batch,
            "dtypes": dtype,
            "causal": [value for value, given in ((True, causal), (False, no_causal)) if given],
            "backends": backend,
        }
        try:
            done = run_command(
                out,
                runs=RUNS,
                seed=seed,
                command=["rda", *sys.argv[1:]],
                measuring={name: x for name, x in measuring.items() if x is not None},
                workloads={name: x for name, x in workloads.items() if x is not None},
            )
        except RankError as error:
            fail(error, 1)
        if not done:
            raise typer.Exit(1)
