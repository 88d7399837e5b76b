"""Ranks of which one does something wrong, as real processes over gloo or NCCL: what the rest say.

Run by `test_faults`, and as a command for many rounds:

    python tests/faulty_ranks.py --rounds 10 --ranks 2,3,5
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import streamed_messages
import torch
import torch.distributed as dist
from several_hosts import Host, several_hosts
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    dilated_attention,
)
from ring_dilated_attention.checks import forked_context
from ring_dilated_attention.engine import compute
from ring_dilated_attention.exchange import ExchangeError, ProcessGroupExchange, collectives
from ring_dilated_attention.exchange import groups as exchange_module

TIMEOUT_S = 3.0
"""Of the groups, where a rank is stopped; it is minutes where one has ended."""
LONG_S = 120.0
GRACE_S = 5.0
MOST_S = 60.0
"""So long ranks may take to end."""
LINGER_S = 0.3
"""So long a rank goes on after it has raised an error, or should have: it is told nothing more."""
STDERR_LINES = 30
EXPECTED = 3  # calls that go well before the fault: forward, backward, forward


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
    """Nobody waits for rows, so ranks learn of it in the next call; then they go on together."""
    me.warm_up()
    alone = DilatedPattern([1], [1])
    me.call(pattern=alone).sum().backward()  # compiles its kernels before the fault
    first = me.call(pattern=alone)
    try:
        if me.is_victim:
            me.fault()
        else:
            me.call(pattern=alone)
        first.sum().backward()
        me.call(pattern=alone)
    except ExchangeError:
        me.call().sum().backward()
        me.synchronize()
        raise


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


def one_call_more(me: Rank, how: str) -> None:
    """All ranks but one call once more, and that one ends, or stays."""
    me.warm_up()
    if me.is_victim:
        me.fault()
        if how == "stays":
            me.stay()
        return
    me.call()
    me.synchronize()


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
    """

    program: Callable[[Rank, str], None]
    how: str
    blames: str
    stops: bool = False
    says: str | None = None


