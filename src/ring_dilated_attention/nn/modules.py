"""What the library asks of modules: hooks, initial weights, who gathers them, shapes of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..parallel import is_fully_sharded
from ..pattern import in_brief, shape_in_brief

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[str]:
    """Which kinds of hooks a module has, as `nn.Module` calls them."""
    return [kind for kind in _KINDS if getattr(module, kind)]


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is what its class says: no subclass, no hooks, no sharded or view weights.

    Its function may then be computed from its parameters, without calling it.
    """
    # `module.weight` takes five times as long, and a layer asks for it in each call.
    return (
        type(module) is kind
        and type(module._parameters.get("weight")) is nn.Parameter
        and not runs_hooks(module)
    )


def runs_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks: its own, those of all modules, or another forward."""
    return bool(
        hooks_of(module)
        or "forward" in module.__dict__  # as accelerate replaces it
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


@contextmanager
def without_weights(module: nn.Module, device: torch.device | str | None = None) -> Iterator[None]:
    """In the body of the statement a module makes its parts; then their memory is allocated.

    Modules of torch draw weights where they are made, and ours would draw them once more. Made
    without weights, a module draws once, in `reset_parameters`: the same from the same seed,
    whether it was made on its device, or on the meta device and emptied onto it later.

    Args:
        module: has no parameters yet.
        device: where to allocate; None: torch's default device, which may be the meta device.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"):
        yield
    if where.type != "meta":
        module.to_empty(device=where)


IN_CHUNKS = "chunk_rows computes gradients of weights from chunk to chunk"


def refuse_sharded_apart(owner: nn.Module, names: Iterable[str], why: str) -> None:
    """Raise where `fully_shard` gathers the weights of a submodule while nobody uses them.

    It gathers them while that very module is called; `why` says why `owner` uses the weights of
    these submodules without that. The check is of the structure, the same on every rank.
    """
    whole = type(owner).__name__.removeprefix("FSDP")
    for name in names:
        for inner, module in owner.get_submodule(name).named_modules(prefix=name):
            if is_fully_sharded(module):
                raise ValueError(
                    f"{whole}.{inner} must not be under fully_shard by itself: {why}. Leave it "
                    f"to fully_shard of the {whole} around it"
                )


def check_rows(name: str, tensor: Any, width: int, shape: str) -> None:
    """Raise unless an argument is a dense tensor of 3 dimensions, `shape` in words and `width`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not a sparse or nested one")
    if tensor.dim() != 3 or tensor.shape[2] != width:
        raise ValueError(f"{name} must have shape {shape}{width}); got {shape_in_brief(tensor)}")
