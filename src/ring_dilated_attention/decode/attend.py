"""`cached_attention`: new positions are queries, the rows of a KV cache are their keys.

There are two ways to compute it. On GPUs the decoding kernels read positions on the device, and so
can be captured in a CUDA graph. Elsewhere back ends of tiles do it: one tile for each branch,
segment and offset, of the queries of one progression against the rows of it that came before, which
lie side by side; new positions that share a segment see each other in another tile. Of a sliding
window each position sees other rows: tiles compute that too, where there are several.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .. import kernels
from ..engine import kernels_on, merge_, merge_sink
from ..exchange import Exchange, all_gather, refuse_capture, together, untraced
from ..functional import autocast_inputs
from ..options import check_options
from ..pattern import in_brief
from ..tiles import (
    Backend,
    Selection,
    TileInputs,
    accumulate_dtype,
    select_backend,
    table_refusal,
)
from ..torch_op import refuse_tangents, validate_sink, validate_tensors
from .cache import DilatedKVCache, runs_of_slots

_NAME = "cached_attention"

_Result: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""out (batch, m, heads, head_dim), and lse (batch, m, heads)."""

_Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query (batch, m, heads, head_dim), key and value (batch, m, kv_heads, head_dim)."""


class Step:
    """State that layers share in a step of a model: the rows of their caches that queries see."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] | None = None
        self._strips: kernels.decode.Strips | None = None

    def strips(self, cache: DilatedKVCache, count: int) -> kernels.decode.Strips:
        """Rows of a cache that `count` new positions see; found once for equal caches."""
        plan = cache.plan
        of = plan, cache.known_lengths, cache.shard, cache.keys.device, count
        if self._strips is None or self._of != of:
            self._of, self._strips = of, kernels.decode.strips_of_cache(
                cache.lengths,
                cache.branches,
                plan.num_kv_heads,
                count,
                shard=cache.shard,
                shards=plan.shards,
                max_length=plan.max_length,
            )  # fmt: skip
        return self._strips


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
    step: Step | None = None,
) -> Any:  # out; (out, lse) with return_lse
    """Causal dilated attention of the next positions to a cache, to which it adds them.

    The result is what the rows of these positions are in `dilated_attention` of the whole document
    with ``is_causal=True``. On the ranks of a group every rank makes the same call, with the same
    tensors; where they share the rows of the cache, one collective brings their results together,
    and all return the same bits. That the ranks' tensors are equal is up to the caller.

    Args:
        query: (batch, m, heads, head_dim), of the next m positions of every row of the batch, in
            the dtype and on the device of the cache; any m from 1 on.
        key: (batch, m, kv_heads, head_dim), of the same positions, rotated where the model does
            that; kv_heads divides heads.
        value: like `key`.
        cache: of this layer.
        scale: factor on the scores; None: head_dim ** -0.5.
        softcap: of the scores, as in `AttentionOptions`; the decoding kernel has none. None, the
            default: they are not capped.
        sink: (heads,), scores of one more key of each head, of value 0, as in `dilated_attention`;
            None: there is none.
        backend: ``"auto"``, the default, takes the decoding kernel on GPUs where that can compute
            the call, otherwise the fastest kernels that support the tensors. ``"triton"`` takes the
            decoding kernel or raises; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``,
            ``"flash"``, ``"efficient"`` and ``"eager"`` take the kernels of that name or raise.
        return_lse: whether to return the lse too.
        step: a `Step` that the layers of a model share in one step; None: of this call alone.

    Returns:
        out (batch, m, heads, head_dim) in the dtype of the inputs; with `return_lse` also lse
        (batch, heads, m), natural logarithm, float32 (float64 for float64 inputs). A position that
        no branch of a head covers gets output 0 and lse -inf (or the sink). Under autocast the
        inputs are cast as they are for `scaled_dot_product_attention`.

    Raises:
        TypeError, ValueError: an argument is not allowed, or ranks that share the rows disagree
            about one; raised on every one of them.
        ExchangeError: a rank is missing, has failed, or makes another call than the rest.
        NotImplementedError: an input has a tangent: there is no forward-mode derivative.
        RuntimeError: a gradient is asked for: there is none. Or a CUDA graph is being captured,
            and ranks share the rows, or the decoding kernel does not compute the call.

    Examples:
        >>> cache = DilatedKVCache(DilatedPattern([256, None], [1, 4]), 1, 2, 16, max_length=2000)
        >>> cache.prefill(torch.randn(1, 1000, 2, 16), torch.randn(1, 1000, 2, 16))
        >>> token = torch.randn(1, 1, 8, 16)
        >>> row = torch.randn(1, 1, 2, 16)
        >>> cached_attention(token, row, row, cache).shape
        torch.Size([1, 1, 8, 16])
    """
    if not isinstance(cache, DilatedKVCache):
        raise TypeError(f"cache must be a DilatedKVCache, got {in_brief(cache)}")
    options = {"scale": scale, "softcap": softcap, "backend": backend, "return_lse": return_lse}
    out, lse = _call((query, key, value), sink, cache, step or Step(), options)
    return (out, lse.transpose(1, 2).contiguous()) if return_lse else out


