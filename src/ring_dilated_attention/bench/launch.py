"""Run a benchmark here, on ranks that are started for it, or on torchrun's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..checks import (
    MOST_PROCESSES,
    RANK_TIMEOUT,
    RankError,
    check_meeting_point,
    check_size,
    launched,
    local_rank,
    not_met,
    run_ranks,
)
from .measure import device_type

ERROR_NAME = "error.txt"
"""File in the folder of a run with the traceback of the rank that failed."""


class Answer(NamedTuple):
    """What a function returned.

    Attributes:
        value: on rank 0; None on torchrun's other ranks.
        first: whether this process speaks for the run: all but torchrun's other ranks do.
    """

    value: Any
    first: bool


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    device: str,
    out: Path,
    timeout: float = RANK_TIMEOUT,
) -> Answer:
    """Call a function on every rank: torchrun's if this process is one of them; one rank is here.

    torch.distributed is initialised for several ranks: gloo, and NCCL for tensors on CUDA, with a
    device per rank.

    Args:
        function: can be pickled (it is defined at the top of a module).
        ranks: number of ranks; torchrun's may be more.
        arguments: of the function; can be pickled.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where there is a device.
        out: folder for `ERROR_NAME`, should a rank fail.
        timeout: seconds that a rank waits for another.

    Raises:
        ValueError: there are too few devices, torchrun's ranks are too few, a variable of the
            launcher is malformed, or a rank raised a `ValueError` or `TypeError`.
        RankError: a rank failed otherwise, and the others have been stopped; or the ranks of a
            launcher did not meet.
    """
    kind = device_type(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    place = launched()
    if place is not None:
        rank, size = place
        if ranks > size:
            raise ValueError(f"torchrun started {size} ranks; leave out --ranks, got {ranks}")
        if kind == "cuda":
            torch.cuda.set_device(local_rank(rank))
        check_meeting_point()
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankError(not_met(rank, size, error)) from error
        value = function(*arguments)
        dist.destroy_process_group()  # not after an error: NCCL would wait for the other ranks
        return Answer(value if rank == 0 else None, rank == 0)
    check_size("ranks", ranks, MOST_PROCESSES)
    if ranks == 1:
        return Answer(function(*arguments), True)
    if kind == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(
            f"{ranks} ranks need a CUDA device each; there are {torch.cuda.device_count()}"
        )
    try:
        values = run_ranks(
            _on_rank, ranks, function, arguments,
            backend=backend, timeout=None, wait_timeout=timeout, fill_with_nan=False,
        )  # fmt: skip
    except RankError as error:
        if error.bad_input:
            raise ValueError(error.summary) from None
        if not error.trace:
            raise
        out.mkdir(parents=True, exist_ok=True)
        (out / ERROR_NAME).write_text(error.trace)
        raise RankError(f"{error.summary} (see {out / ERROR_NAME})") from None
    return Answer(values[0], True)


def is_first() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_rank(rank: int, _: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    value = function(*arguments)
    return value if rank == 0 else None
