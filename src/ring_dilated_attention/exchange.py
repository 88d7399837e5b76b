"""Move rows between ranks.

An `Exchange` is one rank's end of a group. `ProcessGroupExchange` is that of torch.distributed's
groups: rows travel by copies between GPUs of one host (`peer_memory`), else by messages
(`communicator`). `loopback.LoopbackExchange` connects ranks that are threads of one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from .board import MOST_VALUES, Board, make_board
from .communicator import Communicator, Works, timeout_of
from .peer_memory import PeerMemory, out_of_reach, place_of


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

    It may have a `stopwatch` too, which is started where compute waits for transfers in a way that
    `Pending.wait` does not show; what it returns is called when compute goes on.
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

        It runs in shared memory where all ranks are on one Linux host, else on the CPU where the
        group can, else on `device`, where the ranks' tensors are; nothing waits for what that has
        still to compute.
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


class _Transport(Protocol):
    """How rows travel between the ranks of a group."""

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""


_transports: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool | None], _Transport]]
_transports = WeakKeyDictionary()
"""Of each group that has exchanged rows, by device type and what was asked for."""


_boards: WeakKeyDictionary[dist.ProcessGroup, Board | None] = WeakKeyDictionary()
"""Of each group whose ranks have agreed on something."""


@lru_cache(maxsize=8)
def _agreement_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class ProcessGroupExchange:
    """An `Exchange` over a ProcessGroup of torch.distributed (gloo, NCCL).

    GPUs of one host that can read each other's memory move rows by their copy engines, which take
    no multiprocessor from the compute and NVLink's whole rate. Elsewhere rows travel as messages,
    over a communicator of their own: they do not queue behind the caller's collectives, nor these
    behind them. The first call with a group makes what is needed; a communicator of NCCL connects
    every pair of ranks, which takes seconds.

    Args:
        group: the group; this process must be a member.
        peer_memory: whether copy engines move rows; alike on all ranks. None: where they can, with
            a warning where the ranks' GPUs can read each other's memory and the system does not
            let them share it. They take 32 MiB of a GPU for each group, beside what torch has
            allocated. A rank that dies leaves the others waiting, without the timeout of NCCL.

    Raises:
        ValueError: this process is not a member of the group; from the first call, with
            ``peer_memory=True``: the tensors are not on CUDA devices of one host that can read each
            other's memory.
        RuntimeError: from the first call, with ``peer_memory=True``: they cannot share it.
    """

    def __init__(self, group: dist.ProcessGroup, *, peer_memory: bool | None = None) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the group {group!r}")
        self.world_size = dist.get_world_size(group)
        self.sent_bytes = 0
        self._group = group
        self._peer_memory = peer_memory

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is None and receive is None:
            return Works([], [])
        if send is not None:
            self.sent_bytes += send[1].nbytes
        _, tensor = send or receive or (0, torch.empty(0))
        return self._transport(tensor.device).transfer(send, receive)

    def _transport(self, device: torch.device) -> _Transport:
        """How rows on `device` travel; for the first time, all members ask at once."""
        known = _transports.setdefault(self._group, {})
        key = device.type, self._peer_memory
        if key not in known:
            copies = self._peer_memory or (self._peer_memory is None and device.type == "cuda")
            made = self._share_memory(device) if copies else None
            known[key] = made or Communicator(self._group, device)
        return known[key]

    def _share_memory(self, device: torch.device) -> PeerMemory | None:
        """Peer memory of the group; None where that is not to be had, and was not asked for."""
        reason = out_of_reach(self.share(place_of(device)))
        if reason is not None:
            if self._peer_memory:
                raise ValueError(
                    "peer_memory=True needs ranks on CUDA devices of one host, which can read each "
                    f"other's memory and are visible to every rank; {reason}"
                )
            return None
        made, failure = None, ""
        try:
            made = PeerMemory(self.rank, self.world_size, self.share, device)
        except RuntimeError as error:
            failure = f"rank {self.rank}: {error}"
        # Having heard of all, nobody writes to memory that its rank has yet to clear.
        failures = [one for one in self.share(failure) if one]
        if failures and self._peer_memory:
            raise RuntimeError(f"peer_memory=True, but memory cannot be shared: {failures}")
        if failures:
            warnings.warn(
                "the GPUs of this host could read each other's memory, but cannot share it, so "
                "rows travel as messages, which is slower (peer_memory=False asks for that): "
                f"{failures}",
                stacklevel=2,
            )
            return None
        return made

    def outbox_bytes(self, device: torch.device) -> int:
        """Bytes of `device` that copies take beside what torch has allocated.

        0 before the first call, and where rows travel as messages.
        """
        transport = _transports.get(self._group, {}).get((device.type, self._peer_memory))
        return transport.nbytes if isinstance(transport, PeerMemory) else 0

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        if self.world_size == 1:
            return list(values)
        on_cuda = int(device.type == "cuda")
        *found, some, none = self._maximum([*values, on_cuda, -on_cuda], device)
        if some == -none:  # all ranks are here, and on such devices: what making it needs
            self._transport(device)
        return found

    def _maximum(self, values: list[int], device: torch.device) -> list[int]:
        if self._group not in _boards:
            on_cpu = "cpu" in dist.get_backend_config(self._group)
            timeout = timeout_of(self._group, torch.device("cpu" if on_cpu else "cuda"))
            _boards[self._group] = make_board(self.rank, self.world_size, self.share, timeout)
        board = _boards[self._group]
        if board is not None and len(values) <= MOST_VALUES:
            return board.maximum(values)
        return self._all_reduce(values, device)

    def _all_reduce(self, values: list[int], device: torch.device) -> list[int]:
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
