"""Checkpoints of a run: safetensors files under SHA-256 checksums, seen only when complete.

A run keeps them in ``checkpoints/step_0000100/``:

- ``tensors_00000.safetensors`` and so on: parameters and AdamW's state. All ranks write, each its
  share of the files. Tensors have the names that ``torch.distributed.checkpoint`` gives them.
- ``tokenizer.json``: the tokenizer, unless the tokens are bytes.
- ``meta.json``: the step, the configs of model and run, a fingerprint of the corpus, and the sizes
  of the tensor files.
- ``SHA256SUMS``: the checksum of every other file (``sha256sum -c SHA256SUMS`` checks it too).

A checkpoint is written into a hidden folder, synced and then renamed, so a crash leaves the ones
before it as they are (`saving`). Reading checks every byte before it is used, and neither
safetensors nor JSON can hold code. Files that ``SHA256SUMS`` does not list are never opened. Every
rank holds all parameters, so the number of ranks may change; on several hosts the folder of the run
must be on a file system that they share.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..nn import LongNet, LongNetConfig
from .checked_files import (
    META,
    SUMS,
    TEXT_BYTES,
    TOKENIZER,
    DamagedError,
    checked,
    compare,
    digest_of,
    error_text,
    read_sums,
    regular_file,
)
from .config import TrainConfig
from .tokenizer import MOST_FILE_BYTES, SubwordTokenizer

FOLDER = "checkpoints"
FORMAT = 3
"""1 was torch.distributed.checkpoint's, whose index is a pickle; 2 had other names of tensors."""
_FILES = (re.escape(META), re.escape(TOKENIZER), r"tensors_\d{5,9}\.safetensors")
_NAME = re.compile(r"step_(\d{7,18})")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for a parameter
_MOST_REASON = 130  # characters of why a checkpoint is not whole, beside its path


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk whose description has been read and checked.

    Attributes:
        path: its folder.
        step: number of steps it has been trained, at least 1.
        model: the shape of its model.
        config: the options of its run.
        fingerprint: of the corpus it was trained on.
        sums: the SHA-256 checksum of each file, in hexadecimal, by name.
        damaged: one line about each newer checkpoint of the run that `newest` found damaged.
    """

    path: Path
    step: int
    model: LongNetConfig
    config: TrainConfig
    fingerprint: str
    sums: dict[str, str]
    damaged: tuple[str, ...] = ()

    @property
    def tokenizer_file(self) -> Path | None:
        """Its tokenizer's file; None of a model of bytes."""
        return self.path / TOKENIZER if TOKENIZER in self.sums else None

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the description of a checkpoint and check it; the tensors stay on disk.

        Raises:
            ValueError: this is not a checkpoint, or a file is missing, of another size, or damaged
                in what this reads; the message names it.
        """
        try:
            sums = read_sums(path, _FILES)
            text = checked(path, META, sums, TEXT_BYTES)
            try:
                meta = json.loads(text.decode())
                checkpoint = cls._of(path, sums, meta)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise DamagedError(f"{META}: {type(error).__name__}: {reason}") from error
            for name, size in meta["files"].items():
                regular_file(path, name, size)
        except DamagedError as error:
            why = str(error)[:_MOST_REASON]
            raise ValueError(f"{path} is not a whole checkpoint of rda train: {why}") from error
        return checkpoint

    @classmethod
    def _of(cls, path: Path, sums: dict[str, str], meta: dict[str, Any]) -> Checkpoint:
        """The description in parsed JSON, every value checked."""
        if meta["format"] != FORMAT:
            raise ValueError(
                f"format must be {FORMAT}, got {meta['format']!r}: another version of rda train "
                "wrote it, and only that one reads it"
            )
        step, fingerprint, files = meta["step"], meta["fingerprint"], meta["files"]
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"step must be an int >= 1, got {step!r}")
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) != step:
            raise ValueError(f"step must be that of the folder's name, got {step}")
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be a text, got {fingerprint!r}")
        if {*files, META} != set(sums):
            raise ValueError(f"files must be those of {SUMS}")
        config = TrainConfig.from_dict(meta["config"])
        if config.of_bytes == (TOKENIZER in sums):
            raise ValueError(f"there must be a {TOKENIZER} unless tokens are bytes")
        if not all(type(size) is int and size >= 0 for size in files.values()):
            raise ValueError("the sizes of files must be ints >= 0")
        return cls(
            path=path,
            step=step,
            model=config.model,
            config=config,
            fingerprint=fingerprint,
            sums=sums,
        )

    def check_model(self, model: LongNetConfig) -> None:
        """Raise a `ValueError` that names the fields that differ, unless the models are equal."""
        differences = [
            f"{f.name} is {there!r} there and {here!r} here"
            for f in fields(LongNetConfig)
            if (there := getattr(self.model, f.name)) != (here := getattr(model, f.name))
        ]
        if differences:
            raise ValueError(f"{self.path} holds another model: {'; '.join(differences)}")

    def tokenizer(self) -> SubwordTokenizer | None:
        """The tokenizer that the model was trained with; None of a model of bytes.

        Raises:
            ValueError: it is damaged, or the `tokenizers` package is not installed.
        """
        if TOKENIZER not in self.sums:
            return None
        try:
            data = checked(self.path, TOKENIZER, self.sums, MOST_FILE_BYTES)
        except DamagedError as error:
            raise ValueError(f"{self.path} is damaged: {error}") from error
        return SubwordTokenizer.parse(data, str(self.path / TOKENIZER))

    def check_files(self) -> None:
        """Read every file and compare it with its checksum, about a second per GB.

        Raises:
            ValueError: a file is damaged; the message names it.
        """
        try:
            for name in sorted(self.sums):
                compare(name, digest_of(regular_file(self.path, name)), self.sums)
        except (DamagedError, OSError) as error:
            raise ValueError(f"{self.path} is damaged: {error_text(error)}") from error

    def load(self, model: LongNet, optimizer: torch.optim.AdamW | None = None) -> None:
        """Read the tensors into a model, and into its optimizer. Every rank calls this.

        Every file is compared with its checksum before a tensor of it is used. Where this raises,
        the model may hold some of the checkpoint's tensors.

        Args:
            model: with the config of this checkpoint.
            optimizer: of the parameters of `model`; None to leave its state out.

        Raises:
            ValueError: the checkpoint is of another model, or is damaged.
        """
        self.check_model(model.config)
        self._read(model, optimizer)

    def load_weights(self, model: LongNet) -> str:
        """Read the parameters alone into a model, which may have another pattern.

        Args:
            model: whose parameters have the names and shapes of this checkpoint's.

        Returns:
            What the files hold, as a text: the checksums of all of them.

        Raises:
            ValueError: the checkpoint has other tensors than the model, or is damaged.
        """
        self._read(model, None)
        return str(sorted(self.sums.items()))

    def _read(self, model: LongNet, optimizer: torch.optim.AdamW | None) -> None:
        if optimizer is not None:
            for parameter in model.parameters():
                optimizer.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                    "step": torch.zeros((), dtype=torch.float32),
                }
        missing = tensors_of(model, optimizer)
        try:
            for name in sorted(self.sums):
                if name in (META, TOKENIZER):
                    continue
                data = checked(self.path, name, self.sums)
                try:
                    tensors = safetensors.torch.load(data)
                except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
                    raise DamagedError(f"{name}: {error}") from error
                for key, tensor in tensors.items():
                    if optimizer is None and key.startswith("optimizer."):
                        continue
                    target = missing.pop(key, None)
                    if target is None or (target.shape, target.dtype) != (
                        tensor.shape,
                        tensor.dtype,
                    ):
                        raise DamagedError(f"{name}: tensor {key} is not one of this model")
                    target.copy_(tensor)
            if missing:
                raise DamagedError(f"tensor {next(iter(missing))} is missing")
        except DamagedError as error:
            raise ValueError(f"{self.path} is damaged: {error}") from error


def still_there(run: Path) -> str:
    """Which checkpoints a run has, for messages."""
    names = [path.name for path in usable(run)]
    return f"still in {run / FOLDER}: {', '.join(names[-3:]) or 'no checkpoint'}"


def usable(run: Path) -> list[Path]:
    """The checkpoints of a run by their names, oldest first; they may be damaged."""
    folder = run / FOLDER
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of)


def newest(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest whole one of the run at `path`.

    Every file of it has been compared with its checksum. Of a run, damaged checkpoints are passed
    over; `Checkpoint.damaged` of what is returned says which, and why.

    Raises:
        ValueError: there is none, or the one at `path` is damaged.
    """
    if _NAME.fullmatch(path.name) or (path / SUMS).exists() or (path / META).exists():
        return _whole(path)
    found = usable(path)
    if not found:
        raise ValueError(
            f"there is no checkpoint in {path}{'' if path.exists() else ': no such folder'}"
        )
    damaged: list[str] = []
    for candidate in reversed(found):
        try:
            return replace(_whole(candidate), damaged=tuple(damaged))
        except ValueError as error:
            damaged.append(str(error))
    if len(damaged) == 1:
        raise ValueError(damaged[0])
    raise ValueError(f"none of {len(damaged)} checkpoints is whole; the newest: {damaged[0]}")


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
        raise ValueError(
            f"there is no run with a checkpoint in {folder}: make one with `rda train`, or say "
            "where it is (train: --out, sample: --checkpoint)"
        )
    return max(runs)[1]


def _whole(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    checkpoint.check_files()
    return checkpoint


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def tensors_of(model: LongNet, optimizer: torch.optim.AdamW | None) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name: the model's, then the optimizer's.

    The names are those that ``torch.distributed.checkpoint`` gives to ``{"model":
    get_model_state_dict(...), "optimizer": get_optimizer_state_dict(...)}``: ``model.<parameter>``
    and ``optimizer.state.<parameter>.exp_avg``.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in parameters.items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for moment in _MOMENTS:
                tensors[f"optimizer.state.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors
