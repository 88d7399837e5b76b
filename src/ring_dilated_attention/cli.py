"""The `rda` command. Each command parses its options and calls one function of the package.

Heavy imports happen inside the commands, so that ``rda --help`` is fast. To add a command, write a
function decorated with ``@app.command()`` that does its work inside ``with reported_errors():``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

RUNS = Path("runs")

app = typer.Typer(
    help="Exact ring dilated attention: train on sharded sequences, verify, and look at plans.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _app() -> None:
    """Keep commands named even while there is only one."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Show an error as one line: exit code 2 for bad input, 1 for a failed run.

    `ValueError`, `TypeError` and `OSError` are bad input. Anything else that is not a
    `TrainingError` is a bug of the program and keeps its traceback.
    """
    from .train.errors import TrainingError

    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        _fail(error, 2)
    except TrainingError as error:
        _fail(error, 2 if error.bad_input else 1)


def _fail(error: Exception, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)


def _option(default: object, help_text: str) -> Any:
    """An option that is None when not given, so that resuming can keep the run's own value.

    `default` is what the help shows; a test holds it to the default of `TrainConfig`.
    """
    return typer.Option(help=help_text, show_default=str(default))


def _lengths(text: str) -> tuple[int | None, ...]:
    """Parse segment lengths: ``256,1024,all`` (``all``: the whole sequence)."""
    return tuple(None if part.strip() == "all" else _int(part, text) for part in text.split(","))


def _rates(text: str) -> tuple[int, ...]:
    """Parse dilation rates: ``1,2,4``."""
    return tuple(_int(part, text) for part in text.split(","))


def _documents(text: str | None) -> tuple[int, ...] | None:
    """Parse the borders of documents: ``0,100,250``."""
    return None if text is None else tuple(_int(part, text) for part in text.split(","))


def _int(part: str, text: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise ValueError(f"need ints separated by commas; got {text!r}") from None


@app.command()
def train(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run.", show_default="runs/ and the time of day"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint of --out (without --out, of the newest run). "
            "Options not given keep the run's values; the number of ranks is free.",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(help="Local ranks to start; leave out under torchrun.", show_default="1"),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Values of options that are not given: small (the defaults shown here), or "
            "longnet-base (12 layers of width 768 on sequences of millions of bytes, for GPUs).",
            show_default="small",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option("the standard library's sources", "Text file or folder; may be repeated."),
    ] = None,
    steps: Annotated[int | None, _option(350, "Step at which the run is complete.")] = None,
    sequence_length: Annotated[
        int | None, _option(4096, "Global length of a sequence, in bytes.")
    ] = None,
    batch_size: Annotated[int | None, _option(1, "Sequences a step, over all ranks.")] = None,
    sequence_ranks: Annotated[
        int | None, _option("all", "Ranks that share a sequence; must divide the ranks.")
    ] = None,
    layout: Annotated[
        str | None, _option("zigzag", "How a sequence is cut: zigzag or contiguous.")
    ] = None,
    segment_lengths: Annotated[
        str | None,
        _option("256,1024,4096", "One per branch, separated by commas; all: the whole sequence."),
    ] = None,
    dilation_rates: Annotated[
        str | None, _option("1,2,4", "One per branch, separated by commas.")
    ] = None,
    head_offsets: Annotated[str | None, _option("interleaved", "interleaved or blocked.")] = None,
    head_branches: Annotated[str | None, _option("all", "all or split.")] = None,
    num_layers: Annotated[int | None, _option(3, "Blocks of the model.")] = None,
    embed_dim: Annotated[int | None, _option(128, "Width of the model.")] = None,
    num_heads: Annotated[int | None, _option(4, "Attention heads.")] = None,
    num_kv_heads: Annotated[int | None, _option("as many as heads", "Key and value heads.")] = None,
    ffn_dim: Annotated[int | None, _option(512, "Width of the MLP.")] = None,
    rope_theta: Annotated[
        float | None, _option(10_000.0, "Base of the rotary wavelengths.")
    ] = None,
    learning_rate: Annotated[float | None, _option(0.006, "Peak learning rate.")] = None,
    final_learning_rate: Annotated[
        float | None, _option(0.1, "End of its cosine, as a fraction of the peak.")
    ] = None,
    warmup_steps: Annotated[int | None, _option(20, "Steps of linear warm-up.")] = None,
    weight_decay: Annotated[float | None, _option(0.1, "AdamW's, for matrices.")] = None,
    beta1: Annotated[float | None, _option(0.9, "AdamW's.")] = None,
    beta2: Annotated[float | None, _option(0.95, "AdamW's.")] = None,
    max_grad_norm: Annotated[
        float | None, _option(1.0, "Gradients are scaled down to this norm.")
    ] = None,
    seed: Annotated[int | None, _option(0, "Of initial weights and sampling.")] = None,
    heldout_fraction: Annotated[
        float | None, _option(0.05, "Part of the text that is held out of training.")
    ] = None,
    eval_every: Annotated[int | None, _option(50, "Steps between held-out evaluations.")] = None,
    eval_windows: Annotated[int | None, _option(16, "Held-out sequences in an evaluation.")] = None,
    save_every: Annotated[int | None, _option(100, "Steps between checkpoints.")] = None,
    keep: Annotated[int | None, _option(3, "Newest checkpoints to keep.")] = None,
    exchange: Annotated[
        str | None, _option("auto", "How remote rows travel: auto, ring or gather.")
    ] = None,
    backend: Annotated[str | None, _option("auto", "Which attention kernels compute.")] = None,
    device: Annotated[str | None, _option("auto", "auto, cpu or cuda.")] = None,
    precision: Annotated[
        str | None, _option("float32", "float32, or bfloat16 for autocast.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        _option("none", "What backward recomputes: none, full or keep_attention (all but it)."),
    ] = None,
    checkpoint_blocks: Annotated[
        int | None,
        _option(1, "With keep_attention: keep the input of one block in so many only."),
    ] = None,
    chunk_rows: Annotated[
        int | None,
        _option("all", "Rows at a time of MLP, projections and loss: bounds their memory."),
    ] = None,
) -> None:
    """Train a byte-level LongNet with every sequence sharded over the ranks.

    Leaves log.jsonl, loss.png and checkpoints/ in the folder of the run. Ctrl-C stops after the
    current step and leaves a checkpoint to resume from.
    """
    options = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("out", "resume", "ranks", "preset")
    }
    with reported_errors():
        for name, parse in (("segment_lengths", _lengths), ("dilation_rates", _rates)):
            if name in options:
                options[name] = parse(options[name])

        from .train import command

        command.train(out, options, preset=preset, ranks=ranks, resume=resume, runs=RUNS)


@app.command()
def sample(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A checkpoint or a run.", show_default="the newest run in runs/"),
    ] = None,
    count: Annotated[int, typer.Option("--bytes", help="How many bytes to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most likely byte.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among this many bytes only.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Continue a prompt from a checkpoint of `rda train`."""
    with reported_errors():
        from .train.checkpoint import newest_run
        from .train.sample import decoded, sample_bytes

        stream = sample_bytes(
            newest_run(RUNS) if checkpoint is None else checkpoint,
            prompt.encode(errors="surrogateescape"),
            count=count,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        typer.echo(prompt, nl=False)
        for text in decoded(stream):
            typer.echo(text, nl=False)  # flushes, so that bytes show as they come
        typer.echo()


@app.command()
def verify(
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="World size to check; may be repeated.", show_default="1 2 3 4"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU a rank).")] = "cpu",
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs.", show_default="a fresh one")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A row per case, not per pattern.")] = False,
) -> None:
    """Compare forward and backward on real ranks with a brute-force reference.

    Prints errors relative to float64 and the bytes moved against the plan's. Exit code 1 if any
    case is out of bounds.
    """
    with reported_errors():
        from .verify_command import verify as run

        if not run(ranks or [1, 2, 3, 4], device=device, seed=seed, every=every):
            raise typer.Exit(1)


