"""Run every rank of a world in this process, on one device, and check what each of them did.

Ranks are threads that take turns: one computes at a time, and whoever waits for another rank lets
the others go on. So what a rank holds and sends, and how long it computes, can be measured on a
laptop. Behind `rda simulate`.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ..engine import kernel_calls
from ..exchange import Exchange, Pending, run_loopback
from ..functional import dilated_attention
from ..pattern import check_positive_int, in_brief
from ..plan import RankPlan, costs
from ..tiles import accumulate_dtype
from .reference import relative_error
from .verify import TENSORS, TOLERANCE, Case


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What a rank exchanges with others in one direction of a call.

    Attributes:
        sent: bytes sent.
        received: bytes received.
        messages: messages sent.
        peers: the ranks sent to or received from, in rising order.
    """

    sent: int
    received: int
    messages: int
    peers: tuple[int, ...]


class Clock:
    """Adds up the time between `start` and `stop`, in seconds, until it is taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Begin to count."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop counting when the device is done."""
        if self._since is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._sum += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """The sum since this was last called."""
        taken, self._sum = self._sum, 0.0
        return taken

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing inside of ``with``."""
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()


class Turns:
    """An `Exchange` whose rank goes on only while no other rank of its world does.

    It has its turn inside of ``with``, but for the times when it waits for other ranks. It counts
    what it exchanges, and the received rows that are there at once.
    """

    def __init__(self, ends: Exchange, clock: Clock, lock: threading.Lock) -> None:
        self.rank, self.world_size, self.sent_bytes = ends.rank, ends.world_size, 0
        self.calls = ends.calls
        self.clock = clock
        self.most_buffered = 0
        self.waited: Callable[[], None] = lambda: None
        """Is called after every wait for rows, when the rank has its turn again."""
        self._ends, self._lock = ends, lock
        self._buffered = self._received_bytes = self._messages = 0
        self._peers: set[int] = set()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def others_go_on(self) -> Iterator[None]:
        """End the turn, and take another one at the end."""
        with self.clock.stopped():
            self._lock.release()
            try:
                yield
            finally:
                self._lock.acquire()

    def take(self) -> Transfers:
        """What was exchanged since this was last called."""
        taken = Transfers(
            sent=self.sent_bytes,
            received=self._received_bytes,
            messages=self._messages,
            peers=tuple(sorted(self._peers)),
        )
        self.sent_bytes = self._received_bytes = self._messages = 0
        self._peers.clear()
        return taken

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""
        if send is not None:
            self.sent_bytes += send[1].nbytes
            self._messages += 1
            self._peers.add(send[0])
        if receive is not None:
            rows = receive[1]
            self._received_bytes += rows.nbytes
            self._peers.add(receive[0])
            self._buffered += rows.nbytes
            self.most_buffered = max(self.most_buffered, self._buffered)
            weakref.finalize(rows, self._freed, rows.nbytes).atexit = False
        with self.clock.stopped():  # the loopback copies what it sends
            return _Wait(self._ends.start(send, receive), self)

    def _freed(self, nbytes: int) -> None:
        self._buffered -= nbytes

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        return self.others_go_on()(self._ends.begin(number, data))

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """See `Exchange.maximum`."""
        return self.others_go_on()(self._ends.maximum)(values, device)

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        return self.others_go_on()(self._ends.share)(value)


class _Wait:
    """A transfer whose rank lets the others go on while it waits."""

    def __init__(self, pending: Pending, turns: Turns) -> None:
        self._pending, self._turns = pending, turns

    def wait(self) -> None:
        with self._turns.others_go_on():
            self._pending.wait()
        self._turns.waited()


Told = Callable[[float, str], None]
"""(share of all operations that is done, what is being computed) -> None."""


class Total:
    """Operations that all ranks have done; the rank whose turn it is adds its own."""

    def __init__(self, told: Told, flops: float) -> None:
        self._told, self._all, self._flops = told, flops or 1.0, 0.0

    def add(self, flops: float, what: str) -> None:
        """Count operations, and tell how many there are."""
        self._flops += flops
        self._told(self._flops / self._all, what)


class Done:
    """Operations that one rank has done of a pass: some more at every wait, all at the end."""

    def __init__(self, total: Total, name: str, flops: int, waits: int = 0) -> None:
        self._total, self._name, self._flops, self._parts = total, name, flops, waits + 1
        self._left, self._part, self._pass = 0.0, 0.0, ""

    def begin(self, name: str, cost: float) -> None:
        """Begin a pass of `cost` times the operations of forward."""
        self._left, self._pass = cost * self._flops, name
        self._part = self._left / self._parts
        self._total.add(0, f"{self._name}, {name}")

    def some(self) -> None:
        """Count a wait for rows; a pass has at most `waits` of them, often fewer."""
        part = min(self._part, self._left)
        self._left -= part
        self._total.add(part, f"{self._name}, {self._pass}")

    def end(self) -> None:
        """The pass is over."""
        self._total.add(self._left, f"{self._name}, {self._pass}")
        self._left = 0.0


_WARM_UP = 64  # positions
_BACKWARD = 2.5
"""Useful operations of backward over those of forward."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward or backward on one rank.

    Attributes:
        planned: what the plan says that it exchanges.
        counted: what it has exchanged.
        seconds: how long it has computed, alone on the device, without waiting. The first call with
            a plan works the plan out: forward includes that.
    """

    planned: Transfers
    counted: Transfers
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank held, computed and exchanged.

    Attributes:
        rank: which rank.
        positions: how many it holds.
        planned_memory: bytes that the plan says it holds in forward.
        held_memory: bytes of the tensors that it held; of the received rows, the most at once.
        flops: useful operations of forward, by the plan; backward takes 2.5 times these.
        of_mean: its operations over the mean of all ranks; 1.0 if none has any.
        kernel_calls: of forward, by the plan.
        forward: the exchange and the time of forward.
        backward: those of backward; None if it was not run.
    """

    rank: int
    positions: int
    planned_memory: costs.Memory
    held_memory: costs.Memory
    flops: int
    of_mean: float
    kernel_calls: int
    forward: Pass
    backward: Pass | None

    @property
    def seconds(self) -> float:
        """How long it has computed."""
        return self.forward.seconds + (self.backward.seconds if self.backward else 0.0)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What all ranks did, and how it compares with one device that holds everything.

    Attributes:
        ranks: a report per rank.
        balance: how evenly the operations are divided among the ranks.
        gathers: whether all transfers were in flight at once.
        one_device: seconds of forward and backward of the same call on one device.
        errors: relative error of out, lse and, with backward, the gradients, to one device's.
        problems: what differs from the plan or from one device, in words; empty if nothing does.
    """

    ranks: tuple[RankReport, ...]
    balance: costs.Balance
    gathers: bool
    one_device: tuple[float, float]
    errors: Mapping[str, float]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether results are those of one device, and memory and transfers those of the plan."""
        return not self.problems


