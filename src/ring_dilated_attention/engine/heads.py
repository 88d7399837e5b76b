"""All-to-all by heads: rows of all heads become all rows of a few heads, and back.

Messages are rows first, (rows, batch, heads, head_dim): they are received where they belong, and
kernels read views of what was received. Only what is sent is packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import torch

from ..exchange import Exchange, Pending
from ..plan import HeadShare
from .accumulate import add

Sent: TypeAlias = tuple[int, torch.Tensor]


class Peers(NamedTuple):
    """The ranks that have the same heads as this one, for the engine to send rows to."""

    ends: Exchange  # this rank's end of the whole group
    ranks: range  # of the whole group

    def start(self, send: Sent | None, receive: Sent | None) -> Pending:
        """See `Exchange.start`; ranks are counted among these."""
        messages = (None if x is None else (self.ranks[x[0]], x[1]) for x in (send, receive))
        return self.ends.start(*messages)


class HeadExchange(NamedTuple):
    """A rank's end of an all-to-all by heads."""

    share: HeadShare  # which heads and rows this rank has
    ends: Exchange  # its end of the group

    def to_heads(self, *tensors: torch.Tensor) -> torch.Tensor:
        """All rows of the group, of the heads that this rank computes.

        Args:
            tensors: (batch, local_sequence, heads, head_dim) of one dtype; the number of heads is
                the same on all ranks: of a query, or of a key.

        Returns:
            (rows of the group, batch, heads, head_dim), in the order of positions: of each tensor
            the heads of this rank, one behind the other. `rows_of_heads` cuts it.
        """
        share, whole = self.share, [self._by_unit(x) for x in tensors]
        batch, length, _, head_dim = whole[0].shape
        counts = [x.shape[2] // share.all_units for x in whole]  # heads of a unit
        messages = {}
        for member, units in share.units.items():
            rows = share.group_length if member == share.rank else length
            shape = rows, batch, len(units) * sum(counts), head_dim
            messages[member] = whole[0].new_empty(shape)
        _copy((view, part) for view, part in self._pairs(messages, whole, counts))
        found = messages.pop(share.rank)
        self._swap(messages, found, to_heads=True)
        return found

    def to_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `to_heads`: rows of this rank, of all heads; repeated heads are added up.

        Args:
            tensors: (batch, rows of the group, heads of this rank, head_dim) of one dtype: the
                first like query, others like key.

        Returns:
            For each, (batch, local_sequence, heads, head_dim), contiguous.
        """
        share, length = self.share, self.share.local_length
        own = share.units[share.rank]
        counts = [x.shape[2] // len(own) for x in tensors]
        batch, group, _, head_dim = tensors[0].shape
        joined = tensors[0].transpose(0, 1)
        if len(tensors) > 1 or not joined.is_contiguous():
            joined = joined.new_empty(group, batch, len(own) * sum(counts), head_dim)
            views = _split(joined, len(own), counts)
            _copy(
                (view.permute(1, 2, 0, 3), x.transpose(1, 2))
                for view, x in zip(views, tensors, strict=True)
            )
        messages = {
            member: joined.new_empty(length, batch, len(units) * sum(counts), head_dim)
            for member, units in share.units.items()
            if member != share.rank
        }
        self._swap(messages, joined, to_heads=False)
        found = [x.new_empty(batch, length, share.all_units * count, head_dim)
                 for x, count in zip(tensors, counts, strict=True)]  # fmt: skip
        messages[share.rank] = joined
        _copy((part, view) for view, part in self._pairs(messages, found, counts))
        query, *keys = found
        if share.repeats > 1:
            of_key = share.all_units // share.repeats, share.repeats
            keys = [x.view(batch, length, *of_key, head_dim).sum(3) for x in keys]
        return [query, *keys]

    def _pairs(
        self,
        messages: dict[int, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        counts: Sequence[int],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views (batch, heads, rows, head_dim) of messages, and of this rank's tensors, that match.

        Messages hold this rank's rows of the heads of a member; its own one all rows of the group.
        """
        share = self.share
        for member, message in messages.items():
            units, whole = share.units[member], ((0, 0, len(message)),)
            stretches = share.stretches[member] if member == share.rank else whole
            for local, place, size in stretches:
                views = _split(message[place : place + size], len(units), counts)
                for x, count, view in zip(tensors, counts, views, strict=True):
                    heads = slice(units.start * count, units.stop * count)
                    own = x[:, local : local + size, heads].transpose(1, 2)
                    yield view.permute(1, 2, 0, 3), own

    def _by_unit(self, tensor: torch.Tensor) -> torch.Tensor:
        """A KV head for each of its units; a query as it is. Kernels copy whole rows."""
        tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        if tensor.shape[2] >= self.share.all_units:
            return tensor
        return tensor.repeat_interleave(self.share.repeats, 2)

    def _swap(
        self, messages: dict[int, torch.Tensor], joined: torch.Tensor, *, to_heads: bool
    ) -> None:
        """Exchange rows with the other members of the group, range by range.

        Args:
            messages: by member, this rank's rows of the member's heads.
            joined: all rows of the group, of this rank's heads.
            to_heads: whether messages are sent and `joined` is received, or the other way round.
        """
        share, members, pending = self.share, [*self.share.units], []
        place, stretches = members.index(share.rank), share.stretches

        def rows_with(member: int, *, sent: bool) -> Iterator[torch.Tensor]:
            if sent == to_heads:
                found = [messages[member][a : a + size] for a, _, size in stretches[share.rank]]
            else:
                found = [joined[a : a + size] for _, a, size in stretches[member]]
            return filter(torch.Tensor.numel, found)

        for step in range(1, len(members)):
            to, source = (members[(place + x) % len(members)] for x in (step, -step))
            for one, other in zip_longest(rows_with(to, sent=True), rows_with(source, sent=False)):
                pending.append(
                    self.ends.start(
                        None if one is None else (to, one),
                        None if other is None else (source, other),
                    )
                )
        for one in pending:
            one.wait()


def rows_of_heads(rows: torch.Tensor, query_heads: int | None = None) -> list[torch.Tensor]:
    """Views (batch, rows, heads, head_dim) of what `HeadExchange.to_heads` returns.

    Args:
        rows: (rows, batch, heads, head_dim).
        query_heads: how many are of the query, and the others of key and value; None: all.
    """
    rows = rows.transpose(0, 1)
    if query_heads is None:
        return [rows]
    keys = (rows.shape[2] - query_heads) // 2
    return list(torch.split(rows, [query_heads, keys, keys], 2))


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second view (batch, heads, rows, head_dim) of each pair into the first."""
    filled = [pair for pair in pairs if pair[0].numel()]
    if filled:
        add(*zip(*filled, strict=True), store=True)


def _split(rows: torch.Tensor, units: int, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Rows (rows, batch, heads, head_dim) by tensor, of which `units` units have `counts` heads."""
    return torch.split(rows, [units * count for count in counts], 2)
