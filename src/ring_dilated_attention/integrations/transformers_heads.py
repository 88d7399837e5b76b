"""Which heads of a transformers layer this rank computes, under tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..nn.heads import Heads, slice_of_projections
from ..pattern import DilatedPattern
from .transformers_call import Settings

_QUERY = ("q_proj", "q_b_proj", "query", "q_lin", "query_key_value")
_KEY = ("k_proj", "kv_b_proj", "key", "k_lin", "query_key_value")
"""What models call the projections whose rows follow the order of the heads."""


def pattern_of_heads(
    module: nn.Module, settings: Settings, query_heads: int, kv_heads: int
) -> DilatedPattern:
    """The model's pattern for the heads that an attention module has on this rank.

    transformers' ``tp_plan`` and torch's ``parallelize_module`` leave each rank a few heads of a
    layer, of which the module's config says how many there are, and its weights, which.

    Args:
        module: the attention module; its config and the weights of its projections count.
        settings: of `set_attention`.
        query_heads: of this call.
        kv_heads: of this call.

    Raises:
        ValueError: there are other heads than the config says, and neither `head_slice` nor the
            weights say which they are; or query heads are split and KV heads are not.
    """
    pattern = settings.pattern
    if settings.head_slice is not None:
        return pattern.of_heads(settings.head_slice, kv_heads)
    own = Heads(query_heads, kv_heads)
    layer = _heads_of_layer(module) or own
    if own == layer or (pattern.heads_are_alike and own.is_fraction_of(layer)):
        return pattern
    weights = _weight(module, _QUERY), _weight(module, _KEY)
    # Some models have their number of KV heads elsewhere in the config.
    if own.query == layer.query and not any(hasattr(x, "placements") for x in weights):
        return pattern
    found = slice_of_projections(layer, own, weights, type(module).__name__)
    return pattern.of_heads(found, kv_heads)


def _heads_of_layer(module: nn.Module) -> Heads | None:
    """What the config says; None where it says nothing."""
    config: Any = getattr(module, "config", None)
    query: Any = getattr(config, "num_attention_heads", None)
    return Heads(query, getattr(config, "num_key_value_heads", None) or query) if query else None


def _weight(module: nn.Module, names: tuple[str, ...]) -> Any:
    weights = (getattr(getattr(module, name, None), "weight", None) for name in names)
    return next((weight for weight in weights if weight is not None), None)
