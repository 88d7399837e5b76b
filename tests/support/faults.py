"""What a rank may do wrong, each a program for all ranks, and what the others are to say of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    dilated_attention,
)
from ring_dilated_attention.engine import compute
from ring_dilated_attention.exchange import ProcessGroupExchange
from ring_dilated_attention.exchange import groups as exchange_module
from support import streamed_messages


class Rank:
    """What a rank does: calls over a group of all ranks.

    Args:
        rank: this rank.
        world_size: number of ranks.
        victim: the rank that does something wrong.
        device: where the tensors are.
        group: through which rows travel.
        note: told when the fault begins.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        victim: int,
        device: torch.device,
        group: ProcessGroupExchange,
        note: Callable[[], None],
    ) -> None:
        self.rank, self.world_size, self.is_victim = rank, world_size, rank == victim
        self.device, self.group, self._note = device, group, note
        self.stays = False
        self.layout = SequenceLayout.zigzag(61, world_size)
        self.pattern = DilatedPattern([16, None], [1, 3])
        torch.manual_seed(rank)

    def call(self, *, pattern: DilatedPattern | None = None) -> torch.Tensor:
        """A forward, of inputs that need gradients."""
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        shape = 1, self.layout.local_length(self.rank), 4, 16
        tensors = [torch.randn(shape, device=self.device, dtype=dtype) for _ in range(3)]
        query, key, value = (x.requires_grad_() for x in tensors)
        return dilated_attention(
            query,
            key,
            value,
            pattern or self.pattern,
            is_causal=True,
            group=self.group,
            layout=self.layout,
        )

    def cache(self) -> DilatedKVCache:
        """A KV cache that all ranks share."""
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        return DilatedKVCache(
            self.pattern,
            batch=1,
            num_kv_heads=4,
            head_dim=16,
            max_length=100,
            dtype=dtype,
            device=self.device,
            group=self.group,
            sharded=True,
        )

    def prefill(self, cache: DilatedKVCache) -> None:
        """Fill a cache with a prompt, of which each rank has a shard."""
        rows = torch.randn(1, self.layout.local_length(self.rank), 4, 16, device=self.device)
        cache.prefill(rows.to(cache.keys), rows.to(cache.keys), layout=self.layout)

    def decode(self, cache: DilatedKVCache) -> None:
        """Attend from one new position."""
        row = torch.ones(1, 1, 4, 16, device=self.device).to(cache.keys)
        cached_attention(row, row, row, cache)

    def warm_up(self) -> None:
        """Calls that go well: numbers 1, 2 and 3."""
        self.call().sum().backward()
        self.call()
        self.synchronize()

    def go_on(self) -> None:
        """A call that goes well after all ranks have raised an error."""
        self.call().sum().backward()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        streamed_messages.synchronize()

    def fault(self) -> None:
        """Say that the fault begins now."""
        self._note()

    def die(self, how: str) -> None:
        """End this process, or stop it for good."""
        self.fault()
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        while True:  # it is the main thread that is told to stop; this one may run on a little
            time.sleep(1)

    def stay(self) -> None:
        """Stay alive, and in no call, until everybody else has ended."""
        self.stays = True


def between_calls(me: Rank, how: str) -> None:
    me.warm_up()
    if me.is_victim:
        me.die(how)
    me.call().sum().backward()
    me.synchronize()


def in_the_first_call(me: Rank, how: str) -> None:
    if me.is_victim:
        me.die(how)
    me.call()
    me.synchronize()


def in_a_tile(me: Rank, how: str) -> None:
    """In the middle of forward: its rows are sent, or not, and those of others are waited for."""
    me.warm_up()
    if me.is_victim:
        compute.forward = lambda *a, **k: me.die(how)
    me.call().sum().backward()
    me.synchronize()


def in_a_message(me: Rank, how: str) -> None:
    """A part of a large message has come, which gloo does not say when the rest never does."""
    me.warm_up()
    sent, received = torch.zeros(2, 2**24, device=me.device)
    to, source = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    with me.group.calls.enter("dilated_attention", "forward"):
        pending = me.group.start((to, sent), (source, received))
        if me.is_victim:
            time.sleep(0.005)
            me.die(how)
        pending.wait()
    me.call()
    me.synchronize()


def in_backward(me: Rank, how: str) -> None:
    me.warm_up()
    out = me.call()
    if me.is_victim:
        compute.backward = lambda *a, **k: me.die(how)
    out.sum().backward()
    me.synchronize()


