"""Attention of new positions to a KV cache by back ends of tiles: on a CPU, say.

One tile for each branch, segment and offset: the queries of one progression against the rows of it
that came before, which lie side by side. Where several new positions share a segment, they see each
other in another one, of rows that are not in the cache yet.
"""

from __future__ import annotations

import torch

from ..engine import merge_
from ..plan import NewTile
from ..tiles import Selection, TileBackend, TileInputs, accumulate_dtype
from .cache import DilatedKVCache
from .one_position import attend_one_position
from .slots import runs_of_slots


def attend_by_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    selection: Selection,
    scale: float,
    *,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What this rank's rows of the cache, and the new rows, add up to; then the cache has them.

    Args:
        query: (batch, m, heads, head_dim).
        key: (batch, m, kv_heads, head_dim), of the same positions.
        value: like `key`.
        cache: without these positions; with them afterwards.
        selection: what computes the tiles.
        scale: factor on the scores.
        wants_lse: whether lse is needed; else it may be None.

    Returns:
        out (batch, m, heads, head_dim) and, if it is wanted, lse (batch, m, heads), float32 or
        float64.
    """
    batch, count, kv_heads, head_dim = key.shape
    if count == 1:
        return attend_one_position(query, key, value, cache, selection, scale, wants_lse=wants_lse)
    assert selection.backend is not None
    dtype = accumulate_dtype(query.dtype)
    q_bnkgd = query.reshape(batch, count, kv_heads, -1, head_dim)
    out = torch.zeros(q_bnkgd.shape, dtype=dtype, device=query.device)
    lse = out.new_full(out.shape[:-1], -torch.inf)
    tensors = (q_bnkgd, key, value)
    for rows, length in cache.equal_rows():
        for tile in cache.plan.new_tiles(length, count):
            results = tuple(x[rows, tile.queries, tile.kv_heads] for x in (out, lse))
            parts = [x[rows, tile.queries, tile.kv_heads] for x in tensors]
            if cache.shard == 0:  # on one rank: all have the new rows
                _attend_new(parts, results, selection.backend, scale)
            _attend_kept(parts[0], rows, tile, cache, selection, scale, results)
    cache.write(key, value)
    cache.advanced(count)
    cache.lengths += count
    return out.flatten(2, 3), lse.flatten(2)


def _attend_kept(
    q: torch.Tensor,
    rows: slice,
    tile: NewTile,
    cache: DilatedKVCache,
    selection: Selection,
    scale: float,
    results: tuple[torch.Tensor, ...],
) -> None:
    """Queries against what the cache has of their progression."""
    assert selection.backend is not None
    own = cache.plan.own_members(tile.kept, cache.shard)
    if not own:
        return
    keys, values = (x[rows, tile.heads] for x in cache.slots.of_branch(tile.branch))
    # The queries of a KV head, in one block.
    queries = q.transpose(1, 2).flatten(2, 3).contiguous()
    for _, slots in runs_of_slots(own, tile.branch.slots):
        k, v = (x[:, :, slots] for x in (keys, values))
        if not (selection.reads(k) and selection.reads(v)):
            k, v = k.contiguous(), v.contiguous()
        q_given, k, v = selection.backend.ordered(queries, k, v)
        got = selection.backend.forward(TileInputs(q_given, k, v, False, scale))
        tile_out, tile_lse = (x.reshape(*x.shape[:2], -1, q.shape[3], *x.shape[3:]) for x in got)
        _merge(results, tile_out, tile_lse)


def _attend_new(
    parts: list[torch.Tensor],
    results: tuple[torch.Tensor, ...],
    backend: TileBackend,
    scale: float,
) -> None:
    """Queries among the new rows of their progression: each sees itself and those before."""
    q, k, v = parts
    heads, members = q.shape[2:4]
    queries = q.permute(0, 2, 3, 1, 4).flatten(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(members, 1).contiguous() for x in (k, v))
    queries, k, v = backend.ordered(queries.contiguous(), k, v)
    got = backend.forward(TileInputs(queries, k, v, True, scale))
    tile_out, tile_lse = (x.reshape(len(x), heads, members, *x.shape[2:]) for x in got)
    _merge(results, tile_out.transpose(2, 3), tile_lse.transpose(2, 3))


def _merge(
    results: tuple[torch.Tensor, ...], tile_out: torch.Tensor, tile_lse: torch.Tensor
) -> None:
    """Merge (batch, heads, queries, members, ...) into (batch, queries, heads, members, ...)."""
    out, lse = (x.transpose(1, 2) for x in results)
    merge_(out, lse, tile_out, tile_lse)
