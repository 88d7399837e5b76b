"""Run a function on several ranks of this host: one process for each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..exchange import ProcessGroupExchange
from .reference import nan_in_uninitialized_memory


class RankError(RuntimeError):
    """A rank failed where others went on.

    Args:
        message: what has happened, with the traceback of the rank if there is one.
        summary: the same in one line; empty: the message's first line.
        trace: the traceback; empty: the rank left none.
        bad_input: whether the rank raised a `ValueError` or `TypeError`.
    """

    def __init__(
        self, message: str, *, summary: str = "", trace: str = "", bad_input: bool = False
    ) -> None:
        super().__init__(message)
        self.summary = summary or message.partition("\n")[0]
        self.trace, self.bad_input = trace, bad_input


def not_met(rank: int, size: int, error: object) -> str:
    """A line that says that ranks of a launcher did not meet, and what torch says of it."""
    return (
        f"the {size} ranks did not meet: rank {rank}: {error} (start all of them, with the same "
        "MASTER_ADDR and MASTER_PORT, within --timeout)"
    )


def threads_of_a_rank(ranks: int) -> int | None:
    """CPU threads for each of the ranks of this host; None where OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    usable = hasattr(os, "sched_getaffinity")  # by this process
    cores = len(os.sched_getaffinity(0)) if usable else os.cpu_count() or 1
    return max(1, cores // ranks)


_tellers: list[Callable[[int], None]] = []
"""In a rank of `run_ranks`, the function that passes on what `tell_progress` is given."""


def tell_progress(done: int) -> None:
    """Report how much this rank has done to the caller of `run_ranks`; elsewhere, do nothing."""
    for teller in _tellers:
        teller(done)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What all ranks are started with."""

    environment: dict[str, str]
    world_size: int
    backend: str
    store: str
    timeout: float | None
    wait_timeout: float
    fill_with_nan: bool
    tells: bool


def world_exchange() -> ProcessGroupExchange:
    """This rank's end of the default process group, inside `run_ranks`."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return ProcessGroupExchange(group)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    backend: str = "gloo",
    timeout: float | None = 240,
    wait_timeout: float | None = None,
    fill_with_nan: bool = True,
    told: Callable[[int], None] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in one process per rank.

    Where the system can, they are forked from a process that has imported torch and this package
    and done nothing else: importing takes seconds.

    Args:
        function: a function that can be pickled (defined at the top of a module).
        world_size: number of ranks; torch.distributed is initialised with them.
        arguments: passed on; anything that can be pickled.
        backend: of torch.distributed: ``"gloo"``, or ``"nccl"`` or ``"cpu:gloo,cuda:nccl"`` with
            one GPU per rank.
        timeout: seconds after which all ranks are stopped and a `TimeoutError` raised; None: no
            limit. Shortly before, ranks write to stderr where they are.
        wait_timeout: seconds that a rank waits for another; None: `timeout`.
        fill_with_nan: whether uninitialised memory holds NaN, which takes time.
        told: called in this process with what rank 0 gives to `tell_progress`.

    Returns:
        What the calls returned, by rank.

    Raises:
        RankError: a rank failed; the others have been stopped.
        TimeoutError: see `timeout`.
        ValueError: neither `timeout` nor `wait_timeout` is a number.
    """
    waits = timeout if wait_timeout is None else wait_timeout
    if waits is None:
        raise ValueError("wait_timeout must be a number where timeout is None; got None")
    context = forked_context()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        start = _Start(
            environment=dict(os.environ),
            world_size=world_size,
            backend=backend,
            store=str(Path(folder) / "store"),
            timeout=timeout,
            wait_timeout=waits,
            fill_with_nan=fill_with_nan,
            tells=told is not None,
        )
        processes = [
            context.Process(
                target=_rank_main, args=(start, rank, results, function, arguments), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, timeout, told)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def forked_context() -> Any:
    """A context of multiprocessing whose processes start with what `run_ranks` needs, imported."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context: Any = mp.get_context("forkserver")
    # torch imports its compiler's configuration where deterministic algorithms are asked for.
    context.set_forkserver_preload([__name__, "torch._inductor.config"])
    return context


def _rank_main(
    start: _Start, rank: int, results: Any, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    os.environ.clear()  # it is that of whoever asked for ranks first
    os.environ.update(start.environment)
    threads = threads_of_a_rank(start.world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    if start.timeout is not None:
        faulthandler.dump_traceback_later(0.9 * start.timeout)  # where a rank that hangs is
    if start.tells and rank == 0:
        _tellers.append(lambda done: results.put((0, None, done)))
    try:
        if "nccl" in start.backend:
            torch.cuda.set_device(rank)
        # The default group is not bound to the device (`device_id`): where it is, `new_group` has
        # ranks that are not in a new gloo group take part in a split of NCCL's communicator, and
        # wait there.
        store = dist.FileStore(start.store, start.world_size)
        dist.init_process_group(
            start.backend,
            store=store,
            rank=rank,
            world_size=start.world_size,
            timeout=timedelta(seconds=start.wait_timeout),
        )
        if store.add("connected ranks", 1) == start.world_size:
            store.set("all connected", "")
        # Pickled here, so that what cannot be pickled is this rank's error; tensors by value.
        with nan_in_uninitialized_memory() if start.fill_with_nan else nullcontext():
            answer = rank, True, pickle.dumps(function(rank, start.world_size, *arguments))
    except BaseException as error:
        name = "" if isinstance(error, RankError) else f"{type(error).__name__}: "
        text = f"{name}{(str(error).strip().splitlines() or [''])[0]}"
        bad_input = isinstance(error, ValueError | TypeError)
        answer = rank, False, pickle.dumps((text, bad_input, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    results.put(answer)
    if answer[1]:
        # gloo fails in a rank that is still connecting to one that has closed its connections
        store.wait(["all connected"], timedelta(seconds=start.wait_timeout))
        dist.destroy_process_group()


def _collect(
    results: Any,
    processes: Sequence[Any],
    timeout: float | None,
    told: Callable[[int], None] | None,
) -> list[Any]:
    answers: dict[int, Any] = {}
    waited = 0.0
    while len(answers) < len(processes):
        try:
            rank, succeeded, pickled = results.get(timeout=1)
        except queue.Empty:
            waited += 1
            dead = [r for r, p in enumerate(processes) if p.exitcode and r not in answers]
            if dead:
                raise RankError(f"ranks {dead} died without an answer") from None
            if timeout is not None and waited > timeout:
                missing = sorted(set(range(len(processes))) - set(answers))
                for process in processes:
                    process.kill()
                raise TimeoutError(f"no answer from ranks {missing} in {timeout} s") from None
            continue
        if succeeded is None:  # no answer yet
            if told is not None:
                told(pickled)
            continue
        answer = pickle.loads(pickled)
        if not succeeded:
            for process in processes:
                process.kill()
            text, bad_input, trace = answer
            raise RankError(
                f"rank {rank} failed:\n{trace}",
                summary=text if bad_input else f"rank {rank} failed: {text}",
                trace=trace,
                bad_input=bad_input,
            )
        answers[rank] = answer
    return [answers[rank] for rank in range(len(processes))]
