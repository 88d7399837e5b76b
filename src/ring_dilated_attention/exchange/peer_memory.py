"""Transfers between GPUs of one host by their copy engines.

They take no multiprocessor from the compute behind which they run, and NVLink's whole rate.

A rank has an outbox of `SLOTS` slots, in memory that all ranks can read (`mapped_memory`). A
message goes through them in chunks: the sender copies a chunk into a slot, the receiver copies it
from there to where it is wanted. Two kinds of flags keep them in step. `free`, in the sender's
memory, says that a slot may be written, `ready`, in the receiver's, that a slot of that sender may
be read, and which call it belongs to: rows of another call are never taken for those of this one.
Who waits for a flag clears it, the other side sets it. Streams wait for flags and set them
by themselves (stream memory operations of CUDA's driver), so neither the host nor a kernel waits.

All peers share the slots, so an outbox is as large whatever the number of ranks. Which one a chunk
takes depends on how many the sender has sent this receiver, which both know. No two ranks can wait
for each other: ranks start transfers in the same order, a chunk is sent before one is received, and
whatever an operation waits for comes earlier in that order.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch

from .calls import Calls, Roll
from .cuda_driver import copy, set_flag, wait_for_flag
from .mapped_memory import MappedMemory
from .watch import Gate, UnderWay, Watch, prepare_to_watch

SLOTS = 4
"""Slots of an outbox: some are read while others are written, and what a rank that is late has yet
to read leaves slots for the others."""

SLOT_BYTES = 8 << 20
"""Of an outbox: with twice as many, rings on four H200 are no faster
(benchmarks/results/many_gpus.md)."""

_FLAG_BYTES = 128  # an int32 on a cache line of its own: two devices write to neighbours


class DevicePlace(NamedTuple):
    """Where a rank's tensors are, and which devices its own can read.

    Attributes:
        host: name of the host.
        device: uuid of the device; what kind it is where that is not CUDA.
        reads: uuids of the devices whose memory it can map.
    """

    host: str
    device: str
    reads: frozenset[str]


def place_of(device: torch.device) -> DevicePlace:
    """The place of a rank whose tensors are on `device`."""
    host = socket.gethostname()
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls itself cuda too
        return DevicePlace(host, device.type if device.type != "cuda" else "ROCm", frozenset())
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    reads = [_uuid(other) for other in others if torch.cuda.can_device_access_peer(own, other)]
    return DevicePlace(host, _uuid(own), frozenset(reads))


def out_of_reach(places: Mapping[int, DevicePlace]) -> str | None:
    """Which rank at these places, by rank, cannot read whose memory; None if all can."""
    for (rank, here), (other, there) in permutations(places.items(), 2):
        if here.host != there.host or there.device not in here.reads:
            return (
                f"rank {rank} (device {here.device} of {here.host}) cannot read that of rank "
                f"{other} (device {there.device} of {there.host})"
            )
    return None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class Operation(NamedTuple):
    """What a stream is to do: wait for a flag and clear it, copy, and set a flag of the peer's.

    Attributes:
        sends: whether it is part of sending, or of receiving.
        awaited: the rank that sets the flag waited for; None: it is set from the start.
        take: address of the flag waited for, in this rank's memory.
        expects: the value waited for.
        target: address to copy to.
        source: address to copy from.
        nbytes: how much.
        give: address of the flag set, in the peer's memory.
        gives: the value it is set to.
    """

    sends: bool
    awaited: int | None
    take: int
    expects: int
    target: int
    source: int
    nbytes: int
    give: int
    gives: int


_FREE = 1  # the value of a flag `free` that is set
_TOKENS = 2**31 - 1  # values of a flag `ready` that is set: 1 to this


class Outboxes:
    """Where the slots and flags of all ranks are, and which slot is next. Integers only.

    The memory of a rank holds the slots of its outbox, a `free` flag for each, and a `ready` flag
    for each slot of each of its peers.

    Args:
        rank: this rank.
        bases: the address at which this rank finds the memory of each rank.
    """

    def __init__(self, rank: int, bases: Sequence[int]) -> None:
        self._rank, self._bases = rank, bases
        self._sent: Counter[int] = Counter()  # chunks, by peer
        self._received: Counter[int] = Counter()
        self._readers: dict[int, int] = {}  # of each slot of this rank, who was last sent it

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Bytes of a rank's memory."""
        return SLOTS * (SLOT_BYTES + world_size * _FLAG_BYTES)

    @staticmethod
    def flags(world_size: int) -> torch.Tensor:
        """What the end of a rank's memory holds at first, uint8: flags, of which `free` are set."""
        lines = torch.zeros(world_size, SLOTS, _FLAG_BYTES // 4, dtype=torch.int32)
        free, *_ = lines[..., 0]
        free.fill_(_FREE)
        return lines.view(torch.uint8).flatten()

    def operations(
        self, send: tuple[int, int, int] | None, receive: tuple[int, int, int] | None, call: int
    ) -> Iterator[Operation]:
        """What a transfer takes, in order.

        Args:
            send: (peer, address, bytes); None: nothing.
            receive: (peer, address, bytes); None: nothing.
            call: the number of the call that it is part of, the same on both sides.
        """
        token = (call - 1) % _TOKENS + 1
        most = max((one[2] for one in (send, receive) if one is not None), default=0)
        for offset in range(0, most, SLOT_BYTES):
            # In turns, and the one that is sent first: see the module's docstring.
            if send is not None and offset < send[2]:
                peer, address, total = send
                slot, free, ready = self._find(self._rank, peer, self._sent)
                nbytes = min(SLOT_BYTES, total - offset)
                reader = self._readers.get(slot)
                self._readers[slot] = peer
                yield Operation(
                    True, reader, free, _FREE, slot, address + offset, nbytes, ready, token
                )
            if receive is not None and offset < receive[2]:
                peer, address, total = receive
                slot, free, ready = self._find(peer, self._rank, self._received)
                nbytes = min(SLOT_BYTES, total - offset)
                yield Operation(
                    False, peer, ready, token, address + offset, slot, nbytes, free, _FREE
                )

    def _find(self, owner: int, reader: int, chunks: Counter[int]) -> tuple[int, int, int]:
        """Addresses of the slot of `owner`'s next chunk for `reader`, of its flags free, ready."""
        peer = owner + reader - self._rank
        distance = (reader - owner) % len(self._bases)
        slot = (chunks[peer] + distance) % SLOTS  # peers that were sent as much take other slots
        chunks[peer] += 1
        flags = SLOTS * SLOT_BYTES + slot * _FLAG_BYTES
        return (
            self._bases[owner] + slot * SLOT_BYTES,
            self._bases[owner] + flags,
            self._bases[reader] + flags + distance * SLOTS * _FLAG_BYTES,
        )


class PeerMemory:
    """One rank's end of the outboxes of the ranks of a group.

    All ranks make theirs at once, and use it when all have. What they take of device memory,
    `nbytes`, is not in the figures of torch's allocator.

    Args:
        rank: this rank of the group.
        world_size: number of ranks, none of which is `out_of_reach` of another.
        share: every rank's value, by rank: a collective.
        device: this rank's.
        calls: of the group.
        roll: what the ranks know of each other.
        timeout: seconds that a stream may wait for a rank that is alive.

    Raises:
        RuntimeError: memory cannot be shared.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        share: Callable[[Any], list[Any]],
        device: torch.device,
        calls: Calls,
        roll: Roll,
        timeout: float,
    ) -> None:
        self._device, self._calls = device, calls
        self.nbytes = Outboxes.nbytes(world_size)
        self._memory = MappedMemory(self.nbytes, device, rank, share)
        bases = self._memory.addresses
        self._outboxes = Outboxes(rank, bases)
        flags = Outboxes.flags(world_size).to(device)
        end = bases[rank] + self.nbytes
        stream = torch.cuda.current_stream(device)
        copy(stream.cuda_stream, end - flags.nbytes, flags.data_ptr(), flags.nbytes)
        torch.cuda.synchronize(device)
        # With priority: those who wait for rows are compute.
        self._sending, self._receiving = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

        self._queued: deque[_Queued] = deque()
        self._gate = Gate()
        release = partial(_release, device, self._queued)
        self._watch = Watch(calls, roll, release, timeout, partial(prepare_to_watch, device))

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> _Copies:
        """Begin to send, and to receive; see `Exchange.start`."""
        return self._gate.begin(partial(self._begin, send, receive))

    def _begin(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> _Copies:
        computed = torch.cuda.current_stream(self._device).record_event()
        used = [
            (stream, one[1])
            for stream, one in ((self._sending, send), (self._receiving, receive))
            if one is not None
        ]
        for stream, _ in used:
            stream.wait_event(computed)
        streams = self._receiving.cuda_stream, self._sending.cuda_stream
        operations = list(
            self._outboxes.operations(self._extent(send), self._extent(receive), self._calls.number)
        )
        for operation in operations:
            _run(operation, streams[operation.sends])
        done = [stream.record_event() for stream, _ in used]
        awaited = [x.awaited for x in reversed(operations) if x.awaited is not None]
        peers = dict.fromkeys(awaited)
        if peers:
            queued = _Queued([(x.take, x.expects) for x in operations], done)
            while self._queued and self._queued[0].is_done():
                self._queued.popleft()
            self._queued.append(queued)
            self._watch.add(UnderWay(computed.query, queued.is_done, tuple(peers)))
        return _Copies(list(done), used)

    def _extent(self, one: tuple[int, torch.Tensor] | None) -> tuple[int, int, int] | None:
        """(number of the peer, address, bytes) of what is sent or received."""
        if one is None:
            return None
        peer, tensor = one
        assert tensor.is_contiguous()
        return peer, tensor.data_ptr(), tensor.nbytes

    def stop(self) -> None:
        """Begin no transfer any more; return when none is being begun."""
        self._gate.shut()

    def close(self) -> None:
        """Nothing to end: streams go on by themselves, and the watch sees to that."""

    def abandon(self) -> None:
        """Let streams go on, all ranks knowing that they get nothing; nobody uses this again."""
        self._watch.end()
        self.stop()
        _release(self._device, self._queued, lambda: all(x.is_done() for x in list(self._queued)))


class _Queued(NamedTuple):
    """Operations that streams may not have done yet."""

    flags: list[tuple[int, int]]  # waited for: address and value
    done: list[torch.cuda.Event]

    def is_done(self) -> bool:
        return all(event.query() for event in self.done)  # type: ignore[no-untyped-call]


def _release(device: torch.device, queued: deque[_Queued], is_done: Callable[[], bool]) -> None:
    """Set the flags that streams of this rank wait for, until none waits any more."""
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    while not is_done():
        waited = dict.fromkeys(f for one in list(queued) if not one.is_done() for f in one.flags)
        # A stream clears what it waited for: in each round, every stream gets one further at least.
        for address, value in waited:
            set_flag(stream.cuda_stream, address, value)
        stream.synchronize()


class _Copies:
    """Copies under way, and the tensors that must outlive them."""

    def __init__(
        self, done: list[torch.cuda.Event], used: list[tuple[torch.cuda.Stream, torch.Tensor]]
    ) -> None:
        self._done, self._used = done, used

    def wait(self) -> None:
        for event, (_, tensor) in zip(self._done, self._used, strict=True):
            torch.cuda.current_stream(tensor.device).wait_event(event)
        self._done.clear()
        self._used.clear()

    def __del__(self) -> None:
        for stream, tensor in self._used:  # nobody has waited: an error has ended the call
            tensor.record_stream(stream)


def _run(operation: Operation, stream: int) -> None:
    """Have a stream do an operation."""
    wait_for_flag(stream, operation.take, operation.expects)
    set_flag(stream, operation.take, 0)
    copy(stream, operation.target, operation.source, operation.nbytes)
    set_flag(stream, operation.give, operation.gives)
