"""Named sets of training options: what `rda train --preset NAME` starts from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..pattern import check_choice

DEFAULT_PRESET = "small"

_LONGNET_BASE: dict[str, Any] = {
    # 85 million parameters in the blocks, heads of 64 as in LongNet's experiments.
    "num_layers": 12,
    "embed_dim": 768,
    "num_heads": 12,
    "ffn_dim": 3072,
    # LongNet's pattern, and a branch that reaches across the whole sequence: at 8,388,608 bytes it
    # shows a query up to 4,096 keys, and takes a thousandth of the work.
    "segment_lengths": (2048, 4096, 8192, 16384, 32768, None),
    "dilation_rates": (1, 2, 4, 6, 12, 2048),
    "sequence_length": 2_097_152,
    "precision": "bfloat16",
    "checkpoint": "keep_attention",
    "chunk_rows": 65_536,
    # A step sees millions of bytes, so a run has few of them.
    "steps": 100,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "eval_every": 20,
    "eval_windows": 1,
    "save_every": 50,
    "keep": 2,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {DEFAULT_PRESET: {}, "longnet-base": _LONGNET_BASE}
)
"""Options by the names that they have in `TrainConfig` and `LongNetConfig`; those that a preset
leaves out keep their defaults. ``small`` is the defaults: minutes on two CPU cores.
``longnet-base`` is for GPUs: by count of what lives, 100 to 120 GiB each for 2,097,152 bytes of a
sequence (the more where the ranks are so many that attention's gradients are summed in float32),
and 18 GiB less with `checkpoint_blocks` 3, which computes more."""


def preset_options(name: str) -> Mapping[str, Any]:
    """The options of a preset.

    Raises:
        ValueError: there is no such preset.
    """
    check_choice("preset", name, tuple(PRESETS))
    return PRESETS[name]
