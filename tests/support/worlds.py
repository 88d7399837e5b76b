"""What functions need that `run_ranks` runs."""

import torch.distributed as dist

from ring_dilated_attention.exchange import groups


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def pretend_host(patch, host):
    """Let groups of this process, which have made no call yet, find it on a host of that name."""
    patch.setattr(groups, "own_host", lambda: f"host {host}")
