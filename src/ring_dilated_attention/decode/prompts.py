"""The prompt of a KV cache: whose rows of the batch it fills, and where their documents lie."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from ..documents import Integers, as_ints, packed_rows
from ..exchange import Exchange
from ..layout import SequenceLayout
from ..pattern import in_brief


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
