"""What benchmarks under torchrun begin with: the ranks and their devices."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist


class Ranks(NamedTuple):
    """The ranks of torchrun, as one of them sees them.

    Attributes:
        rank: this one.
        size: how many.
        world: all of them.
        host: all of them, to meet without taking the device.
        device: this rank's.
    """

    rank: int
    size: int
    world: dist.ProcessGroup
    host: dist.ProcessGroup
    device: torch.device


def join(kind: str = "cuda") -> Ranks:
    """Meet the others; each rank has a device of its own, or, with ``"cpu"``, all have the same."""
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    world = dist.group.WORLD
    assert world is not None
    host = dist.new_group(backend="gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), world, host, device)
