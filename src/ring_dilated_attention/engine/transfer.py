"""The transfers of a ring: fetching remote rows of K and V, returning their gradients.

Every rank starts its transfers in the same order, empty ones included: fetches of step 1, 2, ...
each before the compute of the step before it, returns after the compute of their step. What the
order needs is thus the same on all ranks, and no rank can wait for one that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from ..exchange import Exchange, Pending
from ..plan import Message, Step
from .messages import (
    ReceivedRows,
    SentRows,
    add_returned,
    pack,
    received_rows,
    sent_rows,
    spread,
    sum_slots,
)


class Fetched(NamedTuple):
    """A step with its remote rows at hand.

    Attributes:
        step: what to compute.
        rows: K and V of the received message, (2, batch, rows, head_dim); None if none came.
        received: what is needed to find the rows of its slots; None if none came.
        sent: the rows of the message sent at this step; None if none was.
    """

    step: Step
    rows: torch.Tensor | None
    received: ReceivedRows | None
    sent: SentRows | None

    def spread(self) -> tuple[torch.Tensor | None, Fetched]:
        """K and V of its slots, (2, batch, slots, head_dim), if any; the step without its rows."""
        if self.rows is None or self.received is None:
            return None, self
        return spread(self.rows, self.received), self._replace(rows=None)


@dataclass
class InFlight:
    """A step whose transfer has started.

    Attributes:
        pending: the transfer.
        packed: where its rows arrive, (2, batch, rows, head_dim); None: there are none.
        fetched: the step, without its rows.
    """

    pending: Pending
    packed: torch.Tensor | None
    fetched: Fetched


def fetch(steps: Iterator[Step], packer: Packer, depth: int) -> Iterator[Fetched]:
    """Start `depth` fetches, then yield each step when its rows are there, starting one more.

    Args:
        steps: what this rank exchanges.
        packer: sends and receives rows.
        depth: messages in flight behind the running compute: 1 is the ring.

    Returns:
        An iterator over the steps; the first `depth` transfers are under way when it is returned.
        Rows are freed when the caller drops a step: do so before asking for the next.
    """
    flight = deque(map(packer.start, islice(steps, depth)))
    if len(flight) < depth:
        packer.forget()

    def arrive() -> Fetched:
        one = flight.popleft()
        one.pending.wait()
        coming = next(steps, None)
        if coming is None:
            packer.forget()
        else:
            flight.append(packer.start(coming))
        return one.fetched._replace(rows=one.packed)

    def arrivals() -> Iterator[Fetched]:
        while flight:
            yield arrive()  # nothing here may outlive it: the caller decides when rows are freed

    return arrivals()


class Packer:
    """Packs rows of K and V; what several ranks in turn are to be sent, once.

    Args:
        exchange: this rank's end of the group.
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the shape of `key`.
        spreads: whether rows that are received are spread to the slots of their message.
    """

    def __init__(
        self,
        exchange: Exchange,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        spreads: bool = True,
    ) -> None:
        self._exchange, self.key, self.value, self._spreads = exchange, key, value, spreads
        self._message: Message | None = None
        self._packed: torch.Tensor | None = None

    def sent(self, message: Message | None) -> SentRows | None:
        """What is needed to find the rows of a message that is sent."""
        if message is None:
            return None
        return sent_rows(message, self.key.shape[2], self.key.device)

    def received(self, message: Message | None) -> ReceivedRows | None:
        """What is needed to find the rows of a message that is received."""
        if message is None:
            return None
        if not self._spreads:
            return ReceivedRows(message, None)
        return received_rows(message, self.key.shape[2], self.key.device)

    def pack(self, rows: SentRows) -> torch.Tensor:
        """The rows of a message, (2, batch, rows, head_dim)."""
        if self._packed is None or not rows.message.is_same_for(self._message):
            self._message, self._packed = rows.message, pack(self.key, self.value, rows)
        return self._packed

    def buffer(self, message: Message) -> torch.Tensor:
        """Where the rows of a message may arrive."""
        return self.key.new_empty(2, self.key.shape[0], message.rows, self.key.shape[3])

    def start(self, step: Step) -> InFlight:
        """Start the transfer of a step."""
        sent, received = self.sent(step.send), self.received(step.receive)
        send = receive = packed = None
        if step.send is not None and sent is not None:
            send = step.send.receiver, self.pack(sent)
        if step.receive is not None:
            packed = self.buffer(step.receive)
            receive = step.receive.sender, packed
        pending = self._exchange.start(send, receive)
        return InFlight(pending, packed, Fetched(step, None, received, sent))

    def forget(self) -> None:
        """All steps have started: let go of the rows that were packed last."""
        self._message = self._packed = None


class GradientReturn:
    """Gradients of remote rows on their way to their owner, and those that come to this rank.

    Args:
        home: where the latter are added.
        send: whom to send what; None: nothing.
        sent: own rows, whose gradients come from the receiver of their message; None: of none.

    Attributes:
        tensors: what is sent and received, held until it has finished.
        nbytes: their bytes.
    """

    def __init__(
        self, home: Home, send: tuple[int, torch.Tensor] | None, sent: SentRows | None
    ) -> None:
        self._home, self._sent = home, sent
        receive = None
        self._returned: torch.Tensor | None = None
        if sent is not None:
            self._returned = home.buffer(sent.message)
            receive = sent.message.receiver, self._returned
        self.tensors = [x[1] for x in (send, receive) if x is not None]
        self.nbytes = sum(x.nbytes for x in self.tensors)
        self._pending = home.exchange.start(send, receive)

    def finish(self) -> None:
        """Wait, and add what came back for this rank's own rows to its dK and dV."""
        self._pending.wait()
        if self._returned is not None and self._sent is not None:
            add_returned(self._home.dkey, self._home.dvalue, self._returned, self._sent)


class Home(NamedTuple):
    """Where gradients of this rank's rows of K and V are added up, and where they come from.

    Attributes:
        exchange: this rank's end of the group.
        dkey: this rank's dK so far, (batch, local_sequence, kv_heads, head_dim), contiguous.
        dvalue: its dV.
        dtype: of the gradients that are sent, on every rank; `dkey` and `dvalue` may have others.
    """

    exchange: Exchange
    dkey: torch.Tensor
    dvalue: torch.Tensor
    dtype: torch.dtype

    def buffer(self, message: Message) -> torch.Tensor:
        """Where the gradients of a message may arrive, (2, batch, rows, head_dim)."""
        shape = 2, self.dkey.shape[0], message.rows, self.dkey.shape[3]
        return self.dkey.new_empty(shape, dtype=self.dtype)

    def start(self, fetched: Fetched, dslots: torch.Tensor | None) -> GradientReturn:
        """Return the gradients of a step's remote rows.

        Args:
            fetched: the step.
            dslots: gradients of its slots, in the dtype in which gradients are summed.
        """
        send = None
        if fetched.received is not None:
            assert dslots is not None
            send = fetched.received.message.sender, sum_slots(dslots, fetched.received)
        return GradientReturn(self, send, fetched.sent)
