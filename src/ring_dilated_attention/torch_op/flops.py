"""How many floating-point operations a call takes: what `FlopCounterMode` counts for it.

Useful operations of this rank, as the plan counts them: 4 * head_dim for each (query, key) pair of
a head in forward, 10 * head_dim in backward. Operations that a kernel throws away (masked scores of
a causal tile) are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ..exchange import exchange_named
from ..plan import costs
from ..resolve import Options, plan_rows


def forward_flops(
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    measured: Sequence[int] | None,
    borders: Sequence[int] | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_offsets: str,
    head_branches: str,
    zero_keys: bool,
    is_causal: bool,
    scale: float | None,
    layout: Sequence[int],
    group: str,
    exchange: str,
    backend: str,
    workspace: float | None,
    needs_gradients: bool,
    documents: Sequence[int] = (),
    lengths: Sequence[int] = (),
    detached: bool = False,
    head_slice: Sequence[int] = (),
    **_: Any,
) -> int:
    """Operations of ``ring_dilated_attention::forward`` on this rank.

    Args:
        query_shape: (batch, local_sequence, heads, head_dim).
        key_shape: (batch, local_sequence, kv_heads, head_dim).
        value_shape: as `key_shape`.
        measured: of lengths in a tensor, whose values are not known: every position counts.
        borders: of documents in a tensor, whose values are not known: one document counts.
        segment_lengths: of the pattern; 0 is the whole document. This and what follows are the
            fields of `resolve.Options`, by their order.
        dilation_rates: of the pattern.
        head_offsets: of the pattern.
        head_branches: of the pattern.
        zero_keys: of the pattern; they take no operations.
        is_causal: whether a query sees no later keys.
        scale: makes no difference.
        layout: `SequenceLayout.flat`; empty: contiguous equal shards.
        group: the name of the group, whose size and whose rank of this process count.
        exchange: makes no difference, as do the next three.
        backend: see `exchange`.
        workspace: see `exchange`.
        needs_gradients: see `exchange`.
        documents: cumulative lengths; empty: one document.
        lengths: valid positions of each row of the batch; empty: all.
        detached: makes no difference: what is worked out again is not counted.
        head_slice: of the pattern; empty: the call has all heads.

    Returns:
        The number of operations, 0 or more.
    """
    batch, length, heads, head_dim = map(int, query_shape)
    ends = exchange_named(group)
    options = Options(
        tuple(segment_lengths), tuple(dilation_rates), head_offsets, head_branches, zero_keys,
        bool(is_causal), scale, tuple(map(int, layout)), group, exchange, backend, workspace,
        needs_gradients, tuple(map(int, documents)), tuple(map(int, lengths)),
        head_slice=tuple(head_slice),
    )  # fmt: skip
    shape = batch, length, heads, head_dim
    flops = 0
    for rows, plan in plan_rows(options, shape, int(key_shape[2]), ends.world_size):
        size = costs.TensorSize(batch=len(range(batch)[rows]), head_dim=head_dim, element_size=1)
        flops += costs.flops_of_rank(plan, size, ends.rank)
    return flops


def backward_flops(
    dout_shape: Sequence[int],
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    *others: Any,
    **_: Any,
) -> int:
    """Operations of ``ring_dilated_attention::backward`` on this rank: 2.5 times forward's.

    Args:
        dout_shape: as `query_shape`.
        query_shape: see `forward_flops`, like the next two.
        key_shape: see `forward_flops`.
        value_shape: see `forward_flops`.
        others: the shapes of what forward saved for backward, then the options of `forward_flops`.

    Returns:
        The number of operations, 0 or more.
    """
    # out, lse and identity; what comes behind them is measured.
    options = others[3:]
    # Scores again, and a product each for dq, dk, dv and the gradient of the scores.
    return forward_flops(query_shape, key_shape, value_shape, *options) // 2 * 5


_COUNTER = "torch.utils.flop_counter"


def count_flops_of(forward: Any, backward: Any) -> None:
    """Have `FlopCounterMode` count the two operators (packets of overloads) by these formulas.

    Its module imports Triton, or warns that there is none, which importing this package must not
    do. So the formulas are registered when somebody imports it: now, if that has happened.
    """

    def register(counter: ModuleType) -> None:
        counter.register_flop_formula(forward)(forward_flops)
        counter.register_flop_formula(backward)(backward_flops)

    if _COUNTER in sys.modules:
        register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport(_COUNTER, register))


class _AfterImport(MetaPathFinder):
    """Finds a module as the other finders do, once, and runs a function on it when it is loaded."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load, function = spec.loader.exec_module, self._function

        def exec_module(module: ModuleType) -> None:
            load(module)
            function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
