"""`replicated_query_attention`: a query that every rank holds whole, against sharded K and V.

For decoding, and for a short query against a long sequence. The query's rows are few, so every rank
takes all of them to its own keys, and only results travel: K and V stay where they are. A rank's
keys are strips of rows to the decoding kernels, as those of a cache are, or tiles.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from .. import kernels
from ..documents import Integers, as_ints
from ..engine import (
    TABLES,
    Accumulator,
    TileCall,
    compute,
    kernels_on,
    merge_sink,
    merge_zero_keys,
    readable,
    readable_in_backward,
)
from ..exchange import (
    Exchange,
    all_gather,
    one_group,
    refuse_capture,
    resolve_exchange,
    settle,
    together,
    untraced,
)
from ..functional import autocast_inputs
from ..options import OptionFields, check_options, read_options
from ..pattern import DilatedPattern
from ..plan import AttentionPlan, cache
from ..resolve import FlatOptions, flat_options, plan_rows, shared_words
from ..tiles import accumulate_dtype, select_backend
from ..torch_op import (
    apply_function,
    once_differentiable,
    refuse_tangents,
    validate_sink,
    validate_tensors,
)
from .attend import kernel_computes, merged_over_ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack  # torch needs it; typing has it from Python 3.11 on

_NAME = "replicated_query_attention"

_Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Call(NamedTuple):
    """Everything but the tensors of one call on one rank."""

    # rows of the batch that are equally long, as evenly spaced slices, each with the plan of a
    # sequence of their length; in the same order on every rank
    planned: tuple[tuple[slice, AttentionPlan], ...]
    positions: range  # of the query
    tiles: TileCall  # what all tiles have in common; its `batch` is that of all rows
    by_kernel: bool  # whether the decoding kernels compute forward; else tiles do
    exchange: Exchange  # this rank's end of the group
    returns_dquery: bool  # whether backward computes the gradient of the query
    number: int  # of the call among those of its group
    sink: torch.Tensor | None  # (heads,)


class ReplicatedQueryAttention(torch.autograd.Function):
    """Attention of a query that is the same on every rank, and its derivative.

    Every rank holds Q, O (B, m, H, D), L (B, H, m) and dO; rank i holds K_i, V_i (B, n_i, K, D).
    The tiles t of rank i cover, once, every (query, visible key) of its keys.

    Forward:
        tile    O_t, L_t = softmax(scale Q_t K_t^T) V_t, and its lse; merged into O_i, L_i
        gather  (O_i, L_i) of every rank: p m B H (D + 1) elements              [float32]
        merge   in rank order: L = logaddexp(L, L_i); O = O e^(L_old-L) + O_i e^(L_i-L)   [float32]
        zeros   m zero keys, where the pattern has them: a tile with O_t = 0 and L_t = log m
        sink    with a sink S (H,): a tile with O_t = 0 and L_t = S
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
        return _forward((query, key, value), call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: D102
        *tensors, ctx.call = inputs
        ctx.save_for_backward(*tensors, *output)
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


def replicated_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    positions: range | int,
    *,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    **fields: Unpack[OptionFields],
) -> Any:  # out; (out, lse) with return_lse
    """Dilated attention of a few queries that every rank has, to sharded keys and values.

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
        pattern: which keys each head sees; without sliding windows.
        positions: where in the whole sequence the query stands: m consecutive positions, or an int
            for a single one. The keys hold these positions too.
        documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole sequence of n
            positions, as in `dilated_attention`: a query sees keys of its own document. None: one.
        lengths: (batch,) ints, or a tensor: row b of the batch holds that many valid positions of
            the whole sequence, 0 to n, and padding behind them, which no query sees and whose
            queries get output 0, lse -inf and gradient 0. None: no padding.
        sink: (heads,), scores of one more key of each head, of value 0, as in `dilated_attention`,
            the same on every rank; a constant: it has no gradient here. None: there is none.
        return_lse: whether to return the lse too. Default False.
        fields: fields of `AttentionOptions` by name: `is_causal`, `scale`, `softcap`, `group` or
            `mesh` (the ranks that share the keys), `layout` (which rank holds which keys),
            `backend`, `workspace`, `head_slice`. `exchange` and `branch_gradients` are refused:
            keys do not travel, and gradients are exact.

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
        RuntimeError: a CUDA graph is being captured, and there are several ranks; or the sink
            requires a gradient.

    Examples:
        Decode one token: it stands at the last position, where its key and value are already in the
        cache (here of one process, else of one of the ranks).

        >>> pattern = DilatedPattern([256, None], [1, 4])
        >>> keys, values = torch.randn(2, 1, 1000, 2, 16).unbind(0)
        >>> token = torch.randn(1, 1, 8, 16)
        >>> replicated_query_attention(token, keys, values, pattern, 999, is_causal=True).shape
        torch.Size([1, 1, 8, 16])
    """
    given = {"documents": documents, "lengths": lengths, "return_lse": return_lse, **fields}
    out, lse = _attend((query, key, value), sink, pattern, positions, given)
    return (out, lse) if return_lse else out


