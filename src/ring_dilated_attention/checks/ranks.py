"""Run a function on several ranks of this host: one process for each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..exchange import ProcessGroupExchange
from .reference import nan_in_uninitialized_memory


class RankError(RuntimeError):
    """A rank failed: which, in the first line of the message, and its traceback if it left one."""


def world_exchange() -> ProcessGroupExchange:
    """This rank's end of the default process group, inside `run_ranks`."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return ProcessGroupExchange(group)


class _Start(NamedTuple):
    """How all ranks start; `folder` has their store and their answers."""

    environment: dict[str, str]
    world_size: int
    backend: str
    folder: str
    timeout: float | None
    wait: timedelta
    fill_with_nan: bool


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    backend: str = "gloo",
    timeout: float | None = 240,
    wait_timeout: float | None = None,
    fill_with_nan: bool = True,
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

    Returns:
        What the calls returned, by rank.

    Raises:
        RankError: a rank failed; the others have been stopped.
        TimeoutError: see `timeout`.
        ValueError: neither `timeout` nor `wait_timeout` is a number.
    """
    wait = timeout if wait_timeout is None else wait_timeout
    if wait is None:
        raise ValueError("wait_timeout must be a number where timeout is None; got None")
    method = forked_context().get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        seconds = timedelta(seconds=wait)
        start = _Start(
            dict(os.environ), world_size, backend, folder, timeout, seconds, fill_with_nan
        )
        given = start, function, arguments
        start_processes: Any = mp.start_processes  # which torch has not annotated
        ranks = start_processes(
            _rank_main, given, world_size, join=False, daemon=True, start_method=method
        )
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not ranks.join(None if end is None else max(0.0, end - time.monotonic())):
                if end is not None and time.monotonic() >= end:
                    running = [r for r, p in enumerate(ranks.processes) if p.is_alive()]
                    raise TimeoutError(f"no answer from ranks {running} in {timeout} s")
            answers = [Path(folder, str(rank)) for rank in range(world_size)]
            missing = [rank for rank, answer in enumerate(answers) if not answer.exists()]
            if missing:  # they have ended without an error, as by os._exit(0)
                raise RankError(f"ranks {missing} ended without an answer")
            return [pickle.loads(answer.read_bytes()) for answer in answers]
        except mp.ProcessRaisedException as error:
            trace = str(error).partition("error:\n")[2]
            raise RankError(f"rank {error.error_index} failed:\n{trace.rstrip()}") from None
        except mp.ProcessExitedException as error:
            raise RankError(f"rank {error.error_index} died without an answer: {error}") from None
        finally:
            for process in ranks.processes:
                process.kill()  # no effect on one that has ended
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
    rank: int, start: _Start, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()  # it is that of whoever asked for ranks first
    os.environ.update(start.environment)
    # All ranks are on this host: gloo would listen at the address that the host's name leads to.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "".join(loopback[:1]))
    if "OMP_NUM_THREADS" not in os.environ:
        usable = hasattr(os, "sched_getaffinity")  # by this process
        cores = len(os.sched_getaffinity(0)) if usable else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // start.world_size))
    if start.timeout is not None:
        faulthandler.dump_traceback_later(0.9 * start.timeout)  # where a rank that hangs is
    if "nccl" in start.backend:
        torch.cuda.set_device(rank)
    # The default group is not bound to the device (`device_id`): where it is, `new_group` has ranks
    # that are not in a new gloo group take part in a split of NCCL's communicator, and wait there.
    store = dist.FileStore(str(Path(start.folder) / "store"), start.world_size)
    dist.init_process_group(
        start.backend, store=store, rank=rank, world_size=start.world_size, timeout=start.wait
    )
    # gloo fails in a rank that is still connecting to one that has ended, or failed, meanwhile.
    if store.add("connected ranks", 1) == start.world_size:
        store.set("all connected", "")
    store.wait(["all connected"], start.wait)
    # Pickled here, so that what cannot be pickled is this rank's error; tensors by value.
    with nan_in_uninitialized_memory() if start.fill_with_nan else nullcontext():
        answer = pickle.dumps(function(rank, start.world_size, *arguments))
    faulthandler.cancel_dump_traceback_later()
    Path(start.folder, str(rank)).write_bytes(answer)
    dist.destroy_process_group()
