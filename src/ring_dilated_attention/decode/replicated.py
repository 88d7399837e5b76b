"""`replicated_query_attention`: a query that every rank holds whole, against sharded K and V.

For decoding, and for a short query against a long sequence. The query's rows are few, so every rank
takes all of them to its own keys, and only results travel: K and V stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch

from ..documents import Integers
from ..engine import (
    TABLES,
    Accumulator,
    compute,
    kernels_on,
    merge_zero_keys,
    readable,
    readable_in_backward,
)
from ..exchange import (
    Group,
    Shared,
    all_gather,
    one_group,
    refuse_capture,
    resolve_exchange,
    settle,
)
from ..functional import autocast_inputs
from ..layout import SequenceLayout
from ..pattern import DilatedPattern
from ..tiles import Backend, accumulate_dtype
from ..torch_op import apply_function, once_differentiable, refuse_tangents
from .by_kernel import attend_to_strips
from .call import ReplicatedCall, make_call
from .over_ranks import merged_over_ranks

_NAME = "replicated_query_attention"


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
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: ReplicatedCall
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
        call: ReplicatedCall = ctx.call

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
    documents: Integers | None = None,
    lengths: Integers | None = None,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
    workspace: float | None = None,
    head_slice: Sequence[int] | None = None,
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
    documents: Integers | None = None,
    lengths: Integers | None = None,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
    workspace: float | None = None,
    head_slice: Sequence[int] | None = None,
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
    documents: Integers | None = None,
    lengths: Integers | None = None,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    backend: Backend = "auto",
    workspace: float | None = None,
    head_slice: Sequence[int] | None = None,
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
        documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole sequence of n
            positions: ints, or a 1-D int32 or int64 tensor; a CUDA tensor makes the call wait for
            the device. A query sees keys of its own document, which is cut into segments on its
            own. None: one document.
        lengths: (batch,) ints, or a tensor as above: row b of the batch holds that many valid
            positions of the whole sequence, 0 to n, and padding behind them, which no query sees
            and whose queries get output 0, lse -inf and gradient 0. None: no padding.
        group: the ranks that share the keys: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`, or
            None for one process that holds them all.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which rank holds which keys; None: contiguous equal shards.
        backend: kernels that compute the tiles: ``"auto"``, the default, takes the fastest that
            supports the tensors; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``, ``"flash"``,
            ``"efficient"``, ``"triton"`` and ``"eager"`` take that one or raise.
        workspace: bound on the temporary memory of kernels, in multiples of the size of query (a
            single head of a single segment may need more). None: about a quarter in forward and a
            half in backward, or 64 MiB or what 131,072 rows take if that is more.
        head_slice: (start, stop, total): the call's KV heads are heads start to stop (excluded) of
            a layer with total of them, and have their offsets and branches. None: it has all heads.
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

    Examples:
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
        (query, key, value),
        pattern,
        positions,
        one_group(group, mesh),
        is_causal=is_causal,
        scale=scale,
        documents=documents,
        lengths=lengths,
        layout=layout,
        backend=backend,
        workspace=workspace,
        head_slice=head_slice,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def _attend(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pattern: DilatedPattern,
    positions: range | int,
    group: Group,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validate, plan, agree, run."""
    ends = resolve_exchange(group)
    query, key, value = autocast_inputs(*tensors)
    refuse_tangents(_NAME, *(x for x in (query, key, value) if isinstance(x, torch.Tensor)))
    device = query.device if isinstance(query, torch.Tensor) else torch.device("cpu")
    refuse_capture(_NAME, ends, device)
    call: ReplicatedCall | None = None
    shared: Shared | None = None
    failure = None
    try:
        call, shared = make_call((query, key, value), pattern, positions, ends, **options)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    with ends.calls.enter(_NAME, "forward") as scope:
        settle(scope, ends, device, shared, failure)
        assert call is not None
        numbered = replace(call, number=scope.call.number)
        out, lse = apply_function(
            ReplicatedQueryAttention, query, key, value, numbered, in_operator=False
        )
        return out, lse


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: ReplicatedCall
) -> tuple[torch.Tensor, torch.Tensor]:
    TABLES.start_call()
    batch, length, num_heads, _ = query.shape
    dtype, sums = accumulate_dtype(query.dtype), Accumulator(query.device)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = out.new_full((batch, num_heads, length), -torch.inf)
    with kernels_on(query.device), sums:
        for some in call.planned:
            rows, tiles = some.rows, some.tiles
            inputs = compute.Inputs(
                *(readable(x[rows], tiles.selection) for x in (query, key, value))
            )
            if some.strips is not None:
                if some.strips.shape[2]:
                    attend_to_strips(inputs, some.strips, tiles.scale, out[rows], lse[rows])
                continue
            for group in some.groups:
                compute.forward(group, tiles, inputs, compute.Result(out[rows], lse[rows]), sums)
        sums.join()
        out, lse = merged_over_ranks(call.exchange, out, lse.transpose(1, 2))
        for some in call.planned:
            merge_zero_keys(some.zero_keys, out[some.rows], lse[some.rows], some.tiles.heads_per_kv)
    return out.to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    call: ReplicatedCall,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    TABLES.start_call()
    sums = Accumulator(query.device)
    dquery, dkey, dvalue = (
        torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (query, key, value)
    )
    with kernels_on(query.device), sums:
        for some in call.planned:
            rows, tiles = some.rows, some.tiles
            do, q, k, v, o = readable_in_backward(
                dout[rows], query[rows], key[rows], value[rows], out[rows], tiles.selection
            )
            inputs, merged = compute.Inputs(q, k, v), compute.Merged(do, o, lse[rows].contiguous())
            gradients = compute.Gradients(dquery[rows], dkey[rows], dvalue[rows])
            for group in some.groups:
                compute.backward(group, tiles, inputs, merged, gradients, sums)
        sums.join()
        dkey, dvalue = dkey.to(key.dtype), dvalue.to(value.dtype)
        if not call.returns_dquery:
            return None, dkey, dvalue
        total, *others = all_gather(call.exchange, dquery)
        for other in others:
            total += other
    return total.to(query.dtype), dkey, dvalue
