"""Modules of a model that `fully_shard` may not be called with by themselves."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..parallel import is_fully_sharded


def refuse_sharded_apart(owner: nn.Module, why: Mapping[str, str]) -> None:
    """Raise where `fully_shard` gathers the weights of a submodule while nobody uses them.

    It gathers them while that very module is called. The check is of the structure, which is the
    same on every rank.

    Args:
        owner: the module whose weights these are.
        why: names of submodules whose weights it uses without calling them, each with the reason.

    Raises:
        ValueError: there is one under `fully_shard`, or a module in it.
    """
    whole = type(owner).__name__.removeprefix("FSDP")
    for name, reason in why.items():
        for inner, module in owner.get_submodule(name).named_modules(prefix=name):
            if is_fully_sharded(module):
                raise ValueError(
                    f"{whole}.{inner} must not be under fully_shard by itself: {reason}. Leave it "
                    f"to fully_shard of the {whole} around it"
                )
