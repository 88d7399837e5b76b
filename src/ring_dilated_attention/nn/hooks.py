"""Hooks of modules: what calling a module runs besides its forward."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _by_kind(module: nn.Module) -> tuple[Any, ...]:
    """A module's own hooks, in the order of `_KINDS`."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def hooks_of(module: nn.Module) -> list[str]:
    """Which kinds of hooks a module has, as `nn.Module` calls them."""
    return [kind for kind, hooks in zip(_KINDS, _by_kind(module), strict=True) if hooks]


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is what its class says: no subclass, no hooks, no sharded or view weights.

    Its function may then be computed from its parameters, without calling it.
    """
    # `module.weight` takes five times as long, and a step of generation asks for it 60 times.
    return (
        type(module) is kind
        and type(module._parameters.get("weight")) is nn.Parameter
        and not runs_hooks(module)
    )


def runs_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks: its own, those of all modules, or another forward."""
    # As accelerate replaces it:
    replaced = "forward" in module.__dict__
    everywhere = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return bool(replaced or any(_by_kind(module)) or everywhere)
