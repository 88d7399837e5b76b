"""Rows between GPUs of one host through torch's symmetric memory, without multiprocessors.

A rank has an outbox of a few slots, in memory that all ranks of the group can read. A message goes
through it in chunks: the sender copies a chunk into a slot, the receiver copies it from there, over
NVLink, to where it is wanted. Signals keep the two in step: the sender's says that a slot may be
read, the receiver's that it may be written again. They are kernels of a few microseconds in streams
of this module, so no host waits. All receivers share the slots, so an outbox is as large whatever
the number of ranks.

Ranks never wait for each other in a circle: they start transfers in the same order, a chunk is sent
before one is received, and whatever an operation waits for comes earlier in that order.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .interface import Message

SLOTS = 4
"""Of an outbox: some are read while others are written."""

SLOT_BYTES = 16 << 20
"""Large: every chunk takes six launches, of which a host makes one in 5 to 10 us."""

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_made = 0
"""How often this process has made an outbox; see `Place`."""


class Place(NamedTuple):
    """Where a rank's tensors are, and which devices its own can read.

    Attributes:
        host: name of the host; empty: its device has no symmetric memory.
        device: uuid of the device.
        reads: uuids of the devices whose memory it can map.
        made: how often its process has made an outbox. torch counts all that a process shares, and
            up to torch 2.13 hangs where the ranks of a group have not shared as often
            (pytorch/pytorch#196082).
    """

    host: str
    device: str
    reads: frozenset[str]
    made: int


def place_of(host: str, device: torch.device) -> Place:
    """The place of a rank whose tensors are on `device`."""
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls itself cuda too
        return Place("", str(device), frozenset(), _made)
    own, uuids = index_of(device), [_uuid(index) for index in range(torch.cuda.device_count())]
    reads = [
        uuid
        for index, uuid in enumerate(uuids)
        if index != own and torch.cuda.can_device_access_peer(own, index)
    ]
    return Place(host, uuids[own], frozenset(reads), _made)


def why_not(places: Sequence[Place]) -> str:
    """Why ranks at these places, by rank, cannot share memory; empty if they can."""
    for (rank, here), (other, there) in permutations(enumerate(places), 2):
        if not here.host:
            return f"rank {rank} has {here.device}"
        if not there.host:
            return f"rank {other} has {there.device}"
        if here.host != there.host:
            return f"ranks {rank} and {other} are on different hosts"
        if there.device not in here.reads:
            return f"device {here.device} of rank {rank} cannot read {there.device} of rank {other}"
        if here.made != there.made:
            return f"ranks {rank} and {other} have not been in as many groups that share memory"
    return ""


def index_of(device: torch.device) -> int:
    """The number of a CUDA device: of the current one, if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def make_outbox(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float,
    host: str,
    share: Callable[[Any], list[Any]],
    *,
    is_asked_for: bool,
) -> Outbox | None:
    """This rank's outbox; all members make theirs at once. None where there can be none.

    Args:
        group: the group.
        device: this rank's.
        timeout: seconds that a stream may wait for another rank.
        host: name of this rank's host.
        share: every rank's value, by rank: a collective.
        is_asked_for: whether to raise in place of returning None.

    Raises:
        ValueError: ranks are on several hosts, or on devices that cannot read each other's memory.
        RuntimeError: the system does not let them share it.
    """
    global _made
    refused = why_not(share(place_of(host, device)))
    if refused:
        if is_asked_for:
            raise ValueError(
                "symmetric_memory=True needs ranks on CUDA devices of one host, which can read "
                f"each other's memory and are visible to every rank; {refused}"
            )
        return None
    made, failure = None, ""
    _made += 1
    try:
        made = Outbox(group, device, timeout)
    except RuntimeError as error:
        failure = f"rank {dist.get_rank(group)}: {str(error).splitlines()[0]}"
    failures = [one for one in share(failure) if one]
    if failures and is_asked_for:
        raise RuntimeError(f"symmetric_memory=True, but memory cannot be shared: {failures}")
    if failures:
        warnings.warn(
            "the GPUs of this host could read each other's memory, but cannot share it, so "
            "rows travel over NCCL, which is slower (symmetric_memory=False asks for that): "
            f"{failures}",
            stacklevel=2,
        )
        return None
    return made


class _Chunk(NamedTuple):
    """A part of a message: with which rank it travels, and through which slot of the sender's."""

    peer: int
    rows: torch.Tensor
    slot: int


class Slots:
    """The slots of all ranks' outboxes: which one is next, and what streams are to do with it.

    Args:
        rank: this rank.
        outboxes: of each rank, by rank: as many bytes, none of which is in use.
        handle: of torch's symmetric memory, for the signals.
        timeout_ms: so long a stream may wait for another rank.
    """

    def __init__(
        self, rank: int, outboxes: Sequence[torch.Tensor], handle: Any, timeout_ms: int
    ) -> None:
        self._rank, self._handle, self._timeout_ms = rank, handle, timeout_ms
        self._slots = [outbox.chunk(SLOTS) for outbox in outboxes]
        self._readers: dict[int, int] = {}  # of each slot of this rank, who was last sent it
        self._sent, self._received = Counter[int](), Counter[int]()  # chunks, by peer

    def acts(
        self, send: Message | None, receive: Message | None
    ) -> Iterator[tuple[bool, Callable[[], None]]]:
        """The operations of a transfer, in order: whether each is part of sending, and a function.

        In turns, and the sending first: see the module's docstring.
        """
        sent = self._chunks(send, self._sent, sends=True)
        received = self._chunks(receive, self._received, sends=False)
        for out, into in zip_longest(sent, received):
            if out is not None:
                yield True, partial(self._send, out)
            if into is not None:
                yield False, partial(self._receive, into)

    def _chunks(
        self, one: Message | None, counts: Counter[int], *, sends: bool
    ) -> Iterator[_Chunk]:
        if one is None:
            return
        peer, tensor = one
        assert tensor.is_contiguous()
        # Both sides count. Peers that were sent as much take other slots.
        distance = (peer - self._rank if sends else self._rank - peer) % len(self._slots)
        size = self._slots[0][0].numel()
        rows = tensor.flatten().view(torch.uint8)
        for piece in torch.split(rows, size) if rows.numel() > size else (rows,):
            if piece.numel():
                counts[peer] += 1
                yield _Chunk(peer, piece, (counts[peer] + distance) % SLOTS)

    def _send(self, chunk: _Chunk) -> None:
        peer, rows, slot = chunk
        reader = self._readers.get(slot)
        if reader is not None:
            self._handle.wait_signal(reader, SLOTS + slot, self._timeout_ms)
        self._readers[slot] = peer
        self._slots[self._rank][slot].narrow(0, 0, rows.numel()).copy_(rows)
        self._handle.put_signal(peer, slot, self._timeout_ms)

    def _receive(self, chunk: _Chunk) -> None:
        peer, rows, slot = chunk
        self._handle.wait_signal(peer, slot, self._timeout_ms)
        rows.copy_(self._slots[peer][slot].narrow(0, 0, rows.numel()))
        self._handle.put_signal(peer, SLOTS + slot, self._timeout_ms)


class Outbox:
    """One rank's end: its outbox, and what it reads of the others'.

    Args:
        group: the group.
        device: this rank's.
        timeout: seconds that a stream may wait for another rank; then CUDA fails in this process.

    Attributes:
        nbytes: of the outbox.

    Raises:
        RuntimeError: memory cannot be shared.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # takes a while to import

        rank = dist.get_rank(group)
        self.nbytes = SLOTS * SLOT_BYTES
        self._device = torch.device("cuda", index_of(device))
        # Whatever mode the first call is in: others write to it, too.
        with torch.inference_mode(False), torch.no_grad():
            own = symmetric.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            is_unset = _NO_MULTICAST not in os.environ
            os.environ.setdefault(_NO_MULTICAST, "1")  # copies and signals do without
            try:
                handle: Any = symmetric.rendezvous(own, group.group_name)
            finally:
                if is_unset:
                    del os.environ[_NO_MULTICAST]
            outboxes = [
                own if each == rank else handle.get_buffer(each, own.shape, own.dtype)
                for each in range(dist.get_world_size(group))
            ]
            # torch may hand out memory that was an outbox before, with its signals.
            handle.get_signal_pad(rank).view(torch.int32).zero_()
            torch.cuda.synchronize(self._device)  # before any rank knows that all have made theirs
            timeout_ms = max(int(timeout * 1000), 1)  # 0 would be for ever
            self._slots = Slots(rank, outboxes, handle, timeout_ms)
        # With priority: those who wait for rows are compute.
        self._sending, self._receiving = (
            torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def transfer(self, send: Message | None, receive: Message | None, number: int) -> _Copies:
        """Begin to send, and to receive; see `Exchange.start`."""
        current = torch.cuda.current_stream(self._device)
        computed = current.record_event()
        used = [
            (stream, one[1])
            for stream, one in ((self._sending, send), (self._receiving, receive))
            if one is not None
        ]
        for stream, _ in used:
            stream.wait_event(computed)
        try:
            with torch.no_grad():
                for sends, act in self._slots.acts(send, receive):
                    # `with torch.cuda.stream` takes 10 us.
                    torch.cuda.set_stream(self._sending if sends else self._receiving)
                    act()
        finally:
            torch.cuda.set_stream(current)
        return _Copies([(stream, stream.record_event(), tensor) for stream, tensor in used])


class _Copies:
    """Copies under way, and the tensors that must outlive them."""

    def __init__(
        self, copies: list[tuple[torch.cuda.Stream, torch.cuda.Event, torch.Tensor]]
    ) -> None:
        self._copies = copies

    def wait(self) -> None:
        """See `Pending.wait`."""
        for _, done, tensor in self._copies:
            torch.cuda.current_stream(tensor.device).wait_event(done)
        self._copies = []

    def __del__(self) -> None:
        for stream, _, tensor in self._copies:  # nobody has waited: an error has ended the call
            tensor.record_stream(stream)
