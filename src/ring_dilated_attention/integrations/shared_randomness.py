"""Dropout of sharded sequences: of rows, each rank its own; of whole sequences, the same on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..exchange import Group, resolve_exchange, settle

_SEEDS = 2**62


class SharedDropPath(nn.Module):
    """Stochastic depth that drops the same sequences on every rank, and scales the others up.

    Args:
        drop_prob: how likely a sequence is dropped.
        group: the ranks that share each sequence.
    """

    def __init__(self, drop_prob: float, group: Group) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Drop sequences of (batch, local_sequence, embed_dim), as the first rank draws them."""
        if not self.training or not self.drop_prob:
            return x
        ends = resolve_exchange(self.group)
        kept = torch.rand(len(x)) >= self.drop_prob  # on every rank: all stay in step
        with ends.calls.enter("DropPath", "forward") as scope:
            settle(scope, ends, x.device)
            kept = torch.tensor(ends.share(kept.tolist())[0])
        scale = kept.to(x.device, x.dtype) / ((1 - self.drop_prob) or 1.0)  # all dropped: by 0
        return x * scale.view(-1, *[1] * (x.dim() - 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedDropPath:
        new = SharedDropPath(self.drop_prob, self.group)  # a group cannot be copied
        new.training = self.training
        return new

    def extra_repr(self) -> str:
        """What `repr` shows of the arguments."""
        return f"drop_prob={self.drop_prob}"


def share_drop_paths(model: nn.Module, group: Group) -> None:
    """Have every `DropPath` in a model drop the same sequences on all ranks of a group.

    Args:
        model: changed in place: on several ranks, its modules `DropPath` are replaced; those that
            were replaced already get the group.
        group: the ranks that share each sequence.
    """
    several = resolve_exchange(group).world_size > 1
    for parent in list(model.modules()):
        if isinstance(parent, SharedDropPath):
            parent.group = group
        for name, child in parent._modules.items():
            if several and child is not None and type(child).__name__ == "DropPath":
                shared = SharedDropPath(float(getattr(child, "drop_prob", None) or 0), group)
                shared.training = child.training
                setattr(parent, name, shared)


@contextmanager
def own_randomness(module: nn.Module, rank: int, device: torch.device) -> Iterator[None]:
    """Have dropout draw other numbers on each rank, also where all were given the same seed.

    Afterwards torch's random state is as it was, but for one draw.

    Args:
        module: what is run; nothing is changed where it has no dropout that is active.
        rank: this rank.
        device: where its inputs are.
    """
    if not any(_draws(each) for each in module.modules()):
        yield
        return
    seed = (int(torch.randint(_SEEDS, ())) + rank) % _SEEDS
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _draws(module: nn.Module) -> bool:
    if isinstance(module, SharedDropPath):
        return module.training and module.drop_prob > 0
    return isinstance(module, nn.Dropout) and module.training and module.p > 0
