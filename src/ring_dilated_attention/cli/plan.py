"""`rda plan` and `rda simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from .common import app, documents_of, ints_of, lengths_of, reported_errors

if TYPE_CHECKING:
    from ..functional import Schedule
    from ..tiles import Backend

Length = Annotated[int, typer.Option(help="Global length of the sequence, in positions.")]
Ranks = Annotated[int, typer.Option(help="World size.")]
Layout = Annotated[str, typer.Option(help="contiguous or zigzag.")]
Causal = Annotated[bool, typer.Option(help="Queries see no later keys.")]
Documents = Annotated[
    str | None,
    typer.Option(help="Cumulative lengths of packed documents, separated by commas: 0,...,n."),
]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="KV heads.", show_default="as many as heads")]
HeadDim = Annotated[int, typer.Option(help="Elements of a row of a head.")]
Batch = Annotated[int, typer.Option(help="Sequences in the batch.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")]


@app.command()
def plan(
    length: Length,
    ranks: Ranks = 1,
    segment_lengths: Annotated[
        str, typer.Option(help="One per branch, separated by commas; all: the whole sequence.")
    ] = "2048,4096,8192,16384,32768",
    dilation_rates: Annotated[
        str, typer.Option(help="One per branch, separated by commas.")
    ] = "1,2,4,6,12",
    head_offsets: Annotated[str, typer.Option(help="interleaved or blocked.")] = "interleaved",
    head_branches: Annotated[str, typer.Option(help="all or split.")] = "all",
    layout: Layout = "contiguous",
    causal: Causal = False,
    documents: Documents = None,
    heads: Heads = 12,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 64,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    rank: Annotated[
        list[int] | None,
        typer.Option(help="Rank to show; may be repeated.", show_default="a few"),
    ] = None,
    tiles: Annotated[bool, typer.Option("--tiles", help="List every tile and message.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Prove the plan by enumeration (short sequences).")
    ] = False,
    check_limit: Annotated[
        int | None,
        typer.Option(
            help="(Query, key) pairs that --check may enumerate; a million takes about 0.5 GB.",
            show_default="2,000,000",
        ),
    ] = None,
) -> None:
    """Print what each rank would hold, compute and exchange; nothing is run."""
    with reported_errors():
        from ..bench import Workload, given_pattern
        from ..checks import MOST_PLANNED_RANKS
        from .run_plan import show
        from .sharded import Sharded

        workload = Workload(
            pattern=given_pattern(
                None,
                lengths_of(segment_lengths),
                ints_of(dilation_rates),
                head_offsets=head_offsets,
                head_branches=head_branches,
            ),
            length=length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            is_causal=causal,
        )
        sharded = Sharded(
            workload=workload,
            ranks=ranks,
            most_ranks=MOST_PLANNED_RANKS,
            layout_name=layout,
            documents=documents_of(documents),
        )
        show(sharded, shown=rank, tiles=tiles, check=check, check_limit=check_limit)


@app.command()
def simulate(
    length: Length,
    ranks: Ranks = 4,
    pattern: Annotated[
        str | None,
        typer.Option(help="longnet, gigapath, longvit or dense.", show_default="longnet"),
    ] = None,
    segment_lengths: Annotated[
        str | None,
        typer.Option(help="Of a pattern without a name: one per branch; all: the whole sequence."),
    ] = None,
    dilation_rates: Annotated[str | None, typer.Option(help="Its rates, one per branch.")] = None,
    head_offsets: Annotated[
        str | None,
        typer.Option(help="interleaved or blocked.", show_default="the pattern's own"),
    ] = None,
    head_branches: Annotated[
        str | None, typer.Option(help="all or split.", show_default="the pattern's own")
    ] = None,
    layout: Layout = "contiguous",
    causal: Causal = False,
    documents: Documents = None,
    heads: Heads = 4,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 64,
    batch: Batch = 1,
    dtype: Dtype = "float32",
    exchange: Annotated[
        str, typer.Option(help="How remote rows travel: auto, ring or gather.")
    ] = "auto",
    backend: Annotated[str, typer.Option(help="Which attention kernels compute.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backward: Annotated[bool, typer.Option(help="Run backward too.")] = True,
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs.", show_default="a fresh one")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every rank, not a few.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write everything to.")
    ] = None,
) -> None:
    """Run every rank on one device, one at a time, and compare with a single rank.

    Prints what each rank held, computed and sent, beside the plan. Exit code 1 if results are not
    those of one device, or memory or bytes not those of the plan.
    """
    with reported_errors():
        from ..bench import Workload, given_pattern
        from ..checks import MOST_SIMULATED_RANKS
        from .run_simulate import run
        from .sharded import Sharded

        workload = Workload(
            pattern=given_pattern(
                pattern,
                None if segment_lengths is None else lengths_of(segment_lengths),
                None if dilation_rates is None else ints_of(dilation_rates),
                head_offsets=head_offsets,
                head_branches=head_branches,
            ),
            length=length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            is_causal=causal,
            backend=cast("Backend", backend),
        )
        sharded = Sharded(
            workload=workload,
            ranks=ranks,
            most_ranks=MOST_SIMULATED_RANKS,
            layout_name=layout,
            documents=documents_of(documents),
        )
        right = run(
            sharded,
            exchange=cast("Schedule", exchange),
            device=device,
            seed=seed,
            backward=backward,
            every=every,
            json_file=json_file,
        )
        if not right:
            raise typer.Exit(1)