_ENDED = r"rank {victim} has gone.*call \d+ \(dilated_attention"
_GONE = _ENDED + r".*this is rank \d"
_SILENT = r"rank {victim} did not answer within 3 s.*this is rank \d"
_IN_PREFILL = r"call 4 \(DilatedKVCache.prefill, forward\)"
_IN_DECODING = r"call 8 \(cached_attention, forward\)"
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
        skipped_where_nothing_travels, "", _DIFFER, says=_DIFFER
    ),
    "other order of backward": Fault(other_order, "swapped", _DIFFER, says=_DIFFER),
    "a call left out of the loss": Fault(other_order, "left out", _DIFFER, says=_DIFFER),
    "checkpoint on one rank": Fault(recomputed, "", _DIFFER, says=_DIFFER),
    "two threads on one rank": Fault(
        two_threads, "", r"rank {victim}\b.* threads? 'user \d'", says=r"threads? 'user \d'"
    ),
    "two threads on all ranks": Fault(
        two_threads, "everywhere", r"threads? 'user \d'", says=r"threads? 'user \d'"
    ),
    "one call more than a rank that ends": Fault(one_call_more, "ends", _GONE),
    "one call more than a rank that stays": Fault(one_call_more, "stays", _SILENT, stops=True),
    "killed in prefill": Fault(
        in_prefill, "kill", r"rank {victim} has gone.*" + _IN_PREFILL + r".*this is rank \d"
    ),
    "stopped in prefill": Fault(in_prefill, "stop", _SILENT, stops=True),
    "error in prefill": Fault(
        in_prefill,
        "error",
        r"rank {victim} failed in " + _IN_PREFILL + ": MemoryError: no memory",
        says="no memory for a row",
    ),
    "killed in decoding": Fault(
        in_decoding, "kill", r"rank {victim} has gone.*" + _IN_DECODING + r".*this is rank \d"
    ),
    "stopped in decoding": Fault(in_decoding, "stop", _SILENT, stops=True),
    "error in decoding": Fault(
        in_decoding,
        "error",
        r"rank {victim} failed in " + _IN_DECODING + ": MemoryError: no memory",
        says="no memory for a row",
    ),
    "another version": Fault(
        other_version, "", r"one version of .* 0\.0\.1 on rank {victim}", says="one version of"
    ),
}


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        error: what it raised.
        seconds: how long after the fault.
        status: its exit status.
        again: what it was told after that, or after its program had ended without an error.
        stderr: its first and last lines.
    """

    error: str
    seconds: float
    status: int | None
    again: str = ""
    stderr: str = ""

    def __str__(self) -> str:
        text = f"said {self.error!r} (exit status {self.status})"
        if self.again:
            text += f", and then {self.again!r}"
        return f"{text}; stderr: {self.stderr or 'nothing'}"


class Transport(NamedTuple):
    """How ranks reach each other.

    Attributes:
        backend: of torch.distributed; ``"streams"``: see `streamed_messages`.
        copies: whether rows travel by copies between GPUs.
        board: whether ranks of one host may agree in shared memory, which those of several cannot.
        cpu: whether the group itself may be used to agree on the CPU, which one of NCCL cannot.
        hosts: host of each rank: of namespaces with gloo, and as the group is told otherwise;
            empty: all are on one.
    """

    backend: str = "gloo"
    copies: bool = False
    board: bool = True
    cpu: bool = True
    hosts: tuple[int, ...] = ()


GLOO = Transport()


def _rank_main(
    rank: int,
    world_size: int,
    victim: int,
    name: str,
    folder: str,
    transport: Transport,
    hosts: Sequence[Host],
) -> None:
    backend, copies, board, cpu, places = transport
    if hosts:
        hosts[places[rank]].enter()
    if not cpu:
        pytest.MonkeyPatch().setattr(collectives, "takes_cpu", lambda group: False)
    if not board:
        pytest.MonkeyPatch().setattr(exchange_module, "make_board", lambda *args: None)
    torch.set_num_threads(1)
    keep_stderr(Path(folder, f"rank{rank}.stderr"))
    device = torch.device("cpu")
    if backend == "streams":
        streamed_messages.use_streams(pytest.MonkeyPatch(), exchange_module)
        backend = "gloo"
    if backend != "gloo":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    mes: list[Rank] = []

    def run() -> None:
        dist.init_process_group(
            backend,
            store=_store(
                Path(folder, "store"),
                rank,
                world_size,
                hosts[0].address if hosts else "127.0.0.1" if not board or places else None,
            ),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=LONG_S),
        )
        Path(folder, f"met{rank}").touch()
        while not all(Path(folder, f"met{r}").exists() for r in range(world_size)):
            time.sleep(0.01)
        group = dist.group.WORLD
        assert group is not None
        ends = ProcessGroupExchange(
            group,
            timeout=TIMEOUT_S if waits_for_timeout(name, transport) else LONG_S,
            peer_memory=copies if device.type == "cuda" else None,
            hosts=places if places and not hosts else None,
        )
        note = Path(folder, "fault").touch
        mes.append(Rank(rank, world_size, victim, device, ends, note))
        FAULTS[name].program(mes[0], FAULTS[name].how)

    said = what_is_said(run, 0 if transport.backend == "gloo" else LINGER_S)
    _write(Path(folder, f"rank{rank}.json"), json.dumps(said))
    if mes and mes[0].stays:
        time.sleep(60)
    sys.stdout.flush()
    os._exit(1 if said[0] else 0)  # as it is: nobody is to wait for anybody here


def what_is_said(run: Callable[[], None], lingers: float) -> tuple[str, float, str]:
    """What a function raises, when it ended, and what it is told after that.

    Args:
        run: the function.
        lingers: seconds to wait for the latter, which a thread that watches streams may have to say
            too late, be it where the first error is handled.
    """
    error, when, again = "", 0.0, ""
    try:
        try:
            run()
        except BaseException as raised:
            error, when = f"{type(raised).__name__}: {raised}", time.time()
        deadline = time.monotonic() + lingers
        while time.monotonic() < deadline:
            time.sleep(0.01)
    except BaseException as raised:
        again = f"{type(raised).__name__}: {raised}"
    return error, when or time.time(), again


def keep_stderr(path: Path) -> None:
    """Have a file of what this process writes to stderr: where it is if it crashes, or hangs."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(0.9 * MOST_S, file=2)


def ends_of(path: Path) -> str:
    """The first and last lines of a file, if there is one."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = [line for line in lines if line.strip() and not line.startswith("frame #")]  # torch's
    if len(lines) > 2 * STDERR_LINES:  # what it said, and where it crashed
        lines[STDERR_LINES:-STDERR_LINES] = ["..."]
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    """Write a file that nobody sees before it is whole."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _store(path: Path, rank: int, world_size: int, address: str | None) -> dist.Store:
    """Where the ranks meet: a port of the first rank's process, or, without an address, a file."""
    if address is None:
        return dist.FileStore(str(path), world_size)
    if rank == 0:
        store = dist.TCPStore(address, 0, world_size, True, wait_for_workers=False)
        _write(path, str(store.port))
        return store
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore(address, int(path.read_text()), world_size, False)


