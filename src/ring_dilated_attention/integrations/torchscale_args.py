"""torchscale's attention: how it is told, and what its configuration and arguments say."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

SUBMODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "inner_attn_ln")
"""What torchscale's `DilatedAttention` is made of."""


def is_torchscales(module: object) -> bool:
    """Whether a module is torchscale's `DilatedAttention`, or a subclass, by its names."""
    named = any(kind.__name__ == "DilatedAttention" for kind in type(module).__mro__)
    return (
        named
        and hasattr(getattr(module, "args", None), "segment_length")
        and all(hasattr(module, name) for name in SUBMODULES)
    )


def ints_of(args: Any, name: str) -> Sequence[int]:
    """A list of ints of torchscale's configuration, which may be given as text."""
    if not hasattr(args, name):
        raise TypeError(f"args must have {name}, a list of ints; got {args!r}")
    value = getattr(args, name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"args.{name} must be a list of ints; got {value!r}") from None
    if not isinstance(value, list | tuple):
        raise TypeError(f"args.{name} must be a list of ints; got {value!r}")
    return value


def check_dropout(dropout: float) -> float:
    """The dropout of torchscale's constructor; raises unless it is a number in [0, 1]."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout must be a number, got {dropout!r}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must lie in [0, 1]; got {dropout!r}")
    return float(dropout)


def refuse_arguments(
    incremental_state: object, attn_mask: object, rel_pos: object, is_first_step: object
) -> None:
    """Raise a `ValueError` unless the arguments of torchscale's forward have their defaults."""
    for name, given, instead in (
        ("incremental_state", incremental_state, "use replicated_query_attention to decode"),
        (
            "attn_mask",
            attn_mask,
            "use is_causal, and the pattern for what a head sees (torchscale's decoder passes a "
            "mask where args.flash_attention is False: set it to True)",
        ),
        ("rel_pos", rel_pos, "dilated attention takes no bias"),
    ):
        if given is not None:
            raise ValueError(f"{name} must be None; {instead}; got {type(given).__name__}")
    if is_first_step:
        raise ValueError(f"is_first_step must be False; got {is_first_step!r}")
