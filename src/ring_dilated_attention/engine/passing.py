"""Transfers where ranks of a host pass on rows that have crossed to it once: see `plan.passing`.

At a step a rank starts up to two transfers: with the owners of rows, then with ranks of its own
host, to which it passes on parts of a load, or which pass it some on. What is passed on has arrived
at an earlier step. Gradients go the same way back: those of a load are added up by the rank that
has it, in float32 at least, and returned a step after the last of them have been sent to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..exchange import Exchange, Pending
from ..plan import Message, PassingStep
from ..tiles import accumulate_dtype
from .messages import SentRows, add_to_rows, part_rows, rows_at, sent_rows, sum_slots
from .transfer import Fetched, GradientReturn, Home, InFlight, Packer


class PassingPacker(Packer):
    """A `Carrier` of steps where ranks pass on rows.

    Args:
        exchange: this rank's end of the group.
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the shape of `key`.
    """

    def __init__(self, exchange: Exchange, key: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(exchange, key, value)
        self._loads: dict[int, torch.Tensor] = {}  # by the identity of their messages
        self._started = self._landed = 0  # steps

    def may_start(self, step: PassingStep) -> bool:  # type: ignore[override]
        """See `Carrier`: loads that may be passed on have arrived.

        On every rank, whether it has one or not: all start their transfers in the same order, those
        that return gradients between them.
        """
        return not step.behind or self._landed > self._started - step.behind

    def start(self, step: PassingStep) -> InFlight:  # type: ignore[override]
        """See `Carrier`."""
        self._started += 1
        sent, received = self.sent(step.sends), self.received(step.step.receive)
        send = receive = packed = None
        if step.sends is not None and sent is not None:
            send = step.sends.receiver, self.pack(sent)
        if step.receives is not None:
            packed = self.buffer(step.receives)
            receive = step.receives.sender, packed
        pending: tuple[Pending, ...] = (self._exchange.start(send, receive),)
        send = receive = None
        if step.passes_on is not None and step.held is not None:
            send = step.passes_on.receiver, self._part(step.passes_on, step.held)
        if step.step.receive is not None and step.source not in (None, self._exchange.rank):
            assert step.source is not None
            packed = self.buffer(step.step.receive)
            receive = step.source, packed
        if send is not None or receive is not None:
            pending = (*pending, self._exchange.start(send, receive))
        return InFlight(pending, packed, Fetched(step.step, None, received, sent, step))

    def landed(self, one: InFlight) -> None:
        """See `Carrier`: keep a load, and find what this rank needs of it."""
        self._landed += 1
        step = one.fetched.passing
        assert step is not None
        if step.receives is not None and step.receives is not step.step.receive:
            assert one.packed is not None
            self._loads[id(step.receives)] = one.packed
            one.packed = None
        if step.load is not None and step.source == self._exchange.rank:
            assert step.step.receive is not None
            one.packed = self._part(step.step.receive, step.load)
        if step.completes is not None:
            del self._loads[id(step.completes)]

    def _part(self, message: Message, load: Message) -> torch.Tensor:
        rows = part_rows(message, load, self.key.shape[2], self.key.device)
        held = self._loads[id(load)]
        return held if rows is None else rows_at(held, rows.numbers)


class _Coming(NamedTuple):
    """Gradients on their way within the host, and the load that they are to be added to.

    Attributes:
        pending: their transfer.
        part: of a load of this rank's, and where its gradients arrive; None: this rank sends only.
    """

    pending: Pending
    part: tuple[Message, Message, torch.Tensor] | None


class Relayed:
    """Gradients of the loads that this rank has passed on, in one call.

    Args:
        home: where gradients of this rank's own rows are added up.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._sums: dict[int, torch.Tensor] = {}  # by the identity of the load
        self._coming: list[_Coming] = []
        self._due: PassingStep | None = None

    def start(self, fetched: Fetched, dslots: torch.Tensor | None) -> GradientReturn:
        """See `Home.start`."""
        step, home = fetched.passing, self._home
        assert step is not None
        far: tuple[int, torch.Tensor] | None = None
        near: tuple[int, torch.Tensor] | None = None
        if fetched.received is not None:
            assert dslots is not None
            message, rows = fetched.received.message, sum_slots(dslots, fetched.received)
            if step.load is None:
                far = message.sender, rows
            elif step.source == home.exchange.rank:
                self._add(message, step.load, rows)
            else:
                assert step.source is not None
                near = step.source, rows
        returning = GradientReturn(home, far, None if step.sends_load else fetched.sent)
        receive = part = None
        if step.passes_on is not None and step.held is not None:
            arrives = home.buffer(step.passes_on)
            receive = step.passes_on.receiver, arrives
            part = step.passes_on, step.held, arrives
        if near is not None or receive is not None:
            self._coming.append(_Coming(home.exchange.start(near, receive), part))
        if step.ends_turn:
            assert self._due is None
            self._due = step
        return returning

    def due(self) -> list[GradientReturn]:
        """Return the gradients of the loads that a turn has completed, if one has since."""
        step, self._due = self._due, None
        if step is None:
            return []
        for one in self._coming:
            one.pending.wait()
            if one.part is not None:
                self._add(*one.part)
        self._coming.clear()
        send = sent = None
        if step.completes is not None:
            total = self._sums.pop(id(step.completes))
            send = step.completes.sender, total.to(self._home.dtype)
        if step.returned is not None:
            sent = self._rows(step.returned)
        return [GradientReturn(self._home, send, sent)]

    def _add(self, message: Message, load: Message, gradients: torch.Tensor) -> None:
        """Add gradients of a part of a load, (2, batch, rows, head_dim), to those of the load."""
        home = self._home
        if id(load) not in self._sums:
            shape = 2, home.dkey.shape[0], load.rows, home.dkey.shape[3]
            dtype = accumulate_dtype(home.dtype)
            self._sums[id(load)] = home.dkey.new_zeros(shape, dtype=dtype)
        total = self._sums[id(load)]
        rows = part_rows(message, load, home.dkey.shape[2], home.dkey.device)
        if rows is None:
            total += gradients
        else:
            add_to_rows(total, gradients, rows.numbers)

    def _rows(self, message: Message) -> SentRows:
        return sent_rows(message, self._home.dkey.shape[2], self._home.dkey.device)
