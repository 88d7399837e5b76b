"""`cached_attention`: new positions are queries, the rows of a KV cache are their keys.

There are two ways to compute it. On GPUs the decoding kernels read positions on the device, and so
can be captured in a CUDA graph. Elsewhere back ends of tiles do it: one tile for each branch,
segment and offset, of the queries of one progression against the rows of it that came before, which
lie side by side; where several new positions share a segment, they see each other in another tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, overload

import torch

from .. import kernels
from ..engine import kernels_on, merge_
from ..exchange import Exchange, Shared, all_gather, refuse_capture, settle
from ..functional import autocast_inputs
from ..options import check_options
from ..pattern import in_brief
from ..plan import NewTile
from ..tiles import (
    Backend,
    Selection,
    TileInputs,
    accumulate_dtype,
    select_backend,
    table_refusal,
)
from ..torch_op import refuse_tangents, validate_tensors
from .cache import DilatedKVCache
from .slots import runs_of_slots

_NAME = "cached_attention"

_Result: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""out (batch, m, heads, head_dim), and lse (batch, m, heads)."""


class Step:
    """What the layers of one step of a model share: which rows of their caches the queries see."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] | None = None
        self._strips: kernels.decode.Strips | None = None

    def strips(self, cache: DilatedKVCache, count: int) -> kernels.decode.Strips:
        """What `count` new positions see of a cache: found on the device once for equal caches."""
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


class _Options(NamedTuple):
    """How a call is computed: see `cached_attention` and `attend_in_step`."""

    scale: float | None
    backend: Backend
    return_lse: bool
    step: Step


@overload
def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal dilated attention of the next positions to a cache, which has their rows afterwards.

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
        backend: ``"auto"``, the default, takes the decoding kernel on GPUs where that can compute
            the call, otherwise the fastest kernels that support the tensors. ``"triton"`` takes the
            decoding kernel or raises; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``,
            ``"flash"``, ``"efficient"`` and ``"eager"`` take the kernels of that name or raise.
        return_lse: whether to return the lse too.

    Returns:
        out (batch, m, heads, head_dim) in the dtype of the inputs; with `return_lse` also lse
        (batch, heads, m), natural logarithm, float32 (float64 for float64 inputs). A position that
        no branch of a head covers gets output 0 and lse -inf. Under autocast the inputs are cast
        as they are for `scaled_dot_product_attention`.

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
    out, lse = _untraced((query, key, value), cache, _Options(scale, backend, return_lse, Step()))
    return (out, lse.transpose(1, 2).contiguous()) if return_lse else out


def attend_in_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cache: DilatedKVCache,
    scale: float | None,
    backend: Backend,
    step: Step,
) -> torch.Tensor:
    """`cached_attention` of one layer of a step, in which layers with equal caches share work.

    Args:
        query: (batch, m, heads, head_dim), of the next m positions of every row of the batch.
        key: (batch, m, kv_heads, head_dim), of the same positions.
        value: like `key`.
        cache: of this layer; those of all layers hold the same positions before the step.
        scale: factor on the scores; None: head_dim ** -0.5.
        backend: kernels that compute it, one of `tiles.BACKENDS`.
        step: a new one for each step of a model.
    """
    return _untraced((query, key, value), cache, _Options(scale, backend, False, step))[0]


_Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _untraced(tensors: _Tensors, cache: DilatedKVCache, options: _Options) -> _Result:
    """`_call`, not traced by torch.compile: it depends on lengths, which change in every call."""
    call = _call
    if torch.compiler.is_compiling():
        call = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
    return call(tensors, cache, options)


def _call(tensors: _Tensors, cache: DilatedKVCache, options: _Options) -> _Result:
    """Check, agree with the ranks that share the rows, attend, and merge what each has found."""
    query, key, value = autocast_inputs(*tensors)
    tensors = query, key, value
    if not cache.is_sharded:
        out, lse = _begin(tensors, cache, options, _check(tensors, cache, options))()
        return out.to(query.dtype), lse
    ends, device = cache.exchange, cache.keys.device
    refuse_capture(_NAME, ends, device)
    selection, failure = None, None
    try:
        selection = _check(tensors, cache, options)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    with ends.calls.enter(_NAME, "forward") as scope:
        if failure is not None:
            settle(scope, ends, device, None, failure)  # raises
        # A GPU reads while the ranks agree, and writes to the cache after that.
        end = _begin(tensors, cache, options, selection)
        words = {
            "cache": cache.described,
            "query": str(tuple(query.shape)),
            "scale": options.scale,
            "backend": options.backend,
        }
        counted = {"lengths": str(cache.known_lengths)}
        settle(scope, ends, device, Shared.of(words, counted=counted))
        out, lse = merged_over_ranks(ends, *end())
        return out.to(query.dtype), lse


def merged_over_ranks(ends: Exchange, out: torch.Tensor, lse: torch.Tensor) -> _Result:
    """One softmax over the keys of all ranks, the same bits on each, inside of a call.

    Args:
        ends: this rank's end of the group.
        out: over this rank's keys, (batch, m, heads, head_dim), float32 or float64.
        lse: (batch, m, heads), of the same dtype.

    Returns:
        out and lse over all keys.
    """
    if ends.world_size == 1:
        return out, lse
    total, *others = all_gather(ends, torch.cat([out, lse.unsqueeze(-1)], -1))
    out, lse = total[..., :-1], total[..., -1]
    for other in others:
        merge_(out, lse, other[..., :-1], other[..., -1])
    return out, lse


def _check(tensors: _Tensors, cache: DilatedKVCache, options: _Options) -> Selection | None:
    """What computes the tiles; None: the decoding kernels do. Raise unless all is allowed."""
    query, key, value = tensors
    scale, backend, return_lse, _ = options
    check_options(scale=scale, backend=backend, return_lse=return_lse)
    validate_tensors(query, key, value)
    refuse_tangents(_NAME, query, key, value)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{_NAME} has no gradient, and an input requires one: call it under torch.no_grad() or "
            "torch.inference_mode(), and train with dilated_attention"
        )
    cache.check_new(key, value)
    kind = backend, query.device, query.dtype
    if kernel_computes(*kind, query.shape[1], query.shape[3]):
        return None
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{_NAME} of {query.shape[1]} new positions in {query.dtype} with "
            f"backend={backend!r} reads positions on the host, and a CUDA graph would "
            "repeat these: only the decoding kernels read them on the device"
        )
    return select_backend(*kind, query.shape[3])


def kernel_computes(
    backend: str, device: torch.device, dtype: torch.dtype, count: int, head_dim: int
) -> bool:
    """Whether the decoding kernels compute a call.

    Args:
        backend: what the user asks for.
        device: of the query.
        dtype: of the query.
        count: new positions.
        head_dim: of the query.

    Raises:
        ValueError: they are asked for, and cannot; or `backend` is unknown.
    """
    if backend == "triton":
        select_backend(backend, device, dtype, head_dim)
        if count > kernels.MOST_NEW_ROWS:
            raise ValueError(
                f"backend={backend!r} decodes at most {kernels.MOST_NEW_ROWS} new positions a "
                f"call; got {count}: give fewer, or backend='auto'"
            )
        return True
    refused = device.type != "cuda" or table_refusal(device, dtype, head_dim) is not None
    return backend == "auto" and not refused and count <= kernels.MOST_NEW_ROWS


def steps_by_kernel(cache: DilatedKVCache, backend: str) -> bool:
    """Whether the decoding kernels compute a step of one position to a cache.

    Args:
        cache: of the dtype and head_dim of the query.
        backend: what the user asks for.

    Raises:
        ValueError: see `kernel_computes`.
    """
    keys = cache.keys
    return kernel_computes(backend, keys.device, keys.dtype, 1, keys.shape[2])


def _begin(
    tensors: _Tensors, cache: DilatedKVCache, options: _Options, selection: Selection | None
) -> Callable[[], _Result]:
    """Begin this rank's part, and return what ends it and adds the positions to the cache."""
    scale = tensors[0].shape[3] ** -0.5 if options.scale is None else float(options.scale)
    if selection is None:
        return begin_by_kernel(*tensors, cache, scale, options.step)

    def whole() -> _Result:
        with torch.no_grad():
            return _by_tiles(*tensors, cache, selection, scale)

    return whole


def begin_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    scale: float,
    step: Step,
) -> Callable[[], _Result]:
    """Begin what this rank's rows of the cache, and the new rows, add up to: it reads, and no more.

    Args:
        query: (batch, m, heads, head_dim).
        key: (batch, m, kv_heads, head_dim), of the same positions.
        value: like `key`.
        cache: without these positions.
        scale: factor on the scores.
        step: that of the model which this call is a part of.

    Returns:
        What ends it, and adds the positions to the cache: out (batch, m, heads, head_dim), in the
        dtype of the query, or float32 where ranks share the rows; lse (batch, m, heads), float32.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    count, plan = key.shape[1], cache.plan
    # All heads' rows lie in one row of the cache: a head stride of 0.
    keys, values = (
        x.unsqueeze(2).expand(-1, -1, plan.num_kv_heads, -1) for x in (cache.keys, cache.values)
    )
    most_rows = sum(branch.slots for branch in plan.branches)
    with kernels_on(query.device):
        begun = kernels.decode.begin_strips(
            query,
            keys,
            values,
            step.strips(cache, count),
            most_rows,
            scale,
            new=kernels.decode.NewRows(key, value, cache.lengths, cache.shard == 0),
        )

    def end() -> _Result:
        with kernels_on(query.device):
            found = begun.merged(torch.float32 if cache.is_sharded else query.dtype)
        cache.advanced(count)
        return found

    return end


def _by_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    selection: Selection,
    scale: float,
) -> _Result:
    """What this rank's rows of the cache, and the new rows, add up to; then the cache has them.

    Args:
        query: (batch, m, heads, head_dim).
        key: (batch, m, kv_heads, head_dim), of the same positions.
        value: like `key`.
        cache: without these positions; with them afterwards.
        selection: what computes the tiles.
        scale: factor on the scores.

    Returns:
        out (batch, m, heads, head_dim) and lse (batch, m, heads), float32 or float64.
    """
    batch, count, kv_heads, head_dim = key.shape
    q_bnkgd = query.reshape(batch, count, kv_heads, -1, head_dim)
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(q_bnkgd.shape, dtype=dtype, device=query.device)
    lse = out.new_full(out.shape[:-1], -torch.inf)
    is_one = count == 1
    if is_one:  # its own row overwrites nothing that is needed, and then is a row like the others
        cache.write(key, value)
    for rows, length in cache.equal_rows():
        for tile in cache.plan.new_tiles(length, count):
            at = rows, tile.queries, tile.kv_heads
            q, result = q_bnkgd[at], (out[at], lse[at])
            if not is_one and cache.shard == 0:  # on one rank: all have the new rows
                _attend_new(q, key[at], value[at], selection, scale, result)
            members = range(tile.kept.start, tile.kept.stop + is_one)
            _attend_kept(q, rows, tile, members, cache, selection, scale, result)
    if not is_one:
        cache.write(key, value)
    cache.count(count)
    return out.flatten(2, 3), lse.flatten(2)


def _attend_kept(
    q: torch.Tensor,
    rows: slice,
    tile: NewTile,
    members: range,
    cache: DilatedKVCache,
    selection: Selection,
    scale: float,
    result: _Result,
) -> None:
    """Queries (batch, m, heads, group, head_dim) against members that the cache has."""
    own = cache.plan.own_members(members, cache.shard)
    if not own:
        return
    keys, values = (x[rows, tile.heads] for x in cache.slots.of_branch(tile.branch))
    group = q.shape[3]
    # The queries of a KV head, in one block.
    queries = q.transpose(1, 2).flatten(2, 3).contiguous()
    for _, slots in runs_of_slots(own, tile.branch.slots):
        k, v = keys[:, :, slots], values[:, :, slots]
        if not (selection.reads(k) and selection.reads(v)):
            k, v = k.contiguous(), v.contiguous()
        found = _tile(selection, queries, k, v, False, scale)
        # (batch, heads, m * group, ...) to (batch, m, heads, group, ...).
        out, lse = (x.reshape(*x.shape[:2], -1, group, *x.shape[3:]).transpose(1, 2) for x in found)
        merge_(*result, out, lse)


def _attend_new(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: Selection,
    scale: float,
    result: _Result,
) -> None:
    """Queries among the new rows of their progression: each sees itself and those before."""
    heads, group = q.shape[2:4]
    queries = q.permute(0, 2, 3, 1, 4).flatten(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1).contiguous() for x in (k, v))
    found = _tile(selection, queries.contiguous(), k, v, True, scale)
    # (batch, heads * group, m, ...) to (batch, m, heads, group, ...).
    out, lse = (x.reshape(len(x), heads, group, *x.shape[2:]).movedim(3, 1) for x in found)
    merge_(*result, out, lse)


def _tile(
    selection: Selection,
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> _Result:
    """One tile, (batch, heads, rows, head_dim): its out and lse."""
    assert selection.backend is not None
    queries, k, v = selection.backend.ordered(queries, k, v)
    return selection.backend.forward(TileInputs(queries, k, v, is_causal, scale))
