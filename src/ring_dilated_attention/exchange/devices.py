"""Where the tensors of a process group may be."""

from __future__ import annotations

import torch
import torch.distributed as dist


def takes_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group's collectives take tensors on the CPU."""
    return "cpu" in dist.get_backend_config(group)


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """A device that a group takes: this one, or the current GPU where it is a CPU that it does not.

    Args:
        group: whose collectives are called.
        device: where the tensors are.
    """
    if device.type != "cpu" or takes_cpu(group):
        return device
    return torch.device("cuda", torch.cuda.current_device())
