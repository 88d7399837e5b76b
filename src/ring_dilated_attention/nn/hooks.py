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
    # `module.weight` takes five times as long, and a step of generation asks for it 60 times.
    return (
        type(module) is kind
        and type(module._parameters.get("weight")) is nn.Parameter
        and not runs_hooks(module)
    )


def runs_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks: its own, those of all modules, or another forward."""
    # `LongNet.step` calls this for every module in every step.
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # as accelerate replaces it
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )
