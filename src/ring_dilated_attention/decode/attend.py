"""`cached_attention`: a few new positions against a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple, TypeAlias, overload

import torch

from ..exchange import Shared, refuse_capture, settle
from ..functional import autocast_inputs, validate_options
from ..pattern import in_brief
from ..tiles import Backend, Selection, select_backend, wants_same_bits
from ..torch_op import refuse_tangents, validate_tensors
from .by_kernel import begin_by_kernel, kernel_computes
from .by_tiles import attend_by_tiles
from .cache import DilatedKVCache
from .over_ranks import merged_over_ranks
from .products import select_for_one_position
from .step import Step

_NAME = "cached_attention"
_PLAIN_OPTIONS = [(scale, str, bool) for scale in (float, int, type(None))]
"""Of scale, backend and return_lse: the types whose values tell whether calls are alike. Arguments
of other types, such as a scale of True, which equals 1.0, are checked in every call."""


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
    _check_cache(cache)
    options = _Options(scale, backend, return_lse, Step())
    out, lse = _untraced((query, key, value), cache, options)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.transpose(1, 2).contiguous()


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
    options = _Options(scale, backend, False, step)
    return _untraced((query, key, value), cache, options)[0]


class _Options(NamedTuple):
    """How a call is computed: see `cached_attention` and `attend_in_step`."""

    scale: float | None
    backend: Backend
    return_lse: bool
    step: Step


_Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Result: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""out (batch, m, heads, head_dim), and lse (batch, m, heads) if it is wanted."""


def _untraced(tensors: _Tensors, cache: DilatedKVCache, options: _Options) -> _Result:
    """`_call`, not traced by torch.compile: it depends on lengths, which change in every call."""
    call = _call
    if torch.compiler.is_compiling():
        call = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
    return call(tensors, cache, options)


def _call(tensors: _Tensors, cache: DilatedKVCache, options: _Options) -> _Result:
    """Check, agree, run."""
    query, key, value = autocast_inputs(*tensors)
    if cache.is_sharded:
        out, lse = _of_shared_rows((query, key, value), cache, options)
    else:
        selection = _checked(query, key, value, cache, options)
        out, lse = _begin(query, key, value, cache, options, selection)()
    return out if out.dtype == query.dtype else out.to(query.dtype), lse


def _of_shared_rows(tensors: _Tensors, cache: DilatedKVCache, options: _Options) -> _Result:
    """Over the rows of all ranks; a GPU reads while they agree, and writes to the cache then."""
    ends, device = cache.exchange, cache.keys.device
    refuse_capture(_NAME, ends, device)
    selection, failure = None, None
    try:
        selection = _checked(*tensors, cache, options)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    with ends.calls.enter(_NAME, "forward") as scope:
        if failure is not None:
            settle(scope, ends, device, None, failure)  # raises
        end = _begin(*tensors, cache, options._replace(return_lse=True), selection)
        words = {
            "cache": cache.described,
            "query": str(tuple(tensors[0].shape)),
            "scale": options.scale,
            "backend": options.backend,
        }
        counted = {"lengths": str(cache.known_lengths)}
        settle(scope, ends, device, Shared.of(words, counted=counted))
        out, lse = end()
        assert lse is not None
        return merged_over_ranks(ends, out, lse)


def _check_cache(cache: DilatedKVCache) -> None:
    if not isinstance(cache, DilatedKVCache):
        raise TypeError(f"cache must be a DilatedKVCache, got {in_brief(cache)}")


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    options: _Options,
) -> Selection | None:
    """`_check`, once for calls that it would treat alike."""
    scale, backend, return_lse, _ = options
    # Without generators, which take a CPU as long as all else here.
    if not (_is_plain(query) and _is_plain(key) and _is_plain(value)):
        return _check(query, key, value, cache, options)
    if (type(scale), type(backend), type(return_lse)) not in _PLAIN_OPTIONS:
        return _check(query, key, value, cache, options)
    refuse_tangents(_NAME, query, key, value)
    kinds = _kind(query), _kind(key), _kind(value), _kind(cache.keys)
    call = (kinds, cache.plan, scale, backend, return_lse, wants_same_bits())
    selection = cache.memo.selection(call, lambda: _check(query, key, value, cache, options))
    cache.check_room(key.shape[1])
    return selection


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not (tensor.is_nested or tensor.requires_grad)


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    options: _Options,
) -> Selection | None:
    """What computes the tiles; None: the decoding kernels do. Raise unless all is allowed."""
    scale, backend, return_lse, _ = options
    validate_options(cache.plan.pattern, True, scale, None, "auto", backend, return_lse)
    validate_tensors(query, key, value)
    refuse_tangents(_NAME, query, key, value)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise RuntimeError(
            f"{_NAME} has no gradient, and an input requires one: call it under torch.no_grad() or "
            "torch.inference_mode(), and train with dilated_attention"
        )
    cache.check_new(key, value)
    kind = (backend, query.device, query.dtype)
    if kernel_computes(*kind, query.shape[1], query.shape[3]):
        return None
    if query.shape[1] == 1:
        return select_for_one_position(*kind, query.shape[3], len(query))
    return select_backend(*kind, query.shape[3])


def _begin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    options: _Options,
    selection: Selection | None,
) -> Callable[[], _Result]:
    """This rank's part: what ends it, and adds the positions to the cache."""
    scale, _, wants_lse, step = options
    factor = query.shape[3] ** -0.5 if scale is None else float(scale)
    cache.memo.by_tiles = selection is not None
    if selection is None:
        return begin_by_kernel(query, key, value, cache, factor, step)

    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{_NAME} of {query.shape[1]} new positions in {query.dtype} with "
            f"backend={options.backend!r} reads positions on the host, and a CUDA graph would "
            "repeat these: only the decoding kernels read them on the device"
        )

    def whole() -> _Result:
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            return attend_by_tiles(query, key, value, cache, selection, factor, wants_lse=wants_lse)

    return whole
