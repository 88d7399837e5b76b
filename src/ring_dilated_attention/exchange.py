"""Move rows between ranks. The only point-to-point code of the library.

An `Exchange` is one rank's end of a group. `ProcessGroupExchange` speaks torch.distributed;
`LoopbackExchange` connects ranks that are threads of one process, for tests and simulation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

T = TypeVar("T")


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

        `device` is where the ranks' tensors are; it runs there, where the group can.
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
        operations, tensors = [], []
        for kind, transfer in ((dist.isend, send), (dist.irecv, receive)):
            if transfer is not None:
                peer, tensor = transfer
                operations.append(dist.P2POp(kind, tensor, group=self._group, group_peer=peer))
                tensors.append(tensor)
        if send is not None:
            self.sent_bytes += send[1].nbytes
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, tensors)

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        if device.type == "cpu" and "cpu" not in dist.get_backend_config(self._group):
            device = torch.device("cuda", torch.cuda.current_device())  # all that NCCL can reach
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
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


class LoopbackError(RuntimeError):
    """Another rank of the loopback world failed, so this one cannot go on."""


class _LoopbackWorld:
    """What the ranks of a loopback share: a letter box per (sender, receiver, number)."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.shared: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)
        self._letters: dict[tuple[int, int, int], Future[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._failed = False

    def letter(self, sender: int, receiver: int, number: int) -> Future[torch.Tensor]:
        """The transfer number `number` from `sender` to `receiver`; either may ask first."""
        with self._lock:
            letter = self._letters.setdefault((sender, receiver, number), Future())
            if self._failed and not letter.done():
                letter.set_exception(LoopbackError("another rank failed"))
            return letter

    def fail(self) -> None:
        """Wake every rank that waits for another."""
        self.barrier.abort()
        with self._lock:
            self._failed = True
            for letter in self._letters.values():
                if not letter.done():
                    letter.set_exception(LoopbackError("another rank failed"))

    def discard(self, sender: int, receiver: int, number: int) -> None:
        """Forget a transfer that has been received."""
        with self._lock:
            del self._letters[sender, receiver, number]


class _Nothing:
    """A transfer that receives nothing."""

    def wait(self) -> None:
        pass


class _LoopbackReceipt:
    def __init__(
        self, world: _LoopbackWorld, key: tuple[int, int, int], into: torch.Tensor
    ) -> None:
        self._world, self._key, self._into = world, key, into
        self._letter = world.letter(*key)

    def wait(self) -> None:
        sent = self._letter.result()
        self._world.discard(*self._key)
        assert sent.shape == self._into.shape, f"{sent.shape} sent, {self._into.shape} expected"
        assert sent.dtype == self._into.dtype, f"{sent.dtype} sent, {self._into.dtype} expected"
        self._into.copy_(sent)


class LoopbackExchange:
    """An `Exchange` between threads of one process; made by `run_loopback`."""

    def __init__(self, world: _LoopbackWorld, rank: int) -> None:
        self.rank, self.world_size, self.sent_bytes = rank, world.world_size, 0
        self._world = world
        self._sent, self._received = Counter[int](), Counter[int]()

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is not None:
            peer, tensor = send
            self.sent_bytes += tensor.nbytes
            letter = self._world.letter(self.rank, peer, self._sent[peer])
            if not letter.done():  # done: the world has failed
                letter.set_result(tensor.clone())
            self._sent[peer] += 1
        if receive is None:
            return _Nothing()
        peer, into = receive
        key = peer, self.rank, self._received[peer]
        self._received[peer] += 1
        return _LoopbackReceipt(self._world, key, into)

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        return [max(column) for column in zip(*self.share(list(values)), strict=True)]

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        try:
            self._world.shared[self.rank] = value
            self._world.barrier.wait()
            values = list(self._world.shared)
            self._world.barrier.wait()
        except threading.BrokenBarrierError:
            raise LoopbackError("another rank failed") from None
        return values

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Exchange.gather`."""
        self.sent_bytes += (self.world_size - 1) * tensor.nbytes
        shared = self.share(tensor.clone())  # what nobody writes to: others may still read it
        assert len({(x.shape, x.dtype) for x in shared}) == 1, f"{[x.shape for x in shared]} differ"
        return [x.clone() for x in shared]


def run_loopback(world_size: int, function: Callable[[LoopbackExchange], T]) -> list[T]:
    """Run every rank of a world inside this process, one thread a rank.

    Args:
        world_size: number of ranks.
        function: called once per rank with that rank's exchange, which it may pass on as the
            `group` of `dilated_attention`.

    Returns:
        What the calls returned, by rank. When one fails, the others are woken and its error raised.
    """
    world = _LoopbackWorld(world_size)

    def call(rank: int) -> T:
        try:
            # On CUDA, all threads share one backward thread; ranks that wait for each other in
            # backward must each have their own.
            with torch.autograd.set_multithreading_enabled(False):
                return function(LoopbackExchange(world, rank))
        except BaseException:
            world.fail()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(call, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, LoopbackError):
            raise error
    return [future.result() for future in futures]
