"""NCCL as torch.distributed has it: a backend that leaves it to us what to do about errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .calls import LostPeerError

_MOST_CTAS = 16
"""Multiprocessors that NCCL may take from the compute behind which it runs."""

_LATER = timedelta(seconds=60)

_SETTINGS = {
    # By default a thread of torch's ends the process when NCCL loses a connection, such as that to
    # a rank that has ended. The watch says which rank that is, in an error that may be caught.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # That thread then waits for four times as long, and nobody may begin or end anything meanwhile.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # Streams wait for transfers: a host that does could not be told that a rank has gone.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""What torch reads in the environment when a backend is made, and nowhere else."""


def make_nccl(group: dist.ProcessGroup, store: dist.Store, timeout: timedelta) -> Any:
    """A backend of NCCL for the ranks of a group.

    Args:
        group: the group.
        store: in which the ranks find each other.
        timeout: how long to wait for another rank.
    """
    # Few multiprocessors, but those before the attention kernels.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _MOST_CTAS
    options._timeout = timeout + _LATER  # the watch raises an error before
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = f"ring_dilated_attention {group.group_name}"
    with _environment(_SETTINGS):
        return dist.ProcessGroupNCCL(
            store, dist.get_rank(group), dist.get_world_size(group), options
        )


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Inside, this process has these environment variables."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_together(
    messages: Any,
    device: torch.device,
    transfers: Sequence[tuple[Callable[..., Any], int, torch.Tensor]],
) -> Any:
    """Start transfers in one launch: two would wait for each other.

    Args:
        messages: a ProcessGroup of NCCL.
        device: where the tensors are.
        transfers: each its `send` or `recv`, a rank and a tensor.

    Raises:
        LostPeerError: NCCL has lost a rank, be it in an earlier transfer.
    """
    try:
        messages._start_coalescing(device)
        try:
            for start, peer, tensor in transfers:
                start([tensor], peer, 0)
        except BaseException:
            with suppress(RuntimeError):  # else all that this thread asks NCCL for waits for it
                messages._end_coalescing(device)
            raise
        return messages._end_coalescing(device)
    except dist.DistBackendError as error:
        raise LostPeerError([peer for _, peer, _ in reversed(transfers)]) from error
