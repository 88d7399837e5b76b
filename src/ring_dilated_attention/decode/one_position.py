"""Attention of one new position to a KV cache without the decoding kernels, in few operations.

On a CPU a step of decoding takes the time of its operations, each a few microseconds, more than
that of their arithmetic. So the integers of a step are worked out once for all layers, and tiles
are views of the cache. Back ends of tiles compute them one by one, and one softmax of their lse
brings the results together; `products` does without that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain
from typing import NamedTuple

import torch

from ..caches import keep_few
from ..plan import CachePlan
from ..plan.cache_step import CacheStep, StepTile, plan_step
from ..tiles import Selection, TileInputs, accumulate_dtype
from .cache import DilatedKVCache
from .products import Products, StepViews, takes_products, views_of

KEPT_STEPS = 256
"""Layers of a model ask for the same step one after another, for each length in a batch."""


class _Merge(NamedTuple):
    """Which tiles each head has.

    Attributes:
        places: int64, for each KV head and each of the most tiles that one has, which of the heads
            of all tiles, flat; where a head has fewer tiles, any.
        penalty: float32, (kv_heads, tiles, 1): 0, and -inf where a head has fewer tiles.
        hidden: the KV heads that are shown nothing.
    """

    places: torch.Tensor
    penalty: torch.Tensor
    hidden: list[int]


class DeviceStep(NamedTuple):
    """A step with its tables on a device.

    Attributes:
        plan: of the cache: as long as it is held, its id belongs to no other.
        planned: the integers.
        sources: int64, which KV heads' rows are kept.
        targets: int64, where. Of `steps_ahead`, both go on with those of values.
        is_whole: whether there is one tile, of all heads.
        views: for products, by what `views_of` depends on.
    """

    plan: CachePlan
    planned: CacheStep
    sources: torch.Tensor
    targets: torch.Tensor
    is_whole: bool
    views: dict[Hashable, StepViews]


_STEPS: dict[Hashable, DeviceStep] = {}
_MERGES: dict[Hashable, _Merge] = {}


def attend_one_position(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    selection: Selection,
    scale: float,
    *,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend_by_tiles` of one new position.

    Args:
        query: (batch, 1, heads, head_dim).
        key: (batch, 1, kv_heads, head_dim).
        value: like `key`.
        cache: without this position; with it afterwards.
        selection: what computes the tiles.
        scale: factor on the scores.
        wants_lse: whether lse is needed; else it may be None.

    Returns:
        out (batch, 1, heads, head_dim) and, if it is wanted, lse (batch, 1, heads), float32 or
        float64.
    """
    batch, _, kv_heads, head_dim = key.shape
    # Rows side by side: back ends allocate their results by the strides of the query.
    q_bkgd = query.reshape(batch, kv_heads, -1, head_dim).contiguous()
    k_bkd, v_bkd = key.squeeze(1), value.squeeze(1)
    groups = list(cache.equal_rows())
    inputs: tuple[torch.Tensor, ...]
    if len(groups) == 1:
        inputs = (q_bkgd, k_bkd, v_bkd, cache.keys, cache.values)
        out, lse = _of_equal_rows(inputs, cache, groups[0].length, selection, scale, wants_lse)
    else:
        dtype = accumulate_dtype(query.dtype)
        out = torch.empty(q_bkgd.shape, dtype=dtype, device=query.device)
        lse = out.new_empty(out.shape[:-1]) if wants_lse else None
        for rows, length in groups:
            inputs = tuple(x[rows] for x in (q_bkgd, k_bkd, v_bkd, cache.keys, cache.values))
            got, got_lse = _of_equal_rows(inputs, cache, length, selection, scale, wants_lse)
            out[rows] = got
            if lse is not None and got_lse is not None:
                lse[rows] = got_lse
    cache.advanced(1)
    cache.lengths.add_(1)
    return out.reshape(query.shape), None if lse is None else lse.reshape(batch, 1, -1)


