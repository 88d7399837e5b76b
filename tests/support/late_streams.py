"""Streams without a device: what is queued on the side stream is done as late as it may be.

Put `late_streams` around calls on loopback ranks. A rank's computing stream is its thread. What an
`Accumulator` queues on the side stream reads what it adds to early and writes it late: whatever the
computing stream writes there in between, without waiting, is lost. Tensors are not kept alive by
what is queued: memory that is freed before it was waited for fails the test, as another tensor
could be made of it on a device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from ring_dilated_attention.engine import accumulate
from ring_dilated_attention.exchange import Exchange


class Weak:
    """A tensor that may be freed."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype = tensor.dtype
        self.view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "memory is freed that the side stream has yet to use"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


def weakened(add_all):
    """The function of a `partial`, and its arguments with every tensor a `Weak`."""

    def weak(x):
        return Weak(x) if isinstance(x, torch.Tensor) else x

    return add_all.func, tree_map(weak, (add_all.args, add_all.keywords))


class Late:
    """What has been queued."""

    def __init__(self, add_all, into):
        self.function, self.arguments = weakened(add_all)
        storages = {x.untyped_storage()._cdata for x in into}
        leaves = [x for x in tree_leaves(self.arguments) if isinstance(x, Weak)]
        self.totals = [x for x in leaves if x.storage.cdata in storages]
        self.before: list[tuple[Weak, torch.Tensor]] = []

    def begin(self):
        """Read what is to be added to."""
        if not self.before:
            self.before = [(x, x.tensor().clone()) for x in self.totals]

    def end(self):
        """Wait for what has to be waited for, add it, and write the sums."""
        self.begin()
        sums = {id(total): (before, before.clone()) for total, before in self.before}

        def read(x):
            if not isinstance(x, Weak):
                return x
            return sums[id(x)][1] if id(x) in sums else x.tensor()

        args, keywords = tree_map(read, self.arguments)
        self.function(*args, **keywords)
        for weak, _ in self.before:
            before, after = sums[id(weak)]
            same = (before == after) | (before.isnan() & after.isnan())
            total = weak.tensor()
            total.copy_(torch.where(same, total, after))


class LateStreams:
    """The streams of a rank.

    Args:
        seed: of when the side stream goes on although nobody waits for it.
        early: how likely it is to, whenever something is queued or waited for.
    """

    def __init__(self, seed, early):
        self.random, self.early = Random(seed), early
        self.queue: deque[Late] = deque()
        self.kept: list[torch.Tensor] = []
        self.queued = 0

    def run(self, add_all, into):
        late = Late(add_all, into)
        self.queue.append(late)
        self.queued += 1
        self.go_on()
        return late

    def wait(self, late):
        while any(late is x for x in self.queue):
            self.queue.popleft().end()
        self.go_on()

    def outlast(self, tensors):
        self.kept.extend(tensors)

    def go_on(self):
        while self.queue and self.random.random() < self.early:
            self.queue.popleft().end()
        if self.queue:
            self.queue[0].begin()


class LateExchange:
    """A loopback end through which messages arrive when they are waited for, not before."""

    def __init__(self, ends: Exchange):
        self.rank, self.world_size, self.sent_bytes = ends.rank, ends.world_size, 0
        self.share, self.calls = ends.share, ends.calls
        self.begin = ends.begin
        self._ends = ends

    def start(self, send, receive):
        if receive is None:
            return self._ends.start(send, None)
        sender, into = receive
        arrived = torch.empty_like(into)
        return Arrival(self._ends.start(send, (sender, arrived)), arrived, Weak(into))


class Arrival:
    """A message on its way."""

    def __init__(self, pending, arrived, into):
        self._pending, self._arrived, self._into = pending, arrived, into

    def wait(self):
        self._pending.wait()
        self._into.tensor().copy_(self._arrived)


@contextmanager
def late_streams(seed: int, early: float) -> Iterator[list[LateStreams]]:
    """Give every `Accumulator` that is made in here late streams; yields those."""
    made: list[LateStreams] = []
    lock = threading.Lock()

    def streams_of(device):
        with lock:
            made.append(LateStreams(seed + len(made), early))
            return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulate, "streams_of", streams_of)
        yield made
