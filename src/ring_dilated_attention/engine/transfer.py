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

from ..exchange import Exchange, Pending
from ..plan import Message, Step
from .messages import MessageRows, add_returned, message_rows, pack, spread, sum_slots


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
    received: MessageRows | None
    sent: MessageRows | None


class _InFlight(NamedTuple):
    step: Step
    pending: Pending
    packed: torch.Tensor | None
    received: MessageRows | None
    sent: MessageRows | None


def fetch(
    steps: Iterator[Step], exchange: Exchange, key: torch.Tensor, value: torch.Tensor, *, depth: int
) -> Iterator[Fetched]:
    """Start `depth` fetches, then yield each step when its rows are there, starting one more.

    Args:
        steps: what this rank exchanges.
        exchange: this rank's end of the group.
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the shape of `key`.
        depth: messages in flight behind the running compute: 1 is the ring.

    Returns:
        An iterator over the steps; the first `depth` transfers are under way when it is returned.
        Rows are freed when the caller drops a step: do so before asking for the next.
    """
    packer = _Packer(key, value)
    flight: deque[_InFlight] = deque()

    def start() -> None:
        step = next(steps, None)
        if step is None:
            packer.forget()
        else:
            flight.append(_start_fetch(step, exchange, packer))

    def arrive() -> Fetched:
        step, pending, packed, received, sent = flight.popleft()
        pending.wait()
        start()
        slots = None if packed is None or received is None else spread(packed, received)
        return Fetched(step, slots, received, sent)

    def arrivals() -> Iterator[Fetched]:
        while flight:
            yield arrive()  # nothing here may outlive it: the caller decides when rows are freed

    for _ in range(depth):
        start()
    return arrivals()


class _Packer:
    """Packs rows of K and V; what several ranks in turn are to be sent, once."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value = key, value
        self._message: Message | None = None
        self._packed: torch.Tensor | None = None

    def rows(self, message: Message | None) -> MessageRows | None:
        if message is None:
            return None
        return message_rows(message, self.key.shape[2], self.key.device)

    def pack(self, rows: MessageRows) -> torch.Tensor:
        if self._packed is None or not rows.message.is_same_for(self._message):
            self._message, self._packed = rows.message, pack(self.key, self.value, rows)
        return self._packed

    def forget(self) -> None:
        self._message = self._packed = None


def _start_fetch(step: Step, exchange: Exchange, packer: _Packer) -> _InFlight:
    sent, received = packer.rows(step.send), packer.rows(step.receive)
    send = receive = packed = None
    if step.send is not None and sent is not None:
        send = step.send.receiver, packer.pack(sent)
    if step.receive is not None:
        key = packer.key
        packed = key.new_empty(2, key.shape[0], step.receive.rows, key.shape[3])
        receive = step.receive.sender, packed
    return _InFlight(step, exchange.start(send, receive), packed, received, sent)


class GradientReturn:
    """Gradients of a step's remote rows on their way to their owner.

    Args:
        exchange: this rank's end of the group.
        fetched: the step.
        dslots: gradients of ``fetched.slots``, in the dtype in which gradients are summed.
        dkey: this rank's dK so far, (batch, local_sequence, kv_heads, head_dim), contiguous.
        dvalue: its dV.
        dtype: of `dslots` on every rank; `dkey` and `dvalue` may have others.

    Attributes:
        tensors: what is sent and received, held until it has finished.
        nbytes: their bytes.
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
        self._returned: torch.Tensor | None = None
        if fetched.step.receive is not None:
            assert dslots is not None
            assert fetched.received is not None
            send = fetched.step.receive.sender, sum_slots(dslots, fetched.received)
        if fetched.step.send is not None:
            shape = 2, dkey.shape[0], fetched.step.send.rows, dkey.shape[3]
            self._returned = dkey.new_empty(shape, dtype=dtype)
            receive = fetched.step.send.receiver, self._returned
        self.tensors = [x[1] for x in (send, receive) if x is not None]
        self.nbytes = sum(x.nbytes for x in self.tensors)
        self._pending = exchange.start(send, receive)

    def finish(self) -> None:
        """Wait, and add what came back for this rank's own rows to its dK and dV."""
        self._pending.wait()
        if self._returned is not None and self._sent is not None:
            add_returned(self._dkey, self._dvalue, self._returned, self._sent)