def _of_equal_rows(
    inputs: tuple[torch.Tensor, ...],
    cache: DilatedKVCache,
    length: int,
    selection: Selection,
    scale: float,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of the batch that hold equally many positions: out (b, k, g, d), lse (b, k, g) or None.

    `inputs` are their query, key and value, and the cache's keys and values.
    """
    q_bkgd, k_bkd, v_bkd, *kept = inputs
    step = _step_of(cache.plan, length, cache.shard, q_bkgd.device)
    if step.planned.targets:
        for rows, new in zip(kept, (k_bkd, v_bkd), strict=True):
            rows.index_copy_(1, step.targets, new.index_select(1, step.sources))
    if not step.planned.tiles:
        out = q_bkgd.new_zeros(q_bkgd.shape, dtype=accumulate_dtype(q_bkgd.dtype))
        return out, out.new_full(out.shape[:-1], -torch.inf)
    if not takes_products(selection, len(q_bkgd), q_bkgd.dtype):
        return _by_tiles(q_bkgd, kept, step, selection, scale, wants_lse)
    query = q_bkgd * scale
    out = torch.empty_like(query)
    of = query.shape, 0, kept[0].stride(1)
    views = step.views.get(of)
    if views is None:
        views = step.views[of] = views_of([step.planned], *of)
    products = Products(query, out, views, [(kept[0], kept[1])])
    products.begin(0)
    products.attend(0)
    return out, products.lse() if wants_lse else None


def steps_ahead(cache: DilatedKVCache, count: int) -> list[DeviceStep]:
    """What the next positions write to a cache, which is not shared, and what each sees there.

    Keys and values are written at once: see `both_of`.

    Worked out one after the other, they take less than half of the time that they take one by one
    between the layers of a model, which leave a CPU's caches full of weights.

    Args:
        cache: of which the batch has one row, with room for another position.
        count: of positions, at most: as many as there is room for.
    """
    plan, first = cache.plan, cache.known_lengths[0]
    stop = first + count if plan.max_length is None else min(first + count, plan.max_length)
    behind = plan.num_kv_heads, plan.rows
    return _make_steps(plan, range(first, stop), 0, cache.keys.device, behind)


def _by_tiles(
    q_bkgd: torch.Tensor,
    kept: list[torch.Tensor],
    step: DeviceStep,
    selection: Selection,
    scale: float,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """By the selected back end, tile by tile; see `_of_equal_rows`."""
    dtype, kv_heads = accumulate_dtype(q_bkgd.dtype), q_bkgd.shape[1]
    outs, lses = [], []
    backend, is_cuda = selection.backend, q_bkgd.is_cuda
    assert backend is not None
    for tile in step.planned.tiles:
        q = q_bkgd if step.is_whole else q_bkgd[:, tile.kv_heads]
        k, v = (_view(rows, tile) for rows in kept)
        # Rows never overlap, which is all that back ends of a CPU ask for.
        if is_cuda and not (selection.reads(k) and selection.reads(v)):
            k, v = k.contiguous(), v.contiguous()
        q, k, v = backend.ordered(q, k, v)
        out, lse = backend.forward(TileInputs(q, k, v, False, scale))
        outs.append(out.to(dtype))
        lses.append(lse)
    if step.is_whole:
        return outs[0], lses[0]
    places, penalty, hidden = _merge_of(step.planned.places(kv_heads), q_bkgd.device)
    shape = (len(q_bkgd), *penalty.shape[:2], -1)
    lse = torch.cat(lses, 1).index_select(1, places).view(shape) + penalty
    weight = lse.softmax(2)
    if hidden:
        weight[:, hidden] = 0
    out = torch.cat(outs, 1).index_select(1, places).view(*shape, q_bkgd.shape[3])
    return (out * weight.unsqueeze(-1)).sum(2), lse.logsumexp(2) if wants_lse else None


def _view(rows: torch.Tensor, tile: StepTile) -> torch.Tensor:
    """(batch, heads, rows, head_dim) of a tile."""
    batch_stride, row = rows.stride()[:2]
    return rows.as_strided(
        (rows.shape[0], tile.heads, tile.rows, rows.shape[2]),
        (batch_stride, tile.head_stride * row, row, 1),
        rows.storage_offset() + tile.first_row * row,
    )


def _step_of(plan: CachePlan, length: int, shard: int, device: torch.device) -> DeviceStep:
    key = (id(plan), length, shard, device)
    return keep_few(_STEPS, key, lambda: _make_steps(plan, [length], shard, device)[0], KEPT_STEPS)


def _make_steps(
    plan: CachePlan,
    lengths: Iterable[int],
    shard: int,
    device: torch.device,
    behind: tuple[int, int] = (0, 0),
) -> list[DeviceStep]:
    """Steps of one new position behind each of these lengths: one copy to the device for all.

    Args:
        plan: of the cache.
        lengths: positions so far.
        shard: which share of it.
        device: of the tables.
        behind: how far behind keys values are, among the sources and among the targets; 0: they
            have no places of their own.
    """
    steps = [plan_step(plan, length, shard) for length in lengths]
    both = [[step.sources for step in steps], [step.targets for step in steps]]
    if behind[0]:
        both = [
            [(*of, *(x + more for x in of)) for of in numbers]
            for numbers, more in zip(both, behind, strict=True)
        ]
    sizes = [*map(len, both[0])]
    rows = torch.tensor(
        [[*chain.from_iterable(numbers)] for numbers in both], dtype=torch.int64, device=device
    )
    sources, targets = (row.split_with_sizes(sizes) for row in rows.unbind())
    wholes = [[tile.heads for tile in step.tiles] == [plan.num_kv_heads] for step in steps]
    return [
        DeviceStep(plan, *step, {}) for step in zip(steps, sources, targets, wholes, strict=True)
    ]


def _merge_of(found: tuple[tuple[int, ...], ...], device: torch.device) -> _Merge:
    """See `CacheStep.places`."""

    def make() -> _Merge:
        most = max(map(len, found))
        places = [[*tiles, *[0] * (most - len(tiles))] for tiles in found]
        penalty = [[0.0] * len(tiles) + [-torch.inf] * (most - len(tiles)) for tiles in found]
        return _Merge(
            torch.tensor(places, dtype=torch.int64, device=device).flatten(),
            torch.tensor(penalty, device=device).unsqueeze(-1),
            [head for head, tiles in enumerate(found) if not tiles],
        )

    return keep_few(_MERGES, (found, device), make, KEPT_STEPS)