def error_in_a_tile(me: Rank, how: str) -> None:
    """An exception on one rank, in the middle of a call; it may be caught."""
    me.warm_up()
    if not me.is_victim:
        me.call().sum().backward()
        me.synchronize()
        return
    forward = compute.forward

    def fail(*args: Any, **options: Any) -> None:
        me.fault()
        raise MemoryError("no memory for a tile")

    compute.forward = fail
    try:
        me.call()
    except MemoryError:
        if how == "uncaught":
            raise
        compute.forward = forward
        try:
            me.call()  # refused: the others have given this group up
        finally:
            me.stay()


def skipped_call(me: Rank, how: str) -> None:
    """One rank leaves a call out; the next one is the backward of another."""
    me.warm_up()
    first = me.call()
    second = None
    if me.is_victim:
        me.fault()
    else:
        if how == "backward, late":  # the victim has begun its backward, and left that, too
            time.sleep(0.5)
        second = me.call()
    if how.startswith("backward"):
        loss = first.sum() if second is None else (first * second).sum()
        loss.backward()
    elif how == "other arguments":
        me.call(pattern=DilatedPattern([7], [1]))
    elif me.is_victim and how == "stays":
        me.stay()
    me.synchronize()


def skipped_where_nothing_travels(me: Rank, how: str) -> None:
    """Nobody waits for rows, so ranks learn of it in the next call."""
    me.warm_up()
    alone = DilatedPattern([1], [1])
    me.call(pattern=alone).sum().backward()  # compiles its kernels before the fault
    me.call()  # its rows travel, so that no rank goes on before all have compiled
    me.synchronize()
    first = me.call(pattern=alone)
    if me.is_victim:
        me.fault()
    else:
        me.call(pattern=alone)
    first.sum().backward()
    me.call(pattern=alone)


def other_order(me: Rank, how: str) -> None:
    me.warm_up()
    first, second = me.call(), me.call()
    if me.is_victim:
        me.fault()
        first, second = second, first
    first.sum().backward()
    if how == "swapped" or not me.is_victim:
        second.sum().backward()
    me.synchronize()


def recomputed(me: Rank, how: str) -> None:
    """One rank checkpoints its activations, and computes forward again in backward."""
    me.warm_up()
    x = torch.zeros((), device=me.device, requires_grad=True)
    runs = []

    def function(y: torch.Tensor) -> torch.Tensor:
        runs.append(y)
        if len(runs) == 2:
            me.fault()
        return me.call() + y

    out = checkpoint(function, x, use_reentrant=False) if me.is_victim else me.call() + x
    out.sum().backward()
    me.synchronize()


