"""Ranks of which one does something wrong, as real processes over gloo or NCCL: what the rest say.

Run by `test_faults`, and as a command for many rounds:

    PYTHONPATH=tests python tests/support/faulty_ranks.py --rounds 10 --ranks 2,3,5
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ring_dilated_attention.exchange import ProcessGroupExchange, collectives
from ring_dilated_attention.exchange import groups as exchange_module
from ring_dilated_attention.exchange.board import Board
from ring_dilated_attention.exchange.calls import Finding, LostPeerError
from support import streamed_messages
from support.faults import FAULTS, IN_DECODING, Rank
from support.launched import forked_context
from support.worlds import pretend_host

TIMEOUT_S = 3.0
"""Of the groups, where a rank is stopped; it is minutes where one has ended."""
LONG_S = 120.0
GRACE_S = 5.0
MOST_S = 60.0
"""So long ranks may take to end."""
LINGER_S = 0.3
"""So long a rank goes on after it has raised an error, or should have: it is told nothing more."""
STDERR_LINES = 30


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        error: what it raised.
        seconds: how long after the fault.
        status: its exit status.
        again: what it was told after that, or after its program had ended without an error.
        stderr: its first and last lines.
        ended: how long after the fault it had gone on too, where it was to.
    """

    error: str
    seconds: float
    status: int | None
    again: str = ""
    stderr: str = ""
    ended: float = 0.0

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
        hosts: host of each rank, as ranks pretend; empty: all are on one.
        late: which rank takes a second to ask why a wait has failed, when others have ended; None:
            none.
    """

    backend: str = "gloo"
    copies: bool = False
    board: bool = True
    cpu: bool = True
    hosts: tuple[int, ...] = ()
    late: int | None = None


GLOO = Transport()


def _rank_main(
    rank: int,
    world_size: int,
    victim: int,
    name: str,
    folder: str,
    transport: Transport,
) -> None:
    backend, copies, board, cpu, places, late = transport
    if places:
        pretend_host(pytest.MonkeyPatch(), places[rank])
    if not cpu:
        pytest.MonkeyPatch().setattr(collectives, "takes_cpu", lambda group: False)
    if not board:
        pytest.MonkeyPatch().setattr(exchange_module, "make_board", lambda *args: None)
    if rank == late:
        for roll in (Board, collectives.Collectives):
            pytest.MonkeyPatch().setattr(roll, "explain", explain_late(roll.explain))
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
                "127.0.0.1" if not board or places else None,
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
            timeout=TIMEOUT_S if FAULTS[name].stops else LONG_S,
            peer_memory=copies if device.type == "cuda" else None,
        )
        note = Path(folder, "fault").touch
        mes.append(Rank(rank, world_size, victim, device, ends, note))
        FAULTS[name].program(mes[0], FAULTS[name].how)

    after = (lambda: mes[0].go_on()) if FAULTS[name].goes_on else None
    said = what_is_said(run, 0 if transport.backend == "gloo" else LINGER_S, after)
    _write(Path(folder, f"rank{rank}.json"), json.dumps(said))
    if mes and mes[0].stays:
        time.sleep(60)
    sys.stdout.flush()
    os._exit(1 if said[0] else 0)  # as it is: nobody is to wait for anybody here


def explain_late(explain: Callable[[Any, LostPeerError], Finding]) -> Any:
    """A method `Roll.explain` that takes a second longer."""

    def late(roll: Any, lost: LostPeerError) -> Finding:
        time.sleep(1)
        return explain(roll, lost)

    return late


def what_is_said(
    run: Callable[[], None], lingers: float, after: Callable[[], None] | None = None
) -> tuple[str, float, str, float]:
    """What a function raises, when, what it is told after that, and when `after` had ended.

    Args:
        run: the function.
        lingers: seconds to wait for the latter, which a thread that watches streams may have to say
            too late, be it where the first error is handled.
        after: called before that; what it raises is told after the first error.
    """
    error, when, again, ended = "", 0.0, "", 0.0
    try:
        try:
            run()
        except BaseException as raised:
            error, when = f"{type(raised).__name__}: {raised}", time.time()
        if after is not None:
            after()
            ended = time.time()
        deadline = time.monotonic() + lingers
        while time.monotonic() < deadline:
            time.sleep(0.01)
    except BaseException as raised:
        again = f"{type(raised).__name__}: {raised}"
    when = when or time.time()
    return error, when, again, ended or when


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
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main, args=(rank, world_size, victim, name, folder, transport)
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
            error, when, again, ended = "", begun, "", begun
            if found.exists():
                error, when, again, ended = json.loads(found.read_text())
            stderr = ends_of(Path(folder, f"rank{rank}.stderr"))
            times = when - begun, ended - begun
            outcomes.append(Outcome(error, times[0], process.exitcode, again, stderr, times[1]))
    return outcomes


def problems(
    name: str,
    world_size: int,
    victim: int,
    outcomes: list[Outcome],
    transport: Transport = GLOO,
) -> list[str]:
    """What is not as it should be."""
    fault, found = FAULTS[name], []
    limit = GRACE_S + TIMEOUT_S * FAULTS[name].stops
    for rank, outcome in enumerate(outcomes):
        wanted = fault.says if rank == victim else fault.blames
        if wanted is None:
            continue
        if not transport.board or transport.hosts:  # where nobody may have heard of its last call
            wanted = wanted.replace(IN_DECODING + ".*this", r"call [78] \(cached_attention.*this")
        wanted = wanted.replace("{victim}", str(victim)).replace("rank ", r"ranks? (?:\d, )*")
        if not re.search(wanted, outcome.error, re.DOTALL):
            found.append(f"rank {rank} was to say {wanted!r}, but {outcome}")
        elif outcome.again:
            found.append(f"rank {rank} had more to say: {outcome}")
        elif rank != victim and (ended := max(outcome.seconds, outcome.ended)) > limit:
            told = f"its error came after {outcome.seconds:.1f} s"
            found.append(f"rank {rank} ended after {ended:.1f} s; {told}")
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
    parser.add_argument("--no-cpu", action="store_true", help="as where the group has NCCL alone")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before, wrong, rows = leftovers(), 0, []
    transport = Transport(options.backend, options.copies, not options.no_board, not options.no_cpu)
    cases = [
        (name, world_size)
        for name in FAULTS
        if options.only in name
        for world_size in map(int, options.ranks.split(","))
    ]
    with ProcessPoolExecutor(options.jobs) as pool:  # threads take each other's exit statuses
        runs = {
            (*case, number): pool.submit(run_fault, *case, number % case[1], transport)
            for case in cases
            for number in range(options.rounds)
        }
        for name, world_size in cases:
            slowest, bad = 0.0, 0
            for number in range(options.rounds):
                victim, outcomes = number % world_size, runs[name, world_size, number].result()
                found = problems(name, world_size, victim, outcomes, transport)
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
