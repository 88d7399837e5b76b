"""Compute groups of tiles: by which back end, in which slices, and into what.

The schedule of a group (`schedule`) says which of its tiles are blocks, a kernel call each, whose
results are added into the whole (`accumulate`), and which share a launch, being too small for one
of their own. What a kernel call allocates is bounded: blocks are taken in slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

from ..kernels import profile_of
from ..plan import TileGroup
from ..tiles import Selection, TileGradients, TileInputs, empty_rows
from .accumulate import Accumulator, add, merge, row_sums
from .blocks import Block
from .schedule import Schedule, launch_of, schedule_of

FORWARD_WORKSPACE = 0.26
"""The most that temporaries of a forward call take, as a share of the size of its query."""
BACKWARD_WORKSPACE = 0.52
"""The same for a backward call."""
WORKSPACE_FLOOR = 64 << 20
"""Bytes that temporaries may take in any case, as may those of a slice of SLICE_ROWS rows: slices
must be large enough to fill a GPU."""
SLICE_ROWS = 1 << 17
"""Query rows that keep a GPU busy: an H200 takes 128 to each of its 132 multiprocessors, and these
are eight rounds, so that the last one matters little."""
LONG_FLOPS = 1e11
"""Operations of a kernel call from which results are added on the side stream, behind the next
call: 0.25 ms on an H200. An addition takes the GPU about 0.02 ms, the side stream the CPU 0.1."""


@dataclass(frozen=True)
class TileCall:
    """What all tiles of a call have in common.

    Attributes:
        selection: the back ends that may compute them.
        scale: factor on the scores.
        batch: batch size.
        heads_per_kv: query heads of a KV head.
        workspace: the most that slices allocate, in multiples of the size of query; None: the
            constants of this module say.
    """

    selection: Selection
    scale: float
    batch: int
    heads_per_kv: int
    workspace: float | None = None

    def most_rows(self, query: torch.Tensor, default: float, row_bytes: float) -> float:
        """How many rows a slice may have that allocates `row_bytes` for each."""
        if self.workspace is not None:
            return self.workspace * query.nbytes / row_bytes
        least = profile_of(query.device).rows(SLICE_ROWS)
        return max(default * query.nbytes / row_bytes, WORKSPACE_FLOOR / row_bytes, least)


class Inputs(NamedTuple):
    """What a group of tiles is computed of.

    query (batch, local_sequence, heads, head_dim); keys and values (batch, local_sequence,
    kv_heads, head_dim), or `by_slot` of a received message.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Result(NamedTuple):
    """Where results of forward are merged.

    out, like query; lse (batch, heads, local_sequence). `stores`: what they hold at the rows of a
    group is written over.
    """

    out: torch.Tensor
    lse: torch.Tensor
    stores: bool = False


class Gradients(NamedTuple):
    """Where gradients are added: to those of `Inputs`, of the same shapes.

    `stores_query`, `stores_keys`: what query, and what keys and values hold at the rows of a group
    is written over.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    stores_query: bool = False
    stores_keys: bool = False


@dataclass
class Merged:
    """The merged result of a call and the gradient of its out: what backward starts from.

    dout, out (batch, sequence, heads, head_dim); lse (batch, heads, sequence).
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @cached_property
    def delta(self) -> torch.Tensor:
        """``rowsum(dout * out)``, like lse. Most back ends work it out for themselves."""
        return row_sums(self.dout, self.out)


def forward(
    group: TileGroup, call: TileCall, inputs: Inputs, result: Result, sums: Accumulator
) -> None:
    """Compute a group and merge it into a result.

    Args:
        group: the tiles.
        call: what all tiles have in common.
        inputs: of the tiles.
        result: changed in place at the group's rows.
        sums: through which results are merged; to be joined when all groups are computed.
    """
    query, (out, lse, store) = inputs.query, result
    selection, head_dim = call.selection, query.shape[3]
    work = schedule_of(
        group, call.batch, call.heads_per_kv, head_dim, selection.forward_table_flops
    )
    lse_rows, long_flops = lse.transpose(1, 2), profile_of(query.device).flops(LONG_FLOPS)
    row_bytes = head_dim * query.element_size() + lse.element_size()
    most_rows = call.most_rows(query, FORWARD_WORKSPACE, row_bytes * sums.most_held)
    for block in work.blocks:
        backend = selection.backend
        assert backend is not None
        same = store and out.dtype == query.dtype
        if same and backend.forward_into and block.queries.stride == 1:
            for part in block.slices(math.inf):
                views = part.view_queries(out), part.view_queries(lse_rows)
                backend.forward_into(_inputs(part, call, inputs), *views)
            continue
        for part in block.slices(most_rows):
            tile = backend.forward(_inputs(part, call, inputs))
            views = part.view_queries(out), part.view_queries(lse_rows)
            is_long = 4 * head_dim * part.pairs >= long_flops
            add_all = partial(merge, *views, *tile, store=store)
            sums.run(add_all, *tile, into=views, is_long=is_long)
            del tile, add_all  # before the next slice makes its own
    if work.shares_launch:
        from ..kernels import tiles_forward

        sums.join()
        launch = launch_of(
            work, "forward", call.batch, call.heads_per_kv, head_dim, query.dtype, query.device
        )
        tiles_forward(
            *inputs,
            out,
            lse,
            launch.cells,
            is_causal=launch.cells.is_causal,
            scale=call.scale,
            store=store,
            config=launch.config,
        )


