"""`bench`: time cases on one device, this library and its peers in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from ..checks import check_seconds, check_size, relative_error
from ..pattern import check_choice
from . import measure
from .case import Case
from .peers import OURS, PEERS, Contender, Shapes, contender
from .result import BACKWARD, FAILED, OK, OUT_OF_MEMORY, REFUSED, Ceilings, Errors, Result, Timing

FEWEST_REPEATS, MOST_WALL_REPEATS = 3, 10
ROTATED_BYTES, MOST_SETS = 128 * 2**20, 64
"""On CUDA calls take turns with input sets, of that many bytes in all, which no cache holds."""

TWIN_LENGTH = {"cpu": 1001, "cuda": 3001}
TWIN_SCORES = {"cpu": 2**22, "cuda": 2**28}
"""Most positions, and most float64 scores of all heads, that are compared with brute force."""


class _Inputs(NamedTuple):
    """Leaves of autograd, and the gradient of out."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dout: torch.Tensor


@dataclass
class _Entry:
    """A contender on its way through a case; it drops out with a status and a reason."""

    name: str
    contender: Contender | None = None
    sets: list[list[_Inputs]] = field(default_factory=list)
    kernel: str = ""
    status: str = OK
    reason: str = ""
    timings: dict[bool, Timing] = field(default_factory=dict)  # by whether backward is in it

    def call(self, index: int, backward: bool) -> None:
        """Compute input set number `index`, counted round."""
        assert self.contender is not None
        for query, key, value, dout in self.sets[index % len(self.sets)]:
            with torch.set_grad_enabled(backward):
                out = self.contender.attend(query, key, value)
            if backward:
                torch.autograd.grad(out, (query, key, value), dout)