def two_threads(me: Rank, how: str) -> None:
    me.warm_up()
    failures: list[BaseException] = []

    def many() -> None:
        try:
            for _ in range(200):
                me.call().sum().backward()
        except BaseException as error:
            failures.append(error)

    if me.is_victim or how == "everywhere":
        me.fault()
        threads = [threading.Thread(target=many, name=f"user {i}") for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        many()
    me.synchronize()
    if failures:
        raise failures[0]


def other_version(me: Rank, how: str) -> None:
    if me.is_victim:
        me.fault()
        pytest.MonkeyPatch().setattr(exchange_module, "__version__", "0.0.1")
    me.call()


def in_prefill(me: Rank, how: str) -> None:
    """In the middle of a prompt: before any row of it has been sent."""
    me.warm_up()
    cache = me.cache()
    if me.is_victim:
        pytest.MonkeyPatch().setattr(type(cache.slots), "keep", lambda *a: ended(me, how))
    try:
        me.prefill(cache)
        me.synchronize()
    finally:
        assert me.is_victim or cache.known_lengths == (0,), "half a prompt is none"


def in_decoding(me: Rank, how: str) -> None:
    """In the middle of a token: the results of ranks are yet to be brought together."""
    me.warm_up()
    cache = me.cache()
    me.prefill(cache)
    for _ in range(3):
        me.decode(cache)
    me.synchronize()
    if me.is_victim:
        cache.advanced = lambda count: ended(me, how)  # type: ignore[method-assign]
    me.decode(cache)
    me.synchronize()


def ended(me: Rank, how: str) -> None:
    """End this process, stop it, or raise an error."""
    if how != "error":
        me.die(how)
    me.fault()
    raise MemoryError("no memory for a row")


class Fault(NamedTuple):
    """A fault, and what the others are to say of it.

    Attributes:
        program: what every rank does.
        how: which variant of it.
        blames: a pattern that the errors of the other ranks match; {victim} is the rank.
        stops: whether the victim stays alive, so that the others wait for the timeout.
        says: a pattern that the victim's error matches; None: it has none, or none that it can say.
        goes_on: whether all ranks make another call after the error, within the same time.
    """

    program: Callable[[Rank, str], None]
    how: str
    blames: str
    stops: bool = False
    says: str | None = None
    goes_on: bool = False


_THREADS = r"threads? ('user \d'|one of autograd)"
_ENDED = r"rank {victim} has gone.*call \d+ \(dilated_attention"
_GONE = _ENDED + r".*this is rank \d"
_SILENT = r"rank {victim} did not answer within 3 s.*this is rank \d"
_IN_PREFILL = r"call 4 \(DilatedKVCache.prefill, forward\)"
IN_DECODING = r"call 8 \(cached_attention, forward\)"
_DIFFER = r"ranks are in different calls.*rank {victim} in call \d+ \(dilated_attention"

FAULTS = {
    "killed between calls": Fault(between_calls, "kill", _GONE),
    "exited between calls": Fault(between_calls, "exit", _GONE),
    "stopped between calls": Fault(between_calls, "stop", _SILENT, stops=True),
    "killed before the first call": Fault(in_the_first_call, "kill", "rank {victim} .*first call"),
    "stopped before the first call": Fault(
        in_the_first_call, "stop", "rank {victim} did not .*first call", stops=True
    ),
    "killed in forward": Fault(in_a_tile, "kill", _GONE),
    "stopped in forward": Fault(in_a_tile, "stop", _SILENT, stops=True),
    "killed in a message": Fault(in_a_message, "kill", _ENDED),  # some are between two calls
    "killed in backward": Fault(in_backward, "kill", _GONE),
    "stopped in backward": Fault(in_backward, "stop", _SILENT, stops=True),
    "error in a tile": Fault(
        error_in_a_tile,
        "uncaught",
        r"rank {victim} failed in call 4 \(dilated_attention, forward\): MemoryError: no memory",
        says="no memory for a tile",
    ),
    "error in a tile, caught": Fault(
        error_in_a_tile,
        "caught",
        r"rank {victim} failed in call 4 \(dilated_attention, forward\): MemoryError: no memory",
        says="cannot be used any more",
    ),
    "skipped call, backward": Fault(skipped_call, "backward", _DIFFER, says=_DIFFER),
    "skipped call, late backward": Fault(skipped_call, "backward, late", _DIFFER, says=_DIFFER),
    "skipped call, other arguments": Fault(
        skipped_call, "other arguments", "pattern is .* on rank {victim}", says="pattern is"
    ),
    "skipped call, then the end": Fault(skipped_call, "ends", _GONE),
    "skipped call, then nothing": Fault(skipped_call, "stays", _SILENT, stops=True),
    "skipped call, nothing travels": Fault(
        skipped_where_nothing_travels, "", _DIFFER, says=_DIFFER, goes_on=True
    ),
    "other order of backward": Fault(other_order, "swapped", _DIFFER, says=_DIFFER),
    "a call left out of the loss": Fault(other_order, "left out", _DIFFER, says=_DIFFER),
    "checkpoint on one rank": Fault(recomputed, "", _DIFFER, says=_DIFFER),
    "two threads on one rank": Fault(
        two_threads, "", rf"rank {{victim}}\b.* {_THREADS}", says=_THREADS
    ),
    "two threads on all ranks": Fault(two_threads, "everywhere", _THREADS, says=_THREADS),
    **{
        f"{name} in {where}": fault
        for where, act, call in (
            ("prefill", in_prefill, _IN_PREFILL),
            ("decoding", in_decoding, IN_DECODING),
        )
        for name, fault in {
            "killed": Fault(act, "kill", rf"rank {{victim}} has gone.*{call}.*this is rank \d"),
            "stopped": Fault(act, "stop", _SILENT, stops=True),
            "error": Fault(
                act,
                "error",
                rf"rank {{victim}} failed in {call}: MemoryError: no memory",
                says="no memory for a row",
            ),
        }.items()
    },
    "another version": Fault(
        other_version, "", r"one version of .* 0\.0\.1 on rank {victim}", says="one version of"
    ),
}
