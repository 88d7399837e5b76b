"""The options of a run as TOML, which ``rda train --config`` takes: ``run.toml`` of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import __version__
from ..nn import LongNetConfig
from .config import TrainConfig

FILE = "run.toml"

# `out` is where this run is, not another one; the vocabulary is that of the tokenizer.
_NOT_OPTIONS = frozenset({"out", "model", "vocab_size", "norm_eps"})


def write_toml(config: TrainConfig, *, ranks: int) -> Path:
    """Write ``run.toml`` into the folder of a run, in place of one that is there.

    Raises:
        OSError: it cannot be written.
    """
    path = config.out / FILE
    partial = path.with_suffix(".partial")
    partial.write_text(to_toml(config, ranks=ranks), encoding="utf-8")
    os.replace(partial, path)
    return path


def to_toml(config: TrainConfig, *, ranks: int) -> str:
    """The options of a run as TOML: the names and spellings of the command line.

    Names are those of the fields of `TrainConfig` and `LongNetConfig`, with dashes. Every option
    is written, so that later defaults change nothing, except those whose value is None,
    which has no spelling: that is their default. Checkpoints, not this file, are what a run is
    resumed from.

    Args:
        config: the options.
        ranks: number of ranks.
    """
    lines = [
        f"# The options of a run of rda train {__version__}. To run it again, in the directory",
        "# where it was started (paths are relative to that one), with the path of this file:",
        f"#     rda train --config {FILE}",
        "",
        f"ranks = {ranks}",
        *_lines(config),
        "",
        "# The model.",
        *_lines(config.model),
    ]
    return "\n".join(lines) + "\n"


def _lines(config: TrainConfig | LongNetConfig) -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _NOT_OPTIONS or value is None or value == ():
            continue
        name = field.name.replace("_", "-")
        line = f"{name} = {_spelled(value)}"
        try:
            line.encode()
        except UnicodeEncodeError:  # in the name of a file
            line = f"# {name} is not UTF-8, and cannot be said in TOML"
        yield line


def _spelled(value: Any) -> str:
    """A value in TOML; numbers of branches as on the command line, ``"256,1024,all"``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, Sequence)
    if any(isinstance(part, str) for part in value):
        return f"[{', '.join(map(_spelled, value))}]"
    return _spelled(",".join("all" if part is None else str(part) for part in value))