def bench(
    cases: Sequence[Case],
    *,
    peers: Sequence[str] = (),
    device: str = "auto",
    repeats: int = 20,
    seconds: float = 10.0,
    cuda_graph: bool = False,
    errors: bool = True,
    seed: int | None = None,
    progress: Callable[[Case], None] | None = None,
) -> list[Result]:
    """Time cases on one device, forward and forward+backward, this library and peers in turn.

    Inputs are random and fresh. Every contender warms up; then they take turns, call by call, so
    that a device whose speed drifts slows all alike. A contender that refuses a case, or runs out
    of memory, is reported and the others go on.

    Args:
        cases: what to compute.
        peers: what else computes it, of `PEERS`.
        device: ``"cpu"``, ``"cuda"`` (the current one), or ``"auto"``: CUDA where there is one.
        repeats: timed calls of each kind.
        seconds: time for the calls of one contender of each kind; there are fewer repeats where
            it would not do, but not fewer than three for that.
        cuda_graph: whether to time replays of CUDA graphs too.
        errors: whether to compare small twins with float64.
        seed: of the inputs; None: a fresh one.
        progress: called with every case before it starts.

    Returns:
        A result per case and contender, in order, `OURS` before its peers.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    on = measure.resolve_device(device)
    if not cases:
        raise ValueError("cases must not be empty")
    for peer in peers:
        check_choice("peer", peer, PEERS)
    check_size("repeats", repeats)
    check_seconds("seconds", seconds)
    generator = torch.Generator(on)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    names = list(dict.fromkeys((OURS, *peers)))
    ceilings: dict[str, Ceilings] = {}
    results = []
    for case in cases:
        if progress is not None:
            progress(case)
        if case.dtype not in ceilings:
            ceilings[case.dtype] = measure.measure_ceilings(on, case.torch_dtype)
        entries = [_Entry(name) for name in names]
        drawn: dict[tuple[Shapes, ...], list[list[_Inputs]]] = {}
        for entry in entries:
            _attempt(entry, partial(_prepare, entry, case, on, generator, drawn))
        for backward in (False, True):
            _time(entries, case, on, backward, repeats, seconds, cuda_graph)
        drawn.clear()
        for entry in entries:
            entry.sets.clear()
        ours = entries[0]
        for entry in entries:
            wanted, why = _errors(entry, case, on, generator) if errors else (None, "")
            results.append(_result(entry, ours, case, ceilings[case.dtype], wanted, why))
    return results


def _attempt(entry: _Entry, function: Callable[[], None]) -> None:
    """Run a function for an entry that is still in; what it raises takes the entry out."""
    if entry.status == OK:
        entry.status, entry.reason = status_of(function)
        if entry.status == OUT_OF_MEMORY and torch.cuda.is_available():
            torch.cuda.empty_cache()


def status_of(function: Callable[[], None]) -> tuple[str, str]:
    """Run a function and say how it went: any error is a finding here, and kept in words."""
    try:
        function()
    except (ValueError, TypeError, NotImplementedError) as error:
        return REFUSED, str(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return OUT_OF_MEMORY, str(error)
    except Exception as error:  # peers are other people's code
        if "can't allocate memory" in str(error):  # what torch's CPU allocator raises
            return OUT_OF_MEMORY, str(error)
        return FAILED, f"{type(error).__name__}: {error}"
    return OK, ""


def _prepare(
    entry: _Entry,
    case: Case,
    device: torch.device,
    generator: torch.Generator,
    drawn: dict[tuple[Shapes, ...], list[list[_Inputs]]],
) -> None:
    """Build the contender and draw its inputs; contenders with the same shapes share them."""
    entry.contender = contender(entry.name, case, device)
    shapes = entry.contender.shapes
    if shapes not in drawn:
        elements = sum(2 * math.prod(query) + 2 * math.prod(key) for query, key in shapes)
        count = 1
        if device.type == "cuda":
            size = elements * case.torch_dtype.itemsize
            count = min(MOST_SETS, -(-ROTATED_BYTES // size))
        drawn[shapes] = [_draw(shapes, case, device, generator) for _ in range(count)]
    entry.sets = list(drawn[shapes])
    query, key, value, _ = entry.sets[0][0]
    entry.kernel = entry.contender.kernel(query, key, value)


def _draw(
    shapes: tuple[Shapes, ...], case: Case, device: torch.device, generator: torch.Generator
) -> list[_Inputs]:
    def draw(shape: tuple[int, ...], leaf: bool) -> torch.Tensor:
        return torch.randn(
            shape, generator=generator, device=device, dtype=case.torch_dtype, requires_grad=leaf
        )

    return [
        _Inputs(draw(query, True), draw(key, True), draw(key, True), draw(query, False))
        for query, key in shapes
    ]


def _time(
    entries: Sequence[_Entry],
    case: Case,
    device: torch.device,
    backward: bool,
    repeats: int,
    seconds: float,
    cuda_graph: bool,
) -> None:
    """Time one kind of call of all entries still in, and a matrix product, taking turns."""
    multiply, size = measure.matmul(device, case.torch_dtype)
    products: list[Callable[[], float]] = []
    rate: float | None = None
    counts: dict[str, int] = {}
    pending: dict[str, list[Callable[[], float]]] = {entry.name: [] for entry in entries}

    def warm_up(entry: _Entry) -> None:
        for index in range(2 if device.type == "cuda" else 1):  # CUDA: the first one compiles
            taken = measure.wall_ms(device, partial(entry.call, index, backward))
        counts[entry.name] = min(repeats, max(FEWEST_REPEATS, int(seconds * 1e3 / taken)))

    def start(entry: _Entry, index: int) -> None:
        call = partial(entry.call, index, backward)
        pending[entry.name].append(measure.start_timing(device, call))

    def finish(entry: _Entry) -> None:
        assert entry.contender is not None
        times = wall = tuple(elapsed() for elapsed in pending[entry.name])
        if device.type == "cuda":
            wall = tuple(
                measure.wall_ms(device, partial(entry.call, index, backward))
                for index in range(min(len(times), MOST_WALL_REPEATS))
            )
        call = partial(entry.call, 0, backward)
        timing = Timing(
            flops=int(entry.contender.flops * (1 + BACKWARD * backward)),
            times_ms=times,
            wall_ms=wall,
            peak_bytes=measure.peak_bytes(device, call),
            matmul_tflops=rate,
        )
        if cuda_graph:
            timing = _with_graph(timing, device, call)
        entry.timings[backward] = timing

    for entry in entries:
        _attempt(entry, partial(warm_up, entry))
    for index in range(max(counts.values(), default=0)):
        first = index % len(entries)  # who comes first changes: a call feels what ran before it
        for entry in (*entries[first:], *entries[:first]):
            if index < counts.get(entry.name, 0):
                _attempt(entry, partial(start, entry, index))
        if index < measure.CEILING_REPEATS[device.type]:
            products.append(measure.start_timing(device, multiply))
    if products:
        rate = 2 * size**3 / statistics.median(elapsed() for elapsed in products) / 1e9
    for entry in entries:
        _attempt(entry, partial(finish, entry))


def _with_graph(timing: Timing, device: torch.device, call: measure.Call) -> Timing:
    """Add replays of a CUDA graph of the call, on one input set, or why there are none."""
    times: tuple[float, ...] = ()

    def replay() -> None:
        nonlocal times
        times = measure.graph_ms(device, call, len(timing.times_ms))

    return replace(timing, graph_reason=status_of(replay)[1], graph_ms=times)


def _errors(
    entry: _Entry, case: Case, device: torch.device, generator: torch.Generator
) -> tuple[Errors | None, str]:
    """Errors of an entry on the case's twin; or None, and why."""
    most = min(TWIN_LENGTH[device.type], math.isqrt(TWIN_SCORES[device.type] // case.heads) - 1 | 1)
    twin = case.twin(most)
    found: Errors | None = None

    def compare() -> None:
        nonlocal found
        attend = contender(entry.name, twin, device)
        if attend.expected is None:
            return
        query, key, value, dout = _draw(attend.shapes, twin, device, generator)[0]
        leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
        expected = attend.expected(*leaves)
        wanted = (expected, *torch.autograd.grad(expected, leaves, dout.double()))
        out = attend.attend(query, key, value)
        got = (out, *torch.autograd.grad(out, (query, key, value), dout))
        errors = [relative_error(a, b) for a, b in zip(got, wanted, strict=True)]
        found = Errors(twin=twin, out=errors[0], gradients=max(errors[1:]))

    _, reason = status_of(compare)
    return found, reason


def _result(
    entry: _Entry,
    ours: _Entry,
    case: Case,
    ceilings: Ceilings,
    errors: Errors | None,
    errors_reason: str,
) -> Result:
    """What is reported of an entry."""
    return Result(
        case=case,
        contender=entry.name,
        ceilings=ceilings,
        kernel=entry.kernel,
        status=entry.status,
        reason=entry.reason,
        forward=entry.timings.get(False),
        forward_backward=entry.timings.get(True),
        errors=errors,
        errors_reason=errors_reason,
        ratios=_both(entry, ours, lambda peer, own: own.tflops / peer.tflops),
        time_ratios=_both(entry, ours, lambda peer, own: peer.median_ms / own.median_ms),
    )


def _both(
    entry: _Entry, ours: _Entry, ratio: Callable[[Timing, Timing], float]
) -> tuple[float | None, float | None]:
    """A ratio of a peer's timing to ours, forward and forward+backward, where both have one."""

    def of(backward: bool) -> float | None:
        peer, own = entry.timings.get(backward), ours.timings.get(backward)
        return None if entry is ours or peer is None or own is None else ratio(peer, own)

    return of(False), of(True)
