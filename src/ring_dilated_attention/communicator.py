"""Transfers between ranks by messages of torch.distributed: gloo and NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

MOST_CTAS = 16
"""Multiprocessors that NCCL may take from the compute behind which it runs."""


class Communicator:
    """A communicator of its own for the rows that a group exchanges.

    They do not queue behind the caller's collectives, nor these behind them. It is put together
    here because `new_group` needs ranks that are not in the group: all of them, or, with
    ``use_local_synchronization``, that they have made as many groups before. All members make
    theirs at once.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = dist.PrefixStore(
            f"ring_dilated_attention {device.type}", _get_process_group_store(group)
        )
        self._messages = dist.ProcessGroup(store, rank, world_size)
        backend: Any
        if device.type == "cuda":
            kind = dist.ProcessGroup.BackendType.NCCL
            backend = dist.ProcessGroupNCCL(store, rank, world_size, _nccl_options(group))
        else:
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, world_size, timeout_of(group, device))
        self._messages._set_default_backend(kind)
        self._messages._register_backend(torch.device(device.type), kind, backend)
        if device.type == "cuda":
            self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Connect every pair of ranks: NCCL does it at their first transfer, and takes long."""
        rank, world_size = self._messages.rank(), self._messages.size()
        self._messages.allreduce([torch.zeros(1, device=device)]).wait()
        for step in range(1, world_size):
            sent, received = torch.zeros(2, 1, device=device).unbind(0)
            to, source = (rank + step) % world_size, (rank - step) % world_size
            self.transfer((to, sent), (source, received)).wait()
        torch.cuda.synchronize(device)

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Works:
        """Begin to send, and to receive, together."""
        transfers = [
            (start, peer, tensor)
            for start, one in ((self._messages.send, send), (self._messages.recv, receive))
            if one is not None
            for peer, tensor in (one,)
        ]
        tensors = [tensor for *_, tensor in transfers]
        if not transfers or not tensors[0].is_cuda:
            return Works([start([x], peer, 0) for start, peer, x in transfers], tensors)
        # One launch: two would wait for each other.
        self._messages._start_coalescing(tensors[0].device)
        for start, peer, tensor in transfers:
            start([tensor], peer, 0)
        return Works([self._messages._end_coalescing(tensors[0].device)], tensors)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group waits for tensors on such devices."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def _nccl_options(group: dist.ProcessGroup) -> Any:
    """The caller's timeout; few multiprocessors, but those before the attention kernels."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MOST_CTAS
    options._timeout = timeout_of(group, torch.device("cuda"))
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = f"ring_dilated_attention {group.group_name}"
    return options


class Works:
    """Transfers of torch.distributed, and the tensors that must outlive them."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """See `exchange.Pending.wait`."""
        for work in self._works:
            work.wait()
        self._tensors.clear()
