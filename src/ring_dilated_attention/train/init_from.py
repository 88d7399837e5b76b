"""`rda train --init-from`: a new run that begins with weights that there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..nn import LongNet, LongNetConfig
from .checkpoint import Checkpoint
from .config import TrainConfig
from .plain_weights import PlainWeights, weights_at
from .ranks import World
from .tokenizer import BYTES, SubwordTokenizer

OF_PARAMETERS = (
    *("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "ffn_dim"),
    "norm_eps",
)
"""Fields of `LongNetConfig` that weights are for; the others, such as the pattern, may change."""


def begun_from(config: TrainConfig, options: Mapping[str, Any]) -> TrainConfig:
    """The options of a run that begins with weights: the user's, over the model of the weights.

    Args:
        config: the defaults.
        options: those the user gave, `init_from` among them.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, the weights are missing or damaged, or the options
            are for another model or tokenizer than theirs.
    """
    found = _undamaged(weights_at(Path(options["init_from"])))
    model = {field.name: getattr(found.model, field.name) for field in fields(LongNetConfig)}
    file = found.tokenizer_file
    if file is not None:
        found.tokenizer()  # compares its checksum
    _check_tokenizer(found, options)
    changed = replace(config, model=found.model).with_options(
        {
            **model,
            **options,
            "tokenizer": None if file is None else str(file),
            "train_tokenizer": None,
            "init_from": str(found.path),
        }
    )
    _check_model(found, changed.model)
    return changed


def load_weights(config: TrainConfig, model: LongNet, world: World) -> None:
    """Read the weights of ``config.init_from`` into the model. Every rank calls this.

    Raises:
        ValueError: they are missing or damaged, do not fit the model, or ranks read different ones.
    """
    assert config.init_from is not None
    path = Path(config.init_from)

    def load() -> str:
        found = _undamaged(weights_at(path))
        _check_model(found, config.model)
        return found.load_weights(model)

    seen = world.gather(world.everywhere(load))
    if len(set(seen)) > 1:
        other = next(rank for rank, digest in enumerate(seen) if digest != seen[0])
        raise ValueError(f"rank {other} reads other weights than rank 0 in {path}")


def _undamaged(found: Checkpoint | PlainWeights) -> Checkpoint | PlainWeights:
    """The weights, unless newer checkpoints of the run were passed over: a run has to be told."""
    if isinstance(found, Checkpoint) and found.damaged:
        raise ValueError(f"{found.damaged[0]}; to begin with an older one, give it: {found.path}")
    return found


def _check_model(found: Checkpoint | PlainWeights, model: LongNetConfig) -> None:
    theirs, ours = (
        {
            **{name: getattr(x, name) for name in OF_PARAMETERS},
            "num_kv_heads": x.num_kv_heads or x.num_heads,
        }
        for x in (found.model, model)
    )
    differences = [
        f"{name} is {theirs[name]!r} there and {ours[name]!r} here"
        for name in OF_PARAMETERS
        if theirs[name] != ours[name]
    ]
    if differences:
        raise ValueError(
            f"{found.path} holds another model: {'; '.join(differences)}; leave these options out"
        )


def _check_tokenizer(found: Checkpoint | PlainWeights, options: Mapping[str, Any]) -> None:
    if "train_tokenizer" in options:
        raise ValueError(
            f"{found.path} has a tokenizer of its own; got --train-tokenizer "
            f"{options['train_tokenizer']}: leave it out"
        )
    if "tokenizer" not in options:
        return
    given, own = options["tokenizer"], found.tokenizer()
    if given in (None, BYTES):
        same = own is None
    else:
        same = own is not None and own.same_as(SubwordTokenizer.read(given))
    if not same:
        raise ValueError(
            f"{found.path} has another tokenizer than --tokenizer {given or BYTES}: leave it out"
        )
