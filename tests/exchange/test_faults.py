"""One rank does something wrong: every rank ends, in time, and none is left with a wrong number.

`make test` tries a few faults, the rest is for ``pytest -m faults``.
"""

import json
import os
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.launched import forked_context

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.engine import compute
from ring_dilated_attention.exchange import ProcessGroupExchange, groups

# One worker has them all: much of their time ranks wait, and the other computes meanwhile.
pytestmark = pytest.mark.xdist_group("faults")

TIMEOUT_S = 3.0  # of the groups where a rank is stopped; it is minutes elsewhere
GRACE_S = 6.0
MOST_S = 60.0  # so long ranks may take to end


class Rank:
    """What a rank does: calls over a group of all ranks, each compared with the reference."""

    pattern = DilatedPattern([16, None], [1, 3])

    def __init__(self, rank, world_size, victim, device, group, note):
        self.rank, self.world_size, self.is_victim = rank, world_size, rank == victim
        self.device, self.group, self.fault = device, group, note
        self.layout = SequenceLayout.zigzag(61, world_size)
        self.calls = 0

    def call(self, pattern=None):
        """A forward, of inputs that need gradients and differ from call to call."""
        self.calls += 1
        pattern, is_gpu = pattern or self.pattern, self.device.type == "cuda"
        generator = torch.Generator().manual_seed(self.calls)
        whole = torch.randn(3, 1, 61, 4, 16, generator=generator)
        whole = whole.to(self.device, torch.float16 if is_gpu else torch.float32)
        query, key, value = (self.layout.shard(x, self.rank, 1).requires_grad_() for x in whole)
        options: dict[str, Any] = {"group": self.group, "layout": self.layout}
        out = dilated_attention(query, key, value, pattern, is_causal=True, **options)
        want = reference_attention(whole[0], whole[1], whole[2], pattern, is_causal=True)[0]
        error = (out - self.layout.shard(want, self.rank, 1)).abs().max() if out.numel() else 0
        assert error < (1e-2 if is_gpu else 1e-4), f"WRONG NUMBER in call {self.calls}: {error}"
        return out

    def warm_up(self):
        """Calls that go well: numbers 1, 2 and 3."""
        self.call().sum().backward()
        self.call()

    def die(self, how):
        """End this process, stop it for good, or raise an error."""
        self.fault()
        if how == "error":
            raise MemoryError("no memory for a tile")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        while True:  # it is the main thread that is told to stop; this one may run on a little
            time.sleep(1)


def before_the_first_call(me, how):
    if me.is_victim:
        me.die(how)
    me.call()


def between_calls(me, how):
    me.warm_up()
    if me.is_victim:
        me.die(how)
    me.call().sum().backward()


def in_forward(me, how):
    """In the middle: its rows are sent, or not, and those of others are waited for."""
    me.warm_up()
    if me.is_victim:
        compute.forward = lambda *a, **k: me.die(how)
    me.call().sum().backward()


def in_backward(me, how):
    me.warm_up()
    out = me.call()
    if me.is_victim:
        compute.backward = lambda *a, **k: me.die(how)
    out.sum().backward()


def skipped_forward(me, how):
    """One rank leaves a forward out; the next call is another one."""
    me.warm_up()
    first = me.call()
    if me.is_victim:
        me.fault()
        me.calls += 1
    else:
        second = me.call()
    if how == "end":
        return
    (first if me.is_victim else first * second.detach()).sum().backward()


def other_backward(me, how):
    """One rank's backward comes in another order, or not at all."""
    me.warm_up()
    first, second = me.call(), me.call()
    if me.is_victim:
        me.fault()
        if how == "order":
            first, second = second, first
    if how == "order" or not me.is_victim:
        first.sum().backward()
    second.sum().backward()
    me.call()


def other_arguments(me, how):
    me.warm_up()
    if me.is_victim:
        me.fault()
    me.call(DilatedPattern([7], [1]) if me.is_victim else None)


def other_version(me, how):
    if me.is_victim:
        me.fault()
        pytest.MonkeyPatch().setattr(groups, "__version__", "0.0.1")
    me.call()


class Fault(NamedTuple):
    """A fault.

    Attributes:
        program: what every rank does.
        how: which variant of it.
        blames: a pattern that the errors of the other ranks match; {victim} is the rank.
        says: a pattern that the victim's error matches; None: it has none.
        goes_on: whether all ranks make another call after the error.
        times_out: whether the others wait until the timeout; always so where a rank is stopped.
    """

    program: Any
    how: str = ""
    blames: str = r"ExchangeError: .*this is rank \d"
    says: str | None = None
    goes_on: bool = False
    times_out: bool = False


_FAILED = r"rank {victim} failed in call \d+ \(.*MemoryError: no memory for a tile"
_DIFFER = r"ExchangeError: ranks are in different calls.*rank {victim} in call \d+ \(dilated_att"
_ARGUMENTS = r"ValueError: .*pattern is .* on rank {victim}"

