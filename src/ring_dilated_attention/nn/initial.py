"""Modules whose initial weights depend on torch's random state and nothing else.

Modules of torch draw weights where they are made, and ours would draw them once more. Made without
weights, a module draws once, in `reset_parameters`: the same from the same seed, whether it was
made on its device, or on the meta device and emptied onto it later (``to_empty``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def without_weights(module: nn.Module, device: torch.device | str | None = None) -> Iterator[None]:
    """In the body of the statement a module makes its parts; then their memory is allocated.

    Args:
        module: has no parameters yet.
        device: where to allocate; None: torch's default device, which may be the meta device.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"):
        yield
    if where.type != "meta":
        module.to_empty(device=where)
