"""Run code on several ranks, and say how large an error may be. For tests and `rda verify`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..exchange import ProcessGroupExchange, run_loopback

__all__ = [
    "forked_context",
    "nan_in_uninitialized_memory",
    "relative_error",
    "run_loopback",
    "run_ranks",
    "world_exchange",
]


@contextmanager
def nan_in_uninitialized_memory() -> Iterator[None]:
    """`torch.empty` returns NaN, so that whatever is read before it is written shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch fills only while deterministic algorithms are asked for.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; 0 for two equal tensors, inf for any NaN."""
    actual, expected = actual.double(), expected.double()
    difference = torch.linalg.vector_norm(actual - expected).item()
    if difference == 0:
        return 0.0
    size = torch.linalg.vector_norm(expected).item()
    error = difference / size if size else torch.inf
    return error if error == error else torch.inf


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
    timeout: float = 240,
    wait_timeout: float | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in one process per rank.

    Uninitialised memory holds NaN there. Where the system can, they are forked from a process that
    has imported torch and this package and done nothing else: importing takes seconds.

    Args:
        function: a function that can be pickled (defined at the top of a module).
        world_size: number of ranks; torch.distributed is initialised with them.
        arguments: passed on; anything that can be pickled.
        backend: of torch.distributed: ``"gloo"``, or ``"nccl"`` with one GPU per rank.
        timeout: seconds after which all ranks are stopped and a `TimeoutError` raised. Shortly
            before, ranks write to stderr where they are.
        wait_timeout: seconds that a rank waits for another; None: `timeout`.

    Returns:
        What the calls returned, by rank.

    Raises:
        RuntimeError: a rank failed; the message holds its traceback.
    """
    context = forked_context()
    results: Any = context.Queue()
    timeouts = timeout, timeout if wait_timeout is None else wait_timeout
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank_main,
                args=(
                    dict(os.environ),
                    rank,
                    world_size,
                    backend,
                    store,
                    timeouts,
                    results,
                    function,
                    arguments,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, timeout)
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
    environment: dict[str, str],
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    timeouts: tuple[float, float],
    results: Any,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    os.environ.clear()  # it is that of whoever asked for ranks first
    os.environ.update(environment)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    faulthandler.dump_traceback_later(0.9 * timeouts[0])  # to stderr: where a rank that hangs is
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeouts[1]),
        )
        # Pickled here, so that what cannot be pickled is this rank's error; tensors by value.
        with nan_in_uninitialized_memory():
            answer = rank, True, pickle.dumps(function(rank, world_size, *arguments))
    except BaseException:
        answer = rank, False, pickle.dumps(traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    results.put(answer)
    if answer[1]:
        dist.destroy_process_group()


def _collect(results: Any, processes: Sequence[Any], timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    waited = 0.0
    while len(answers) < len(processes):
        try:
            rank, succeeded, pickled = results.get(timeout=1)
        except queue.Empty:
            waited += 1
            dead = [r for r, p in enumerate(processes) if p.exitcode and r not in answers]
            if dead:
                raise RuntimeError(f"ranks {dead} died without an answer") from None
            if waited > timeout:
                missing = sorted(set(range(len(processes))) - set(answers))
                for process in processes:
                    process.kill()
                raise TimeoutError(f"no answer from ranks {missing} in {timeout} s") from None
            continue
        answer = pickle.loads(pickled)
        if not succeeded:
            for process in processes:
                process.kill()
            raise RuntimeError(f"rank {rank} failed:\n{answer}")
        answers[rank] = answer
    return [answers[rank] for rank in range(len(processes))]
