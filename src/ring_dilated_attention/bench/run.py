"""Measure workloads on one rank and on several: this library and baselines in turns.

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
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, cycle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..checks import run_ranks
from ..pattern import check_choice, check_positive_int
from ..plan import costs
from ..units import count_of
from .contenders import BASELINES, Contender, Place, make_contender
from .result import OURS, Result, Workload

MOST_INPUT_SETS, FEWEST_SAMPLES, INPUT_BYTES = 64, 3, 128 * 2**20
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another."""

Call = Callable[[], object]
T = TypeVar("T")
Inputs = list[tuple[torch.Tensor, ...]]
"""query, key, value (leaves of autograd) and the gradient of out, for each shape of a call."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        ranks: numbers of ranks, each measured by itself; under torchrun its number alone.
        baselines: what takes turns with this library, of `BASELINES`.
        device: ``"cpu"``, or ``"cuda"`` with a GPU for each rank.
        repeats: samples of forward, and of forward+backward, of each contender; fewer, but at least
            3, where they would take more than 10 s.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    ranks: tuple[int, ...] = (1,)
    baselines: tuple[str, ...] = ()
    device: str = "cuda"
    repeats: int = 20

    def __post_init__(self) -> None:
        for ranks in self.ranks or (0,):
            check_positive_int("ranks", ranks)
        for name in self.baselines:
            check_choice("baseline", name, BASELINES)
        check_choice("device", self.device, ("cpu", "cuda"))
        check_positive_int("repeats", self.repeats)


def bench(
    workloads: Sequence[Workload],
    settings: Settings | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Time forward and forward+backward, and measure the memory of both.

    Args:
        workloads: what to compute.
        settings: how to measure; None: the defaults of `Settings`.
        progress: called with what is measured next.

    Returns:
        Two results per number of ranks, workload and contender, `OURS` before the baselines; under
        torchrun the same on all ranks.

    Raises:
        ValueError: there are too few GPUs, or torchrun started another number of ranks.
        RankError: a rank failed.
    """
    settings = Settings() if settings is None else settings
    on_cuda = settings.device == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    launched = int(os.environ.get("WORLD_SIZE", "1"))  # by torchrun
    if launched > 1:
        if settings.ranks not in ((1,), (launched,)):
            raise ValueError(f"leave out the number of ranks: torchrun started {launched}")
        if on_cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=PATIENCE)
        results = _on_rank(dist.get_rank(), launched, workloads, settings, progress)
        dist.destroy_process_group()
        return results
    most, gpus = max(settings.ranks), torch.cuda.device_count()
    if on_cuda and most > gpus:
        raise ValueError(f"{count_of(most, 'rank')} on GPUs: each needs its own; there are {gpus}")
    results = []
    for ranks in settings.ranks:
        if ranks == 1:
            results += _on_rank(0, 1, workloads, settings, progress)
            continue
        progress(f"{ranks} ranks")
        results += run_ranks(
            _on_rank, ranks, workloads, settings, backend=backend, fill_with_nan=False,
            timeout=None, wait_timeout=PATIENCE.total_seconds(),
        )[0]  # fmt: skip
    return results


def _on_rank(
    rank: int,
    ranks: int,
    workloads: Sequence[Workload],
    settings: Settings,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """The results of all workloads; the ranks are those of the default process group."""
    place = Place(device=torch.device(settings.device), ranks=ranks, rank=rank)
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if ranks > 1 else None
    results = []
    for workload in workloads:
        progress(str(workload))
        results += _measure(workload, settings, place, group)
    return results


def _measure(
    workload: Workload, settings: Settings, place: Place, group: dist.ProcessGroup | None
) -> list[Result]:
    generator = torch.Generator(place.device).manual_seed(place.rank)
    names = list(dict.fromkeys((OURS, *settings.baselines)))
    contenders: dict[str, Contender] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            contenders[name] = make_contender(name, workload, place)
        except ValueError as error:  # the same on every rank
            reasons[name] = str(error)
    drawn = {  # contenders of the same shapes share their inputs
        shapes: _draw(shapes, workload.torch_dtype, generator)
        for shapes in dict.fromkeys(contender.shapes for contender in contenders.values())
    }
    results = []
    for backward in (False, True):
        calls: dict[str, Callable[[], None]] = {}
        peaks: dict[str, int | None] = {}
        for name, contender in contenders.items():
            call = partial(_call, contender, cycle(drawn[contender.shapes]), backward)
            try:
                with contender.inside():
                    call()  # what it allocates to keep is not of the peak
                    peaks[name] = peak_bytes(place.device, call)
                calls[name] = call
            except Exception as error:  # out of memory, or not computed by a library's kernel
                if group is not None:
                    raise
                reasons[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                torch.cuda.empty_cache()
        contexts = {name: contenders[name].inside for name in calls}
        times = take_turns(
            calls, place.device, repeats=settings.repeats, group=group, inside=contexts
        )
        for name in names:
            found = Result(workload=workload, ranks=place.ranks, contender=name, backward=backward)
            if name not in times:
                results.append(replace(found, reason=reasons[name]))
                continue
            contender, peak = contenders[name], peaks[name]
            inputs = sum(x.nbytes for x in chain(*drawn[contender.shapes][0]))
            found = replace(
                found,
                kernel=contender.kernel,
                samples_ms=times[name],
                flops=int(contender.flops * (3.5 if backward else 1)),
                sent=_sent(workload, place.ranks, backward) if name == OURS else 0,
                memory=None if peak is None else inputs + peak,
            )
            results.append(max(share(found, group), key=lambda each: each.memory or 0))
    return sorted(results, key=lambda result: names.index(result.contender))


def _sent(workload: Workload, ranks: int, backward: bool) -> int:
    plan = workload.plan(ranks)
    traffic = [costs.traffic(plan.rank(rank), workload.size) for rank in range(ranks)]
    return max(each.forward_sent + each.backward_sent * backward for each in traffic)


def _draw(
    shapes: tuple[tuple[tuple[int, ...], ...], ...], dtype: torch.dtype, generator: torch.Generator
) -> list[Inputs]:
    """Random inputs for a call; on a GPU several sets, together larger than its L2 cache."""
    draw = partial(
        torch.randn, generator=generator, device=generator.device, dtype=dtype, requires_grad=True
    )

    def draw_set() -> Inputs:
        return [(draw(q), draw(kv), draw(kv), draw(q).detach()) for q, kv in shapes]

    sets = [draw_set()]
    if generator.device.type == "cuda":
        nbytes = sum(tensor.nbytes for tensors in sets[0] for tensor in tensors)
        sets += [draw_set() for _ in range(min(INPUT_BYTES // nbytes, MOST_INPUT_SETS))]
    return sets


def _call(contender: Contender, sets: Iterator[Inputs], backward: bool) -> None:
    """One call on the next inputs."""
    for query, key, value, dout in next(sets):
        with torch.set_grad_enabled(backward):
            out = contender.attend(query, key, value)
        if backward:
            torch.autograd.grad(out, (query, key, value), dout)


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