def backward(
    group: TileGroup,
    call: TileCall,
    inputs: Inputs,
    merged: Merged,
    gradients: Gradients,
    sums: Accumulator,
) -> None:
    """Compute the gradients of a group and add them up.

    Args:
        group: the tiles.
        call: what all tiles have in common.
        inputs: of the tiles.
        merged: the merged result of the whole call.
        gradients: changed in place at the group's rows.
        sums: through which results are added; to be joined when all groups are computed.
    """
    query, (dquery, dkeys, dvalues, store, store_keys) = inputs.query, gradients
    selection, head_dim = call.selection, query.shape[3]
    work = schedule_of(
        group, call.batch, call.heads_per_kv, head_dim, selection.backward_table_flops
    )
    lse_rows, long_flops = merged.lse.transpose(1, 2), profile_of(query.device).flops(LONG_FLOPS)
    for block in work.blocks:
        backend = selection.backend
        assert backend is not None
        own_keys = store_keys and block.member == 0  # members of a KV head share its gradients
        # Where nothing is there to add to, a back end may write what it finds where it belongs.
        places_keys = bool(backend.backward_into) and own_keys and dkeys.dtype == query.dtype
        places_query = places_keys and store and dquery.dtype == query.dtype
        held = (not places_query) + 2 * (not places_keys)
        row_bytes = lse_rows.element_size() + backend.backward_workspace(head_dim)
        row_bytes += held * head_dim * query.element_size() * sums.most_held
        for part in block.slices(call.most_rows(query, BACKWARD_WORKSPACE, row_bytes)):
            tile_inputs = _inputs(part, call, inputs)
            tile_gradients = TileGradients(
                part.view_queries(merged.dout),
                part.view_queries(merged.out),
                part.view_queries(lse_rows),
            )
            totals = part.view_queries(dquery), part.view_keys(dkeys), part.view_keys(dvalues)
            if places_keys:
                assert backend.backward_into is not None
                dq = totals[0] if places_query else empty_rows(tile_inputs.q)
                backend.backward_into(tile_inputs, tile_gradients, dq, *totals[1:])
                additions = [] if places_query else [_Addition(totals[0], dq, store)]
                del dq
            else:
                tile = backend.backward(tile_inputs, tile_gradients)
                stores = store, own_keys, own_keys
                additions = list(map(_Addition, totals, tile, stores))
                del tile
            if additions:
                sums.run(
                    partial(_add_all, additions),
                    *(addition.part for addition in additions),
                    into=[addition.total for addition in additions],
                    is_long=10 * head_dim * part.pairs >= long_flops,
                )
            del additions  # before the next slice makes its own
    if work.shares_launch:
        sums.join()
        _backward_launch(work, call, inputs, merged, gradients)


def _backward_launch(
    work: Schedule, call: TileCall, inputs: Inputs, merged: Merged, gradients: Gradients
) -> None:
    """The gradients of all tiles that share a launch, added where they belong."""
    from ..kernels import tiles_backward

    query = inputs.query
    launch = launch_of(
        work, "backward", call.batch, call.heads_per_kv, query.shape[3], query.dtype, query.device
    )
    tiles_backward(
        merged.dout,
        *inputs,
        merged.lse,
        merged.delta,
        *gradients[:3],
        launch.cells,
        is_causal=launch.cells.is_causal,
        scale=call.scale,
        store=gradients.stores_query,
        store_keys=gradients.stores_keys,
        config=launch.config,
    )


class _Addition(NamedTuple):
    total: torch.Tensor
    part: torch.Tensor
    store: bool


def _add_all(additions: Sequence[_Addition]) -> None:
    for store in (True, False):
        chosen = [addition for addition in additions if addition.store is store]
        if chosen:
            add([x.total for x in chosen], [x.part for x in chosen], store=store)


def _inputs(block: Block, call: TileCall, inputs: Inputs) -> TileInputs:
    query, keys, values = inputs
    return TileInputs(
        block.view_queries(query),
        block.view_keys(keys),
        block.view_keys(values),
        block.is_causal,
        call.scale,
    )