def simulate(case: Case, *, backward: bool = True, told: Told = lambda *_: None) -> Simulation:
    """Make a call of `dilated_attention` on every rank of a layout, one rank computing at a time.

    The time that planning takes grows with the square of the number of ranks.

    Args:
        case: the call; its inputs are drawn from its seed, on its device.
        backward: whether to run backward too.
        told: for a progress display: called with the share of the operations that is done, from 0
            to 1, and a text that says what is computed. Calls come from several threads, one at a
            time. Default: nothing is called.

    Returns:
        A report per rank, and the errors relative to the same call on one device. They may be as
        large as `rda verify` allows or, where a gradient is a small difference of large numbers, 4
        times the one device's own error to float64.

    Raises:
        TypeError, ValueError: the case is not one that `dilated_attention` can compute.
    """
    if not isinstance(case, Case):
        raise TypeError(f"case must be a Case, got {in_brief(case)}")
    if case.lengths is not None:
        raise ValueError(f"a simulated case has no padding; got lengths {case.lengths}")
    size, plan = _size(case), case.plan()
    device, whole = torch.device(case.device), _inputs(case)
    # First, so that whatever cannot be computed is refused before there are any threads. The short
    # run takes what the first call of a process costs out of the measured time.
    short = replace(case, documents=None)
    work = costs.flops_by_rank(plan, size)
    _run(short, [x[:, :_WARM_UP] for x in whole], None, Clock(device), backward)
    # One device does them all, and the ranks do as many together.
    total = Total(told, 2 * sum(work) * (1 + _BACKWARD * backward))
    alone = _run(case, whole, None, Clock(device), backward, Done(total, "one device", sum(work)))
    lock = threading.Lock()

    def run(ends: Exchange) -> _Ran:
        turns = Turns(ends, Clock(device), lock)
        with turns:
            shards = [case.layout.shard(x, ends.rank, 1).clone() for x in whole]
            name, waits = f"rank {ends.rank}", ends.world_size - 1
            done = Done(total, name, work[ends.rank], waits)
            turns.waited = done.some
            return _run(case, shards, turns, turns.clock, backward, done)

    ran = run_loopback(case.layout.world_size, run)
    gathers = plan.gathers if case.exchange == "auto" else case.exchange == "gather"
    reports = tuple(
        _report(plan.rank(rank), size, work, result, gathers=gathers)
        for rank, result in enumerate(ran)
    )
    errors, problems = _compare(case, [x.tensors for x in ran], alone.tensors, whole, backward)
    return Simulation(
        ranks=reports,
        balance=costs.balance(work),
        gathers=gathers,
        one_device=(alone.seconds[0], sum(alone.seconds[1:])),
        errors=errors,
        problems=(*problems, *(text for report in reports for text in _disagreements(report))),
    )


