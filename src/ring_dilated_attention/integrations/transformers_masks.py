"""The masks that transformers' models ask for: causal or bidirectional, or refused.

A model asks for a mask, and its layers say by ``is_causal`` what they compute without one. Usually
these agree. Where they do not, transformers' own ``"eager"`` and ``"sdpa"`` differ, so attention is
refused: the masks of the current call are noted by the config that they were asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function


class _Asked(threading.local):
    """By the id of a config, which masks were asked for: True is causal, False bidirectional."""

    def __init__(self) -> None:
        self.masks: dict[int, set[bool]] = {}


_ASKED = _Asked()


def forget_asked() -> None:
    """Begin a call of a model: masks of earlier calls do not count."""
    if not torch.compiler.is_compiling():
        _ASKED.masks.clear()


def check_asked(module: nn.Module, is_causal: bool) -> None:
    """Raise a ValueError if the model has asked for the other mask only.

    Compiled code and recomputation in another thread have no note of masks and are not checked.

    Args:
        module: the attention module.
        is_causal: what it computes.
    """
    if torch.compiler.is_compiling():
        return
    asked = _ASKED.masks.get(id(getattr(module, "config", None)))
    if asked and is_causal not in asked:
        mask = "bidirectional" if is_causal else "causal"
        raise ValueError(
            f"{type(module).__name__} has is_causal={is_causal}, but its model asks for a {mask} "
            "mask, so that transformers' own eager and sdpa attention differ: use a config whose "
            "layers and masks agree (is_causal and use_bidirectional_attention decide it)"
        )


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **others: Any,
) -> None:
    """What transformers calls to make a mask; without it, it would drop masks in silence.

    Causal masks and none at all are `is_causal` of the layer, and padding and documents the model's
    hook has seen. Any other mask is refused here.

    Raises:
        ValueError: the mask is another, or of other keys than those so far.
    """
    is_causal = mask_function is causal_mask_function
    if is_causal:
        plain = allow_is_causal_skip
    else:
        plain = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
    if not plain:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise ValueError(
            "only transformers' causal and bidirectional masks are supported: the pattern decides "
            "what a head sees. A sliding window must be off: config.sliding_window=None where the "
            "model allows that, as Mistral does; models that always make its mask, as Gemma3 does, "
            "are not supported. For packing and padding, call set_attention(model, pattern) first. "
            f"Got the mask {name.split('.')[0]}"
        )
    if kv_offset != 0 or kv_length != q_offset + q_length:
        raise ValueError(
            "only self-attention is dilated, and a KV cache must be a DilatedCache; got queries "
            f"{q_offset} to {q_offset + q_length}, keys {kv_offset} to {kv_offset + kv_length}"
        )
    if others.get("config") is not None and not torch.compiler.is_compiling():
        _ASKED.masks.setdefault(id(others["config"]), set()).add(is_causal)
