"""Weights alone, for other programs: ``config.json`` and ``model.safetensors`` in a folder.

- ``config.json``: the fields of `LongNetConfig`.
- ``model.safetensors``: the parameters, by the names of `LongNet.named_parameters`.
- ``tokenizer.json``: the tokenizer, unless the tokens are bytes.
- ``SHA256SUMS``: the checksums of these files. `export` writes it; a folder of another program need
  not have it, and then there is nothing to compare the files with.

Neither JSON nor safetensors can hold code. Checkpoints of ``torch.distributed.checkpoint`` are
refused: their index is a pickle, which can.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..nn import LongNet, LongNetConfig
from . import checkpoint
from .checked_files import (
    META,
    SUMS,
    TEXT_BYTES,
    TOKENIZER,
    DamagedError,
    check_listed,
    checked,
    read_sums,
    regular_file,
    remove,
    sync,
    write_sums,
    write_synced,
)
from .checkpoint import Checkpoint
from .config import check_sizes
from .errors import one_line
from .tokenizer import MOST_FILE_BYTES, SubwordTokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_DCP_INDEX = ".metadata"  # of torch.distributed.checkpoint, a pickle
_HEADER_BYTES = 100_000_000  # the most that safetensors allows
_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class PlainWeights:
    """A folder of plain weights whose config has been read and checked.

    Attributes:
        path: the folder.
        model: the shape of the model.
        sums: the SHA-256 checksum of each file, in hexadecimal, by name; None where the folder has
            none.
    """

    path: Path
    model: LongNetConfig
    sums: dict[str, str] | None

    @classmethod
    def open(cls, path: Path) -> PlainWeights:
        """Read the config of a folder of weights; the tensors stay on disk.

        Raises:
            ValueError: there is no such folder, a file is missing or damaged, or the config is not
                that of a `LongNet`; the message names the file.
        """
        try:
            sums = read_sums(path, (CONFIG, WEIGHTS, TOKENIZER)) if _has(path, SUMS) else None
            for name in (CONFIG, WEIGHTS):
                regular_file(path, name)
                check_listed(name, sums)
            text = checked(path, CONFIG, sums, TEXT_BYTES)
            try:
                values = json.loads(text.decode())
                check_sizes(values)
                model = LongNetConfig(**values)
            except (TypeError, ValueError, AttributeError, RecursionError) as error:
                raise DamagedError(f"{CONFIG} is not that of a LongNet: {error}") from error
        except DamagedError as error:
            raise ValueError(f"{path} does not hold weights of a LongNet: {error}") from error
        return cls(path=path, model=model, sums=sums)

    @property
    def tokenizer_file(self) -> Path | None:
        """Its tokenizer's file; None of a model of bytes."""
        return self.path / TOKENIZER if _has(self.path, TOKENIZER) else None

    def tokenizer(self) -> SubwordTokenizer | None:
        """The tokenizer that the model was trained with; None of a model of bytes.

        Raises:
            ValueError: it is damaged, or the `tokenizers` package is not installed.
        """
        if self.tokenizer_file is None and TOKENIZER not in (self.sums or {}):
            return None
        try:
            check_listed(TOKENIZER, self.sums)
            data = checked(self.path, TOKENIZER, self.sums, MOST_FILE_BYTES)
        except DamagedError as error:
            raise ValueError(f"{self.path} is damaged: {error}") from error
        return SubwordTokenizer.parse(data, str(self.path / TOKENIZER))

    def load_weights(self, model: LongNet) -> str:
        """Read the parameters into a model, and return the checksum of their file.

        Args:
            model: whose parameters have the names and shapes of the file's.

        Returns:
            SHA-256 of the file, in hexadecimal.

        Raises:
            ValueError: the file is damaged, or has other tensors than the model; where this raises,
                the model may hold some of them.
        """
        missing = {name: parameter.detach() for name, parameter in model.named_parameters()}
        size = sum(parameter.numel() * parameter.element_size() for parameter in missing.values())
        try:
            data = checked(self.path, WEIGHTS, self.sums, size + _HEADER_BYTES)
            try:
                tensors = safetensors.torch.load(data)
            except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
                raise DamagedError(f"{WEIGHTS}: {error}") from error
            for name, tensor in tensors.items():
                target = missing.pop(name, None)
                if target is None:
                    raise DamagedError(f"{WEIGHTS}: tensor {name} is not one of this model")
                _check_tensor(name, tensor, target)
                target.copy_(tensor)
            if missing:
                raise DamagedError(f"{WEIGHTS}: tensor {next(iter(missing))} is missing")
        except DamagedError as error:
            raise ValueError(f"{self.path} does not hold these weights: {error}") from error
        return hashlib.sha256(data).hexdigest()


