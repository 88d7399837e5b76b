"""What `rda train` does with its options."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..terminal import count_of
from . import checkpoint, launch
from .config import DEFAULT_PRESET, TrainConfig, preset_options
from .curve import CURVE
from .init_from import begun_from
from .loop import Outcome
from .prepare import with_vocabulary, without_tokenizer
from .run_folder import LOG
from .run_toml import FILE
from .scalars import FOLDER


class Begin(NamedTuple):
    """With which step a run begins.

    Attributes:
        resume: with the one after the newest checkpoint.
        restartable: with that one if there is a checkpoint, else with the first one, whatever a
            process that ended before its first checkpoint has left in the folder.
    """

    resume: bool = False
    restartable: bool = False

    def resumes(self, out: Path | None) -> bool:
        """Whether a run that is restartable goes on from a checkpoint.

        Raises:
            ValueError: options contradict each other.
        """
        if self.resume:
            raise ValueError(
                "--restartable goes on from a checkpoint if there is one, and --resume refuses "
                "to begin: leave out one of them"
            )
        if out is None:
            raise ValueError("--restartable needs --out, the same folder at every start")
        return bool(checkpoint.usable(out))


def train(
    out: Path | None,
    options: Mapping[str, Any],
    *,
    preset: str | None,
    ranks: int | None,
    begin: Begin,
    runs: Path,
) -> None:
    """Run, and say where the results are.

    Args:
        out: folder of the run; None for a new one in `runs`, or its newest one on `resume`.
        options: those the user gave, by their names in `TrainConfig` and `LongNetConfig`; others
            keep their default, or on `resume` the run's value.
        preset: one of `PRESETS`, whose options count where the user gave none.
        ranks: local ranks to start; None means 1, or torchrun's.
        begin: with which step to begin.
        runs: where runs go that have no folder given.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option, the data or the checkpoint is bad.
        OSError: the folder cannot be written.
        TrainingError: the run failed.
    """
    resume = begin.resume
    if begin.restartable:
        resume = begin.resumes(out)
        if resume:  # the run has what it began with
            preset = None
            options = {name: value for name, value in options.items() if name != "init_from"}
    config = make_config(out, options, preset=preset, resume=resume, runs=runs)
    if begin.restartable and resume and checkpoint.newest(config.out).step >= config.steps:
        print(f"done before: {config.out} has all of its {count_of(config.steps, 'step')}")
        return
    outcome = launch.train(config, ranks=ranks, resume=resume, restartable=begin.restartable)
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
        ValueError: an option is out of range, the preset unknown or given on `resume`, there is no
            checkpoint to resume, the tokenizer cannot be read or is not that of the checkpoint, or
            the weights to begin with are not usable or do not fit the options.
    """
    if not resume:
        out = out or runs / time.strftime("%Y%m%d-%H%M%S")
        defaults = preset_options(preset or DEFAULT_PRESET)
        if "init_from" in options:
            return begun_from(TrainConfig(out=out).with_options(defaults), options)
        return with_vocabulary(TrainConfig(out=out).with_options({**defaults, **options}))
    if preset is not None:
        raise ValueError(f"a run that is resumed keeps its own options; got preset {preset!r}")
    if "init_from" in options:
        raise ValueError(
            "a run that is resumed has its weights; got --init-from: leave it or --resume out"
        )
    out = out or checkpoint.newest_run(runs)
    start = checkpoint.newest(out)
    return start.config.with_options({**without_tokenizer(start, options), "out": out})


def summary(outcome: Outcome) -> str:
    """Lines that say how the run ended and what it left."""
    out = outcome.checkpoint.parent.parent
    rda = _program()
    resume = f"{rda} train --resume --out {out}"
    if outcome.stopped:
        return f"stopped after step {outcome.step}; go on with: {resume}"
    heldout = outcome.heldout_bits_per_byte
    lines = [
        f"done: {heldout:.3f} bits per byte on held-out text after "
        f"{count_of(outcome.step, 'step')}",
        f"  curve       {out / CURVE}",
        f"  log         {out / LOG}",
        f"  options     {out / FILE}",
        f"  checkpoint  {outcome.checkpoint}",
        f'  try         {rda} sample --checkpoint {out} --prompt "def "',
    ]
    if (out / FOLDER).exists():
        lines.insert(2, f"  curves      tensorboard --logdir {out / FOLDER}")
    return "\n".join(lines)


def _program() -> str:
    """How to call `rda` from here, so that lines shown can be pasted."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "rda" and shutil.which("rda") is None else "rda"
