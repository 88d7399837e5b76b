"""Run every rank of a world in this process, on one device, and check what each of them did.

Ranks are threads that take turns: one computes at a time, and whoever waits for another rank lets
the others go on. So what a rank holds and sends, and how long it computes, can be measured on a
laptop. Behind `rda simulate`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..exchange import Exchange, Pending, SoloExchange, run_loopback
from ..layout import SequenceLayout
from ..pattern import in_brief
from ..plan import RankPlan, costs, lower
from .verify import TENSORS, TOLERANCE, Case, attend, compare


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What a rank exchanges with others in one direction of a call."""

    sent: int  # bytes
    received: int  # bytes
    messages: int  # sent
    peers: tuple[int, ...]  # the ranks sent to or received from, in rising order


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
        forward: the exchange and the time of forward.
        backward: those of backward; None if it was not run.
    """

    rank: int
    positions: int
    planned_memory: costs.Memory
    held_memory: costs.Memory
    flops: int
    of_mean: float
    forward: Pass
    backward: Pass | None

    @property
    def seconds(self) -> float:
        """How long it has computed."""
        return self.forward.seconds + (self.backward.seconds if self.backward else 0.0)

    def disagreements(self) -> Iterator[str]:
        """Where what it did is not what the plan says."""
        for name, done in (("forward", self.forward), ("backward", self.backward)):
            if done is not None and done.counted != done.planned:
                yield f"rank {self.rank}, {name}: planned {done.planned}, counted {done.counted}"
        if self.held_memory != self.planned_memory:
            yield f"rank {self.rank}: planned {self.planned_memory}, held {self.held_memory}"


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


def simulate(case: Case, *, backward: bool = True) -> Simulation:
    """Make a call of `dilated_attention` on every rank of a layout, one rank computing at a time.

    The time that planning takes grows with the square of the number of ranks.

    Args:
        case: the call; its inputs are drawn from its seed, on its device. Of the exchanges that
            ``"auto"`` may take it is ring or gather.
        backward: whether to run backward too.

    Returns:
        A report per rank, and the errors relative to the same call on one device. They may be as
        large as `rda verify` allows or, where a gradient is a small difference of large numbers, 4
        times its rounding (`Case.roundoff`).

    Raises:
        TypeError, ValueError: the case is not one that `dilated_attention` can compute, or it has
            padding, detached gradients, a loss of lse, or an exchange by heads.
    """
    if not isinstance(case, Case):
        raise TypeError(f"case must be a Case, got {in_brief(case)}")
    given = case.lengths, case.branch_gradients, case.loss_of
    if given != (None, "exact", ("out",)) or case.exchange.startswith("heads"):
        raise ValueError(
            "a simulated case has no padding, exact gradients, a loss of out alone, no exchange by "
            f"heads; got lengths, branch_gradients, loss_of {given}, exchange {case.exchange!r}"
        )
    plan = case.plan()
    if case.exchange == "auto":
        case = replace(case, exchange="gather" if plan.gathers else "ring")
    gathers = case.exchange == "gather"
    device, layout, lock = torch.device(case.device), case.layout, threading.Lock()
    whole = [x.to(case.dtype) for x in case.inputs()]

    def alone(case: Case, tensors: Sequence[torch.Tensor]) -> _Ran:
        one = SequenceLayout.contiguous(tensors[0].shape[1], 1)
        return _run(case, tensors, Turns(SoloExchange(), device, lock), one, backward)

    def run(ends: Exchange) -> _Ran:
        shards = [layout.shard(x, ends.rank, 1).clone() for x in whole]
        return _run(case, shards, Turns(ends, device, lock), layout, backward)

    # First, so that whatever cannot be computed is refused before there are any threads. The short
    # run takes what the first call of a process costs out of the measured time.
    alone(replace(case, documents=None), [x[:, :64] for x in whole])
    one = alone(case, whole)
    ran = run_loopback(layout.world_size, run)
    size = costs.TensorSize(
        batch=case.batch, head_dim=case.head_dim, element_size=case.dtype.itemsize
    )
    work = costs.flops_by_rank(plan, size)
    reports = tuple(
        _report(plan.rank(rank), size, work, result, gathers=gathers)
        for rank, result in enumerate(ran)
    )
    joined = {
        name: layout.unshard([x.tensors[name] for x in ran], 1 + (name == "lse"))
        for name in one.tensors
    }
    outcome = compare(case, joined, one.tensors, one.tensors)
    errors, bound = outcome.errors(), TOLERANCE[case.dtype]
    problems = [
        f"{name}: relative error {errors[name]:.1e}, allowed {bound:.1e}"
        for name in outcome.wrong(case.dtype)
    ]
    if not (problems or outcome.valid):
        problems.append("lse: the ranks and one device cover different positions")
    return Simulation(
        ranks=reports,
        balance=costs.balance(work),
        gathers=gathers,
        one_device=(one.seconds[0], sum(one.seconds[1:])),
        errors=errors,
        problems=(*problems, *(text for report in reports for text in report.disagreements())),
    )


class Turns:
    """An `Exchange` whose rank goes on only while no other rank of its world does.

    It has its turn inside of ``with``, but for the times when it waits for other ranks. It counts
    what it exchanges, the received rows that are there at once, and the seconds of its turns.
    """

    def __init__(self, ends: Exchange, device: torch.device, lock: threading.Lock) -> None:
        self.rank, self.world_size, self.calls = ends.rank, ends.world_size, ends.calls
        self.sent_bytes = self.most_buffered = 0
        self._ends, self._device, self._lock = ends, device, lock
        self._buffered = self._received_bytes = self._messages = 0
        self._peers: set[int] = set()
        self._seconds = self._since = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _stop_counting(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - self._since

    @contextmanager
    def others_go_on(self) -> Iterator[None]:
        """End the turn, and take another one at the end."""
        self._stop_counting()
        self._lock.release()
        try:
            yield
        finally:
            self.__enter__()

    def take(self) -> tuple[Transfers, float]:
        """What was exchanged, and for how many seconds was computed, since this was last called."""
        self._stop_counting()
        taken = Transfers(
            sent=self.sent_bytes,
            received=self._received_bytes,
            messages=self._messages,
            peers=tuple(sorted(self._peers)),
        )
        seconds, self._seconds, self._since = self._seconds, 0.0, time.perf_counter()
        self.sent_bytes = self._received_bytes = self._messages = 0
        self._peers.clear()
        return taken, seconds

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
        self._stop_counting()  # the loopback copies what it sends, which devices do beside
        pending = self._ends.start(send, receive)
        self._since = time.perf_counter()
        return _Wait(pending, self.others_go_on)

    def _freed(self, nbytes: int) -> None:
        self._buffered -= nbytes

    def begin(self, number: int, data: bytes = b"") -> Callable[[], list[tuple[int, bytes]]]:
        """See `Exchange.begin`."""
        return self.others_go_on()(self._ends.begin(number, data))

    def share(self, value: Any) -> list[Any]:
        """See `Exchange.share`."""
        return self.others_go_on()(self._ends.share)(value)


class _Wait(NamedTuple):
    """A transfer whose rank lets the others go on while it waits."""

    pending: Pending
    others_go_on: Any

    def wait(self) -> None:
        with self.others_go_on():
            self.pending.wait()


class _Ran(NamedTuple):
    """Results by name, and of forward and then backward what was exchanged and the seconds."""

    tensors: dict[str, torch.Tensor]
    transfers: tuple[Transfers, ...]
    seconds: tuple[float, ...]
    held: costs.Memory


def _run(
    case: Case,
    tensors: Sequence[torch.Tensor],
    turns: Turns,
    layout: SequenceLayout,
    backward: bool,
) -> _Ran:
    """Make the call on one rank, in turns with the others."""
    *leaves, dout = tensors
    query, key, value = (x.detach().requires_grad_(backward) for x in leaves)
    with turns:
        out, lse = attend(case, query, key, value, layout, turns)
        passes, results = [turns.take()], [out.detach(), lse]
        held = {"query": query, "key": key, "value": value, "out": out, "lse": lse}
        memory = costs.Memory(
            **{name: x.nbytes for name, x in held.items()}, buffers=turns.most_buffered
        )
        if backward:
            results += torch.autograd.grad(out, (query, key, value), dout)
            passes.append(turns.take())
    transfers, seconds = zip(*passes, strict=True)
    return _Ran(dict(zip(TENSORS, results, strict=False)), transfers, seconds, memory)


def _report(
    rank: RankPlan, size: costs.TensorSize, work: Sequence[int], ran: _Ran, *, gathers: bool
) -> RankReport:
    passes = []
    for backward, counted, seconds in zip((False, True), ran.transfers, ran.seconds, strict=False):
        program = lower(rank, gathers=gathers, backward=backward)
        sent, received = map(sum, zip(*(action.nbytes(size) for action in program), strict=True))
        sends = [action.sends[0] for action in program if action.sends]
        peers = {*sends, *(action.receives[0] for action in program if action.receives)}
        planned = Transfers(
            sent=sent, received=received, messages=len(sends), peers=tuple(sorted(peers))
        )
        passes.append(Pass(planned=planned, counted=counted, seconds=seconds))
    return RankReport(
        rank=rank.index,
        positions=rank.plan.layout.local_length(rank.index),
        planned_memory=costs.memory(rank, size, gathers=gathers),
        held_memory=ran.held,
        flops=work[rank.index],
        of_mean=work[rank.index] * len(work) / sum(work) if any(work) else 1.0,
        forward=passes[0],
        backward=passes[1] if len(passes) > 1 else None,
    )