def weights_at(path: Path) -> Checkpoint | PlainWeights:
    """Plain weights, a checkpoint of rda train, or the newest whole one of a run.

    Raises:
        ValueError: there is none of these, or it is damaged.
    """
    if _has(path, _DCP_INDEX) and not _has(path, META):
        raise ValueError(
            f"{path} is a checkpoint of torch.distributed.checkpoint, whose index is a pickle that "
            "can run code: it is not read. Load it in your own program, and write plain weights "
            "as the docs show (Checkpoints)"
        )
    if _has(path, CONFIG) or _has(path, WEIGHTS):
        return PlainWeights.open(path)
    return checkpoint.newest(path)


def export_newest(run: Path, to: Path, *, told: Callable[[str], None] = lambda _: None) -> Path:
    """Write the weights of a checkpoint, or of the newest whole one of a run, as plain ones.

    Args:
        run: the checkpoint, or the run.
        to: the folder, which does not exist or is empty.
        told: called with one line for every newer checkpoint of the run that is damaged.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: there is no usable checkpoint, or `to` holds something.
        OSError: it cannot be written.
    """
    found = weights_at(run)
    if isinstance(found, PlainWeights):
        raise ValueError(f"{run} holds plain weights already")
    for damaged in found.damaged:
        told(f"{one_line(damaged)}; taking {found.path.name}")
    export(found, to)
    return found.path


def export(found: Checkpoint, to: Path) -> None:
    """Write the weights of a checkpoint as plain ones, without the optimizer's state.

    The files are written into a hidden folder beside `to`, synced and then renamed.

    Args:
        found: the checkpoint.
        to: the folder, which does not exist or is empty.

    Raises:
        ValueError: `to` holds something, or the checkpoint is damaged.
        OSError: it cannot be written.
    """
    if _has(to) and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} is not an empty folder; choose another")
    model = LongNet(found.model)
    found.load_weights(model)
    config = json.dumps(asdict(found.model), indent=1) + "\n"
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    files = {
        CONFIG: config.encode(),
        WEIGHTS: safetensors.torch.save(tensors, {"format": "pt"}),
    }
    tokenizer = found.tokenizer()
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer.json
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.parent / f".partial_{to.name}"
    remove(partial)  # of an export that was killed
    partial.mkdir()
    try:
        write_sums(partial, {name: write_synced(partial / name, files[name]) for name in files})
        sync(partial)
        partial.rename(to)
    except BaseException:
        remove(partial)
        raise
    sync(to.parent)


def _has(path: Path, name: str = "") -> bool:
    """Whether there is a file of that name, or a link, whatever it leads to."""
    file = path / name if name else path
    return os.path.lexists(file)


def _check_tensor(name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise DamagedError(
            f"{WEIGHTS}: tensor {name} must have the shape {(*target.shape,)} of {CONFIG}; it has "
            f"{(*tensor.shape,)}"
        )
    if tensor.dtype not in _EXACT_IN_FLOAT32:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _EXACT_IN_FLOAT32)
        raise DamagedError(
            f"{WEIGHTS}: the dtype of {name} must be one of {names}; it is "
            f"{str(tensor.dtype).removeprefix('torch.')}"
        )
