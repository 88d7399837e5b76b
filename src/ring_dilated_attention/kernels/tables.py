"""What tables of cells and of programs are made with: numpy, on the CPU.

Its operations take a third of torch's on a few hundred numbers. It is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Table: TypeAlias = np.ndarray[Any, Any]


def spread(counts: Table) -> tuple[Table, Table]:
    """Index i repeated ``counts[i]`` times, for all i; and 0, 1, ... within each index."""
    import numpy as np

    indices = np.repeat(np.arange(len(counts)), counts)
    return indices, np.arange(len(indices)) - (counts.cumsum() - counts)[indices]
