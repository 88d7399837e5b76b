"""What functions need that `run_ranks` runs."""

import torch.distributed as dist


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group
