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
            "describes a case: every combination is measured.",
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
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="What else to run, in turn with it: sdpa (dense), torchscale (gathers), kernel "
            "(attention on contiguous segments), flash4 (dense); name:KERNEL forces the kernel "
            "inside (cudnn, flash, ...). With --ranks: cp:allgather, cp:alltoall (torch's "
            "context_parallel), ring-flash-attn:zigzag, ours:messages (rows travel by NCCL). "
            "May be repeated."
        ),
    ] = None,
    ranks: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure on so many ranks of this host: 4, or 1,2,4 to compare them in one run; "
            "may be repeated. Under torchrun its ranks are used.",
            show_default="one device, and what follows does not apply",
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
            help="contiguous, zigzag, or auto: zigzag for causal cases.", show_default="auto"
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(help="How remote rows travel: auto, ring or gather.", show_default="auto"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="With --ranks: seconds that a rank waits for another before it raises.",
            show_default="600",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Timed calls of each kind; with --ranks, samples (see --sample-ms).",
            show_default="20; with --ranks 10",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(help="Time for one contender's calls of a kind; at least 3 are made."),
    ] = 10.0,
    sample_ms: Annotated[
        float | None,
        typer.Option(
            help="With --ranks: a sample is as many back-to-back calls as take so long.",
            show_default="300 on CUDA, one call on the CPU",
        ),
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Time replays of CUDA graphs too.")
    ] = False,
    errors: Annotated[
        bool, typer.Option(help="Compare a small twin of each case with float64.")
    ] = True,
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs.", show_default="a fresh one")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.json and tflops.png (scaling.png with --ranks).",
            show_default="runs/bench-TIME",
        ),
    ] = None,
) -> None:
    """Measure speed, memory and error, beside what else could compute the same.

    On one device, or with --ranks on many. Exit code 1 if this library failed in a case, computed
    none, or sent other bytes than its plan; 2 if the only case is refused.
    """
    with reported_errors():
        from ..bench import RankError, run_anywhere

        try:
            done = run_anywhere(
                out,
                runs=RUNS,
                device=device,
                peers=peer or [],
                ranks=None if ranks is None else [size for text in ranks for size in ints_of(text)],
                scaling=scaling,
                layout=layout,
                exchange=exchange,
                timeout=timeout,
                repeats=repeats,
                seconds=seconds,
                sample_ms=sample_ms,
                cuda_graph=cuda_graph,
                errors=errors,
                seed=seed,
                command=["rda", *sys.argv[1:]],
                patterns=pattern or [],
                segment_lengths=None if segment_lengths is None else lengths_of(segment_lengths),
                dilation_rates=None if dilation_rates is None else ints_of(dilation_rates),
                head_offsets=head_offsets,
                lengths=length or [],
                heads=heads or [],
                kv_heads=kv_heads or [],
                head_dims=head_dim or [],
                batches=batch or [],
                dtypes=dtype or [],
                causal=[value for value, given in ((True, causal), (False, no_causal)) if given],
                backends=backend or [],
            )
        except RankError as error:
            fail(error, 1)
        if not done:
            raise typer.Exit(1)
