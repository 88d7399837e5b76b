"""Write a checkpoint: every rank its share of the files, which are seen only when complete."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..nn import LongNet
from .checked_files import META, TOKENIZER, cut, regular_file, remove, seal, write_synced
from .checkpoint import FOLDER, FORMAT, Checkpoint, step_of, still_there, tensors_of, usable
from .config import TrainConfig
from .errors import TrainingError, one_line
from .ranks import World

FILE_BYTES = 32 << 20
"""Of a file, unless a tensor is larger: loading takes about twice this above the model."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a checkpoint holds.

    Attributes:
        step: number of steps trained.
        model: the model.
        optimizer: its optimizer.
        fingerprint: of the corpus.
        tokenizer: the bytes of the tokenizer's JSON; None of a model of bytes.
    """

    step: int
    model: LongNet
    optimizer: torch.optim.AdamW
    fingerprint: str
    tokenizer: bytes | None = None


def save(
    config: TrainConfig,
    trained: Trained,
    world: World,
    *,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write a checkpoint and drop all but the newest `config.keep`. Every rank calls this.

    A checkpoint of the same step, such as a damaged one that the run did not go on from, is
    replaced. Checkpoints of later steps stay.

    Args:
        config: of the run; its `out` decides where.
        trained: what to write; rank 0's tokenizer counts.
        world: the ranks.
        file_bytes: a file of tensors has at most this many bytes of them, or one tensor.

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: a rank cannot write it; the message says why and which checkpoints there
            are. The folder is left without the half-written one.
    """
    path = config.out / FOLDER / f"step_{trained.step:07d}"
    partial = path.parent / f".partial_{path.name}"
    tensors = tensors_of(trained.model, trained.optimizer)
    files = {
        f"tensors_{index:05d}.safetensors": names
        for index, names in enumerate(cut(tensors, file_bytes))
    }

    def begin() -> None:
        if world.rank == 0:
            for stale in path.parent.glob(".partial_*"):  # of a run that was killed while writing
                remove(stale)
            partial.mkdir(parents=True)

    def write() -> dict[str, tuple[int, str]]:
        """This rank's files: their sizes and checksums."""
        written = {}
        for name in list(files)[world.rank :: world.size]:
            data = safetensors.torch.save(
                {key: tensors[key].cpu().contiguous() for key in files[name]}
            )
            written[name] = len(data), write_synced(partial / name, data)
        if world.rank == 0 and trained.tokenizer is not None:
            data = trained.tokenizer
            written[TOKENIZER] = len(data), write_synced(partial / TOKENIZER, data)
        return written

    def finish() -> None:
        if world.rank == 0:
            written = {name: entry for share in shares for name, entry in share.items()}
            meta = {
                "step": trained.step,
                "fingerprint": trained.fingerprint,
                "config": asdict(config),
            }
            _finish(partial, path, meta, dict(sorted(written.items())))
            _prune(config, trained.step)

    try:
        world.everywhere(begin)
        shares = world.gather(world.everywhere(write))
        world.everywhere(finish)
    except (ValueError, OSError, TrainingError) as error:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        needed = sum(t.numel() * t.element_size() for t in tensors.values())
        raise TrainingError(
            f"cannot save {path.name} ({needed / 1e6:,.1f} MB): {one_line(error)}; "
            f"{still_there(config.out)}"
        ) from error
    return path


def _finish(
    partial: Path, path: Path, meta: dict[str, Any], files: dict[str, tuple[int, str]]
) -> None:
    """Make a checkpoint of a folder of tensors: add its description, and seal it.

    Args:
        partial: the folder, which becomes `path`.
        path: of the checkpoint; one that is there already is replaced.
        meta: step, fingerprint and config.
        files: sizes and checksums of the other files, by name.
    """
    for name, (size, _) in files.items():
        regular_file(partial, name, size)
    meta = {
        "format": FORMAT,
        **meta,
        "config": {**meta["config"], "out": str(meta["config"]["out"])},
        "torch": torch.__version__,
        "files": {name: size for name, (size, _) in files.items()},
    }
    described = write_synced(partial / META, json.dumps(meta, indent=1).encode())
    seal(partial, path, {META: described, **{name: files[name][1] for name in files}})


def _prune(config: TrainConfig, step: int) -> None:
    """Drop all but the newest `config.keep` up to `step`; incomplete ones do not count as kept."""
    complete = []
    for old in usable(config.out):
        if step_of(old) <= step:
            with suppress(ValueError):
                complete.append(Checkpoint.open(old).path)
    for old in complete[: -config.keep]:
        # Hidden first: a folder that is half deleted must not look like a checkpoint.
        hidden = old.with_name(f".partial_{old.name}")
        old.rename(hidden)
        remove(hidden)
