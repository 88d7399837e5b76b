"""Refuse models that have nothing of torchscale to replace, or nothing that was replaced."""

from __future__ import annotations

from torch import nn

_MOST_SHOWN = 5


def refuse_nothing_to_replace(model: nn.Module) -> None:
    """Raise a `ValueError` for a model in which `replace_dilated_attention` finds nothing."""
    raise ValueError(
        f"replace_dilated_attention found no DilatedAttention of torchscale in {_shown(model)}; "
        "pass the model that holds torchscale's LongNet encoder"
    )


def refuse_nothing_replaced(model: nn.Module) -> None:
    """Raise a `ValueError` for a model in which `set_layout` finds nothing."""
    raise ValueError(
        f"set_layout found no TorchscaleDilatedAttention in {_shown(model)}; "
        "call replace_dilated_attention first"
    )


def _shown(model: nn.Module) -> str:
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules())
    seen = [kind for kind in kinds if "attention" in kind.lower()][:_MOST_SHOWN]
    return f"{type(model).__name__}, whose attention modules are: {', '.join(seen) or 'none'}"
