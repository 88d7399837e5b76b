"""Checkpoints: written by all ranks through torch.distributed.checkpoint, seen only when whole.

A run keeps them in ``checkpoints/step_0000100/``: the tensors, and `META` with the step and the
configs of model and run. One is written under another name and renamed when it is complete, so a
folder of that name is always usable. Every rank holds all parameters, so the number of ranks may
change. Open only checkpoints that you trust: torch.distributed.checkpoint unpickles its index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from ..nn import LongNet, LongNetConfig
from .comm import World
from .config import TrainConfig

FOLDER = "checkpoints"
META = "meta.json"
_NAME = re.compile(r"step_(\d{7,})")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for a parameter


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A usable checkpoint on disk.

    Attributes:
        path: its folder.
        step: number of steps it has been trained.
        model: the shape of its model.
        config: the options of its run.
        fingerprint: of the corpus it was trained on.
    """

    path: Path
    step: int
    model: LongNetConfig
    config: TrainConfig
    fingerprint: str

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the description of a checkpoint; the tensors stay on disk.

        Raises:
            ValueError: this is not a checkpoint, or cannot be read; the message names it.
        """
        try:
            meta = json.loads((path / META).read_text())
            config = TrainConfig.from_dict(meta["config"])
            step, fingerprint = int(meta["step"]), str(meta["fingerprint"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a checkpoint of rda train: {type(error).__name__}: {error}"
            ) from error
        return cls(path=path, step=step, model=config.model, config=config, fingerprint=fingerprint)

    def check_model(self, model: LongNetConfig) -> None:
        """Raise a `ValueError` that names the fields that differ, unless the models are equal."""
        differences = [
            f"{f.name} is {there!r} there and {here!r} here"
            for f in fields(LongNetConfig)
            if (there := getattr(self.model, f.name)) != (here := getattr(model, f.name))
        ]
        if differences:
            raise ValueError(f"{self.path} holds another model: {'; '.join(differences)}")

    def load(self, model: LongNet, optimizer: torch.optim.AdamW | None = None) -> None:
        """Read the tensors into a model, and into its optimizer. Every rank calls this.

        Args:
            model: with the config of this checkpoint.
            optimizer: of the parameters of `model`; None to leave its state out.

        Raises:
            ValueError: the checkpoint is of another model, or is damaged.
        """
        self.check_model(model.config)
        if optimizer is not None:
            for parameter in model.parameters():
                optimizer.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                    "step": torch.zeros((), dtype=torch.float32),
                }
        try:
            with _alone_or_together():
                load_tensors(_tensors(model, optimizer), checkpoint_id=self.path)
        except (CheckpointException, RuntimeError, OSError) as error:
            raise ValueError(f"cannot read the tensors of {self.path}: {error}") from error


def save(
    config: TrainConfig,
    step: int,
    model: LongNet,
    optimizer: torch.optim.AdamW,
    fingerprint: str,
    world: World,
) -> Path:
    """Write a checkpoint and drop all but the newest `config.keep`. Every rank calls this.

    Args:
        config: of the run; its `out` decides where.
        step: number of steps trained.
        model: the model.
        optimizer: its optimizer.
        fingerprint: of the corpus.
        world: the ranks.

    Returns:
        The folder of the checkpoint; if the run has one of that step already, that one, untouched.

    Raises:
        ValueError: a rank cannot write it.
    """
    folder = config.out / FOLDER
    path = folder / f"step_{step:07d}"
    partial = folder / f".partial_{path.name}"

    def begin() -> bool:
        """Whether the run has it already, which rank 0 decides."""
        if world.rank != 0 or (path / META).is_file():
            return world.rank == 0
        for stale in folder.glob(".partial_*"):  # of a run that was killed while writing
            shutil.rmtree(stale)
        partial.mkdir(parents=True)
        return False

    def finish() -> None:
        if world.rank != 0:
            return
        meta = {
            "step": step,
            "fingerprint": fingerprint,
            "config": {**asdict(config), "out": str(config.out)},
            "torch": torch.__version__,
        }
        _write_synced(partial / META, json.dumps(meta, indent=1))
        _sync(partial)
        partial.rename(path)
        _sync(folder)
        for old in usable(config.out)[: -config.keep]:
            # Hidden first: a folder that is half deleted must not look like a checkpoint.
            hidden = folder / f".partial_{old.name}"
            old.rename(hidden)
            shutil.rmtree(hidden)

    if any(world.gather(world.everywhere(begin))):
        return path
    with _alone_or_together():
        save_tensors(_tensors(model, optimizer), checkpoint_id=partial)
    world.everywhere(finish)
    return path


def usable(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / META).is_file()
    ]
    return [path for _, path in sorted(found)]


def newest(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest one of the run at `path`.

    Raises:
        ValueError: there is none.
    """
    if (path / META).is_file():
        return Checkpoint.open(path)
    found = usable(path)
    if not found:
        raise ValueError(f"there is no checkpoint in {path}")
    return Checkpoint.open(found[-1])


def newest_run(folder: Path) -> Path:
    """The run below `folder` whose last checkpoint was written last.

    Raises:
        ValueError: there is none.
    """
    runs = [
        (checkpoints[-1].stat().st_mtime_ns, run)
        for run in (folder.iterdir() if folder.is_dir() else ())
        if (checkpoints := usable(run))
    ]
    if not runs:
        raise ValueError(f"there is no run with a checkpoint in {folder}")
    return max(runs)[1]


def _tensors(model: LongNet, optimizer: torch.optim.AdamW | None) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name; reading fills them in place."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            for moment in _MOMENTS:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors


@contextmanager
def _alone_or_together() -> Iterator[None]:
    """Silence the warning that torch.distributed.checkpoint gives where there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        yield


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
