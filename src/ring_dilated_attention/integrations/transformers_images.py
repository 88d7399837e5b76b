"""Vision models of transformers: their patches are the sequence.

Such a model takes whole images, makes tokens of their patches, often with a class token in front,
and hands them to its layers, some of them without the keyword arguments of the call. So its
attention modules have the settings themselves. On several ranks every rank gives the same images
and embeds them; a hook behind the embeddings takes this rank's tokens, and hidden states are those
of the shard. Its gradients, those of the embeddings too, are the sums over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..exchange import resolve_exchange
from ..layout import SequenceLayout
from ..parallel import agree_on_batch
from .transformers_call import CACHE_NAMES, SETTINGS, Settings, by_name, refuse
from .transformers_masks import forget_asked

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
