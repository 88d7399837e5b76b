"""`rda train` and `rda sample`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..named_patterns import given_pattern
from . import options
from . import train_options as own
from .command import Example, command
from .common import RUNS
from .train_options import by_preset, run_s

NOT_CONFIG = {"out", "resume", "restartable", "ranks", "preset", "pattern"}
"""Options of `rda train` that are no fields of a config."""

DTYPE = options.DTYPE.meaning("fp32, or bf16 for autocast (or torch's names).")
PATTERN = options.PATTERN_NAME.but(shown=f"{options.THE_PRESET_S} --segment-lengths")
"""A preset has no pattern with a name."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors as one line of less than 300 characters each."""
    from ..train import TrainingError, one_line

    try:
        yield
    except TrainingError as error:
        raise TrainingError(one_line(error), bad_input=error.bad_input) from error
    except BrokenPipeError:
        raise  # of standard output, which is no error
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(one_line(error)) from error
    except MemoryError as error:
        raise TrainingError(one_line(f"out of memory: {error}")) from error


@command(
    Example("On the standard library's sources, on 2 ranks of this machine", "rda train --ranks 2"),
    Example(
        "On texts of your own, in sequences of 16,384",
        "rda train --data texts --seq-len 16K \\\n"
        "    --segment-lengths 2K,all --dilation-rates 1,8",
    ),
    Example("Go on for another 1,000 steps with the newest run", "rda train --resume --steps 1350"),
)
def train(
    preset: Annotated[str | None, own.PRESET],
    num_layers: Annotated[int | None, own.NUM_LAYERS],
    embed_dim: Annotated[int | None, own.EMBED_DIM],
    ffn_dim: Annotated[int | None, own.FFN_DIM],
    rope_theta: Annotated[float | None, own.ROPE_THETA],
    pattern: Annotated[str | None, PATTERN],
    segment_lengths: Annotated[
        Sequence[int | None] | None, by_preset(options.SEGMENT_LENGTHS, "256,1K,4K")
    ],
    dilation_rates: Annotated[Sequence[int] | None, by_preset(options.DILATION_RATES, "1,2,4")],
    head_offsets: Annotated[str | None, by_preset(options.HEAD_OFFSETS_, "interleaved")],
    head_branches: Annotated[str | None, by_preset(options.HEAD_BRANCHES_, "all")],
    seq_len: Annotated[int | None, by_preset(options.SEQ_LENGTH, "4K")],
    num_heads: Annotated[int | None, by_preset(options.NUM_HEADS, 4)],
    num_kv_heads: Annotated[int | None, run_s(options.NUM_KV_HEADS)],
    batch_size: Annotated[int | None, run_s(options.BATCH_SIZE)],
    dtype: Annotated[str | None, by_preset(DTYPE, "fp32")],
    data: Annotated[Sequence[str] | None, own.DATA],
    tokenizer: Annotated[str | None, own.TOKENIZER],
    train_tokenizer: Annotated[int | None, own.TRAIN_TOKENIZER],
    init_from: Annotated[str | None, own.INIT_FROM],
    heldout_fraction: Annotated[float | None, own.HELDOUT_FRACTION],
    eval_every: Annotated[int | None, own.EVAL_EVERY],
    eval_windows: Annotated[int | None, own.EVAL_WINDOWS],
    steps: Annotated[int | None, own.STEPS],
    learning_rate: Annotated[float | None, own.LEARNING_RATE],
    final_learning_rate: Annotated[float | None, own.FINAL_LEARNING_RATE],
    warmup_steps: Annotated[int | None, own.WARMUP_STEPS],
    weight_decay: Annotated[float | None, own.WEIGHT_DECAY],
    beta1: Annotated[float | None, own.BETA1],
    beta2: Annotated[float | None, own.BETA2],
    max_grad_norm: Annotated[float | None, own.MAX_GRAD_NORM],
    ranks: Annotated[int | None, run_s(options.RANKS)],
    sequence_ranks: Annotated[int | None, own.SEQUENCE_RANKS],
    layout: Annotated[str | None, run_s(options.LAYOUT)],
    exchange: Annotated[str | None, run_s(options.EXCHANGE)],
    timeout: Annotated[float | None, run_s(options.TIMEOUT_)],
    device: Annotated[str | None, run_s(options.DEVICE)],
    backend: Annotated[str | None, run_s(options.BACKEND)],
    seed: Annotated[int | None, run_s(options.SEED)],
    activation_checkpoint: Annotated[str | None, own.ACTIVATION_CHECKPOINT],
    activation_checkpoint_blocks: Annotated[int | None, own.ACTIVATION_CHECKPOINT_BLOCKS],
    chunk_rows: Annotated[int | None, own.CHUNK_ROWS],
    out: Annotated[Path | None, options.OUT],
    resume: Annotated[bool, own.RESUME],
    restartable: Annotated[bool, own.RESTARTABLE],
    save_every: Annotated[int | None, own.SAVE_EVERY],
    keep: Annotated[int | None, own.KEEP],
    tensorboard: Annotated[bool | None, own.TENSORBOARD],
) -> None:
    """Train a LongNet on bytes or tokens, with every sequence sharded over the ranks.

    Leaves log.jsonl, loss.png, run.toml (the options, for --config) and checkpoints/ in the folder
    of the run. Ctrl-C stops after the current step and leaves a checkpoint to resume from. One
    training at a time can use a folder. Under torchrun, leave out --ranks; with its restarts, or
    where a job is queued again, give --restartable and --out.
    """
    given: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in NOT_CONFIG
    }
    if pattern is not None:
        chosen = given_pattern(
            pattern,
            segment_lengths,
            dilation_rates,
            head_offsets=head_offsets,
            head_branches=head_branches,
        )
        for name in ("segment_lengths", "dilation_rates", "head_offsets", "head_branches"):
            given[name] = getattr(chosen, name)
    with one_line_errors():
        from ..train import Begin
        from ..train import train as run

        begin = Begin(resume=resume, restartable=restartable)
        run(out, given, preset=preset, ranks=ranks, begin=begin, runs=RUNS)


@command(
    Example("Continue a prompt with the newest run", 'rda sample --prompt "def "'),
    Example(
        "400 tokens, always the most likely, from a run of your choice",
        'rda sample --prompt "def " --checkpoint runs/mine \\\n'
        "    --temperature 0 --max-new-tokens 400",
    ),
    Example("From plain weights", 'rda sample --prompt "def " --checkpoint weights'),
)
def sample(
    prompt: Annotated[str, own.PROMPT],
    checkpoint: Annotated[Path | None, own.CHECKPOINT],
    max_new_tokens: Annotated[int, own.MAX_NEW_TOKENS],
    temperature: Annotated[float, own.TEMPERATURE],
    top_k: Annotated[int | None, own.TOP_K],
    top_p: Annotated[float | None, own.TOP_P],
    seed: Annotated[int, options.SEED],
) -> None:
    """Continue a prompt from a checkpoint of `rda train`, or from plain weights of `rda export`.

    Of a run, the newest undamaged checkpoint is used. Neither format can hold code. The rate, in
    tokens per second, goes to standard error.
    """
    with one_line_errors():
        from ..checks import check_one_process
        from ..terminal import streamed
        from ..train import decoded, newest_run, sample_bytes

        check_one_process("rda sample")
        stream = sample_bytes(
            newest_run(RUNS) if checkpoint is None else checkpoint,
            prompt.encode(errors="surrogateescape"),
            count=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
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
        streamed(texts, shown=prompt, total=max_new_tokens, unit="tokens", what="sample")