def run_fault(
    name: str, world_size: int, victim: int, transport: Transport = GLOO
) -> list[Outcome]:
    """Run ranks of which one does something wrong.

    Args:
        name: of the fault.
        world_size: number of ranks.
        victim: which one.
        transport: how they reach each other.

    Returns:
        How the ranks ended, by rank. Those that had not after `MOST_S` are killed.
    """
    context = forked_context()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        hosts: list[Host] = []
        if transport.hosts and transport.backend == "gloo":
            hosts = stack.enter_context(several_hosts(max(transport.hosts) + 1))
        processes = [
            context.Process(
                target=_rank_main, args=(rank, world_size, victim, name, folder, transport, hosts)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + MOST_S
        for process in (p for rank, p in enumerate(processes) if rank != victim):
            process.join(max(0.0, deadline - time.monotonic()))
        if FAULTS[name].says is not None:
            while processes[victim].is_alive() and not Path(folder, f"rank{victim}.json").exists():
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    break
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        begun = Path(folder, "fault").stat().st_mtime if Path(folder, "fault").exists() else 0.0
        outcomes = []
        for rank, process in enumerate(processes):
            found = Path(folder, f"rank{rank}.json")
            error, when, again = "", begun, ""
            if found.exists():
                error, when, again = json.loads(found.read_text())
            stderr = ends_of(Path(folder, f"rank{rank}.stderr"))
            outcomes.append(Outcome(error, when - begun, process.exitcode, again, stderr))
    return outcomes


def waits_for_timeout(name: str, transport: Transport) -> bool:
    """Whether the others can know of the fault by the timeout alone.

    Before a group's first call its ranks know nothing of each other, unless gloo connects them.
    """
    is_connected = transport.cpu and transport.backend != "nccl"
    is_first = FAULTS[name].program is in_the_first_call
    return FAULTS[name].stops or (is_first and not is_connected)


def problems(
    name: str,
    world_size: int,
    victim: int,
    outcomes: list[Outcome],
    transport: Transport = GLOO,
) -> list[str]:
    """What is not as it should be."""
    fault, found = FAULTS[name], []
    limit = GRACE_S + TIMEOUT_S * waits_for_timeout(name, transport)
    for rank, outcome in enumerate(outcomes):
        wanted = fault.says if rank == victim else fault.blames
        if wanted is None:
            continue
        if not transport.board or transport.hosts:  # where nobody may have heard of its last call
            wanted = wanted.replace(_IN_DECODING + ".*this", r"call [78] \(cached_attention.*this")
        wanted = wanted.replace("{victim}", str(victim)).replace("rank ", r"ranks? (?:\d, )*")
        if not re.search(wanted, outcome.error, re.DOTALL):
            found.append(f"rank {rank} was to say {wanted!r}, but {outcome}")
        elif outcome.again:
            found.append(f"rank {rank} had more to say: {outcome}")
        elif rank != victim and outcome.seconds > limit:
            found.append(f"rank {rank} ended after {outcome.seconds:.1f} s")
        if rank != victim and outcome.status != 1:
            found.append(f"rank {rank} was to exit with 1, but {outcome}")
    return found


def leftovers() -> set[str]:
    """Names of this package in shared memory and in the folder of temporary files."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return {name for name in names if name.startswith(("ring-dilated", "rda-"))}


def main() -> None:
    """All faults, several times, each time with another rank at fault."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", default="2,3,5")
    parser.add_argument(
        "--backend", default="gloo", choices=["gloo", "streams", "nccl", "cpu:gloo,cuda:nccl"]
    )
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--no-board", action="store_true", help="as where memory is not shared")
    parser.add_argument("--hosts", type=int, default=1, help="on how many; the first has the most")
    parser.add_argument("--no-cpu", action="store_true", help="as where the group has NCCL alone")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before, wrong, rows = leftovers(), 0, []

    def transport(world_size: int) -> Transport:
        hosts = [rank * options.hosts // world_size for rank in range(world_size)]
        board, cpu = not options.no_board, not options.no_cpu
        places = tuple(hosts) if options.hosts > 1 else ()
        return Transport(options.backend, options.copies, board, cpu, places)

    cases = [
        (name, world_size)
        for name in FAULTS
        if options.only in name
        for world_size in map(int, options.ranks.split(","))
    ]
    with ProcessPoolExecutor(options.jobs) as pool:  # threads take each other's exit statuses
        runs = {
            (*case, number): pool.submit(run_fault, *case, number % case[1], transport(case[1]))
            for case in cases
            for number in range(options.rounds)
        }
        for name, world_size in cases:
            slowest, bad = 0.0, 0
            for number in range(options.rounds):
                victim, outcomes = number % world_size, runs[name, world_size, number].result()
                found = problems(name, world_size, victim, outcomes, transport(world_size))
                others = [one.seconds for rank, one in enumerate(outcomes) if rank != victim]
                slowest, bad = max(slowest, *others), bad + bool(found)
                for problem in found:
                    print(f"  {name}, {world_size} ranks, victim {victim}: {problem}")
            print(f"{name}, {world_size} ranks: {bad} of {options.rounds} wrong; "
                  f"slowest {slowest:.1f} s", flush=True)  # fmt: skip
            rows.append([name, world_size, options.rounds, bad, slowest])
            wrong += bad
    left = leftovers() - before
    print(f"{wrong} wrong, left behind: {sorted(left)}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "wrong": wrong, "left": sorted(left)}))
    sys.exit(bool(wrong or left))


if __name__ == "__main__":
    main()
