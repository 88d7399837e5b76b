"""Move rows between ranks. The only point-to-point code of the library.

An `Exchange` is one rank's end of a group. `ProcessGroupExchange` speaks torch.distributed;
`loopback.LoopbackExchange` connects ranks that are threads of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _resolve_process_group,
)


class Pending(Protocol):
    """A started transfer."""

    def wait(self) -> None:
        """Return when the received tensor may be read and the sent one reused."""


class Exchange(Protocol):
    """One rank's end of a group of ranks.

    Attributes:
        rank: this rank, in [0, world_size).
        world_size: number of ranks.
        sent_bytes: bytes that `start` and `gather` have sent so far.
    """

    rank: int
    world_size: int
    sent_bytes: int

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """Begin sending a contiguous tensor to a rank, and receiving one from a rank.

        Between two ranks, transfers pair up in the order in which both start them.
        """

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """The elementwise maximum of `values` (int64) over all ranks: one small collective.

        It runs on the CPU where the group can, else on `device`, where the ranks' tensors are,
        without waiting for what that has still to compute.
        """

    def share(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank: a collective of small Python objects."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, by rank: a collective; shapes, dtypes and devices are alike.

        Each is the caller's own: it may be written to. A rank sends its tensor to each other one.
        """


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Exchange | None
"""What a `group` argument may be: a ProcessGroup, a 1-D DeviceMesh, an Exchange, or None for one
process on its own."""


_MEMBERS = ("rank", "world_size", "start", "maximum", "share", "gather")
"""What tells an `Exchange`."""

_registered: WeakValueDictionary[str, Exchange] = WeakValueDictionary()
"""The `Exchange` objects that were passed as a group, by name. Operators take no Python objects, so
groups reach them as names; torch.distributed knows the names of process groups, this the others.
Weak: the caller keeps the object, and autograd does until backward."""


def group_name(group: Group) -> str:
    """The name by which `exchange_named` finds `group` in this process; "" for None.

    Raises:
        TypeError: `group` is none of the kinds allowed.
        ValueError: a DeviceMesh is not 1-D, or this rank is not a member of the group.
    """
    if group is None:
        return ""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh; got {group.ndim} dimensions: {group}"
            )
        if group.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the DeviceMesh {group}")
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    # What `new_group` returns on ranks outside of the group is no ProcessGroup at all.
    if group is cast(object, dist.GroupMember.NON_GROUP_MEMBER):
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group it was given"
        )
    if all(hasattr(group, name) for name in _MEMBERS):
        name = f"exchange {id(group)}"  # no two objects that are alive share it
        _registered[name] = group
        return name
    raise TypeError(
        "group must be a torch.distributed ProcessGroup, a 1-D DeviceMesh, an Exchange or None; "
        f"got {group!r}"
    )


def exchange_named(name: str) -> Exchange:
    """This rank's end of the group that `group_name` named.

    Raises:
        KeyError: it was an `Exchange` that nobody has kept.
    """
    if not name:
        return _SoloExchange()
    if name.startswith("exchange "):
        return _registered[name]
    return ProcessGroupExchange(_resolve_process_group(name))  # type: ignore[arg-type]


def resolve_exchange(group: Group) -> Exchange:
    """This rank's end of `group`.

    Raises:
        TypeError: `group` is none of the kinds allowed.
        ValueError: a DeviceMesh is not 1-D, or this rank is not a member of the group.
    """
    return exchange_named(group_name(group))


class _SoloExchange:
    """A world of one rank: nothing to exchange with anybody."""

    rank = 0
    world_size = 1
    sent_bytes = 0

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        raise AssertionError("a single rank has no peer")

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        return list(values)

    def share(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone()]


MOST_CTAS = 16
"""Multiprocessors that transfers may take from the compute behind which they run."""

_communicators: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]
_communicators = WeakKeyDictionary()
"""Of each group that has exchanged rows: the communicators over which they travel, by device."""


