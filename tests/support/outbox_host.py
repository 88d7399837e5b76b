"""A host without devices: outboxes in plain memory, and streams that are queues of operations."""

from __future__ import annotations

import threading
from random import Random

import torch

from ring_dilated_attention.exchange import peer_memory
from ring_dilated_attention.exchange.loopback import LoopbackExchange
from ring_dilated_attention.exchange.peer_memory import Operation, Outboxes

WAIT_S = 60  # for other ranks to queue what is waited for


class Host:
    """Ranks whose streams do what they are told when `step` picks them, in any order.

    Args:
        world_size: number of ranks.
        streams: of a rank: one that sends and one that receives, or one for both, which is what
            CUDA makes of two at worst.
        seed: of the order.
    """

    def __init__(self, world_size, streams, seed):
        self.world_size, self.streams, self.random = world_size, streams, Random(seed)
        nbytes, flags = Outboxes.nbytes(world_size), Outboxes.flags(world_size)
        self.memory = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(world_size)]
        for memory in self.memory:
            memory[-flags.numel() :] = flags
        bases = [memory.data_ptr() for memory in self.memory]
        self.outboxes = [Outboxes(rank, bases) for rank in range(world_size)]
        self.queues: dict[tuple[int, int], list[Operation]] = {
            (rank, i): [] for rank in range(world_size) for i in range(streams)
        }
        self.messages: list[torch.Tensor] = []  # bytes of what is under way
        self.changed = threading.Condition()

    def transfer(self, rank, send, receive, call=1):
        """Queue a transfer; `send` and `receive` are (peer, contiguous tensor) or None.

        Returns:
            Its operations, and the bytes that must outlive them.
        """
        extents, used, queued = [], [], []
        for one in (send, receive):
            if one is not None:
                assert one[1].is_contiguous()
                used.append(one[1].view(-1).view(torch.uint8))
            extents.append(one and (one[0], one[1].data_ptr(), one[1].nbytes))
        self.messages += used
        for operation in self.outboxes[rank].operations(*extents, call):
            self.queues[rank, operation.sends % self.streams].append(operation)
            queued.append(operation)
        return queued, used

    def step(self):
        """Let one stream go on that can; whether any could."""
        able = [
            queue
            for queue in self.queues.values()
            if queue and self.flag(queue[0].take) == queue[0].expects
        ]
        if not able:
            return False
        operation = self.random.choice(able).pop(0)
        self.at(operation.take, 4).zero_()
        target = self.at(operation.target, operation.nbytes)
        target.copy_(self.at(operation.source, operation.nbytes))
        assert self.flag(operation.give) == 0
        self.at(operation.give, 4).view(torch.int32).fill_(operation.gives)
        return True

    def is_queued(self, operation):
        """Whether it has yet to be done."""
        return any(operation is one for queue in self.queues.values() for one in queue)

    def flag(self, address):
        return self.at(address, 4).view(torch.int32).item()

    def at(self, address, nbytes):
        for memory in (*self.memory, *self.messages):
            if memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes:
                offset = address - memory.data_ptr()
                assert offset + nbytes <= memory.nbytes
                return memory[offset : offset + nbytes]
        raise AssertionError(f"{address} is in nobody's memory")

    def assert_empty(self):
        """All streams are done, all slots free."""
        assert not any(self.queues.values())
        for memory in self.memory:
            flags = memory[-Outboxes.flags(self.world_size).numel() :].view(torch.int32)
            free, *ready = flags.view(self.world_size, peer_memory.SLOTS, -1)[..., 0]
            assert free.all()
            assert not torch.stack(ready).any()


class HostExchange:
    """An `Exchange` through the outboxes of a host: rows move when somebody waits, not before."""

    def __init__(self, host, ends: LoopbackExchange):
        self.rank, self.world_size, self.sent_bytes = ends.rank, ends.world_size, 0
        self.maximum, self.share, self.calls = ends.maximum, ends.share, ends.calls
        self._host = host

    def start(self, send, receive):
        if send is not None:
            self.sent_bytes += send[1].nbytes
        with self._host.changed:
            queued, used = self._host.transfer(self.rank, send, receive, self.calls.number)
            self._host.changed.notify_all()
        return HostTransfer(self._host, queued, used)


class HostTransfer:
    """A transfer under way."""

    def __init__(self, host, queued, used):
        self._host, self._queued, self._used = host, queued, used

    def wait(self):
        host = self._host
        with host.changed:
            while any(map(host.is_queued, self._queued)):
                if host.step():
                    host.changed.notify_all()
                else:
                    assert host.changed.wait(WAIT_S), "all streams wait"
            host.messages = [x for x in host.messages if not any(x is y for y in self._used)]