@untraced
def _attend(
    tensors: _Tensors,
    sink: torch.Tensor | None,
    pattern: DilatedPattern,
    positions: range | int,
    given: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validate, plan, agree, run; `given` are the other arguments."""
    # Taken out of the options: nothing is looked up by the group's name.
    ends = resolve_exchange(one_group(given.pop("group", None), given.pop("mesh", None)))
    query, key, value = autocast_inputs(*tensors)
    refuse_tangents(_NAME, query, key, value)
    device = query.device if isinstance(query, torch.Tensor) else torch.device("cpu")
    refuse_capture(_NAME, ends, device)
    with ends.calls.enter(_NAME, "forward") as scope:
        with together(scope, ends, device) as agreed:
            options = _options((query, key, value), pattern, **given)
            positions = _consecutive(positions, query.shape[1])
            if sink is not None:
                validate_sink(sink, query)
                if torch.is_grad_enabled() and sink.requires_grad:
                    raise RuntimeError(
                        f"{_NAME} has no gradient of a sink: pass sink.detach(), or train with "
                        "dilated_attention"
                    )
            call = _plan(options, query, key, positions, ends, scope.call.number, sink)
            words = {
                "positions": str(positions),
                "query needs a gradient": str(call.returns_dquery),
            }
            agreed.shared = shared_words(options, query, key, ends, words=words, holder="key")
        out, lse = apply_function(
            ReplicatedQueryAttention, query, key, value, call, in_operator=False
        )
        return out, lse


def _options(
    tensors: _Tensors,
    pattern: DilatedPattern,
    *,
    documents: Integers | None,
    lengths: Integers | None,
    return_lse: bool,
    **fields: Any,
) -> FlatOptions:
    """The options of a call, checked."""
    check_options(pattern=pattern, return_lse=return_lse)
    if pattern.has_windows:
        raise ValueError(
            f"{_NAME} takes no sliding windows; got {pattern}: slice the keys that a window holds "
            "and attend to these, or shard the query and call dilated_attention"
        )
    for name in ("exchange", "branch_gradients"):
        if name in fields:
            raise TypeError(
                f"{_NAME} has no option {name!r}: keys stay where they are, and gradients are exact"
            )
    options = read_options(_NAME, None, fields)
    validate_tensors(*tensors, same_length=False)
    return flat_options(
        pattern,
        options,
        tensors[1].shape[2],
        documents=None if documents is None else tuple(as_ints("documents", documents)),
        lengths=None if lengths is None else tuple(as_ints("lengths", lengths)),
        needs_gradients=False,  # each rank may ask for those of its own keys
    )


def _plan(
    options: FlatOptions,
    query: torch.Tensor,
    key: torch.Tensor,
    positions: range,
    ends: Exchange,
    number: int,
    sink: torch.Tensor | None,
) -> _Call:
    """This rank's part."""
    batch, _, num_heads, head_dim = query.shape
    num_kv_heads, kind = key.shape[2], (options.backend, query.device, query.dtype)
    length = options.layout_of(key.shape[1], ends.world_size).length
    if positions.start < 0 or positions.stop > length:
        raise ValueError(
            f"positions must lie in [0, {length}), the sequence that the keys make up; "
            f"got {positions!r}"
        )
    shape = (batch, key.shape[1], num_heads, head_dim)
    scale = head_dim**-0.5 if options.scale is None else options.scale
    capped = options.softcap is not None
    selection = select_backend(*kind, head_dim, softcap=capped)
    size = batch, num_heads // num_kv_heads
    return _Call(
        tuple(plan_rows(options, shape, ends.world_size)),
        positions,
        TileCall(selection, scale, *size, options.workspace, softcap=options.softcap),
        not capped and kernel_computes(*kind, len(positions), head_dim),
        ends,
        torch.is_grad_enabled() and query.requires_grad,
        number,
        sink,
    )


def _consecutive(positions: range | int, count: int) -> range:
    """The positions of the query, one for each of its rows."""
    if not isinstance(positions, range):
        if isinstance(positions, bool) or not hasattr(positions, "__index__"):
            raise TypeError(f"positions must be a range or an int, got {positions!r}")
        positions = range(operator.index(positions), operator.index(positions) + 1)
    if positions.step != 1 or not positions or len(positions) != count:
        raise ValueError(
            "positions must be consecutive and rising, one for each row of query and one at least: "
            f"a range of step 1; got {positions!r} for {count} rows"
        )
    return positions


_groups = lru_cache(maxsize=64)(cache.replicated_groups)


def strips_on(
    plan: AttentionPlan, positions: range, rank: int, device: torch.device
) -> torch.Tensor:
    """The keys of a rank that the queries see, (1, kv_heads, strips, 3 + m) on the device."""

    def make() -> tuple[torch.Tensor]:
        strips = cache.replicated_strips(plan, positions, rank)
        table = torch.tensor(strips, dtype=torch.int64)
        # There may be none: of a rank whose keys all lie behind the query, or a row without any.
        shape = 1, plan.num_kv_heads, len(strips[0]), 3 + len(positions)
        return (table.view(shape).to(device),)

    return TABLES.get(plan, (positions, rank, device), device, make)[0]


def _forward(tensors: _Tensors, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    query = tensors[0]
    TABLES.calls += 1
    with kernels_on(query.device):
        found = []
        for rows, plan in call.planned:
            q, k, v = (readable(x[rows], call.tiles.selection) for x in tensors)
            found.append(_of_rows(q, k, v, plan, call))
        out, lse = found[0]
        if len(found) > 1:
            out, lse = out.new_empty(query.shape), lse.new_empty(query.shape[:3])
            for (rows, _), (some, lse_of_some) in zip(call.planned, found, strict=True):
                out[rows], lse[rows] = some, lse_of_some
        out, lse = merged_over_ranks(call.exchange, out, lse)
        for rows, plan in call.planned:
            zero_keys = cache.replicated_zero_keys(plan, call.positions)
            merge_zero_keys(zero_keys, out[rows], lse[rows], call.tiles.heads_per_kv)
        if call.sink is not None:
            merge_sink(call.sink, out, lse.transpose(1, 2))
    return out.to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _of_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, call: _Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the keys of this rank: out (batch, m, heads, head_dim) and lse (batch, m, heads)."""
    dtype, tiles = accumulate_dtype(query.dtype), replace(call.tiles, batch=len(query))
    table = None
    if call.by_kernel:
        table = strips_on(plan, call.positions, call.exchange.rank, query.device)
    if table is not None and table.shape[2]:
        count = table.shape[2]
        strips, most_rows = kernels.decode.Strips(table, count, 0), key.shape[1] * count
        return kernels.decode.attend_to_strips(
            query, key, value, strips, most_rows, tiles.scale, dtype=dtype
        )
    batch, length, num_heads, _ = query.shape
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = out.new_full((batch, num_heads, length), -torch.inf)
    inputs, result = compute.Inputs(query, key, value), compute.Result(out, lse)
    with Accumulator(query.device) as sums:
        for group in _groups(plan, call.positions, call.exchange.rank):
            compute.forward(group, tiles, inputs, result, sums)
        sums.join()
    return out, lse.transpose(1, 2)


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
    TABLES.calls += 1
    sums = Accumulator(query.device)
    dquery, dkey, dvalue = (
        torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (query, key, value)
    )
    with kernels_on(query.device), sums:
        for rows, plan in call.planned:
            do, q, k, v, o = readable_in_backward(
                dout[rows], query[rows], key[rows], value[rows], out[rows], call.tiles.selection
            )
            inputs, merged = compute.Inputs(q, k, v), compute.Merged(do, o, lse[rows].contiguous())
            gradients = compute.Gradients(dquery[rows], dkey[rows], dvalue[rows])
            tiles = replace(call.tiles, batch=len(q))
            for group in _groups(plan, call.positions, call.exchange.rank):
                compute.backward(group, tiles, inputs, merged, gradients, sums)
        sums.join()
        dkey, dvalue = dkey.to(key.dtype), dvalue.to(value.dtype)
        if not call.returns_dquery:
            return None, dkey, dvalue
        total, *others = all_gather(call.exchange, dquery)
        for other in others:
            total += other
    return total.to(query.dtype), dkey, dvalue
