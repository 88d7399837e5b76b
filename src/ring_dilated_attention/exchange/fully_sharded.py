"""Modules under FSDP2, whose weights are whole only while they are called."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_REGISTERED = "_ring_dilated_attention_parts"  # of a module: `gather_weights_in` has seen it


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this very module, not with one around it."""
    # Not isinstance: importing FSDPModule takes longer than all of this package.
    return hasattr(type(module), "_get_fsdp_state")


def gather_weights_in(module: nn.Module, methods: Iterable[str]) -> None:
    """Have `fully_shard` gather a module's weights for methods too that others call.

    It gathers them for forward alone. Nothing happens with modules that it was not called with.

    Args:
        module: any.
        methods: names of its methods that use its weights.

    Raises:
        ValueError: this is the first call, and torch.compile is tracing it.
    """
    if not is_fully_sharded(module) or _REGISTERED in module.__dict__:
        return
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{type(module).__name__.removeprefix('FSDP')} is under fully_shard by itself, which "
            "torch.compile cannot trace in the first call: leave it to fully_shard of the block "
            "around it"
        )
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in methods:
        register_fsdp_forward_method(module, name)
    setattr(module, _REGISTERED, True)
