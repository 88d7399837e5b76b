"""Symmetric memory: which ranks can have it, and how messages go through slots.

The streams of a rank are threads here, its outbox is memory of this process. tests/tiles has GPUs.
"""

import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch

from ring_dilated_attention.exchange.symmetric import SLOTS, Place, Slots, make_outbox, why_not

HERE = Place("host", "a", frozenset("bc"), 0)
THERE = Place("host", "b", frozenset("ac"), 0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (THERE, ""),
        (THERE._replace(host="other"), "ranks 0 and 1 are on different hosts"),
        (THERE._replace(reads=frozenset("c")), "device b of rank 1 cannot read a of rank 0"),
        (HERE, "device a of rank 0 cannot read a of rank 1"),
        (THERE._replace(made=1), "have not been in as many groups"),
        (Place("", "cpu", frozenset(), 0), "rank 1 has cpu"),
    ],
)
def test_why_not(other, said):
    found = why_not([HERE, other])
    assert said in found
    assert bool(said) == bool(found)


def test_it_is_refused_where_it_was_asked_for():
    def share(value):
        return [value, value]

    given: Any = (None, torch.device("cpu"), 1.0, "host", share)
    assert make_outbox(*given, is_asked_for=False) is None
    with pytest.raises(ValueError, match=r"symmetric_memory=True needs .*rank 0 has cpu"):
        make_outbox(*given, is_asked_for=True)


class Host:
    """Outboxes and signals of all ranks."""

    def __init__(self, world_size, slot_bytes):
        self.world_size = world_size
        self.outboxes = torch.full((world_size, SLOTS * slot_bytes), 255, dtype=torch.uint8)
        self.signals = Counter[tuple[int, int, int]]()  # by who gets it, who has sent it, channel
        self.changed = threading.Condition()


class Handle:
    """Signals as torch's symmetric memory has them: who sets one waits until it is not set."""

    def __init__(self, host, rank):
        self.host, self.rank = host, rank

    def _change(self, key, before):
        with self.host.changed:
            done = self.host.changed.wait_for(lambda: self.host.signals[key] == before, 20)
            assert done, f"nobody has changed {key}"
            self.host.signals[key] = 1 - before
            self.host.changed.notify_all()

    def put_signal(self, peer, channel, timeout):
        self._change((peer, self.rank, channel), 0)

    def wait_signal(self, peer, channel, timeout):
        self._change((self.rank, peer, channel), 1)


def run_rank(host, rank, streams, repeats):
    """Messages of all sizes, many in flight; how many have arrived broken."""
    slots = Slots(rank, host.outboxes, Handle(host, rank), 1)
    queues: list[Any] = [deque() for _ in range(streams)]
    size, wrong = host.world_size, []
    for number in range(repeats):
        random = Random(number)  # alike on all ranks
        step = random.randrange(1, size)
        sizes = [random.choice([None, 0, 1, 7, 8, 9, 50]) for _ in range(size)]
        to, source = (rank + step) % size, (rank - step) % size

        def message(sender, number=number, sizes=sizes):
            return torch.full((sizes[sender],), (31 * number + sender) % 255, dtype=torch.uint8)

        send = None if sizes[rank] is None else (to, message(rank))
        receive = None
        if sizes[source] is not None:
            receive = source, torch.full((sizes[source],), 255, dtype=torch.uint8)
            wrong.append((receive[1], message(source)))
        for sends, act in slots.acts(send, receive):
            queues[sends % streams].append(act)

    late = Random(rank)

    def work(queue):
        for act in queue:
            if late.random() < 0.05:
                time.sleep(0.002)
            act()

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(work, queues))
    return sum(not torch.equal(got, want) for got, want in wrong), len(wrong)


@pytest.mark.parametrize("streams", [2, 1], ids=["two streams", "one hardware queue"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages(world_size, streams):
    """Also where a device does everything in the order in which it was told to."""
    host = Host(world_size, slot_bytes=8)
    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(lambda rank: run_rank(host, rank, streams, 200), range(world_size)))
    assert all(broken == 0 for broken, _ in found)
    assert sum(count for _, count in found) > 100
