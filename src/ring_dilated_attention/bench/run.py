"""`bench`: time workloads on one rank and on several, this library and baselines in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ..exchange import Group, resolve_exchange
from ..plan import costs
from ..terminal import count_of
from . import measure
from .contender import Contender, Shapes, Site
from .contenders import OURS, contender
from .entry import Entry, Inputs, draw_sets
from .errors import twin_errors, twin_of
from .memory import heaviest, measure_memory
from .options import Options
from .result import BACKWARD, OK, Ceilings, Communication, Errors, Result, Timing
from .team import PATIENCE, Failure, Team, form_teams, status_of
from .turns import Samples, Turn, take_turns
from .waits import TimedExchange, combined, measure_communication
from .workload import Workload

MOST_WALL_SAMPLES = 10
_MATMUL = "matmul"
_PREPARED, _FORWARD, _BOTH = 0.02, 0.3, 0.85
"""Roughly which fraction of a workload's time has passed once inputs are drawn, once forward is
measured, and once forward + backward is; the errors take the rest."""

Progress = Callable[[float, str], None]
"""(workloads done, fractions of one included; what is being measured) -> None."""


def bench(
    workloads: Sequence[Workload],
    options: Options,
    *,
    progress: Progress | None = None,
    finished: Callable[[list[Result]], None] | None = None,
) -> list[Result]:
    """Time workloads on the first p ranks, for every p of the options: forward, forward+backward.

    Inputs are random and fresh. Every contender warms up; then they take turns, a matrix product
    among them, so that a device whose speed drifts slows all alike. A contender that refuses a
    workload, or runs out of memory, is reported and the others go on.

    One rank needs no process group. For several, every rank of the default process group makes this
    call; those that are not among the first p wait.

    Args:
        workloads: what to compute.
        options: how to measure.
        progress: called on rank 0 with how many workloads are done, of their number times that of
            `options.ranks`, the part of the present one included, and what is being measured.
        finished: given on rank 0, after each workload and size, all results so far.

    Returns:
        A result per workload, number of ranks and contender, in order, `OURS` before the baselines;
        on every rank.

    Raises:
        TypeError, ValueError: an argument is not allowed.
        RankError: a rank failed where others went on.
    """
    if not workloads:
        raise ValueError("workloads must not be empty")
    distributed = dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    sizes = sorted(set(options.ranks))
    if sizes[-1] > world_size:
        raise ValueError(f"need ranks of 1 to {world_size}, the ranks that there are; got {sizes}")
    everyone = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed else None

    def from_first(value: list[Result] | Options) -> list[Result] | Options:
        shared = [value]
        if distributed:
            dist.broadcast_object_list(shared, 0, group=everyone)
        return shared[0]

    options = from_first(options)  # type: ignore[assignment]  # one seed for all
    device = measure.resolve_device(options.device)
    teams = form_teams(sizes, list(dict.fromkeys((OURS, *options.baselines))), device)
    ceilings: dict[str, Ceilings] = {}
    results: list[Result] = []
    done = 0
    for base in workloads:
        if base.dtype not in ceilings:
            ceilings[base.dtype] = measure.measure_ceilings(device, base.torch_dtype)
        for size in sizes:
            length = base.seq_len * (size if options.scaling == "weak" else 1)
            workload = replace(base, seq_len=length)
            what = f"{workload} on {count_of(size, 'rank')}"
            told = _Told(progress if rank == 0 else None, done, what)
            told(0.0)
            done += 1
            team = teams[size]
            if team is not None:
                measured = _Run(base, workload, team, options, ceilings[base.dtype])
                results += measured.results(told)
                if finished is not None and rank == 0:
                    finished(results)
            if distributed:
                dist.barrier(group=everyone)
    results = from_first(results)  # type: ignore[assignment]
    if distributed:
        dist.destroy_process_group(everyone)
    return results


class _Told:
    """Reports the fraction of a workload that is done, added to the workloads before it."""

    def __init__(self, progress: Progress | None, before: int, what: str) -> None:
        self._progress, self._before, self._what = progress, before, what

    def __call__(self, part: float) -> None:
        if self._progress is not None:
            self._progress(self._before + part, self._what)

    def between(self, start: float, stop: float) -> Callable[[float], None]:
        """Reports a part of the workload: its own 0 to 1 become `start` to `stop`."""
        return lambda part: self(start + part * (stop - start))


class _Run:
    """One workload on one team."""

    def __init__(
        self,
        base: Workload,
        workload: Workload,
        team: Team,
        options: Options,
        ceilings: Ceilings,
    ) -> None:
        self.base, self.workload, self.team = base, workload, team
        self.options, self.ceilings = options, ceilings
        self.entries = [Entry(name) for name in dict.fromkeys((OURS, *options.baselines))]

    def results(self, told: _Told) -> list[Result]:
        """Measure, and say what was found; the same on all ranks."""
        generator = torch.Generator(self.team.device)
        generator.manual_seed(self.options.seed + self.team.rank)
        drawn: dict[tuple[Shapes, ...], list[list[Inputs]]] = {}
        for entry in self.entries:
            entry.attempt(self.team, partial(self._prepare, entry, drawn, generator))
        self._time(False, told.between(_PREPARED, _FORWARD))
        self._time(True, told.between(_FORWARD, _BOTH))
        drawn.clear()
        for entry in self.entries:
            entry.sets.clear()
        found, left = [], told.between(_BOTH, 1.0)
        for number, entry in enumerate(self.entries):
            left(number / len(self.entries))
            found.append(self._result(entry))
        return found

    def _result(self, entry: Entry) -> Result:
        errors, why = self._errors(entry) if self.options.errors else (None, "")
        return Result(
            base=self.base,
            workload=self.workload,
            ranks=self.team.size,
            scaling=self.options.scaling,
            contender=entry.name,
            layout=self.options.layout,
            exchange=self.options.exchange,
            ceilings=self.ceilings,
            kernel=entry.kernel,
            status=entry.status,
            reason=entry.reason,
            forward=entry.timings.get(False),
            forward_backward=entry.timings.get(True),
            errors=errors,
            errors_reason=why,
        )

    def _build(self, name: str, workload: Workload, group: Group = None) -> Contender:
        team, options = self.team, self.options
        found = team.groups.get(name) if group is None else group
        site = Site(group=found, size=team.size, rank=team.rank, device=team.device)
        return contender(name, workload, site, layout=options.layout, exchange=options.exchange)

    def _prepare(
        self,
        entry: Entry,
        drawn: dict[tuple[Shapes, ...], list[list[Inputs]]],
        generator: torch.Generator,
    ) -> None:
        """Build the contender and draw its inputs; contenders with the same shapes share them."""
        entry.contender = self._build(entry.name, self.workload)
        shapes = entry.contender.shapes
        if shapes not in drawn:
            drawn[shapes] = draw_sets(shapes, self.workload.torch_dtype, generator)
        entry.sets = list(drawn[shapes])
        query, key, value, _ = entry.sets[0][0]
        entry.kernel = entry.contender.kernel(query, key, value)

    def _time(self, backward: bool, told: Callable[[float], None]) -> None:
        """Time one kind of call of all entries still in, and a matrix product, taking turns."""
        multiply, side = measure.matmul(self.team.device, self.workload.torch_dtype)
        entries = {entry.name: entry for entry in self.entries if entry.status == OK}
        if not entries:
            return
        turns = [entry.turn(backward) for entry in entries.values()]
        turns.append(Turn(name=_MATMUL, call=lambda _: (multiply(),), is_reference=True))

        def failed(name: str, failure: Failure) -> None:
            if name == _MATMUL:
                raise failure
            entries[name].fail(failure)

        samples = take_turns(turns, self.team, self.options, failed, told)
        products = samples.pop(_MATMUL)
        if not samples:
            return
        rates = tuple(2 * side**3 / statistics.median(ms) / 1e9 for ms in products.by_rank)
        for name, found in samples.items():
            timing = self._timing(entries[name], backward, found)
            if timing is not None:
                entries[name].timings[backward] = replace(
                    timing, matmul_tflops=rates, matmul_size=side
                )

    def _timing(self, entry: Entry, backward: bool, samples: Samples) -> Timing | None:
        """What is reported of the samples of an entry, its memory and communication."""
        team, exchange = self.team, self.options.exchange
        measured = partial(
            measure_memory, entry, self.workload, team, backward=backward, exchange=exchange
        )
        held = entry.attempt(team, measured)
        if held is None:
            return None
        assert entry.contender is not None
        by_rank = team.share(int(entry.contender.flops * (1 + BACKWARD * backward)))
        timing = Timing(
            flops_by_rank=tuple(by_rank),
            calls=samples.calls,
            times_ms=samples.slowest,
            matmul_tflops=(),
            matmul_size=0,
            memory=heaviest(team.share(held)),
        )
        if team.size == 1:
            return entry.attempt(team, partial(self._alone, entry, backward, timing))
        if entry.name == OURS:
            measured_waits = partial(self._communication, entry, backward, samples.calls)
            communication = entry.attempt(team, measured_waits)
            if communication is None:
                return None
            timing = replace(timing, communication=combined(team.share(communication)))
        return timing

    def _alone(self, entry: Entry, backward: bool, timing: Timing) -> Timing:
        """What is measured of one rank only: the clock's time of calls, and CUDA graphs."""
        device, turn, times = self.team.device, entry.turn(backward), timing.times_ms
        with turn.inside():
            wall = times
            if device.type == "cuda":
                wall = tuple(
                    measure.wall_ms(device, partial(turn.call, number))
                    for number in range(min(len(times), MOST_WALL_SAMPLES))
                )
            timing = replace(timing, wall_ms=wall)
            if not self.options.cuda_graph:
                return timing
            replays: list[float] = []

            def replay() -> None:
                replays.extend(measure.graph_ms(device, lambda: turn.call(0), len(times)))

            _, reason = status_of(replay)
        return replace(timing, graph_ms=tuple(replays), graph_reason=reason)

    def _communication(self, entry: Entry, backward: bool, calls: int) -> Communication:
        """What this rank waits and sends in a call of ours."""
        team = self.team
        timed = TimedExchange(resolve_exchange(team.groups[OURS]), team.device)
        waiting = Entry(OURS, self._build(OURS, self.workload, timed), entry.sets)
        assert waiting.contender is not None
        plan = self.workload.plan(waiting.contender.layout).rank(team.rank)
        expected = costs.sent_bytes(plan, self.workload.size, backward=backward)
        return measure_communication(waiting.turn(backward), timed, team, calls, expected)

    def _errors(self, entry: Entry) -> tuple[Errors | None, str]:
        """Errors of an entry on the workload's twin; or None, and why."""
        twin = twin_of(entry.name, self.workload, self.team)
        try:
            build = partial(self._build, entry.name)
            return twin_errors(twin, self.team, self.options.seed, build), ""
        except Failure as failure:
            return None, failure.reason
