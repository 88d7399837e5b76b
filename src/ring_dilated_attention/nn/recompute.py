"""What calling modules again in backward needs: the weights and the random numbers of forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..parallel import is_dtensor
from .modules import runs_hooks
from .norm import LayerNorm

_PACKAGE = __name__.partition(".")[0]
_FIXED = (nn.Linear, nn.Embedding, nn.LayerNorm, LayerNorm)
"""Modules that draw no random numbers, beside the blocks of this library."""

_NONE = object()
"""In place of a tensor where there is none."""

RandomState: TypeAlias = tuple[Tensor, Tensor | None]
"""Of the CPU's generator, and of that of a device where it has one."""


class Weights:
    """The weights and buffers that modules have now, by where they are.

    `torch.func.functional_call` gives a module others, and takes them away when it returns, before
    backward.

    Args:
        modules: and all that is in them.

    Attributes:
        tensors: those that gradients may be wanted of, each one once.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places = [
            (x, tensors, name, tensor)
            for module in modules
            for x in module.modules()
            for tensors in (x._parameters, x._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        by_id: dict[int, Tensor] = {
            id(tensor): tensor
            for module, tensors, _, tensor in self._places
            if tensors is module._parameters or tensor.requires_grad
        }
        self.tensors = list(by_id.values())
        self._versions: list[int | None] = []

    def note_versions(self) -> None:
        """Note that a call has ended, which may itself have changed weights in place."""
        self._versions = [_version(tensor) for *_, tensor in self._places]

    def refuse_changes(self) -> None:
        """Raise a `RuntimeError` if a parameter was changed in place since the call before.

        Backward would compute with weights that forward did not have. Buffers may change.
        """
        for place, version in zip(self._places, self._versions, strict=False):  # none at first
            module, tensors, name, tensor = place
            if tensors is module._parameters and _version(tensor) != version:
                raise RuntimeError(
                    f"{name} of a {type(module).__name__} was changed in place between forward and "
                    "backward, which computes with it again: call backward before the optimizer's "
                    'step, or give checkpoint="none" and no chunk_rows'
                )

    def _are_there(self) -> bool:
        for module, tensors, name, tensor in self._places:
            now = tensors.get(name)
            if now is not tensor and not _is_kept_elsewhere(module, name, now, tensor):
                return False
        return True

    def _have_history(self) -> bool:
        return any(not x.is_leaf and now.get(name) is x for _, now, name, x in self._places)

    @contextmanager
    def back(self, *, as_leaves: bool) -> Iterator[list[Tensor]]:
        """In the body, the modules have these tensors; yields those of `tensors`.

        Args:
            as_leaves: whether those that autograd computed stand there without their history, for
                gradients with respect to them.
        """
        if self._are_there() and not (as_leaves and self._have_history()):
            yield self.tensors
            return
        there = {
            id(x): x.detach().requires_grad_() if as_leaves and not x.is_leaf else x
            for x in self.tensors
        }
        others: list[Any] = [tensors.get(name, _NONE) for _, tensors, name, _ in self._places]
        try:
            for _, tensors, name, tensor in self._places:
                tensors[name] = there.get(id(tensor), tensor)  # type: ignore[assignment]
            yield list(there.values())
        finally:
            for (_, tensors, name, _), other in zip(self._places, others, strict=True):
                if other is _NONE:
                    del tensors[name]
                else:
                    tensors[name] = other


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where that is not known."""
    unknown = is_dtensor(tensor) or is_lazy(tensor) or tensor.is_inference()
    return None if unknown else tensor._version


def _is_kept_elsewhere(module: nn.Module, name: str, now: Tensor | None, then: Tensor) -> bool:
    """Whether whoever shards or offloads weights, and brings them back by itself, has this one.

    `fully_shard` has DTensors in its place, FullyShardedDataParallel makes attributes of weights,
    and accelerate, which replaces forward, has meta tensors.
    """
    if now is None:
        return name in module.__dict__
    is_away = "forward" in module.__dict__ and (now.is_meta or then.is_meta)
    return is_away or is_dtensor(now) or is_dtensor(then)


def refuse_flat_weights(modules: Sequence[nn.Module]) -> None:
    """Raise a `ValueError` where FullyShardedDataParallel has put weights into a flat one.

    Its views are no parameters of their modules.
    """
    for module in modules:
        for x in module.modules():
            weight = x.__dict__.get("weight")
            is_view = isinstance(weight, Tensor) and weight.requires_grad and weight._is_view()
            if is_view and "weight" not in x._parameters:
                raise ValueError(
                    "chunk_rows computes gradients of the weights of modules, and "
                    f"FullyShardedDataParallel has put the weight of a {type(x).__name__} into a "
                    "flat one: use fully_shard, or use_orig_params=True and no checkpointing"
                )


def may_draw(function: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Whether a function may draw random numbers, as the dropout of an adapter does.

    Args:
        function: methods of this library do not, beside their modules.
        modules: that it uses; there are some.
    """
    whose = getattr(getattr(function, "func", function), "__self__", function)
    return not (modules and _is_ours(whose)) or any(
        not (type(x) in _FIXED or _is_ours(x)) or runs_hooks(x)
        for module in modules
        for x in module.modules()
    )


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == _PACKAGE


def random_state(device: torch.device) -> RandomState:
    """From which random numbers are drawn now, on the CPU and on a device."""
    has_own = device.type not in ("cpu", "meta")
    own = torch.get_device_module(device).get_rng_state(device) if has_own else None
    return torch.get_rng_state(), own


@contextmanager
def drawing_again(state: RandomState, device: torch.device) -> Iterator[None]:
    """In the body random numbers are those that followed `state`; behind it, what they would be.

    Args:
        state: of `random_state`.
        device: that it was asked for.
    """
    on_cpu, on_device = state
    devices = [] if on_device is None else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.get_device_module(device).set_rng_state(on_device, device)
        yield
