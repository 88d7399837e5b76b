"""Compute groups of tiles: by which back end, in which slices, and into what.

The schedule of a group (`parts`) says which of its tiles are blocks, a kernel call each, whose
results are added into the whole (`accumulate`), and which share a launch, being too small for one
of their own. What a kernel call allocates is bounded: blocks are taken in slices.

A zero key, of score 0 and value 0, adds exp(0) to the denominator of a softmax and 0 to its
numerator. So m of them are a tile whose out is 0 and whose lse is log m, merged like any other.
Nothing is done for them in backward: they have no gradient, and the merged lse and out, which every
tile of backward uses, already count them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..caches import keep_few
from ..kernels import profile_of
from ..plan import TileGroup
from ..tiles import TileBackend, TileGradients, TileInputs
from .accumulate import Accumulator, add, merge, row_sums
from .blocks import Block, families
from .parts import (
    BESIDE_FLOPS,
    Additions,
    BackwardPart,
    ForwardPart,
    Schedule,
    TileCall,
    cut_backward,
    cut_forward,
    kept_parts,
    launch_of,
    schedule_of,
)


def merge_zero_keys(
    groups: Sequence[TileGroup], out: torch.Tensor, lse: torch.Tensor, heads_per_kv: int
) -> None:
    """Merge the zero keys of `plan.zero_keys.zero_key_groups` into `out` and `lse`, in place.

    One pass over the rows that see any; temporaries are at most of the size of `lse`.

    Args:
        groups: which queries see how many.
        out: (batch, local_sequence, heads, head_dim), any floating dtype.
        lse: (batch, local_sequence, heads), float32 or float64; may be a transposed view.
        heads_per_kv: query heads of a KV head.
    """
    if not groups:
        return
    zero = torch.zeros(out.shape[-1], dtype=lse.dtype, device=out.device)
    for group in groups:
        for block in _blocks(group, out.shape[0], heads_per_kv):
            out_rows, lse_rows = block.view_queries(out), block.view_queries(lse)
            log_count = torch.full(
                (1,), math.log(block.keys.length), dtype=lse.dtype, device=out.device
            )
            merge(
                out_rows,
                lse_rows,
                zero.expand(out_rows.shape),
                log_count.expand(lse_rows.shape),
                store=False,
            )


KEPT_BLOCKS: WeakKeyDictionary[TileGroup, dict[Hashable, tuple[Block, ...]]] = WeakKeyDictionary()
"""Blocks live as long as the plan of their group, whose size bounds theirs: at most as many blocks
as it has tiles, for each of the last few batch sizes."""
_BATCH_SIZES = 4


def _blocks(group: TileGroup, batch: int, heads_per_kv: int) -> tuple[Block, ...]:
    def make() -> tuple[Block, ...]:
        return tuple(
            block
            for family in families(group.tiles)
            for block in family.blocks(batch, heads_per_kv)
        )

    return keep_few(KEPT_BLOCKS.setdefault(group, {}), (batch, heads_per_kv), make, _BATCH_SIZES)


LONG_FLOPS = 1e11
"""Operations of a kernel call from which results are added on the side stream, behind the next
call: 0.25 ms on an H200. An addition takes the GPU about 0.02 ms, the side stream the CPU 0.1."""


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
    def room(self) -> torch.Tensor:
        """For `delta`: memory of the stream that asks for it."""
        return torch.empty_like(self.lse)

    @cached_property
    def delta(self) -> torch.Tensor:
        """``rowsum(dout * out)``, like lse. Most back ends work it out for themselves.

        By the stream that is first to ask for it, for which others wait.
        """
        row_sums(self.dout, self.out, self.room)
        return self.room


def launches_first(
    groups: Sequence[TileGroup], call: TileCall, head_dim: int
) -> Sequence[TileGroup]:
    """The groups, but first those of launches alone, which run beside the others' kernel calls."""
    flops = call.limits.forward
    if not flops:
        return groups

    def has_calls(group: TileGroup) -> bool:
        return bool(schedule_of(group, call.batch, call.heads_per_kv, head_dim, flops).blocks)

    return sorted(groups, key=has_calls)


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
    head_dim, backend, profile = query.shape[3], call.selection.backend, profile_of(query.device)
    work = schedule_of(group, call.batch, call.heads_per_kv, head_dim, call.limits.forward)
    if work.shares_launch:  # first, so that it runs beside the kernel calls, whose rows are others
        add_all = partial(_forward_launch, work, call, inputs, result)
        is_long = work.flops >= profile.flops(BESIDE_FLOPS)
        sums.run(add_all, *inputs, into=(out, lse, *inputs[1:]), is_long=is_long, holds=False)
    lse_rows, long_flops = lse.transpose(1, 2), profile.flops(LONG_FLOPS)
    tensors = *inputs, out, lse_rows
    for part in kept_parts(cut_forward, work, call, tensors, held=sums.most_held, store=store):
        assert backend is not None
        tile_inputs = _inputs(part, call, inputs)
        views = part.totals[0].of(out), part.totals[1].of(lse_rows)
        if part.is_beside:
            add_all = partial(_forward_part, backend, tile_inputs, views, part.places, store)
            sums.run(add_all, *inputs, into=(*views, *inputs[1:]), is_long=True, holds=False)
        elif part.places:
            _forward_part(backend, tile_inputs, views, part.places, store)
        else:
            tile = backend.forward(tile_inputs)
            add_all = partial(merge, *views, *tile, store=store)
            sums.run(add_all, *tile, into=views, is_long=part.flops >= long_flops)
            del tile, add_all  # before the next call makes its own


