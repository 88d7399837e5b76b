"""Move rows between ranks. The only point-to-point code of the library.

An `Exchange` is one rank's end of a group. `ProcessGroupExchange` speaks torch.distributed;
`loopback.LoopbackExchange` connects ranks that are threads of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group


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

_communicators: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Of groups that have exchanged on CUDA: their communicators for transfers."""


@lru_cache(maxsize=8)
def _agreement_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _for_transfers(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group over which rows on `device` travel; for the first time, all members ask at once."""
    if device.type != "cuda":
        return group
    if group not in _communicators:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = MOST_CTAS
        with _unbound():
            made = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="nccl",
                pg_options=options,
                use_local_synchronization=True,  # only members are here
                group_desc="ring_dilated_attention",
            )
        _connect(made, device)
        _communicators[group] = made
    return _communicators[group]


@contextmanager
def _unbound() -> Iterator[None]:
    """Have `new_group` make a communicator from nothing.

    Where the default group is bound to a device, it would split that group's instead, which all of
    its ranks must take part in; here are the members of a group alone.
    """
    default: Any = dist.group.WORLD
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect every pair of ranks: NCCL does it at the first transfer, and takes long."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    for step in range(1, len(ranks)):
        sent, received = torch.zeros(2, 1, device=device).unbind(0)
        operations = [
            dist.P2POp(dist.isend, sent, ranks[(rank + step) % len(ranks)], group),
            dist.P2POp(dist.irecv, received, ranks[(rank - step) % len(ranks)], group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    torch.cuda.synchronize(device)


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

    On CUDA, rows travel over a communicator of their own: they do not queue behind the caller's
    collectives, nor these behind them. The first call with a group makes it and connects every pair
    of ranks, which takes seconds.

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
        transfers = [x for x in (send, receive) if x is not None]
        if not transfers:
            return _Works([], [])
        tensors = [tensor for _, tensor in transfers]
        group = _for_transfers(self._group, tensors[0].device)
        operations = [
            dist.P2POp(kind, tensor, dist.get_global_rank(self._group, peer), group)
            for kind, transfer in ((dist.isend, send), (dist.irecv, receive))
            if transfer is not None
            for peer, tensor in (transfer,)
        ]
        if send is not None:
            self.sent_bytes += send[1].nbytes
        return _Works(dist.batch_isend_irecv(operations), tensors)

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        _for_transfers(self._group, device)  # all ranks are here, which making it needs
        if "cpu" in dist.get_backend_config(self._group):
            return self._maximum(torch.tensor(values, dtype=torch.int64))
        if device.type == "cpu":
            device = torch.device("cuda", torch.cuda.current_device())  # all that NCCL can reach
        # On a stream of its own it does not wait for what the device has still to compute.
        with torch.cuda.stream(_agreement_stream(device)):
            return self._maximum(torch.tensor(values, dtype=torch.int64, device=device))

    def _maximum(self, tensor: torch.Tensor) -> list[int]:
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
