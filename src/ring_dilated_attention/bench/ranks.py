"""`measure_ranks`: time cases on growing numbers of ranks, this library and its peers in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ..pattern import check_positive_int
from ..plan import AttentionPlan, TensorSize, flops_by_rank, plan_attention
from . import measure
from .case import Case
from .peers import OURS
from .ranks_entry import Entry, Inputs
from .ranks_errors import twin_errors, twin_of
from .ranks_exposed import combined, measure_communication
from .ranks_memory import heaviest, measure_memory
from .ranks_options import RanksOptions
from .ranks_result import RanksResult, RanksTiming
from .ranks_team import PATIENCE, Failure, Team, form_teams
from .ranks_turns import Samples, Turn, take_turns
from .result import BACKWARD, OK, Errors
from .ring_peers import RingContender, ring_contender
from .run import MOST_SETS, ROTATED_BYTES

_MATMUL = "matmul"


def measure_ranks(
    cases: Sequence[Case],
    sizes: Sequence[int],
    options: RanksOptions,
    *,
    progress: Callable[[str], None] | None = None,
    finished: Callable[[list[RanksResult]], None] | None = None,
) -> list[RanksResult]:
    """Time cases on the first p ranks of the default process group, for every size p.

    Every rank of the group makes this call; those that are not among the first p wait. Contenders
    take turns sample by sample, a matrix product among them. A contender that refuses a case, or
    runs out of memory, is reported and the others go on.

    Args:
        cases: what to compute.
        sizes: numbers of ranks.
        options: how to measure.
        progress: told on rank 0 what is about to be measured.
        finished: given on rank 0, after each case and size, all results so far.

    Returns:
        A result per case, size and contender, in order, `OURS` before its peers; on every rank.

    Raises:
        TypeError, ValueError: an argument is not allowed.
        RankError: a rank failed where others went on.
    """
    if not cases:
        raise ValueError("cases must not be empty")
    sizes = sorted({check_positive_int("ranks", size) for size in sizes})
    world_size = dist.get_world_size()
    if not sizes or sizes[-1] > world_size:
        raise ValueError(f"need ranks of 1 to {world_size}, the ranks that there are; got {sizes}")
    everyone = dist.new_group(backend="gloo", timeout=PATIENCE)
    shared_options = [options]
    dist.broadcast_object_list(shared_options, 0, group=everyone)  # one seed for all
    options = shared_options[0]
    device = measure.resolve_device(options.device)
    names = list(dict.fromkeys((OURS, *options.peers)))
    teams = form_teams(sizes, names, device)
    results: list[RanksResult] = []
    for base in cases:
        for size in sizes:
            case = base
            if options.scaling == "weak":
                case = replace(base, length=base.length * size)
            if progress is not None and dist.get_rank() == 0:
                progress(f"{case} on {size} rank{'s' * (size > 1)}")
            team = teams[size]
            if team is not None:
                results.extend(_Run(base, case, team, names, options).results())
                if finished is not None and team.rank == 0:
                    finished(results)
            dist.barrier(group=everyone)
    shared: list[list[RanksResult]] = [results]
    dist.broadcast_object_list(shared, 0, group=everyone)
    dist.destroy_process_group(everyone)
    return shared[0]


class _Run:
    """One case on one team."""

    def __init__(
        self, base: Case, case: Case, team: Team, names: Sequence[str], options: RanksOptions
    ) -> None:
        self.base, self.case, self.team, self.options = base, case, team, options
        self.entries = [Entry(name) for name in names]
        self.generator = torch.Generator(team.device).manual_seed(options.seed + team.rank)
        self.size = TensorSize(
            batch=case.batch, head_dim=case.head_dim, element_size=case.torch_dtype.itemsize
        )

    def results(self) -> list[RanksResult]:
        """Measure, and say what was found; the same on all ranks."""
        drawn: dict[tuple[tuple[int, ...], ...], list[Inputs]] = {}
        for entry in self.entries:
            entry.attempt(self.team, partial(self._prepare, entry, drawn))
        for backward in (False, True):
            self._time(backward)
        drawn.clear()
        for entry in self.entries:
            entry.sets.clear()
        found = []
        for entry in self.entries:
            errors, why = self._errors(entry) if self.options.errors else (None, "")
            found.append(
                RanksResult(
                    base=self.base,
                    case=self.case,
                    ranks=self.team.size,
                    scaling=self.options.scaling,
                    contender=entry.name,
                    layout=self.options.layout,
                    exchange=self.options.exchange,
                    status=entry.status,
                    reason=entry.reason,
                    forward=entry.timings.get(False),
                    forward_backward=entry.timings.get(True),
                    errors=errors,
                    errors_reason=why,
                )
            )
        return found

    def _build(self, name: str, case: Case) -> RingContender:
        team, options = self.team, self.options
        return ring_contender(
            name,
            case,
            team.groups[name],
            team.size,
            team.device,
            layout=options.layout,
            exchange=options.exchange,
        )

    def _prepare(
        self, entry: Entry, drawn: dict[tuple[tuple[int, ...], ...], list[Inputs]]
    ) -> None:
        """Build the contender and draw its inputs; contenders with the same shapes share them."""
        case, team = self.case, self.team
        entry.contender = self._build(entry.name, case)
        length = entry.contender.layout.local_length(team.rank)

        def shape(heads: int) -> tuple[int, ...]:
            assert entry.contender is not None
            inner = (heads, length) if entry.contender.heads_first else (length, heads)
            return case.batch, *inner, case.head_dim

        def draw(shape: tuple[int, ...], leaf: bool) -> torch.Tensor:
            return torch.randn(
                shape,
                generator=self.generator,
                device=team.device,
                dtype=case.torch_dtype,
                requires_grad=leaf,
            )

        query, key = shapes = shape(case.heads), shape(case.num_kv_heads)
        if shapes not in drawn:
            count = 1
            if team.device.type == "cuda":
                elements = 2 * math.prod(query) + 2 * math.prod(key)
                size = elements * case.torch_dtype.itemsize
                count = min(MOST_SETS, -(-ROTATED_BYTES // max(size, 1)))
            drawn[shapes] = [
                Inputs(draw(query, True), draw(key, True), draw(key, True), draw(query, False))
                for _ in range(count)
            ]
        entry.sets = list(drawn[shapes])

    def _plan(self, contender: RingContender) -> AttentionPlan:
        case = self.case
        return plan_attention(
            case.pattern,
            contender.layout,
            is_causal=case.is_causal,
            num_heads=case.heads,
            num_kv_heads=case.num_kv_heads,
        )

    def _time(self, backward: bool) -> None:
        """Time one kind of call of all entries still in, and a matrix product, taking turns."""
        team, options = self.team, self.options
        multiply, side = measure.matmul(team.device, self.case.torch_dtype)
        entries = {entry.name: entry for entry in self.entries if entry.status == OK}
        turns = [entry.turn(backward) for entry in entries.values()]
        turns.append(Turn(name=_MATMUL, call=lambda _: (multiply(),)))

        def failed(name: str, failure: Failure) -> None:
            if name == _MATMUL:
                raise failure
            entries[name].fail(failure)

        samples = take_turns(
            turns,
            team,
            options.repeats,
            options.seconds,
            options.sample_ms_on(team.device.type),
            failed,
        )
        products = samples.pop(_MATMUL)
        rates = [2 * side**3 / statistics.median(ms) / 1e9 for ms in products.by_rank]
        for name, found in samples.items():
            timing = self._timing(entries[name], backward, found)
            if timing is not None:
                entries[name].timings[backward] = replace(
                    timing, matmul_tflops=tuple(rates), matmul_size=side
                )

    def _timing(self, entry: Entry, backward: bool, samples: Samples) -> RanksTiming | None:
        """What is reported of the samples of an entry, and its memory and communication."""
        team, turn = self.team, entry.turn(backward)
        assert entry.contender is not None
        plan = self._plan(entry.contender)
        held = entry.attempt(
            team,
            measure_memory(
                turn,
                team,
                plan.rank(team.rank),
                self.size,
                backward=backward,
                exchange=self.options.exchange,
            ),
        )
        if held is None:
            return None
        memory = heaviest(team.share(held))
        communication = None
        if entry.name == OURS and team.size > 1:
            communication = entry.attempt(
                team,
                partial(
                    measure_communication,
                    entry,
                    self.case,
                    team,
                    plan.rank(team.rank),
                    self.size,
                    backward=backward,
                    calls=samples.calls,
                    options=self.options,
                ),
            )
            if communication is None:
                return None
            communication = combined(team.share(communication))
        return RanksTiming(
            flops_by_rank=tuple(
                int(flops * (1 + BACKWARD * backward)) for flops in flops_by_rank(plan, self.size)
            ),
            calls=samples.calls,
            times_ms=samples.slowest,
            matmul_tflops=(),
            matmul_size=0,
            memory=memory,
            communication=communication,
        )

    def _errors(self, entry: Entry) -> tuple[Errors | None, str]:
        """Errors of an entry on the case's twin; or None, and why."""
        twin = twin_of(entry.name, self.case, self.team)
        try:
            build = partial(self._build, entry.name)
            return twin_errors(twin, self.team, self.options.seed, build), ""
        except Failure as failure:
            return None, failure.reason
