"""What tables of cells and of programs are made with: numpy, on the CPU.

Its operations take a third of torch's on a few hundred numbers. It is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    import numpy as np

    Table: TypeAlias = np.ndarray[Any, Any]

_ALIGNMENT = 16
"""The address of each table is a multiple of it: Triton compiles a kernel again for others."""


def spread(counts: Table) -> tuple[Table, Table]:
    """Index i repeated ``counts[i]`` times, for all i; and 0, 1, ... within each index."""
    import numpy as np

    indices = np.repeat(np.arange(len(counts)), counts)
    return indices, np.arange(len(indices)) - (counts.cumsum() - counts)[indices]


def moved_together(device: torch.device | str, *tables: Table) -> list[torch.Tensor]:
    """Tables of int32 or int64, on a device: in one allocation, because they are usually small."""
    import numpy as np

    sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tables]
    together = torch.zeros(sum(sizes), dtype=torch.uint8)
    flat, start = together.numpy(), 0
    for table, size in zip(tables, sizes, strict=True):
        flat[start : start + table.nbytes] = table.reshape(-1).view(np.uint8)
        start += size
    places = together.to(device).split(sizes)
    dtypes = {4: torch.int32, 8: torch.int64}
    return [
        place[: x.nbytes].view(dtypes[x.itemsize]).view(x.shape)
        for x, place in zip(tables, places, strict=True)
    ]