@untraced  # lengths change in every call
def _call(
    tensors: _Tensors,
    sink: torch.Tensor | None,
    cache: DilatedKVCache,
    step: Step,
    options: dict[str, Any],
) -> _Result:
    """Check, agree with the ranks that share the rows, attend, and merge what each has found."""
    query, key, value = autocast_inputs(*tensors)
    tensors, ends = (query, key, value), cache.exchange
    if not cache.is_sharded:
        selection = _check(tensors, sink, cache, options)
        out, lse = _of_rank(tensors, cache, step, selection, options)
        return _with_sink(sink, out, lse, query.dtype)
    refuse_capture(_NAME, ends, cache.keys.device)
    with ends.calls.enter(_NAME, "forward") as scope:
        with together(scope, ends, cache.keys.device) as agreed:
            selection = _check(tensors, sink, cache, options)
            words = {
                "cache": cache.described,
                "query": str(tuple(query.shape)),
                "scale": options["scale"],
                "softcap": options["softcap"],
                "backend": options["backend"],
                "lengths": str(cache.known_lengths),
            }
            agreed.on(words)
        out, lse = _of_rank(tensors, cache, step, selection, options)
        return _with_sink(sink, *merged_over_ranks(ends, out, lse), query.dtype)


def _with_sink(
    sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype
) -> _Result:
    if sink is not None:
        with torch.no_grad(), kernels_on(out.device):
            merge_sink(sink, out, lse.transpose(1, 2))
    return out.to(dtype), lse


def merged_over_ranks(ends: Exchange, out: torch.Tensor, lse: torch.Tensor) -> _Result:
    """Merge results of all ranks into one softmax over their keys, with the same bits on each.

    out, (batch, m, heads, head_dim), and lse, (batch, m, heads), are those of this rank's keys,
    float32 or float64.
    """
    if ends.world_size == 1:
        return out, lse
    total, *others = all_gather(ends, torch.cat([out, lse.unsqueeze(-1)], -1))
    out, lse = total[..., :-1], total[..., -1]
    for other in others:
        merge_(out, lse, other[..., :-1], other[..., -1])
    return out, lse


def _check(
    tensors: _Tensors, sink: torch.Tensor | None, cache: DilatedKVCache, options: dict[str, Any]
) -> Selection | None:
    """The back end of the tiles; None: the decoding kernels. Raise unless all is allowed."""
    query, key, value = tensors
    backend = options["backend"]
    check_options(**options)
    validate_tensors(query, key, value)
    refuse_tangents(_NAME, query, key, value)
    if sink is not None:
        validate_sink(sink, query)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, sink) if x is not None):
        raise RuntimeError(
            f"{_NAME} has no gradient, and an input requires one: call it under torch.no_grad() or "
            "torch.inference_mode(), and train with dilated_attention"
        )
    cache.check_new(key, value)
    kind = backend, query.device, query.dtype
    count = query.shape[1]
    bands = count > 1 and cache.plan.has_windows
    capped = options["softcap"] is not None
    if not capped and kernel_computes(*kind, count, query.shape[3], bands=bands):
        return None
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{_NAME} of {query.shape[1]} new positions in {query.dtype} with "
            f"backend={backend!r}, softcap={options['softcap']} reads positions on the host, and "
            "a CUDA graph would repeat these: only the decoding kernels read them on the device"
        )
    return select_backend(*kind, query.shape[3], bands=bands, softcap=capped)


def kernel_computes(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    count: int,
    head_dim: int,
    *,
    bands: bool = False,
) -> bool:
    """Whether the decoding kernels compute a call of `count` queries.

    `bands`: whether these see different rows of a window, which the kernels do not compute.

    Raises:
        ValueError: they are asked for, and cannot; or `backend` is unknown.
    """
    most = 1 if bands else kernels.MOST_NEW_ROWS
    if backend == "triton":
        select_backend(backend, device, dtype, head_dim)
        if count > most:
            raise ValueError(
                f"backend={backend!r} decodes at most {most} new positions a "
                f"call{' to a sliding window' * bands}; got {count}: give fewer, or backend='auto'"
            )
        return True
    refused = device.type != "cuda" or table_refusal(device, dtype, head_dim) is not None
    return backend == "auto" and not refused and count <= most


def steps_by_kernel(cache: DilatedKVCache, backend: str) -> bool:
    """Whether the decoding kernels compute a step of one position to a cache of its dtype."""
    keys = cache.keys
    return kernel_computes(backend, keys.device, keys.dtype, 1, keys.shape[2])