@app.command()
def plan(
    length: Annotated[int, typer.Option(help="Global length of the sequence, in positions.")],
    ranks: Annotated[int, typer.Option(help="World size.")] = 1,
    segment_lengths: Annotated[
        str, typer.Option(help="One per branch, separated by commas; all: the whole sequence.")
    ] = "2048,4096,8192,16384,32768",
    dilation_rates: Annotated[
        str, typer.Option(help="One per branch, separated by commas.")
    ] = "1,2,4,6,12",
    head_offsets: Annotated[str, typer.Option(help="interleaved or blocked.")] = "interleaved",
    head_branches: Annotated[str, typer.Option(help="all or split.")] = "all",
    layout: Annotated[str, typer.Option(help="contiguous or zigzag.")] = "contiguous",
    causal: Annotated[bool, typer.Option(help="Queries see no later keys.")] = False,
    documents: Annotated[
        str | None,
        typer.Option(help="Cumulative lengths of packed documents, separated by commas: 0,...,n."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads.", show_default="as many as heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Elements of a row of a head.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    rank: Annotated[
        list[int] | None,
        typer.Option(help="Rank to show; may be repeated.", show_default="a few"),
    ] = None,
    tiles: Annotated[bool, typer.Option("--tiles", help="List every tile and message.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Prove the plan by enumeration (short sequences).")
    ] = False,
) -> None:
    """Print what each rank would hold, compute and exchange; nothing is run."""
    with reported_errors():
        from .pattern import DilatedPattern
        from .plan_command import show

        show(
            DilatedPattern(
                _lengths(segment_lengths),
                _rates(dilation_rates),
                head_offsets=head_offsets,
                head_branches=head_branches,
            ),
            length=length,
            world_size=ranks,
            layout=layout,
            is_causal=causal,
            documents=_documents(documents),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            ranks=rank,
            tiles=tiles,
            check=check,
        )


@app.command()
def simulate(
    length: Annotated[int, typer.Option(help="Global length of the sequence, in positions.")],
    ranks: Annotated[int, typer.Option(help="World size.")] = 4,
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
    layout: Annotated[str, typer.Option(help="contiguous or zigzag.")] = "contiguous",
    causal: Annotated[bool, typer.Option(help="Queries see no later keys.")] = False,
    documents: Annotated[
        str | None,
        typer.Option(help="Cumulative lengths of packed documents, separated by commas: 0,...,n."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads.", show_default="as many as heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Elements of a row of a head.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "float32",
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
    """Run every rank on one device, one at a time, and compare with one rank that holds it all.

    Prints what each rank held, computed and sent, beside the plan. Exit code 1 if results are not
    those of one device, or memory or bytes not those of the plan.
    """
    with reported_errors():
        from .simulate_command import run

        right = run(
            pattern=pattern,
            segment_lengths=None if segment_lengths is None else _lengths(segment_lengths),
            dilation_rates=None if dilation_rates is None else _rates(dilation_rates),
            head_offsets=head_offsets,
            head_branches=head_branches,
            length=length,
            world_size=ranks,
            layout=layout,
            is_causal=causal,
            documents=_documents(documents),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            exchange=exchange,
            backend=backend,
            device=device,
            seed=seed,
            backward=backward,
            every=every,
            json_file=json_file,
        )
        if not right:
            raise typer.Exit(1)


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
        from .bench.command import run_anywhere
        from .bench.ranks_team import RankError

        try:
            done = run_anywhere(
                out,
                runs=RUNS,
                device=device,
                peers=peer or [],
                ranks=None if ranks is None else [size for text in ranks for size in _rates(text)],
                scaling=scaling,
                layout=layout,
                exchange=exchange,
                repeats=repeats,
                seconds=seconds,
                sample_ms=sample_ms,
                cuda_graph=cuda_graph,
                errors=errors,
                seed=seed,
                command=["rda", *sys.argv[1:]],
                patterns=pattern or [],
                segment_lengths=None if segment_lengths is None else _lengths(segment_lengths),
                dilation_rates=None if dilation_rates is None else _rates(dilation_rates),
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
            _fail(error, 1)
        if not done:
            raise typer.Exit(1)


def main() -> None:
    """Entry point of `rda`."""
    app()


if __name__ == "__main__":
    main()
