"""The transfers of a ring: fetching remote rows of K and V, returning their gradients.

Every rank starts its transfers in the same order, empty ones included: fetches of step 1, 2, ...
each before the compute of the step before it, returns after the compute of their step. What the
order needs is thus the same on all ranks, and no rank can wait for one that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .exchange import Exchange, Pending
from .packing import MessageIndex, add_home, gather, index_message, pack, spread
from .plan import Message, RankPlan, Step


class Fetched(NamedTuple):
    """A step with its remote rows at hand.

    Attributes:
        step: what to compute.
        slots: K and V of the received message, (2, batch, slots, head_dim); None if none came.
        received: the rows of that message; None if none came.
        sent: the rows of the message sent at this step; None if none was.
    """

    step: Step
    slots: torch.Tensor | None
    received: MessageIndex | None
    sent: MessageIndex | None


class _InFlight(NamedTuple):
    step: Step
    pending: Pending
    rows: torch.Tensor | None
    received: MessageIndex | None
    sent: MessageIndex | None


def fetch(
    plan: RankPlan, exchange: Exchange, key: torch.Tensor, value: torch.Tensor, *, depth: int
) -> Iterator[Fetched]:
    """Start `depth` fetches, then yield each step when its rows are there, starting one more.

    Args:
        plan: what this rank exchanges.
        exchange: this rank's end of the group.
        key: (batch, local_sequence, kv_heads, head_dim).
        value: likewise.
        depth: messages in flight behind the running compute: 1 is the ring.

    Returns:
        An iterator over the steps; the first `depth` transfers are under way when it is returned.
        Rows are freed when the caller drops a step: do so before asking for the next.
    """
    steps = plan.steps()
    flight: deque[_InFlight] = deque()

    def start() -> None:
        step = next(steps, None)
        if step is not None:
            flight.append(_start_fetch(step, exchange, key, value))

    def arrive() -> Fetched:
        step, pending, rows, received, sent = flight.popleft()
        pending.wait()
        start()
        slots = None if rows is None or received is None else spread(rows, received)
        return Fetched(step, slots, received, sent)

    def arrivals() -> Iterator[Fetched]:
        while flight:
            yield arrive()  # nothing here may outlive it: the caller decides when rows are freed

    for _ in range(depth):
        start()
    return arrivals()


def _index(message: Message | None, key: torch.Tensor) -> MessageIndex | None:
    return None if message is None else index_message(message, key.shape[2], key.device)


def _start_fetch(
    step: Step, exchange: Exchange, key: torch.Tensor, value: torch.Tensor
) -> _InFlight:
    sent, received = _index(step.send, key), _index(step.receive, key)
    send = receive = rows = None
    if step.send is not None and sent is not None:
        send = step.send.receiver, pack(key, value, sent)
    if step.receive is not None:
        rows = key.new_empty(2, key.shape[0], step.receive.rows, key.shape[3])
        receive = step.receive.sender, rows
    return _InFlight(step, exchange.start(send, receive), rows, received, sent)


class GradientReturn:
    """Gradients of a step's remote rows on their way to their owner.

    Args:
        exchange: this rank's end of the group.
        fetched: the step.
        dslots: gradients of ``fetched.slots``, in the dtype in which gradients are summed.
        dkey: this rank's dK so far, (batch, local_sequence, kv_heads, head_dim), contiguous.
        dvalue: its dV.
        dtype: of `dslots` on every rank; `dkey` and `dvalue` may be narrower.
    """

    def __init__(
        self,
        exchange: Exchange,
        fetched: Fetched,
        dslots: torch.Tensor | None,
        dkey: torch.Tensor,
        dvalue: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._dkey, self._dvalue, self._sent = dkey, dvalue, fetched.sent
        send = receive = None
        self._rows: torch.Tensor | None = None
        if fetched.step.receive is not None:
            assert dslots is not None
            assert fetched.received is not None
            send = fetched.step.receive.sender, gather(dslots, fetched.received)
        if fetched.step.send is not None:
            shape = 2, dkey.shape[0], fetched.step.send.rows, dkey.shape[3]
            self._rows = dkey.new_empty(shape, dtype=dtype)
            receive = fetched.step.send.receiver, self._rows
        self._pending = exchange.start(send, receive)

    def finish(self) -> None:
        """Wait, and add what came back for this rank's own rows to its dK and dV."""
        self._pending.wait()
        if self._rows is not None and self._sent is not None:
            add_home(self._dkey, self._dvalue, self._rows, self._sent)
