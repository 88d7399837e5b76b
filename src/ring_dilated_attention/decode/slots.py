"""Where a rank keeps the rows of a cache, and how a prompt fills them.

Every branch and head has slots side by side: see `plan.cache`. Of a prompt, whose positions lie on
the ranks of a group as a layout says, every rank hands the others the rows that they keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch

from ..documents import Integers, as_ints, packed_rows
from ..exchange import Exchange
from ..layout import SequenceLayout
from ..pattern import in_brief
from ..plan import CachedBranch, CachePlan, KeptRows


class Slots(NamedTuple):
    """The rows of a cache, by branches, heads and slots.

    Attributes:
        plan: what is kept, and where.
        keys: (batch, rows, head_dim).
        values: like `keys`.
    """

    plan: CachePlan
    keys: torch.Tensor
    values: torch.Tensor

    def of_branch(self, branch: CachedBranch) -> list[torch.Tensor]:
        """Keys and values of a branch: each (batch, heads, slots, head_dim), a view."""
        heads, slots = len(branch.heads), branch.slots
        shape = len(self.keys), heads, slots, self.keys.shape[2]
        return [
            x.narrow(1, branch.first_row, heads * slots).view(shape)
            for x in (self.keys, self.values)
        ]

    def keep(self, rows: slice, kept: KeptRows, both: Sequence[torch.Tensor]) -> None:
        """Write keys and values, each (batch rows, heads, members, head_dim)."""
        for target, source in zip(self.of_branch(kept.branch), both, strict=True):
            for places, to in runs_of_slots(kept.members, kept.branch.slots):
                target[rows, kept.heads, to] = source[:, :, places]

    def grown(self, plan: CachePlan) -> Slots:
        """A copy with room for longer documents, by a plan of a larger `max_length`."""
        shape = len(self.keys), plan.rows, self.keys.shape[2]
        found = Slots(plan, self.keys.new_empty(shape), self.values.new_empty(shape))
        before = {branch.index: branch for branch in self.plan.branches}
        for branch in plan.branches:
            known = before.get(branch.index)
            if known is None:
                continue
            # A branch that gets more slots had one for each member: they stay where they were. It
            # may get more heads too, whose offsets lie behind the former max_length.
            places = [branch.heads.index(head) for head in known.heads]
            for to, source in zip(found.of_branch(branch), self.of_branch(known), strict=True):
                to[:, places, : known.slots] = source
        return found


def rows_of(tensor: torch.Tensor, rows: slice, kept: KeptRows) -> torch.Tensor:
    """The kept rows, (batch, heads, rows, head_dim), of (batch, sequence, kv_heads, head_dim)."""
    return tensor[rows, kept.rows, kept.kv_heads].transpose(1, 2)


def runs_of_slots(members: range, slots: int) -> Iterator[tuple[slice, slice]]:
    """The slots of consecutive members, at most one per slot: one or two (places, slots)."""
    first = members.start % slots
    before_end = min(len(members), slots - first)
    yield slice(0, before_end), slice(first, first + before_end)
    if before_end < len(members):
        yield slice(before_end, len(members)), slice(0, len(members) - before_end)


class Prompt(NamedTuple):
    """Rows of a batch whose prompts are alike.

    Attributes:
        rows: of the prompt, evenly spaced: indexing with it gives a view.
        to: the rows of the cache that take them, as many.
        document: the positions of the document that goes on, in the whole sequence.
    """

    rows: slice
    to: slice
    document: range


def resolve_layout(layout: SequenceLayout | None, count: int, ends: Exchange) -> SequenceLayout:
    """The layout of a prompt, of which this rank holds `count` positions; raises if it is not."""
    if layout is None:
        return SequenceLayout.contiguous(count * ends.world_size, ends.world_size)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None, got {in_brief(layout)}")
    held = f"its key has a local sequence length of {count}"
    layout.check_shard(ends.rank, ends.world_size, count, held)
    return layout


def find_prompts(
    documents: Integers | None, lengths: Integers | None, total: int, rows: Sequence[int]
) -> list[Prompt]:
    """The last document of each row of a prompt of `total` positions, for these rows of a cache.

    Raises a `TypeError` or `ValueError` where documents, lengths or rows are not allowed.
    """
    if len(set(rows)) < len(rows):
        raise ValueError(f"rows must differ, to take a prompt each; got {tuple(rows)}")
    borders = () if documents is None else tuple(as_ints("documents", documents))
    valid = () if lengths is None else tuple(as_ints("lengths", lengths))
    in_order = list(rows) == list(range(len(rows)))
    found = []
    for some, ends in packed_rows(borders, valid, len(rows), total):
        document = range(*ends[-2:]) if len(ends) > 1 else range(0)
        if in_order:  # `some` may be all rows: of these, not of the cache
            found.append(Prompt(some, slice(*some.indices(len(rows))), document))
            continue
        for row in range(len(rows))[some]:
            to = slice(rows[row], rows[row] + 1)
            found.append(Prompt(slice(row, row + 1), to, document))
    return found


def words_of(layout: SequenceLayout, prompts: Sequence[Prompt], batch: int) -> dict[str, str]:
    """The arguments of a prompt that must be equal on all ranks, for a cache of `batch` rows."""
    found = [
        f"{document.start} to {document.stop} in rows {list(range(batch)[to])}"
        for _, to, document in prompts
    ]
    digest = blake2b(repr(found).encode(), digest_size=4).hexdigest()
    return {
        "layout": f"{layout!r} ({layout.digest[:8]})",
        "the document that goes on": f"{', '.join(found[:3])} ({digest})",
    }


def hand_over(
    ends: Exchange,
    tensors: tuple[torch.Tensor, torch.Tensor],
    slots: Slots,
    layout: SequenceLayout,
    prompts: Sequence[Prompt],
) -> None:
    """Fill a cache with the rows of a prompt, of which each rank has a shard, inside of a call.

    Every rank sends to each other the rows that this one keeps, in one message, and no others; one
    message is under way at a time, so that a large cache does not take twice its memory.
    `tensors` are this rank's keys and values, (batch, local_sequence, kv_heads, head_dim), and
    `slots` where it keeps what it gets; `prompts` have the same order on every rank.
    """
    for prompt, kept, _ in _parts(slots, layout, prompts, ends.rank, ends.rank):
        slots.keep(prompt.to, kept, [rows_of(x, prompt.rows, kept) for x in tensors])
    packed: torch.Tensor | None = None
    for step in range(1, ends.world_size):
        to, source = (ends.rank + step) % ends.world_size, (ends.rank - step) % ends.world_size
        if packed is None or slots.plan.shards > 1:  # else all get the same
            outgoing = _parts(slots, layout, prompts, ends.rank, to)
            packed = slots.keys.new_empty(sum(prod(shape) for *_, shape in outgoing))
            for prompt, kept, both in _views(packed, outgoing):
                for part, tensor in zip(both, tensors, strict=True):
                    part.copy_(rows_of(tensor, prompt.rows, kept))
        incoming = _parts(slots, layout, prompts, source, ends.rank)
        buffer = slots.keys.new_empty(sum(prod(shape) for *_, shape in incoming))
        send = (to, packed) if packed.numel() else None
        receive = (source, buffer) if buffer.numel() else None
        if send or receive:
            ends.start(send, receive).wait()
        for prompt, kept, both in _views(buffer, incoming):
            slots.keep(prompt.to, kept, both.unbind(0))


def _parts(
    slots: Slots, layout: SequenceLayout, prompts: Sequence[Prompt], source: int, to: int
) -> list[tuple[Prompt, KeptRows, tuple[int, ...]]]:
    """The messages from rank `source` to rank `to`, each with the shape of its keys and values."""
    shard = to if slots.plan.shards > 1 else 0
    batch, _, head_dim = slots.keys.shape
    found: list[tuple[Prompt, KeptRows, tuple[int, ...]]] = []
    for prompt in prompts:
        rows = len(range(batch)[prompt.to])
        for kept in slots.plan.handed_over(layout, prompt.document, source, shard):
            heads = len(range(len(kept.branch.heads))[kept.heads])
            found.append((prompt, kept, (2, rows, heads, len(kept.members), head_dim)))
    return found


def _views(
    packed: torch.Tensor, parts: Sequence[tuple[Prompt, KeptRows, tuple[int, ...]]]
) -> Iterator[tuple[Prompt, KeptRows, torch.Tensor]]:
    """All parts of a message, each with its keys and values: (2, batch, heads, rows, head_dim)."""
    taken = 0
    for prompt, kept, shape in parts:
        yield prompt, kept, packed.narrow(0, taken, prod(shape)).view(shape)
        taken += prod(shape)
