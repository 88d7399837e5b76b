"""Models of transformers that are made of several: of text and of images, for example."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..exchange import resolve_exchange
from ..layout import SequenceLayout
from ..parallel import agree_on_batch
from .transformers_call import (
    CACHE_NAMES,
    SETTINGS,
    Settings,
    by_name,
    cache_name,
    forget_asked,
    refuse,
)
from .transformers_models import has_cross_attention, rotates_in_dimensions

ON_RANKS = ("ViTModel", "SiglipVisionModel")
"""Models of images that several ranks can share: behind their embeddings nothing but attention
mixes tokens, as soon as they do not pool."""

_POOLERS = {
    "pooler": "make it with add_pooling_layer=False",
    "head": "set config.vision_use_head = False before it is made",
}
_REFUSED = ("attention_mask", "head_mask", *CACHE_NAMES)
_MASKS = ("pixel_attention_mask", "patch_attention_mask", "pixel_mask")
"""Which patches of an image are not padding, as models of images of several sizes take it."""


def takes_images(base: Any) -> bool:
    """Whether images are what a model takes, and nothing else."""
    return getattr(base, "main_input_name", None) == "pixel_values"


def check_images(model: Any, base: Any, world_size: int) -> None:
    """Raise a ValueError unless a model of images is supported.

    Args:
        model: with or without a head.
        base: the same without its head.
        world_size: ranks that share each sequence.
    """
    name = type(model).__name__
    if not any(hasattr(x, "is_causal") for x in base.modules()):
        raise ValueError(f"{name} has no attention of transformers' AttentionInterface")
    if world_size == 1:
        return
    where = f"on {world_size} ranks"
    if not any(kind.__name__ in ON_RANKS for kind in type(base).__mro__):  # fully_shard's too
        raise ValueError(
            f"{where} the models of images are {' and '.join(ON_RANKS)}; got {type(base).__name__}"
        )
    if base is not model:
        raise ValueError(
            f"{where} a head must treat every token alone, but that of {name} is for an image: "
            f"call set_attention with the {type(base).__name__} in it, and compute the head where "
            "the tokens are that it needs"
        )
    for part, advice in _POOLERS.items():
        if getattr(_with_embeddings(base), part, None) is not None:
            raise ValueError(f"{where} {name} must not pool the tokens of a shard: {advice}")


def set_on_images(base: nn.Module, settings: Settings) -> list[RemovableHandle]:
    """Hook a model of images.

    Args:
        base: the model without its head.
        settings: of `set_attention`.

    Returns:
        Handles that take the hooks away.
    """
    tell_modules(base, settings)
    handles = [base.register_forward_pre_hook(_before_images, with_kwargs=True)]
    if resolve_exchange(settings.group).world_size > 1:
        handles.append(_with_embeddings(base).embeddings.register_forward_hook(_sharded))
    return handles


def _with_embeddings(base: Any) -> Any:
    """The part that has the embeddings: older versions of transformers keep it one level down."""
    return base if hasattr(base, "embeddings") else base.vision_model


def tell_modules(base: nn.Module, settings: Settings | None) -> None:
    """Give all parts of a model of images its settings; None: take them away."""
    for module in base.modules():
        if settings is not None:
            setattr(module, SETTINGS, settings)
        elif SETTINGS in module.__dict__:
            delattr(module, SETTINGS)


def _before_images(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the model: refuses what would be ignored; ranks compare their images."""
    given, settings = by_name(module, args, kwargs), getattr(module, SETTINGS)
    forget_asked()
    ends = resolve_exchange(settings.group)
    failure: Exception | None = None
    try:
        refuse(module, given, ends.world_size)
        for name in _REFUSED:
            if given.get(name) is not None:
                raise ValueError(f"a model of images must have no {name}; got it")
        for name in _MASKS:
            _refuse_padding(name, given.get(name))
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    batch: dict[str, Any] = {k: x for k, x in given.items() if isinstance(x, (Tensor, bool))}
    layout = settings.layout
    batch["layout"] = layout and f"{layout!r} ({layout.digest[:8]})"
    agree_on_batch(type(module).__name__, batch if failure is None else {}, ends, failure)
    return None


def _refuse_padding(name: str, mask: Any) -> None:
    if isinstance(mask, Tensor) and not bool((mask == 1).all()):
        raise ValueError(
            f"dilated attention does not support padded images: every value of {name} must be 1, "
            f"got {int((mask != 1).sum())} others; call the model with images of one size at a time"
        )


def _sharded(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Behind the embeddings: this rank's tokens, (batch, local_sequence, hidden)."""
    settings: Any = getattr(module, SETTINGS)
    ends, tokens = resolve_exchange(settings.group), output.shape[1]
    layout = settings.layout
    if layout is None and tokens % ends.world_size == 0:
        layout = SequenceLayout.contiguous(tokens, ends.world_size)
    held = (layout.length, layout.world_size) if layout else None
    if layout is None or held != (tokens, ends.world_size):
        raise ValueError(  # on every rank: all have the same images and layout
            f"an image has {tokens} tokens, a class token included, on {ends.world_size} ranks: "
            f"set_layout(model, SequenceLayout.contiguous({tokens}, {ends.world_size})); got "
            f"{settings.layout}"
        )
    shard: Tensor = layout.shard(output, ends.rank, 1)
    return shard.contiguous()


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