FAULTS = {
    "killed before the first call": Fault(before_the_first_call, "kill", times_out=True),
    "killed between calls": Fault(between_calls, "kill"),
    "stopped between calls": Fault(between_calls, "stop"),
    "killed in forward": Fault(in_forward, "kill"),
    "error in forward": Fault(in_forward, "error", _FAILED, "no memory"),
    "killed in backward": Fault(in_backward, "kill"),
    "stopped in backward": Fault(in_backward, "stop"),
    "error in backward": Fault(in_backward, "error", _FAILED, "no memory"),
    "skipped forward": Fault(skipped_forward, "", _DIFFER, _DIFFER, goes_on=True),
    "skipped forward, then the end": Fault(skipped_forward, "end"),
    "skipped backward": Fault(other_backward, "skip", _DIFFER, _DIFFER, goes_on=True),
    "other order": Fault(other_backward, "order", _DIFFER, _DIFFER, goes_on=True),
    "other arguments": Fault(other_arguments, "", _ARGUMENTS, _ARGUMENTS, goes_on=True),
    "another version": Fault(
        other_version, "", r"one version of .* 0\.0\.1 on rank {victim}", "one version of"
    ),
}


def is_timed(fault):
    return fault.times_out or fault.how == "stop"


ALWAYS = ["killed in forward", "stopped in backward", "error in forward", "skipped forward"]


def rank_main(rank, world_size, victim, name, folder, backend):
    torch.set_num_threads(1)
    fault = FAULTS[name]
    said: list[str] = []
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if backend != "gloo":
        torch.cuda.set_device(device)
    path = Path(folder, f"rank{rank}.json")
    mes: list[Rank] = []

    def run():
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(Path(folder, "store")), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S if is_timed(fault) else 120),
        )
        dist.barrier()
        assert dist.group.WORLD is not None
        ends = ProcessGroupExchange(dist.group.WORLD)
        me = Rank(rank, world_size, victim, device, ends, Path(folder, "fault").touch)
        mes.append(me)
        fault.program(me, fault.how)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for part in [run, lambda: mes[0].call(Rank.pattern)][: 1 + fault.goes_on]:
        try:
            if said:
                mes[0].calls = 100  # alike on all ranks again
            part()
            said.append("")
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")
    path.with_suffix(".new").write_text(json.dumps([time.time(), *said]))
    path.with_suffix(".new").rename(path)
    os._exit(0)  # as it is: nobody is to wait for anybody here


def outcomes_of(name, world_size, victim, backend):
    """Of each rank: seconds after the fault, what it said, and what it said when it went on."""
    context = forked_context()
    with tempfile.TemporaryDirectory() as folder:
        given = world_size, victim, name, folder, backend
        processes = [
            context.Process(target=rank_main, args=(rank, *given)) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + MOST_S
        for rank, process in enumerate(processes):
            if rank != victim or FAULTS[name].says is not None:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        begun = Path(folder, "fault").stat().st_mtime
        found = [Path(folder, f"rank{rank}.json") for rank in range(world_size)]
        texts = [json.loads(path.read_text()) if path.exists() else [] for path in found]
        return [(text[0] - begun, *text[1:]) if text else None for text in texts]


def check(name, world_size, victim, backend="gloo"):
    fault = FAULTS[name]
    outcomes = outcomes_of(name, world_size, victim, backend)
    limit = GRACE_S + TIMEOUT_S * is_timed(fault)
    for rank, outcome in enumerate(outcomes):
        wanted = fault.says if rank == victim else fault.blames
        if wanted is None:
            continue
        assert outcome is not None, f"rank {rank} had not ended after {MOST_S} s"
        seconds, said, *again = outcome
        wanted = wanted.replace("{victim}", str(victim)).replace("rank ", r"ranks? (?:\d, )*")
        assert re.search(wanted, said, re.DOTALL), f"rank {rank}: {outcome}"
        assert seconds < limit, f"rank {rank}: {outcome}"
        assert again == [""] * fault.goes_on, f"rank {rank}: {outcome}"


@pytest.mark.parametrize("name", ALWAYS)
def test_dilated_attention_on_faulty_ranks(name):
    check(name, 3, 1)


@pytest.mark.faults
@pytest.mark.parametrize(("world_size", "victim"), [(3, 1), (2, 0)])
@pytest.mark.parametrize("name", FAULTS)
def test_dilated_attention_on_all_faulty_ranks(name, world_size, victim):
    check(name, world_size, victim)


ON_GPUS = [name for name, fault in FAULTS.items() if fault.goes_on or "before" in name]


@pytest.mark.gpu
@pytest.mark.faults
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ON_GPUS)
def test_dilated_attention_on_faulty_gpus(name):
    """Faults that hosts find. Streams that wait for a rank that has ended do until the timeout."""
    check(name, 2, 1, "cpu:gloo,cuda:nccl")
