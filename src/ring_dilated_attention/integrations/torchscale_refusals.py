"""What to say of a model that has nothing of torchscale."""

from __future__ import annotations

from torch import nn

_MOST_SHOWN = 5


def holds_none(function: str, wanted: str, model: nn.Module, advice: str) -> str:
    """The message for a model in which a function finds no module of the wanted class.

    Args:
        function: its name.
        wanted: the class.
        model: as it was given.
        advice: what to do.
    """
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules())
    seen = [kind for kind in kinds if "attention" in kind.lower()][:_MOST_SHOWN]
    return (
        f"{function} found no {wanted} in {type(model).__name__}, whose attention modules are: "
        f"{', '.join(seen) or 'none'}; {advice}"
    )