def _forward_part(
    backend: TileBackend,
    tile: TileInputs,
    views: tuple[torch.Tensor, torch.Tensor],
    places: bool,
    store: bool,
) -> None:
    """Compute a kernel call, and write its result where it belongs, or merge it there."""
    if places:
        assert backend.forward_into is not None
        backend.forward_into(tile, *views)
    else:
        merge(*views, *backend.forward(tile), store=store)


def _forward_launch(work: Schedule, call: TileCall, inputs: Inputs, result: Result) -> None:
    """All tiles that share a launch, merged where they belong."""
    from ..kernels import tiles_forward

    query, (out, lse, store) = inputs.query, result
    launch = launch_of(
        work, "forward", call.batch, call.heads_per_kv, query.shape[3], query.dtype, query.device
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
    head_dim, backend, profile = query.shape[3], call.selection.backend, profile_of(query.device)
    work = schedule_of(group, call.batch, call.heads_per_kv, head_dim, call.limits.backward)
    if work.shares_launch:  # first, as in forward
        of_merged = merged.dout, merged.out, merged.lse, merged.room
        add_all = partial(_backward_launch, work, call, inputs, merged, gradients)
        into = dquery, dkeys, dvalues, *inputs[1:]
        # 10 operations for an element of a pair, 4 in forward.
        is_long = 2.5 * work.flops >= profile.flops(BESIDE_FLOPS)
        sums.run(add_all, *inputs, *of_merged, into=into, is_long=is_long, holds=False)
    lse_rows, long_flops = merged.lse.transpose(1, 2), profile.flops(LONG_FLOPS)
    tensors = *inputs, merged.dout, merged.out, lse_rows, dquery, dkeys, dvalues
    flags = {"held": sums.most_held, "store": store, "store_keys": store_keys}
    for part in kept_parts(cut_backward, work, call, tensors, **flags):
        assert backend is not None
        tile_inputs = _inputs(part, call, inputs)
        dout, out, lse = part.merged
        tile_gradients = TileGradients(dout.of(merged.dout), out.of(merged.out), lse.of(lse_rows))
        totals = [x.of(total) for x, total in zip(part.totals, tensors[6:], strict=True)]
        if part.is_beside and not sums.may_wait():
            add_all = partial(_backward_part, backend, tile_inputs, tile_gradients, totals, part)
            sums.run(add_all, *tensors[:6], into=totals, is_long=True, holds=False)
            continue
        found = _gradients(backend, tile_inputs, tile_gradients, totals, part.added)
        if found:
            added = totals[: part.added]
            add_all = partial(_add_all, part.additions, added, found)
            sums.run(add_all, *found, into=added, is_long=part.flops >= long_flops)
            del add_all
        del found  # before the next call makes its own


def _gradients(
    backend: TileBackend,
    tile: TileInputs,
    gradients: TileGradients,
    totals: Sequence[torch.Tensor],
    added: int,
) -> Sequence[torch.Tensor]:
    """Compute a kernel call: the first `added` gradients; the others are written into `totals`."""
    if added == 3:
        return backend.backward(tile, gradients)
    assert backend.backward_into is not None
    found = [backend.empty_like(tile.q)] if added else []
    backend.backward_into(tile, gradients, *found, *totals[added:])
    return backend.ordered(*found)


def _backward_part(
    backend: TileBackend,
    tile: TileInputs,
    gradients: TileGradients,
    totals: Sequence[torch.Tensor],
    part: BackwardPart,
) -> None:
    """Compute a kernel call, and add its gradients where they belong."""
    found = _gradients(backend, tile, gradients, totals, part.added)
    if found:
        _add_all(part.additions, totals, found)


def _backward_launch(
    work: Schedule,
    call: TileCall,
    inputs: Inputs,
    merged: Merged,
    gradients: Gradients,
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


def _add_all(
    additions: Additions, totals: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> None:
    for store, chosen in additions:
        add([totals[i] for i in chosen], [found[i] for i in chosen], store=store)


def _inputs(part: ForwardPart | BackwardPart, call: TileCall, inputs: Inputs) -> TileInputs:
    (q, k, v), (query, keys, values) = part.inputs, inputs
    return TileInputs(q.of(query), k.of(keys), v.of(values), part.is_causal, call.scale, part.memo)