def _size(case: Case) -> costs.TensorSize:
    return costs.TensorSize(
        batch=check_positive_int("batch", case.batch),
        head_dim=check_positive_int("head_dim", case.head_dim),
        element_size=case.dtype.itemsize,
    )


def _inputs(case: Case) -> list[torch.Tensor]:
    """Whole query, key, value and dout, (batch, sequence, heads, head_dim)."""
    generator = torch.Generator().manual_seed(case.seed)
    return [
        torch.randn(
            case.batch,
            case.layout.length,
            heads,
            case.head_dim,
            generator=generator,
            dtype=case.dtype,
        ).to(case.device)
        for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    ]


@dataclass(frozen=True)
class _Ran:
    """Results by name, and of forward and then backward the seconds and what was exchanged."""

    tensors: dict[str, torch.Tensor]
    seconds: list[float]
    transfers: list[Transfers]
    held: costs.Memory


def _run(
    case: Case,
    tensors: Sequence[torch.Tensor],
    ends: Turns | None,
    clock: Clock,
    backward: bool,
    ran: Done | None = None,
) -> _Ran:
    """Make the call: on one rank, or without `ends` on one device; `ran` counts its operations."""
    *leaves, dout = tensors
    query, key, value = (x.detach().requires_grad_(backward) for x in leaves)
    seconds, transfers = [], []

    def done() -> None:
        clock.stop()
        seconds.append(clock.take())
        if ends is not None:
            transfers.append(ends.take())
        if ran is not None:
            ran.end()

    clock.take()
    if ran is not None:
        ran.begin("forward", 1)
    clock.start()
    out, lse = dilated_attention(
        query,
        key,
        value,
        case.pattern,
        is_causal=case.is_causal,
        documents=case.documents,
        group=ends,
        layout=None if ends is None else case.layout,
        exchange=case.exchange,
        backend=case.backend,
        return_lse=True,
    )
    done()
    held = costs.Memory(
        query=query.nbytes,
        key=key.nbytes,
        value=value.nbytes,
        out=out.nbytes,
        lse=lse.nbytes,
        buffers=0 if ends is None else ends.most_buffered,
    )
    results = [out.detach(), lse]
    if backward:
        if ran is not None:
            ran.begin("backward", _BACKWARD)
        clock.start()
        results += torch.autograd.grad(out, (query, key, value), dout)
        done()
    return _Ran(dict(zip(TENSORS, results, strict=False)), seconds, transfers, held)


