"""What `rda train` and `rda sample` do with their options."""

from __future__ import annotations

import codecs
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..nn import LongNet
from ..pattern import check_positive_float, check_positive_int
from . import checkpoint, launch
from .config import DEFAULT_PRESET, TrainConfig, preset_options
from .errors import one_line
from .loop import Outcome
from .run_folder import CURVE, LOG


def train(
    out: Path | None,
    options: Mapping[str, Any],
    *,
    preset: str | None,
    ranks: int | None,
    resume: bool,
    runs: Path,
) -> None:
    """Run, and say where the results are.

    Args:
        out: folder of the run; None for a new one in `runs`, or its newest one on `resume`.
        options: those the user gave, by their names in `TrainConfig` and `LongNetConfig`; others
            keep their default, or on `resume` the run's value.
        preset: one of `PRESETS`, whose options count where the user gave none.
        ranks: local ranks to start; None means 1, or torchrun's.
        resume: whether to go on from the newest checkpoint.
        runs: where runs go that have no folder given.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option, the data or the checkpoint is bad.
        OSError: the folder cannot be written.
        TrainingError: the run failed.
    """
    config = make_config(out, options, preset=preset, resume=resume, runs=runs)
    outcome = launch.train(config, ranks=ranks, resume=resume)
    if outcome is not None:
        print(summary(outcome))


def make_config(
    out: Path | None,
    options: Mapping[str, Any],
    *,
    preset: str | None,
    resume: bool,
    runs: Path,
) -> TrainConfig:
    """The options of a run: the user's over the preset's, or on `resume` over the run's own.

    Args:
        out: see `train`.
        options: see `train`.
        preset: see `train`.
        resume: see `train`.
        runs: see `train`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, the preset unknown or given on `resume`, or there is
            no checkpoint to resume.
    """
    if not resume:
        out = out or runs / time.strftime("%Y%m%d-%H%M%S")
        defaults = preset_options(preset or DEFAULT_PRESET)
        return TrainConfig(out=out).with_options({**defaults, **options})
    if preset is not None:
        raise ValueError(f"a run that is resumed keeps its own options; got preset {preset!r}")
    out = out or checkpoint.newest_run(runs)
    return checkpoint.newest(out).config.with_options({**options, "out": out})


def summary(outcome: Outcome) -> str:
    """Lines that say how the run ended and what it left."""
    out = outcome.checkpoint.parent.parent
    rda = _program()
    resume = f"{rda} train --resume --out {out}"
    if outcome.stopped:
        return f"stopped after step {outcome.step}; go on with: {resume}"
    heldout = outcome.heldout_bits_per_byte
    return "\n".join(
        (
            f"done: {heldout:.3f} bits per byte on held-out text after {outcome.step} steps",
            f"  curve       {out / CURVE}",
            f"  log         {out / LOG}",
            f"  checkpoint  {outcome.checkpoint}",
            f'  try         {rda} sample --checkpoint {out} --prompt "def "',
        )
    )


def _program() -> str:
    """How to call `rda` from here, so that lines shown can be pasted."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "rda" and shutil.which("rda") is None else "rda"


def sample_bytes(
    path: Path,
    prompt: bytes,
    *,
    told: Callable[[str], None] = lambda _: None,
    count: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Bytes that continue a prompt, one at a time.

    The model reads at most the last ``seq_len`` bytes, the length it was trained on.

    Args:
        path: a checkpoint, or a run, whose newest checkpoint is taken.
        prompt: at least one byte.
        count: how many bytes to give.
        temperature: logits are divided by it; 0 takes the most likely byte always.
        top_k: draw among this many most likely bytes only; None means all.
        seed: of the draws, from 0 to 2**64 - 1.
        told: called with one line for every newer checkpoint of the run that is damaged.

    Returns:
        An iterator; the checkpoint has been read when this returns.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, the prompt is empty, or there is no usable
            checkpoint of a model of bytes.
    """
    check_positive_int("count", count)
    if temperature != 0:
        check_positive_float("temperature", temperature)
    if not prompt:
        raise ValueError("the prompt must have at least one byte; got an empty one")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be >= 0 and below 2**64; got {seed}")
    found = checkpoint.newest(path)
    for damaged in found.damaged:
        told(f"{one_line(damaged)}; taking {found.path.name}")
    vocabulary = found.model.vocab_size
    if vocabulary != 256:
        raise ValueError(f"{found.path} is not a model of bytes: its vocabulary is {vocabulary}")
    if top_k is not None and check_positive_int("top_k", top_k) > vocabulary:
        raise ValueError(f"top_k must be at most {vocabulary}; got {top_k}")
    model = LongNet(found.model)
    found.load(model)
    model.eval()
    return _draws(
        model,
        prompt,
        count=count,
        context=found.config.seq_len,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )


def _draws(
    model: LongNet,
    prompt: bytes,
    *,
    count: int,
    context: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(count):
        tokens = tokens[:, -context:]
        with torch.no_grad():
            logits: Tensor = model(tokens)[0, -1].double()
        if temperature == 0:
            token = logits.argmax().view(1)
        else:
            if top_k is not None:
                lowest = logits.topk(top_k).values[-1]
                logits = logits.masked_fill(logits < lowest, -torch.inf)
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, token[None]), dim=1)
        yield int(token)


def decoded(stream: Iterable[int]) -> Iterator[str]:
    """Bytes as text as soon as they make characters; what is not UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in stream:
        if text := decoder.decode(bytes([byte])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
