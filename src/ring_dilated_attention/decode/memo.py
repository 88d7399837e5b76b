"""What is worked out once for a cache, and holds for the calls that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..plan import CachePlan
from ..tiles import Selection


class HeldRows(NamedTuple):
    """A cache as the decoding kernels take it.

    Attributes:
        plan: of the cache when this was made.
        source: its keys then.
        keys: (batch, rows, kv_heads, head_dim): a view of them, with a head stride of 0.
        values: like `keys`.
        branches: the plan as a table on the device; see `kernels.decode.strips_of_cache`.
        most_rows: that a KV head may have in a row of the batch.
    """

    plan: CachePlan
    source: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    branches: torch.Tensor
    most_rows: int


class Memo:
    """What is known of a cache from calls before.

    Attributes:
        held: the cache as `by_kernel` takes it; None before it has.
        by_tiles: whether back ends of tiles have computed the newest call.
    """

    def __init__(self) -> None:
        self.held: HeldRows | None = None
        self.by_tiles = False
        self._last: tuple[tuple[object, ...] | None, Selection | None] = None, None

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()  # a copy, or what is read from a file, works it out anew

    def selection(
        self, call: tuple[object, ...], check: Callable[[], Selection | None]
    ) -> Selection | None:
        """What computes a call, as it was found for an equal one just before.

        Args:
            call: all that `check` depends on, but for the lengths of documents.
            check: raises unless the call is allowed; returns what computes it, and None for the
                decoding kernels.
        """
        last, selection = self._last
        if last != call:
            selection = check()
            self._last = call, selection
        return selection
