"""How many positions each row of a cache's batch has, and how many may be taken back: ints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..documents import even_slices
from ..plan import CachePlan


class Lengths:
    """The positions that each row's document has, as the host knows them.

    Args:
        batch: rows of the batch, which have none yet.

    Attributes:
        known: positions of each row.
        longest: the most that each row has had since it began: what its last segment's rows were
            overwritten by.
    """

    def __init__(self, batch: int) -> None:
        self.known, self.longest = [0] * batch, [0] * batch

    def copy(self) -> Lengths:
        """An independent copy."""
        return self.of_rows(range(len(self.known)))

    def of_rows(self, rows: Sequence[int]) -> Lengths:
        """The lengths of some rows; a row may be taken repeatedly."""
        found = Lengths(len(rows))
        found.known = [self.known[row] for row in rows]
        found.longest = [self.longest[row] for row in rows]
        return found

    def equal_rows(self) -> Iterator[tuple[slice, int]]:
        """All rows as (evenly spaced rows, their length), so that indexing gives views."""
        rows_of: dict[int, list[int]] = {}
        for row, length in enumerate(self.known):
            rows_of.setdefault(length, []).append(row)
        for length, found in rows_of.items():
            for rows in even_slices(found):
                yield rows, length

    def begin(self, rows: Iterable[int], length: int) -> None:
        """Some rows begin a new document, of which `length` positions are there already."""
        for row in rows:
            self.known[row] = self.longest[row] = length

    def advance(self, count: int) -> None:
        """Add `count` positions to every row."""
        self.known = [length + count for length in self.known]
        self.longest = list(map(max, self.known, self.longest))

    def overwritten(self, count: int) -> None:
        """Rows of the next `count` positions were written, and are to be written again.

        The last one of them has dropped no more than a row's next position does.
        """
        for row, known in enumerate(self.known):
            self.longest[row] = max(self.longest[row], known + count - 1)

    def take_back(self, counts: Sequence[int], max_rewind: int) -> None:
        """Rows have fewer positions again; raises a `ValueError`, and changes none, if they cannot.

        Args:
            counts: positions of each row.
            max_rewind: of the cache.
        """
        for row, count in enumerate(counts):
            known, longest = self.known[row], self.longest[row]
            most = min(known, known - longest + max_rewind)
            if count < 0:
                raise ValueError(f"count must be >= 0; got {count} for row {row}")
            if count > most:
                had = f", after it had {longest}" if longest > known else ""
                raise ValueError(
                    f"at most {most} positions of row {row} can be taken back: it has {known}"
                    f"{had}, and max_rewind is {max_rewind}; got {count}. A cache made with a "
                    "larger max_rewind can take back more"
                )
        self.known = [known - count for known, count in zip(self.known, counts, strict=True)]


def check_room(length: int, plan: CachePlan) -> None:
    """Raise a `ValueError` unless a cache has room for a document of `length` positions."""
    if plan.max_length is not None and length > plan.max_length:
        raise ValueError(
            f"a document would have {length} positions, and the cache has room for "
            f"max_length={plan.max_length}; make it with a larger one, or call its "
            f"reserve({length})"
        )