def _of_rank(
    tensors: _Tensors,
    cache: DilatedKVCache,
    step: Step,
    selection: Selection | None,
    options: dict[str, Any],
) -> _Result:
    """Attention over this rank's rows of the cache and the new rows; then the cache has them."""
    scale = options["scale"]
    scale = tensors[0].shape[3] ** -0.5 if scale is None else float(scale)
    if selection is None:
        return attend_by_kernel(tensors, cache, scale, step)
    with torch.no_grad():
        return _by_tiles(tensors, cache, selection, scale, options["softcap"])


def attend_by_kernel(tensors: _Tensors, cache: DilatedKVCache, scale: float, step: Step) -> _Result:
    """Attend by the decoding kernels, which write the new rows and move `lengths` on the device.

    Returns:
        out (batch, m, heads, head_dim), in the dtype of the query, or float32 where ranks share the
        rows; lse (batch, m, heads), float32.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    count, plan = key.shape[1], cache.plan
    # All heads' rows lie in one row of the cache: a head stride of 0.
    keys, values = (
        x.unsqueeze(2).expand(-1, -1, plan.num_kv_heads, -1) for x in (cache.keys, cache.values)
    )
    with kernels_on(query.device):
        found = kernels.decode.attend_to_strips(
            query,
            keys,
            values,
            step.strips(cache, count),
            sum(branch.slots for branch in plan.branches),
            scale,
            dtype=torch.float32 if cache.is_sharded else query.dtype,
            new=kernels.decode.NewRows(key, value, cache.lengths, cache.shard == 0),
        )
    cache.advanced(count)
    return found


def _by_tiles(
    tensors: _Tensors,
    cache: DilatedKVCache,
    selection: Selection,
    scale: float,
    softcap: float | None,
) -> _Result:
    """Attend by tiles: out and lse in float32 or float64."""
    query, key, value = tensors
    batch, count, kv_heads, head_dim = key.shape
    q_bnkgd = query.reshape(batch, count, kv_heads, -1, head_dim)
    out = torch.zeros(q_bnkgd.shape, dtype=accumulate_dtype(query.dtype), device=query.device)
    lse = out.new_full(out.shape[:-1], -torch.inf)

    def merge_tile(
        at: tuple[slice, ...],
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        band: tuple[int, int] | None,
    ) -> None:
        """Queries of `at` against keys (batch, KV heads, rows, head_dim)."""
        assert selection.backend is not None
        q, group = q_bnkgd[at], q_bnkgd.shape[3]
        by_position = causal or band is not None
        if by_position:  # the same keys for each query head of a group: a row is a position
            q_bhnd = q.permute(0, 2, 3, 1, 4).flatten(1, 2).contiguous()
            k, v = (x.repeat_interleave(group, 1).contiguous() for x in (k, v))
        else:  # the queries of a KV head, in one block
            q_bhnd = q.transpose(1, 2).flatten(2, 3).contiguous()
            if not (selection.reads(k) and selection.reads(v)):
                k, v = k.contiguous(), v.contiguous()
        q_bhnd, k, v = selection.backend.ordered(q_bhnd, k, v)
        tile = TileInputs(q_bhnd, k, v, causal, scale, band=band, softcap=softcap)
        found = selection.backend.forward(tile)
        if by_position:  # (batch, heads * group, m, ...) to (batch, m, heads, group, ...)
            parts = [x.reshape(len(x), -1, group, *x.shape[2:]).movedim(3, 1) for x in found]
        else:  # (batch, heads, m * group, ...)
            parts = [
                x.reshape(*x.shape[:2], -1, group, *x.shape[3:]).transpose(1, 2) for x in found
            ]
        merge_(out[at], lse[at], *parts)

    is_one = count == 1
    if is_one:  # its own row overwrites nothing that is needed, and then is a row like the others
        cache.write(key, value)
    for rows, length in cache.equal_rows():
        for tile in cache.plan.new_tiles(length, count):
            at = rows, tile.queries, tile.kv_heads
            if not is_one and cache.shard == 0:  # on one rank: all have the new rows
                new = key[at].transpose(1, 2), value[at].transpose(1, 2)
                merge_tile(at, *new, tile.band is None, tile.band)
            seen = range(tile.kept.start, tile.kept.stop + is_one)
            own = cache.plan.own_members(seen, cache.shard)
            if own:
                keys, values = (x[rows, tile.heads] for x in cache.of_branch(tile.branch))
                for places, slots in runs_of_slots(own, tile.branch.slots):
                    for queries, seen_of, band in cache.plan.shown(tile, own[places], cache.shard):
                        k, v = (x[:, :, slots][:, :, seen_of] for x in (keys, values))
                        merge_tile((rows, queries, tile.kv_heads), k, v, False, band)
    if not is_one:
        cache.write(key, value)
    cache.count(count)
    return out.flatten(2, 3), lse.flatten(2)
