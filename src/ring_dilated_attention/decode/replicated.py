"""`replicated_query_attention`: a query that every rank holds whole, against sharded K and V.

For decoding, and for a short query against a long sequence. The query's rows are few, so every rank
takes all of them to its own keys, and only results travel: K and V stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, overload

import torch

from ..caches import cache_by_size
from ..engine import (
    TABLES,
    Accumulator,
    autocast_off,
    compute,
    merge_,
    merge_zero_keys,
    readable,
    readable_in_backward,
)
from ..exchange import Exchange, Group, Shared, all_gather, refuse_capture, resolve_exchange, settle
from ..functional import autocast_inputs, validate_options, validate_tensors
from ..layout import SequenceLayout
from ..pattern import DilatedPattern
from ..plan import TileGroup, plan_attention, replicated_groups, replicated_zero_keys
from ..tiles import Backend, accumulate_dtype, select_backend
from ..torch_op import apply_function, once_differentiable, refuse_tangents

_NAME = "replicated_query_attention"


@dataclass(frozen=True)
class _Call:
    """Everything but the tensors of one call on one rank."""

    groups: tuple[TileGroup, ...]
    zero_keys: tuple[TileGroup, ...]
    exchange: Exchange
    tiles: compute.TileCall
    returns_dquery: bool
    number: int = 0  # of the call among those of its group


class ReplicatedQueryAttention(torch.autograd.Function):
    """Attention of a query that is the same on every rank, and its derivative.

    Every rank holds Q, O (B, m, H, D), L (B, H, m) and dO; rank i holds K_i, V_i (B, n_i, K, D).
    The tiles t of rank i cover, once, every (query, visible key) of its keys.

    Forward:
        tile    O_t, L_t = softmax(scale Q_t K_t^T) V_t, and its lse; merged into O_i, L_i
        gather  (O_i, L_i) of every rank: p m B H (D + 1) elements              [float32]
        merge   in rank order: L = logaddexp(L, L_i); O = O e^(L_old-L) + O_i e^(L_i-L)   [float32]
        zeros   m zero keys, where the pattern has them: a tile with O_t = 0 and L_t = log m
    Saved: Q, K_i, V_i, O, L.

    Backward, given dO, with delta = rowsum(dO * O):
        tile    P = exp(scale Q_t K_t^T - L);  dS = scale P * (dO_t V_t^T - delta)
                dQ_i += dS K_t;  dK_i += dS^T Q_t;  dV_i += P^T dO_t
        gather  dQ_i of every rank, where Q needs a gradient: p m B H D elements [float32]
        add     in rank order: dQ = sum_i dQ_i                                  [float32]

    The merged softmax is one softmax, so every tile uses the same L and delta, and no gradient of K
    or V travels. Every rank merges the same numbers in the same order: out, lse and dQ are equal on
    all ranks to the bit. float32 is float64 for float64 inputs.
    """

    @staticmethod
    def forward(  # noqa: D102
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _forward(query, key, value, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: D102
        query, key, value, call = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.call = call
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, dout: torch.Tensor, dlse: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call

        def gradient(*tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if not call.returns_dquery:  # nothing travels, and a rank may leave it out
                return _backward(*tensors, call=call)
            with call.exchange.calls.enter(_NAME, "backward", call.number) as scope:
                settle(scope, call.exchange, dout.device)
                return _backward(*tensors, call=call)

        return *once_differentiable(_NAME, gradient, dout, *ctx.saved_tensors), None


@overload
def replicated_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    positions: range | int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def replicated_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    positions: range | int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def replicated_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    positions: range | int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Some rows of `dilated_attention`, for a query that every rank of the group holds whole.

    The result is what rows `positions` of the dilated attention of the whole sequence are: segments
    and offsets go by global position, and a position that no branch covers gets output 0, lse -inf
    and gradient 0. Each rank attends to its own keys and values, which stay where they are; one
    collective brings the p ranks' (out, lse) together, ``p * batch * m * heads * (head_dim + 1)``
    numbers of 4 bytes (8 for float64 inputs), and backward one of ``p * batch * m * heads *
    head_dim``. All ranks return the same bits. Memory and work of every rank grow with m: for a
    query as long as the sequence, shard it and call `dilated_attention`.

    Every rank makes the same call with its own keys and values; backward runs on every rank too, on
    empty shards included. That the ranks' queries, and the gradients of their outputs, are equal is
    up to the caller: it is not checked. Not for ``torch.compile(fullgraph=True)``: a compiled
    function calls it between two graphs.

    Args:
        query: (batch, m, heads, head_dim), the same on every rank; float64, float32, bfloat16 or
            float16.
        key: (batch, local_sequence, kv_heads, head_dim), of the same dtype and device; kv_heads
            divides heads, and KV head j serves the query heads from j * heads / kv_heads on.
        value: like `key`.
        pattern: which keys each head sees.
        positions: where in the whole sequence the query stands: m consecutive positions, or an int
            for a single one. The keys hold these positions too.
        is_causal: whether a query sees only keys at positions <= its own.
        scale: factor on the scores; None: head_dim ** -0.5.
        group: the ranks that share the keys: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`, or
            None for one process that holds them all.
        layout: which rank holds which keys; None: contiguous equal shards.
        backend: kernels that compute the tiles, one of `tiles.BACKENDS`; ``"auto"``, the default,
            takes the fastest one that supports the tensors, and any other name is used or refused.
        return_lse: whether to return the lse too.

    Returns:
        out (batch, m, heads, head_dim) in the dtype of the inputs, equal on every rank; with
        `return_lse` also lse (batch, heads, m), natural logarithm, float32 (float64 for float64
        inputs), outside of autograd. The gradient of query is equal on every rank too: that of one
        function of one query, not a share to be added up. Under autocast the inputs are cast as
        they are for `scaled_dot_product_attention`.

    Raises:
        TypeError, ValueError: an argument is not allowed, or the ranks disagree about one; raised
            on every rank of the group, naming the ranks at fault.
        ExchangeError: a rank is missing, has failed in the middle of a call, or makes another call
            than the rest.
        NotImplementedError: an input has a tangent: there is no forward-mode derivative.
        RuntimeError: a CUDA graph is being captured, and there are several ranks.

    Example:
        Decode one token: it stands at the last position, where its key and value are already in the
        cache (here of one process, else of one of the ranks).

        >>> pattern = DilatedPattern([256, None], [1, 4])
        >>> keys, values = torch.randn(2, 1, 1000, 2, 16).unbind(0)
        >>> token = torch.randn(1, 1, 8, 16)
        >>> replicated_query_attention(token, keys, values, pattern, 999, is_causal=True).shape
        torch.Size([1, 1, 8, 16])
    """
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _attend
    if torch.compiler.is_compiling():
        # Not to be traced: what the plan is looked up by changes from call to call.
        attend = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]
    out, lse = attend(
        query, key, value, pattern, positions, is_causal, scale, group, layout, backend, return_lse
    )
    return (out, lse) if return_lse else out


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    positions: range | int,
    is_causal: bool,
    scale: float | None,
    group: Group,
    layout: SequenceLayout | None,
    backend: Backend,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validate, plan, agree, run."""
    ends = resolve_exchange(group)
    query, key, value = autocast_inputs(query, key, value)
    refuse_tangents(_NAME, *(x for x in (query, key, value) if isinstance(x, torch.Tensor)))
    device = query.device if isinstance(query, torch.Tensor) else torch.device("cpu")
    refuse_capture(_NAME, ends, device)
    call, shared, failure = None, None, None
    try:
        validate_options(pattern, is_causal, scale, layout, "auto", backend, return_lse)
        validate_tensors(query, key, value, same_length=False)
        whole = _whole(layout, key.shape[1], ends)
        rows = _rows(positions, whole.length, query.shape[1])
        call, shared = _make_call(
            query, key, pattern, rows, is_causal, scale, ends, whole, backend
        )  # fmt: skip
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    with ends.calls.enter(_NAME, "forward") as scope:
        settle(scope, ends, device, None if shared is None else Shared.of(shared), failure)
        assert call is not None
        numbered = replace(call, number=scope.call.number)
        out, lse = apply_function(
            ReplicatedQueryAttention, query, key, value, numbered, in_operator=False
        )
        return out, lse


def _whole(layout: SequenceLayout | None, local_length: int, ends: Exchange) -> SequenceLayout:
    """The layout of the keys, checked against what this rank holds."""
    if layout is None:
        if local_length == 0:
            raise ValueError("the sequence is empty: key has no rows, and no layout is given")
        return _equal_shards(local_length, ends.world_size)
    held = f"its key has a local sequence length of {local_length}"
    layout.check_shard(ends.rank, ends.world_size, local_length, held)
    return layout


def _rows(positions: range | int, length: int, count: int) -> range:
    """The positions of the query, checked against the sequence and the number of its rows."""
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
    if positions.start < 0 or positions.stop > length:
        raise ValueError(
            f"positions must lie in [0, {length}), the sequence that the keys make up; "
            f"got {positions!r}"
        )
    if len(positions) != count:
        raise ValueError(
            f"positions must be one for each row of query; got {positions!r} for {count} rows"
        )
    return positions


def _make_call(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: DilatedPattern,
    positions: range,
    is_causal: bool,
    scale: float | None,
    ends: Exchange,
    layout: SequenceLayout,
    backend: Backend,
) -> tuple[_Call, dict[str, Any]]:
    """The call, and what must be equal on all ranks, in words for the message."""
    batch, _, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    selection = select_backend(backend, query.device, query.dtype, head_dim)
    needs_gradient = torch.is_grad_enabled() and query.requires_grad
    call = _Call(
        *_groups(pattern, layout, positions, is_causal, num_heads, num_kv_heads, ends.rank),
        ends,
        compute.TileCall(
            selection,
            head_dim**-0.5 if scale is None else float(scale),
            batch,
            num_heads // num_kv_heads,
        ),
        needs_gradient,
    )
    shared = {
        "batch": batch,
        "heads": num_heads,
        "kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype": str(query.dtype),
        "device": query.device.type,
        "pattern": str(pattern),
        "layout": f"{layout!r} ({layout.digest[:8]})",
        "positions": str(positions),
        "is_causal": is_causal,
        "scale": scale,
        "backend": backend,
        "query needs a gradient": needs_gradient,
    }
    return call, shared


@lru_cache(maxsize=64)
def _equal_shards(local_length: int, world_size: int) -> SequenceLayout:
    return SequenceLayout.contiguous(local_length * world_size, world_size)


def _nbytes_of_groups(arguments: tuple[Any, ...], groups: Any) -> int:
    pattern, layout = arguments[0], arguments[1]
    numbers: int = len(pattern.branches) * (8 + layout.world_size)
    return 4096 * numbers


@cache_by_size(16 << 20, _nbytes_of_groups)
def _groups(
    pattern: DilatedPattern,
    layout: SequenceLayout,
    positions: range,
    is_causal: bool,
    num_heads: int,
    num_kv_heads: int,
    rank: int,
) -> tuple[tuple[TileGroup, ...], tuple[TileGroup, ...]]:
    """The tiles of a rank, and the zero keys that the queries see."""
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    return replicated_groups(plan, positions, rank), replicated_zero_keys(plan, positions)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
) -> tuple[torch.Tensor, torch.Tensor]:
    TABLES.start_call()
    inputs = compute.Inputs(*(readable(x, call.tiles.selection) for x in (query, key, value)))
    query = inputs.query
    batch, length, num_heads, _ = query.shape
    dtype, sums = accumulate_dtype(query.dtype), Accumulator(query.device)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = out.new_full((batch, num_heads, length), -torch.inf)
    with autocast_off(query.device):
        for group in call.groups:
            compute.forward(group, call.tiles, inputs, compute.Result(out, lse), sums)
        sums.join()
        packed = torch.cat([out, lse.transpose(1, 2).unsqueeze(-1)], -1)
        total, *others = all_gather(call.exchange, packed)
        out, lse = total[..., :-1], total[..., -1]
        for other in others:
            merge_(out, lse, other[..., :-1], other[..., -1])
        merge_zero_keys(call.zero_keys, out, lse, call.tiles.group)
    return out.to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    call: _Call,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    TABLES.start_call()
    dout, query, key, value, out = readable_in_backward(
        dout, query, key, value, out, call.tiles.selection
    )
    merged, sums = compute.Merged(dout, out, lse.contiguous()), Accumulator(query.device)
    dquery, dkey, dvalue = (
        torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (query, key, value)
    )
    inputs = compute.Inputs(query, key, value)
    gradients = compute.Gradients(dquery, dkey, dvalue)
    with autocast_off(query.device):
        for group in call.groups:
            compute.backward(group, call.tiles, inputs, merged, gradients, sums)
        sums.join()
        del gradients  # which are float32
        dkey, dvalue = dkey.to(key.dtype), dvalue.to(value.dtype)
        if not call.returns_dquery:
            return None, dkey, dvalue
        total, *others = all_gather(call.exchange, dquery)
        for other in others:
            total += other
    return total.to(query.dtype), dkey, dvalue
