"""How calls are timed, and how their memory is measured.

The rules, which `rda bench` and the programs in benchmarks/ share:

- **Turns.** Calls that are compared run in one process and take turns, one sample each, so that a
  device whose clock drifts slows all of them alike. The order rotates from turn to turn.
- **Warm-up.** CUDA compiles in the first call and allocates in the second; the CPU allocates in
  the first. These calls, and one more that decides how many calls a sample has, do not count.
- **Wall time.** A sample is one call, from an idle device until the device is idle again: what its
  user waits for, launching included. To time calls in a row, pass a function that makes them.
- **Several ranks** start a sample together, behind a barrier that they leave 0.1 ms apart, and the
  slowest rank counts.
- **Inputs** rotate through sets that are together larger than the L2 cache (`INPUT_BYTES`): the
  cache is as cold as in a model.
- **The median** counts; the lowest and the highest sample stand beside it.
- **Memory** is measured in a call of its own: the peak that torch's allocator counts above what was
  allocated before, after a garbage collection. On a CPU nobody counts, and it is not known.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Call = Callable[[], object]
T = TypeVar("T")

FEWEST_SAMPLES = 3
INPUT_BYTES = 128 * 2**20


def take_turns(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    repeats: int = 20,
    seconds: float = 10.0,
    group: dist.ProcessGroup | None = None,
    inside: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Time calls in turns, by the rules at the top of this file.

    Args:
        calls: what to time, by name.
        device: where the calls compute.
        repeats: samples of each call.
        seconds: time for the samples of one call; at least 3 are taken.
        group: the ranks (gloo), each of which makes this call; None: one rank.
        inside: contexts in which some of the calls run, by name; entering them is not timed.

    Returns:
        Milliseconds of every sample, on the slowest rank, by name.
    """
    contexts = dict.fromkeys(calls, nullcontext) | dict(inside or {})
    samples: dict[str, int] = {}
    for name, call in calls.items():
        with contexts[name]():
            for _ in range(2 if device.type == "cuda" else 1):
                call()
            once = max(share(_sample(call, device, group), group))
        samples[name] = min(repeats, max(FEWEST_SAMPLES, int(seconds * 1e3 / once)))
    taken: dict[str, list[float]] = {name: [] for name in samples}
    names = list(samples)
    for turn in range(max(samples.values(), default=0)):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            if turn < samples[name]:
                with contexts[name]():
                    taken[name].append(_sample(calls[name], device, group))
    by_rank = share(taken, group)
    return {
        name: tuple(max(times) for times in zip(*(one[name] for one in by_rank), strict=True))
        for name in names
    }


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


def _sample(call: Call, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Milliseconds of a call, until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        dist.barrier(group=group)
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) * 1e3
