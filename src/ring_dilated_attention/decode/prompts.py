"""What goes on of a prompt: the last document of each row."""

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
    """The layout of a prompt.

    Args:
        layout: which positions each rank holds; None: contiguous equal shards.
        count: positions that this rank holds.
        ends: this rank's end of the group.

    Raises:
        TypeError, ValueError: it is not a layout, or not of these ranks and positions.
    """
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None, got {in_brief(layout)}")
    if layout is None:
        if count == 0:
            raise ValueError(
                "the prompt is empty: key has no rows, and no layout is given; reset() drops all "
                "rows of a cache"
            )
        layout = SequenceLayout.contiguous(count * ends.world_size, ends.world_size)
    held = f"its key has a local sequence length of {count}"
    layout.check_shard(ends.rank, ends.world_size, count, held)
    return layout


def find_prompts(
    documents: Integers | None, lengths: Integers | None, total: int, rows: Sequence[int]
) -> list[Prompt]:
    """The last document of each row of a prompt.

    Args:
        documents: cumulative lengths; None: one document.
        lengths: valid positions of each row; None: all.
        total: positions of the whole prompt.
        rows: of the cache, one for each row of the prompt.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if len(set(rows)) < len(rows):
        raise ValueError(f"rows must differ, to take a prompt each; got {tuple(rows)}")
    borders = () if documents is None else tuple(as_ints("documents", documents))
    valid = () if lengths is None else tuple(as_ints("lengths", lengths))
    in_order = list(rows) == list(range(len(rows)))
    found = []
    for some, ends in packed_rows(borders, valid, len(rows), total):
        document = range(*ends[-2:]) if len(ends) > 1 else range(0)
        if in_order:
            found.append(Prompt(some, slice(*some.indices(len(rows))), document))
            continue
        for row in range(len(rows))[some]:
            to = slice(rows[row], rows[row] + 1)
            found.append(Prompt(slice(row, row + 1), to, document))
    return found


def words_of(layout: SequenceLayout, prompts: Sequence[Prompt], batch: int) -> dict[str, str]:
    """What must be equal on all ranks of a prompt.

    Args:
        layout: which positions each rank holds.
        prompts: all rows of the prompt.
        batch: rows of the cache.
    """
    found = [
        f"{prompt.document.start} to {prompt.document.stop} in rows {list(range(batch)[prompt.to])}"
        for prompt in prompts
    ]
    digest = blake2b(repr(found).encode(), digest_size=4).hexdigest()
    return {
        "layout": f"{layout!r} ({layout.digest[:8]})",
        "the document that goes on": f"{', '.join(found[:3])} ({digest})",
    }
