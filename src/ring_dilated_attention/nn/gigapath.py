"""The weights of Prov-GigaPath's slide encoder: which parameter of `SlideEncoder` each of them is.

Its classes are `LongNetViT` of prov-gigapath's slide_encoder.py, and torchscale's encoder inside.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MODULES = {
    "embedding": "patch_embed.proj",
    "norm": "encoder.layer_norm",
    "pooled_norm": "norm",
    **{f"attention.{x}_proj": f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")},
    "attention.norm": "self_attn.inner_attn_ln",
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "expand": "ffn.fc1",
    "inner_norm": "ffn.ffn_layernorm",
    "contract": "ffn.fc2",
}
"""Our modules, those of a block without its path, and theirs."""

_TELLING = "patch_embed.proj.weight"
"""A key that every state dict has, behind the prefix of a model around the encoder."""


def gigapath_key(name: str) -> str:
    """The key that prov-gigapath has for a parameter of `SlideEncoder`."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, number, inner = module.split(".", 2)
        return f"encoder.layers.{number}.{_MODULES[inner]}.{kind}"
    return f"{_MODULES[module]}.{kind}" if module else name  # the class token is of no module


def gigapath_state(file: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a file, or of a mapping like its content, by prov-gigapath's keys."""
    found: Any = file
    if not isinstance(file, Mapping):
        # A training program's arguments may be beside the weights: names and values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(file, map_location="cpu", weights_only=True)
    state = found.get("model", found) if isinstance(found, Mapping) else {}
    telling = next((key for key in state if key.endswith(_TELLING)), None)
    if telling is None:
        raise ValueError(
            f"this is no slide encoder of prov-gigapath: no key ends with {_TELLING!r}; got keys "
            f"{', '.join(map(str, list(state)[:5])) or 'none'}"
        )
    prefix = telling.removesuffix(_TELLING)
    return {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}


def gigapath_fields(
    state: Mapping[str, Tensor], *, global_pool: bool, max_wsi_size: int, tile_size: float
) -> dict[str, Any]:
    """The fields of `SlideEncoderConfig` that weights and prov-gigapath's code tell."""
    numbers = {key.split(".")[2] for key in state if key.startswith("encoder.layers.")}
    first = "encoder.layers.0.ffn.fc1.weight"
    if first not in state:
        raise ValueError(f"the weights of prov-gigapath's slide encoder lack {first}")
    width, features = state[_TELLING].shape
    # Five lengths, evenly spaced in their logarithms, from 1,024 to about all tiles of a slide.
    most = int(math.log2((max_wsi_size // tile_size) ** 2))
    return {
        "in_dim": features,
        "num_layers": len(numbers),
        "embed_dim": width,
        "ffn_dim": len(state[first]),
        "segment_lengths": [int(2 ** (10 + (most - 10) * i / 4)) for i in range(5)],
        "head_offsets": "blocked",
        "zero_keys": True,
        "branch_gradients": "detached",
        "tile_size": tile_size,
        "grid_positions": True,
        "pooling": "mean" if global_pool else "cls",
        "pooled_norm_eps": 1e-6,
    }


def weights_of(state: Mapping[str, Tensor], names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters with these names, copied; a `ValueError` where some lack or are unknown."""
    keys = {gigapath_key(name): name for name in names}
    missing = [key for key in keys if key not in state]
    # Prov-GigaPath's code does not read what else is in the file, a decoder's weights, say.
    others = [key for key in state if key.startswith("encoder.") and key not in keys]
    if missing or others:
        told = " and ".join(
            f"{what} {', '.join(found[:4])}{', ...' * (len(found) > 4)}"
            for what, found in (("lack", missing), ("also have", others))
            if found
        )
        raise ValueError(f"the weights of prov-gigapath's slide encoder {told}")
    return {name: state[key].detach().clone() for key, name in keys.items()}
