"""The pattern in a model's config: what ``save_pretrained`` keeps and ``from_pretrained`` restores.

``config.json`` gets two entries. ``attn_implementation`` names this package's attention, so that
transformers itself refuses to load the model where nobody has registered that name. The other one
has the pattern with all its options and the kind of the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from ..layout import SequenceLayout
from ..pattern import DilatedPattern, in_brief

SAVED = "ring_dilated_attention"
"""The entry of a config that holds the pattern."""

IMPLEMENTATION = "attn_implementation"
"""The entry of a config from which transformers takes the name of the attention."""

_LOAD = "import ring_dilated_attention.integrations.transformers before from_pretrained"
_OPTIONS = ("segment_lengths", "dilation_rates", "head_offsets", "head_branches", "zero_keys")


def pattern_entry(pattern: DilatedPattern) -> dict[str, Any]:
    """A pattern as JSON has it: every option by its name, tuples as lists."""
    values = ((name, getattr(pattern, name)) for name in _OPTIONS)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values}


def layout_kind(layout: SequenceLayout | None) -> str:
    """``"contiguous"``, which None means too, ``"zigzag"``, or ``"custom"``: other ranges."""
    if layout is None:
        return "contiguous"
    size = (layout.length, layout.world_size)
    if layout == SequenceLayout.contiguous(*size):
        return "contiguous"
    return "zigzag" if layout == SequenceLayout.zigzag(*size) else "custom"


def write(config: Any, pattern: DilatedPattern, kind: str) -> None:
    """Note a pattern and the kind of a layout in a config of transformers.

    Args:
        config: of the model; changed in place.
        pattern: which keys each head sees.
        kind: of the layout; see `layout_kind`.
    """
    setattr(config, IMPLEMENTATION, SAVED)
    setattr(config, SAVED, {"pattern": pattern_entry(pattern), "layout": kind, "load": _LOAD})


def erase(config: Any) -> None:
    """Take out of a config what `write` has put there."""
    for name in (IMPLEMENTATION, SAVED):
        if name in vars(config):
            delattr(config, name)


def saved_entry(config: Any) -> Any:
    """What a config says about the pattern, as it is; None: nothing."""
    return vars(config).get(SAVED)


def saved_pattern(config: Any) -> DilatedPattern | None:
    """The pattern that `write` has put into a config; None where there is none.

    Raises:
        ValueError: the entry is not one that `write` makes.
    """
    entry = saved_entry(config)
    if entry is None:
        return None
    options = entry.get("pattern") if isinstance(entry, dict) else None
    if not isinstance(options, dict) or set(options) != set(_OPTIONS):
        got = sorted(map(str, options)) if isinstance(options, dict) else in_brief(entry)
        raise ValueError(
            f"config.{SAVED} must have a 'pattern' with {', '.join(_OPTIONS)}, as set_attention "
            f"writes it; got {got}"
        )
    try:
        return DilatedPattern(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.{SAVED} holds no pattern: {error}") from None


def saved_kind(config: Any) -> str:
    """The kind of layout that a config names; contiguous where it names none."""
    entry = saved_entry(config)
    return str(entry["layout"]) if isinstance(entry, dict) and "layout" in entry else "contiguous"


def is_dense(pattern: DilatedPattern) -> bool:
    """Whether a pattern computes what transformers' own attention computes."""
    return pattern.branches == DilatedPattern.dense().branches


def check_same_pattern(config: Any, pattern: DilatedPattern) -> None:
    """Raise a ValueError unless a config holds this pattern, so that what is saved is right.

    Args:
        config: of a model with `set_attention`.
        pattern: of its settings.
    """
    entry = saved_entry(config)
    if not isinstance(entry, dict) or entry.get("pattern") != pattern_entry(pattern):
        raise ValueError(
            f"set_attention gave this model the pattern {pattern}, but its config has "
            f"{saved_pattern(config) or 'none'}: models that share one config object share its "
            "pattern; make each with copy.deepcopy(config), or call set_attention again"
        )


def restore_when_made(set_attention: Callable[[PreTrainedModel], None]) -> None:
    """Let every model of transformers have the pattern of its config as soon as it is made.

    Args:
        set_attention: is called with a new model whose config holds a pattern. Such a model whose
            ``attn_implementation`` is another raises a ValueError.
    """
    post_init = PreTrainedModel.post_init

    @wraps(post_init)
    def made(model: PreTrainedModel) -> None:
        post_init(model)
        pattern, implementation = saved_pattern(model.config), model.config._attn_implementation
        if pattern is None:
            return
        if implementation != SAVED:
            raise ValueError(
                f"the config says that this {type(model).__name__} has the dilated pattern "
                f"{pattern}, but attn_implementation is {implementation!r}, which computes another "
                f"function: pass attn_implementation={SAVED!r}, or, where this model is part of "
                f"another, {{'text_config': {SAVED!r}}} with the name of its config in that of the "
                f"whole; if you want the other attention, a config without the pattern: del "
                f"config.{SAVED}"
            )
        set_attention(model)

    PreTrainedModel.post_init = made