def _report(
    rank: RankPlan, size: costs.TensorSize, work: Sequence[int], ran: _Ran, *, gathers: bool
) -> RankReport:
    rounds = rank.rounds(gathers=gathers)
    steps = [step for one in rounds for step in one.steps()]
    local, remote = rank.groups(gathers=gathers)
    receivers = [step.send.receiver for step in steps if step.send is not None]
    senders = [step.receive.sender for step in steps if step.receive is not None]
    peers = tuple(sorted({*receivers, *senders}))
    moved = costs.traffic(rank, size)
    planned = [
        Transfers(
            sent=moved.forward_sent,
            received=moved.forward_received,
            messages=len(receivers),
            peers=peers,
        ),
        Transfers(
            sent=moved.backward_sent,
            received=moved.backward_received,
            messages=len(receivers) + len(senders),  # rows again, and returned gradients
            peers=peers,
        ),
    ]
    passes = [
        Pass(planned=a, counted=b, seconds=seconds)
        for a, b, seconds in zip(planned, ran.transfers, ran.seconds, strict=False)
    ]
    return RankReport(
        rank=rank.index,
        positions=rank.plan.layout.local_length(rank.index),
        planned_memory=costs.memory(rank, size, gathers=gathers),
        held_memory=ran.held,
        flops=work[rank.index],
        of_mean=work[rank.index] * len(work) / sum(work) if any(work) else 1.0,
        kernel_calls=kernel_calls((*local, *remote), rank, size.batch),
        forward=passes[0],
        backward=passes[1] if len(passes) > 1 else None,
    )


def _disagreements(report: RankReport) -> Iterator[str]:
    """Where what a rank did is not what the plan says."""
    for name, done in (("forward", report.forward), ("backward", report.backward)):
        if done is not None and done.counted != done.planned:
            yield f"rank {report.rank}, {name}: planned {done.planned}, counted {done.counted}"
    if report.held_memory != report.planned_memory:
        yield f"rank {report.rank}: planned {report.planned_memory}, held {report.held_memory}"


def _compare(
    case: Case,
    shards: Sequence[Mapping[str, torch.Tensor]],
    alone: Mapping[str, torch.Tensor],
    whole: Sequence[torch.Tensor],
    backward: bool,
) -> tuple[dict[str, float], list[str]]:
    """Relative errors by tensor, and what is out of bounds."""
    errors, problems = {}, []
    bound = TOLERANCE[case.dtype]

    @cache
    def exact() -> dict[str, torch.Tensor]:
        wide = Case(**{**vars(case), "dtype": torch.float64, "backend": "auto"})
        tensors = [x.double() for x in whole]
        return _run(wide, tensors, None, Clock(torch.device(case.device)), backward).tensors

    for name, want in alone.items():
        got = case.layout.unshard([x[name] for x in shards], 2 if name == "lse" else 1)
        if name == "lse":
            if not torch.equal(torch.isneginf(got), torch.isneginf(want)):
                problems.append("lse: the ranks and one device cover different positions")
            got, want = (x.masked_fill(torch.isneginf(x), 0) for x in (got, want))
        errors[name] = relative_error(got, want)
        if not errors[name] <= bound and not _rounds_alike(got, want, exact()[name]):
            problems.append(f"{name}: relative error {errors[name]:.1e}, allowed {bound:.1e}")
    return errors, problems


def _rounds_alike(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `got` is as near to float64 as `want`: within 4 times, and rounding of numbers of 1.

    A gradient can be a small difference of large numbers (a query that sees one key).
    """
    exact = exact.masked_fill(torch.isneginf(exact), 0)
    ours, theirs = (float(torch.linalg.vector_norm(x.double() - exact)) for x in (got, want))
    rounding = torch.finfo(accumulate_dtype(want.dtype)).eps * math.sqrt(want.numel())
    return ours <= 4 * (theirs + rounding)
