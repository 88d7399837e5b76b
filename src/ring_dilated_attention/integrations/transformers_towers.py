"""Models of transformers that are made of several: of text and of images, for example.

Nothing here imports transformers.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .transformers_call import cache_name
from .transformers_models import has_cross_attention, rotates_in_dimensions


def check_one_tower(model: Any) -> None:
    """Raise a ValueError if several models with attention are inside of a model.

    The padding, documents and positions of one of them mean nothing to the others.

    Args:
        model: with or without a head.
    """
    found = _towers(model)
    if len(found) < 2 or has_cross_attention(model):  # the latter `check_model` refuses
        return
    paths = {f"model.{path}" if path else "model": tower for path, tower in found.items()}
    listed = ", ".join(f"{path} ({type(tower).__name__})" for path, tower in paths.items())
    whole = [p for p in paths if any(other.startswith(f"{p}.") for other in paths)]  # hold others
    inner = {path: x for path, x in paths.items() if path not in whole and _is_model(x)}
    texts = [path for path, tower in inner.items() if _takes_text(tower)]
    best = next(iter((*texts, *inner)), None)
    if best is None:
        advice = "it is not supported"
    else:
        advice = f"call it with the one that shall have it, as set_attention({best}, pattern)"
        if texts and model.can_generate():
            cache = f"{cache_name(inner[best])}=DilatedCache({best})"
            needs = "use_cache=False" if rotates_in_dimensions(inner[best]) else cache
            advice += f", and give generate {needs}"
    raise ValueError(
        f"set_attention is for a model of one sequence, but {type(model).__name__} is made of "
        f"several models with attention, {listed}: {advice}"
    )


def _takes_text(tower: nn.Module) -> bool:
    return "input_ids" in inspect.signature(tower.forward).parameters


def _towers(model: nn.Module) -> dict[str, nn.Module]:
    """The parts, by path, that have layers of attention of their own; "" is the model itself.

    A part is the innermost model around a layer. Where layers of one model have configs of several
    classes, as in older versions of transformers, the children of that model are the parts.
    """
    modules = dict(model.named_modules())
    owners: dict[str, str] = {}
    configs: dict[str, set[type]] = {}
    for path, module in modules.items():
        if not hasattr(module, "is_causal") and not type(module).__name__.endswith("Attention"):
            continue
        owner = path
        while owner and not _is_model(modules[owner]):
            owner = owner.rpartition(".")[0]
        owners[path] = owner
        if getattr(module, "config", None) is not None:
            configs.setdefault(owner, set()).add(type(module.config))
    found = {}
    for path, owner in owners.items():
        if len(configs.get(owner, ())) > 1:
            child = path[len(owner) :].lstrip(".").partition(".")[0]
            owner = f"{owner}.{child}".lstrip(".")
        found[owner] = modules[owner]
    return found


def _is_model(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
