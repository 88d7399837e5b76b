"""`rda train` and `rda sample`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import RUNS, app, ints_of, lengths_of, reported_errors


def _option(default: object, help_text: str) -> Any:
    """An option that is None when not given, so that resuming can keep the run's own value.

    `default` is what the help shows; a test holds it to the default of `TrainConfig`.
    """
    return typer.Option(help=help_text, show_default=str(default))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """`reported_errors`, of one line of less than 300 characters each."""
    from ..train import TrainingError, one_line

    with reported_errors():
        try:
            yield
        except TrainingError as error:
            raise TrainingError(one_line(error), bad_input=error.bad_input) from error
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(one_line(error)) from error
        except MemoryError as error:
            raise TrainingError(one_line(f"out of memory: {error}")) from error


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
    tokenizer: Annotated[
        str | None,
        _option("bytes", "bytes, or a tokenizer.json of a byte-level tokenizer (Hugging Face)."),
    ] = None,
    train_tokenizer: Annotated[
        int | None,
        _option("none", "Train a tokenizer of so many tokens on the training text, and use it."),
    ] = None,
    steps: Annotated[int | None, _option(350, "Step at which the run is complete.")] = None,
    sequence_length: Annotated[
        int | None, _option(4096, "Global length of a sequence, in tokens (bytes).")
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
        _option(1, "With keep_attention: keep the input of every Nth block only."),
    ] = None,
    chunk_rows: Annotated[
        int | None,
        _option("all", "Rows at a time of MLP, projections and loss: bounds their memory."),
    ] = None,
    timeout: Annotated[
        float | None,
        _option(
            "1800 for gloo, 600 for NCCL",
            "Seconds that a rank waits for another before the run fails and names it.",
        ),
    ] = None,
    tensorboard: Annotated[
        bool | None,
        _option("no-tensorboard", "Write the log as events of TensorBoard too."),
    ] = None,
) -> None:
    """Train a LongNet on bytes or tokens, with every sequence sharded over the ranks.

    Leaves log.jsonl, loss.png, run.toml (the options) and checkpoints/ in the folder of the run.
    Ctrl-C stops after the current step and leaves a checkpoint to resume from. One training at a
    time can use a folder.
    """
    options = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("out", "resume", "ranks", "preset")
    }
    with _one_line_errors():
        for name, parse in (("segment_lengths", lengths_of), ("dilation_rates", ints_of)):
            if name in options:
                options[name] = parse(options[name])

        from ..train import train as run

        run(out, options, preset=preset, ranks=ranks, resume=resume, runs=RUNS)


@app.command()
def sample(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A checkpoint or a run.", show_default="the newest run in runs/"),
    ] = None,
    count: Annotated[
        int, typer.Option("--tokens", help="How many tokens to add (of a model of bytes: bytes).")
    ] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among this many tokens only.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Continue a prompt from a checkpoint of `rda train`.

    Of a run, the newest checkpoint that is whole counts. Checkpoints hold no code.
    """
    with _one_line_errors():
        from ..terminal import streamed
        from ..train import decoded, newest_run, sample_bytes

        stream = sample_bytes(
            newest_run(RUNS) if checkpoint is None else checkpoint,
            prompt.encode(errors="surrogateescape"),
            count=count,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            told=lambda line: typer.echo(line, err=True),
        )
        done = 0

        def counted() -> Iterator[bytes]:
            nonlocal done
            for part in stream:
                done += 1
                yield part

        texts = ((done, text) for text in decoded(counted()))
        streamed(texts, shown=prompt, total=count, unit="tokens", what="sample")
