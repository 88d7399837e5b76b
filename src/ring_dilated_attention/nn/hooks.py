"""Hooks of modules: what calling a module runs besides its forward."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[str]:
    """Which kinds of hooks a module has, as `nn.Module` calls them."""
    return [kind for kind in _KINDS if getattr(module, kind)]


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is what its class says: no subclass, no hooks, no sharded or view weights.

    Its function may then be computed from its parameters, without calling it.
    """
    weight = getattr(module, "weight", None)
    return type(module) is kind and type(weight) is nn.Parameter and not runs_hooks(module)


def runs_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks: its own, those of all modules, or another forward."""
    # As accelerate replaces it:
    replaced = "forward" in module.__dict__
    everywhere = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return bool(replaced or hooks_of(module) or everywhere)