@lru_cache(maxsize=8)
def _agreement_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group's communicator for rows on `device`; for the first time, all members ask at once.

    It is put together here because `new_group` needs ranks that are not in the group: all of them,
    or, with ``use_local_synchronization``, that they have made as many groups before.
    """
    known = _communicators.setdefault(group, {})
    if device.type in known:
        return known[device.type]
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.PrefixStore(
        f"ring_dilated_attention {device.type}", _get_process_group_store(group)
    )
    made = dist.ProcessGroup(store, rank, world_size)
    backend: Any
    if device.type == "cuda":
        kind = dist.ProcessGroup.BackendType.NCCL
        backend = dist.ProcessGroupNCCL(store, rank, world_size, _nccl_options(group))
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, world_size, _timeout(group, device))
    made._set_default_backend(kind)
    made._register_backend(torch.device(device.type), kind, backend)
    if device.type == "cuda":
        _connect(made, device)
    known[device.type] = made
    return made


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The caller's."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def _nccl_options(group: dist.ProcessGroup) -> Any:
    """The caller's timeout; few multiprocessors, but those before the attention kernels."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MOST_CTAS
    options._timeout = _timeout(group, torch.device("cuda"))
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = f"ring_dilated_attention {group.group_name}"
    return options


def _connect(communicator: dist.ProcessGroup, device: torch.device) -> None:
    """Connect every pair of ranks: NCCL does it at their first transfer, and takes long."""
    rank, world_size = communicator.rank(), communicator.size()
    communicator.allreduce([torch.zeros(1, device=device)]).wait()
    for step in range(1, world_size):
        sent, received = torch.zeros(2, 1, device=device).unbind(0)
        to, source = (rank + step) % world_size, (rank - step) % world_size
        _transfer(communicator, (to, sent), (source, received)).wait()
    torch.cuda.synchronize(device)


def _transfer(
    communicator: dist.ProcessGroup,
    send: tuple[int, torch.Tensor] | None,
    receive: tuple[int, torch.Tensor] | None,
) -> _Works:
    """Begin to send, and to receive, together."""
    transfers = [
        (start, peer, tensor)
        for start, one in ((communicator.send, send), (communicator.recv, receive))
        if one is not None
        for peer, tensor in (one,)
    ]
    tensors = [tensor for *_, tensor in transfers]
    if not transfers or not tensors[0].is_cuda:
        return _Works([start([x], peer, 0) for start, peer, x in transfers], tensors)
    # One launch: two would wait for each other.
    communicator._start_coalescing(tensors[0].device)
    for start, peer, tensor in transfers:
        start([tensor], peer, 0)
    return _Works([communicator._end_coalescing(tensors[0].device)], tensors)


class _Works:
    """Transfers of torch.distributed, and the tensors that must outlive them."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors.clear()


class ProcessGroupExchange:
    """An `Exchange` over a ProcessGroup of torch.distributed (gloo, NCCL).

    Rows travel over a communicator of their own: they do not queue behind the caller's collectives,
    nor these behind them. The first call with a group makes it, and on CUDA connects every pair of
    ranks, which takes seconds.

    Args:
        group: the group; this process must be a member.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the group {group!r}")
        self.world_size = dist.get_world_size(group)
        self.sent_bytes = 0
        self._group = group

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is None and receive is None:
            return _Works([], [])
        if send is not None:
            self.sent_bytes += send[1].nbytes
        _, tensor = send or receive or (0, torch.empty(0))
        return _transfer(_communicator(self._group, tensor.device), send, receive)

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        on_cuda = int(device.type == "cuda")
        *found, some, none = self._maximum([*values, on_cuda, -on_cuda], device)
        if some == -none:  # all ranks are here, and on such devices: what making it needs
            _communicator(self._group, device)
        return found

    def _maximum(self, values: list[int], device: torch.device) -> list[int]:
        if "cpu" in dist.get_backend_config(self._group):
            return self._reduce(torch.tensor(values, dtype=torch.int64))
        if device.type == "cpu":
            device = torch.device("cuda", torch.cuda.current_device())  # all that NCCL can reach
        # On a stream of its own it does not wait for what the device has still to compute.
        with torch.cuda.stream(_agreement_stream(device)):
            return self._reduce(torch.tensor(values, dtype=torch.int64, device=device))

    def _reduce(self, tensor: torch.Tensor) -> list[int]:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Exchange.gather`."""
        tensor = tensor.contiguous()
        everyone = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.sent_bytes += (self.world_size - 1) * tensor.nbytes
        dist.all_gather(everyone, tensor, group=self._group)
        return everyone
