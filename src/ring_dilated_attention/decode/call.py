"""What a call with a replicated query is: its options checked, the tiles of this rank."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..caches import cache_by_size
from ..documents import as_ints
from ..engine import TABLES, TileCall
from ..exchange import Exchange, Shared
from ..functional import (
    flat_pattern,
    flat_scale,
    validate_options,
    validate_workspace,
)
from ..pattern import DilatedPattern
from ..plan import AttentionPlan, TileGroup
from ..resolve import Options, plan_rows, shared_words
from ..tiles import select_backend
from ..torch_op import validate_tensors
from .by_kernel import kernel_computes


@dataclass(frozen=True)
class ReplicatedRows:
    """Rows of a batch that are computed together, because they are equally long.

    Attributes:
        rows: which, evenly spaced: indexing with it gives a view.
        plan: of a sequence of their length.
        positions: of the query.
        rank: whose keys.
        tiles: what all tiles have in common.
        strips: the keys of this rank as the decoding kernels take them, (1, kv_heads, strips,
            3 + m) on the device; None: forward computes tiles.
    """

    rows: slice
    plan: AttentionPlan
    positions: range
    rank: int
    tiles: TileCall
    strips: torch.Tensor | None

    @property
    def groups(self) -> tuple[TileGroup, ...]:
        """The tiles of this rank."""
        return _groups(self.plan, self.positions, self.rank)

    @property
    def zero_keys(self) -> tuple[TileGroup, ...]:
        """The zero keys that the queries see."""
        return _zero_keys(self.plan, self.positions)


@dataclass(frozen=True)
class ReplicatedCall:
    """Everything but the tensors of one call on one rank.

    Attributes:
        planned: all rows of the batch, in the same order on every rank.
        exchange: this rank's end of the group.
        returns_dquery: whether backward computes the gradient of the query.
        number: of the call among those of its group.
    """

    planned: tuple[ReplicatedRows, ...]
    exchange: Exchange
    returns_dquery: bool
    number: int = 0


def make_call(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pattern: DilatedPattern,
    positions: range | int,
    ends: Exchange,
    **given: Any,
) -> tuple[ReplicatedCall, Shared]:
    """Check a call, and plan this rank's part of it.

    Args:
        tensors: query, key and value.
        pattern: which keys each head sees.
        positions: of the query in the whole sequence.
        ends: this rank's end of the group.
        given: the other options of `replicated_query_attention`, by their names.

    Returns:
        The call, and what must be equal on all ranks.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    layout, backend, scale = given["layout"], given["backend"], given["scale"]
    documents, lengths, workspace = given["documents"], given["lengths"], given["workspace"]
    is_causal, return_lse = given["is_causal"], given["return_lse"]
    validate_options(pattern, is_causal, scale, layout, "auto", backend, return_lse)
    validate_workspace(workspace)
    validate_tensors(*tensors, same_length=False)
    options = Options(
        *flat_pattern(pattern),
        is_causal,
        flat_scale(scale),
        () if layout is None else layout.flat,
        group="",  # nothing is looked up by its name
        exchange="auto",
        backend=backend,
        workspace=None if workspace is None else float(workspace),
        needs_gradients=False,  # each rank may ask for those of its own keys
        documents=() if documents is None else tuple(as_ints("documents", documents)),
        lengths=() if lengths is None else tuple(as_ints("lengths", lengths)),
        head_slice=pattern.slice_for(given["head_slice"], tensors[1].shape[2]) or (),
    )
    query, key, _ = tensors
    if not options.layout and key.shape[1] == 0:
        raise ValueError("the sequence is empty: key has no rows, and no layout is given")
    needs_gradient = torch.is_grad_enabled() and query.requires_grad
    asked = _consecutive(positions, query.shape[1])
    words = {"positions": str(asked), "query needs a gradient": str(needs_gradient)}
    shared = shared_words(options, query, key, ends, words=words, holder="key")
    return ReplicatedCall(_plan(options, query, key, asked, ends), ends, needs_gradient), shared


def _plan(
    options: Options,
    query: torch.Tensor,
    key: torch.Tensor,
    positions: range,
    ends: Exchange,
) -> tuple[ReplicatedRows, ...]:
    batch, _, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    selection = select_backend(options.backend, query.device, query.dtype, head_dim)
    scale = head_dim**-0.5 if options.scale is None else options.scale
    by_kernel = kernel_computes(
        options.backend, query.device, query.dtype, len(positions), head_dim
    )
    found = []
    shape = (batch, key.shape[1], num_heads, head_dim)
    for rows, plan in plan_rows(options, shape, num_kv_heads, ends.world_size):
        length = plan.layout.length
        if positions.start < 0 or positions.stop > length:
            raise ValueError(
                f"positions must lie in [0, {length}), the sequence that the keys make up; "
                f"got {positions!r}"
            )
        of_rows = len(range(*rows.indices(batch)))
        tiles = TileCall(selection, scale, of_rows, num_heads // num_kv_heads, options.workspace)
        strips = strips_on(plan, positions, ends.rank, query.device) if by_kernel else None
        found.append(ReplicatedRows(rows, plan, positions, ends.rank, tiles, strips))
    return tuple(found)


def _consecutive(positions: range | int, count: int) -> range:
    """The positions of the query, one for each of its rows."""
    if not isinstance(positions, range):
        try:
            if isinstance(positions, bool):
                raise TypeError
            position = operator.index(positions)
        except TypeError:
            raise TypeError(f"positions must be a range or an int, got {positions!r}") from None
        positions = range(position, position + 1)
    if positions.step != 1 or not positions:
        raise ValueError(
            f"positions must be consecutive and rising, one at least: a range of step 1; "
            f"got {positions!r}"
        )
    if len(positions) != count:
        raise ValueError(
            f"positions must be one for each row of query; got {positions!r} for {count} rows"
        )
    return positions


def _nbytes_of_groups(arguments: tuple[Any, ...], _: Any) -> int:
    plan: AttentionPlan = arguments[0]
    return 4096 * len(plan.pattern.branches) * (8 + plan.layout.world_size)


class _Strips(NamedTuple):
    table: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.table,)


def strips_on(
    plan: AttentionPlan, positions: range, rank: int, device: torch.device
) -> torch.Tensor:
    """The keys of a rank that the queries see, (1, kv_heads, strips, 3 + m) on the device."""

    def make() -> _Strips:
        strips = plan.replicated_strips(positions, rank)
        table = torch.tensor(strips, dtype=torch.int64)
        # There may be none: of a rank whose keys all lie behind the query, or a row without any.
        shape = 1, plan.num_kv_heads, len(strips[0]), 3 + len(positions)
        return _Strips(table.view(shape).to(device))

    return TABLES.get(plan, (positions, rank, device), device, make).table


@cache_by_size(16 << 20, _nbytes_of_groups)
def _groups(plan: AttentionPlan, positions: range, rank: int) -> tuple[TileGroup, ...]:
    return plan.replicated_groups(positions, rank)


@cache_by_size(4 << 20, _nbytes_of_groups)
def _zero_keys(plan: AttentionPlan, positions: range) -> tuple[TileGroup, ...]:
    return plan.replicated_zero_keys(positions)
