"""What calling modules again in backward needs: the weights and the random numbers of forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..exchange import is_dtensor
from .hooks import runs_hooks
from .norm import LayerNorm

_PACKAGE = __name__.partition(".")[0]
_FIXED = (nn.Linear, nn.Embedding, nn.LayerNorm, LayerNorm)
"""Modules that draw no random numbers, beside the blocks of this library."""

RandomState: TypeAlias = tuple[Tensor, Tensor | None]
"""Of the CPU's generator, and of that of a device where it has one."""


class Weights:
    """The weights that modules have now, by where they are.

    `torch.func.functional_call` gives a module others, and takes them away when it returns, before
    backward.

    Args:
        modules: and all that is in them.

    Attributes:
        tensors: the weights, each one once.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places = [
            (x._parameters, name, tensor)
            for module in modules
            for x in module.modules()
            for name, tensor in x._parameters.items()
            if tensor is not None
        ]
        by_id: dict[int, Tensor] = {id(tensor): tensor for *_, tensor in self._places}
        self.tensors = list(by_id.values())

    def are_there(self) -> bool:
        """Whether the modules have them still, or again.

        Those that `fully_shard` shards are there: it gathers them before backward, in others.
        """
        return all(
            now is tensor or is_dtensor(now) or is_dtensor(tensor)
            for now, tensor in ((owner.get(name), x) for owner, name, x in self._places)
        )

    @contextmanager
    def back(self) -> Iterator[list[Tensor]]:
        """In the body, the modules have these weights; yields them, each one once.

        Where the modules have others by now, those that autograd computed stand there without
        their history, which is not that of the body.
        """
        if self.are_there():
            yield self.tensors
            return
        leaves = {
            id(x): x if x.is_leaf else x.detach().requires_grad_(x.requires_grad)
            for x in self.tensors
        }
        others: list[Any] = [owner.get(name) for owner, name, _ in self._places]
        try:
            for owner, name, tensor in self._places:
                owner[name] = leaves[id(tensor)]  # type: ignore[assignment]
            yield list(leaves.values())
        finally:
            for (owner, name, _), other in zip(self._places, others, strict=True):
                owner[name] = other


def may_draw(modules: Sequence[nn.Module]) -> bool:
    """Whether calling modules may draw random numbers, as the dropout of an adapter does."""
    return any(
        not (type(x) in _FIXED or type(x).__module__.partition(".")[0] == _PACKAGE) or runs_hooks(x)
        for module in modules
        for x in module.modules()
    )


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
