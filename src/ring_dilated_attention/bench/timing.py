"""How calls are timed, and how their memory is measured.

The rules, which `rda bench` and the programs in benchmarks/ share:

- **Turns.** Calls that are compared run in one process and take turns, one sample each, so that a
  device whose clock drifts slows all of them alike. The order rotates from turn to turn.
- **Warm-up.** CUDA compiles in the first call and allocates in the second; the CPU allocates in
  the first. These calls, and one more that decides how many calls a sample has, do not count.
- **GPU time.** On one GPU samples are queued behind each other and timed by CUDA events: the time
  of the GPU alone, unless the host cannot keep up. With `wall=True`, on several ranks and on a CPU
  it is the time of the clock, from an idle device to an idle device.
- **Several ranks** start a sample together, behind a barrier, and the slowest rank counts. On GPUs
  a sample is then `SAMPLE_MS` of back-to-back calls: ranks leave a barrier 0.1 ms apart, and a GPU
  lowers its clock after some 50 ms of work.
- **Inputs** rotate through sets that are together larger than the L2 cache (`INPUT_BYTES`): the
  cache is as cold as in a model.
- **The median** counts; the lowest and the highest sample stand beside it.
- **Memory** is measured in a call of its own: the peak that torch's allocator counts above what was
  allocated before, after a garbage collection. On a CPU nobody counts, and it is not known.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..pattern import check_choice

Call = Callable[[], object]
T = TypeVar("T")

FEWEST_SAMPLES = 3
SAMPLE_MS = 300.0
INPUT_BYTES = 128 * 2**20


def resolve_device(name: str) -> torch.device:
    """The device that ``"cpu"``, ``"cuda"`` or ``"auto"`` (CUDA where there is a GPU) stands for.

    Raises:
        ValueError: there is no such device.
    """
    check_choice("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a GPU, and torch finds none; use 'cpu' or 'auto'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def take_turns(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    repeats: int = 20,
    seconds: float = 10.0,
    wall: bool = False,
    sample_ms: float | None = None,
    group: dist.ProcessGroup | None = None,
    inside: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Time calls in turns, by the rules at the top of this file.

    Args:
        calls: what to time, by name.
        device: where the calls compute.
        repeats: samples of each call.
        seconds: time for the samples of one call; at least 3 are taken.
        wall: whether a GPU's time is that of the clock, launching included.
        sample_ms: milliseconds of a sample, of back-to-back calls; None: `SAMPLE_MS` on several
            ranks with GPUs, else one call.
        group: the ranks (gloo), each of which makes this call; None: one rank.
        inside: contexts in which some of the calls run, by name; entering them is not timed.
        failed: called with the name and the error of a call that fails in its warm-up, which then
            takes no turn; None, or several ranks: the error is raised.

    Returns:
        Milliseconds of a call in every sample, on the slowest rank, by name.
    """
    contexts = dict.fromkeys(calls, nullcontext) | dict(inside or {})
    queued = device.type == "cuda" and not wall and group is None
    if sample_ms is None:
        sample_ms = SAMPLE_MS if device.type == "cuda" and group is not None else 0.0
    counts: dict[str, tuple[int, int]] = {}  # calls of a sample, samples
    for name, call in calls.items():
        try:
            with contexts[name]():
                for _ in range(2 if device.type == "cuda" else 1):
                    call()
                once = max(share(_sample(call, 1, device, group, queued=False)(), group))
        except Exception as error:
            if failed is None or group is not None:
                raise
            failed(name, error)
            continue
        length = max(1, math.ceil(sample_ms / once))
        affordable = int(seconds * 1e3 / (length * once))
        counts[name] = length, min(repeats, max(FEWEST_SAMPLES, affordable))
    taken: dict[str, list[Callable[[], float]]] = {name: [] for name in counts}
    names = list(counts)
    for turn in range(max((samples for _, samples in counts.values()), default=0)):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            length, samples = counts[name]
            if turn < samples:
                with contexts[name]():
                    elapsed = _sample(calls[name], length, device, group, queued=queued)
                taken[name].append(elapsed)
    found = {}
    for name, pending in taken.items():
        by_rank = share([elapsed() for elapsed in pending], group)
        found[name] = tuple(max(times) for times in zip(*by_rank, strict=True))
    return found


def share(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks of a group, by rank; of one rank without a group."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def peak_bytes(device: torch.device, call: Call) -> int | None:
    """Most bytes that a call allocates at a time on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()  # what is collected during the call would hide what the call allocates
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _sample(
    call: Call, count: int, device: torch.device, group: dist.ProcessGroup | None, *, queued: bool
) -> Callable[[], float]:
    """Make `count` calls back to back; the result tells the milliseconds of one of them."""
    if queued:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            call()
        stop.record()

        def elapsed() -> float:
            stop.synchronize()
            return float(start.elapsed_time(stop)) / count

        return elapsed
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        dist.barrier(group=group)
    begun = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = (time.perf_counter() - begun) * 1e3 / count
    return lambda: taken
