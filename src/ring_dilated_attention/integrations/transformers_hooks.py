"""The hooks of a model with `set_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .transformers_cached import CachedCall, restored
from .transformers_call import (
    ARGUMENT,
    SETTINGS,
    by_name,
    check_loss_arguments,
    is_cached,
    prepared,
    rounded_count,
)
from .transformers_generate import prepared_with_cache
from .transformers_loss import own_loss, without_labels
from .transformers_masks import forget_asked


def before_base(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a decoder or encoder: its arguments, by name."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    forget_asked()
    if is_cached(given):
        return (), _prepared_with_cache_untraced(module, settings, given)
    prepare = prepared if settings.group is None else _prepared_untraced
    return (), prepare(module, settings, given)


def after_base(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Behind it: the cache has what the call added, and hidden states are where the input was."""
    if isinstance(kwargs.get(ARGUMENT), CachedCall):
        return _restored_untraced(module, args, kwargs, output)
    return None


def before_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a head: checks its loss, and says of how many columns it needs hidden states."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    if settings.group is not None:
        _check_loss_untraced(type(module).__name__, settings, given)
    elif failure := rounded_count(given):
        raise failure
    if not is_cached(given):
        return ((), without_labels(given)) if own_loss(module, settings, given) else None
    kept = given.get("logits_to_keep")
    # A negative number, or a tensor, may name any column: the head chooses among all of them.
    return args, {**kwargs, ARGUMENT: kept if isinstance(kept, int) and kept > 0 else 0}


# torch.compile cannot trace what ranks tell each other, nor what a cache becomes.
_prepared_untraced: Any = torch.compiler.disable(prepared)  # type: ignore[no-untyped-call]
_prepared_with_cache_untraced: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    prepared_with_cache
)
_restored_untraced: Any = torch.compiler.disable(restored)  # type: ignore[no-untyped-call]
_check_loss_untraced: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    check_loss_arguments
)
