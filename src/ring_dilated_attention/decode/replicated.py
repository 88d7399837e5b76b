"""`replicated_query_attention`: a query that every rank holds whole, against sharded K and V.

For decoding, and for a short query against a long sequence. The query's rows are few, so every rank
takes all of them to its own keys, and only results travel: K and V stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import torch

from .. import kernels
from ..caches import cache_by_size
from ..documents import Integers, as_ints
from ..engine import (
    TABLES,
    Accumulator,
    TileCall,
    compute,
    kernels_on,
    merge_zero_keys,
    readable,
    readable_in_backward,
)
from ..exchange import (
    Exchange,
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
from ..options import AttentionOptions, check_options
from ..pattern import DilatedPattern
from ..plan import (
    AttentionPlan,
    TileGroup,
)
from ..resolve import FlatOptions, flat_options, plan_rows, shared_words
from ..tiles import Backend, accumulate_dtype, select_backend
from ..torch_op import apply_function, once_differentiable, refuse_tangents, validate_tensors
from .attend import kernel_computes, merged_over_ranks

_NAME = "replicated_query_attention"


@dataclass(frozen=True)
class ReplicatedRows:
    """Rows of a batch that are computed together, because they are equally long.

    Attributes:
        rows: which, evenly spaced: indexing with it gives a view.
        plan: of a sequence of their length.
        positions: of the query.
        rank: whose keys.
        tiles: what all tiles have in common.
        strips: the keys of this rank as the decoding kernels take them, (1, kv_heads, strips,
            3 + m) on the device; None: forward computes tiles.
    """

    rows: slice
    plan: AttentionPlan
    positions: range
    rank: int
    tiles: TileCall
    strips: torch.Tensor | None

    @property
    def groups(self) -> tuple[TileGroup, ...]:
        """The tiles of this rank."""
        return _groups(self.plan, self.positions, self.rank)


@dataclass(frozen=True)
class ReplicatedCall:
    """Everything but the tensors of one call on one rank.

    Attributes:
        planned: all rows of the batch, in the same order on every rank.
        exchange: this rank's end of the group.
        returns_dquery: whether backward computes the gradient of the query.
        number: of the call among those of its group.
    """

    planned: tuple[ReplicatedRows, ...]
    exchange: Exchange
    returns_dquery: bool
    number: int = 0


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
        call, shared = _make_call((query, key, value), pattern, positions, ends, **options)
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


def _make_call(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pattern: DilatedPattern,
    positions: range | int,
    ends: Exchange,
    **given: Any,
) -> tuple[ReplicatedCall, Shared]:
    """Check a call, and plan this rank's part of it: the call, and what all ranks must agree on.

    `given` are the other options of `replicated_query_attention`.
    """
    documents, lengths = given.pop("documents"), given.pop("lengths")
    check_options(pattern=pattern, return_lse=given.pop("return_lse"))
    asked_for = AttentionOptions(**given)  # without a group: nothing is looked up by its name
    validate_tensors(*tensors, same_length=False)
    options = flat_options(
        pattern,
        asked_for,
        tensors[1].shape[2],
        documents=None if documents is None else tuple(as_ints("documents", documents)),
        lengths=None if lengths is None else tuple(as_ints("lengths", lengths)),
        needs_gradients=False,  # each rank may ask for those of its own keys
    )
    query, key, _ = tensors
    if not options.layout and key.shape[1] == 0:
        raise ValueError("the sequence is empty: key has no rows, and no layout is given")
    needs_gradient = torch.is_grad_enabled() and query.requires_grad
    asked = _consecutive(positions, query.shape[1])
    words = {"positions": str(asked), "query needs a gradient": str(needs_gradient)}
    shared = shared_words(options, query, key, ends, words=words, holder="key")
    return ReplicatedCall(_plan(options, query, key, asked, ends), ends, needs_gradient), shared


def _plan(
    options: FlatOptions,
    query: torch.Tensor,
    key: torch.Tensor,
    positions: range,
    ends: Exchange,
) -> tuple[ReplicatedRows, ...]:
    batch, _, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    selection = select_backend(options.backend, query.device, query.dtype, head_dim)
    scale = head_dim**-0.5 if options.scale is None else options.scale
    by_kernel = kernel_computes(
        options.backend, query.device, query.dtype, len(positions), head_dim
    )
    found = []
    shape = (batch, key.shape[1], num_heads, head_dim)
    for rows, plan in plan_rows(options, shape, num_kv_heads, ends.world_size):
        length = plan.layout.length
        if positions.start < 0 or positions.stop > length:
            raise ValueError(
                f"positions must lie in [0, {length}), the sequence that the keys make up; "
                f"got {positions!r}"
            )
        of_rows = len(range(*rows.indices(batch)))
        tiles = TileCall(selection, scale, of_rows, num_heads // num_kv_heads, options.workspace)
        strips = strips_on(plan, positions, ends.rank, query.device) if by_kernel else None
        found.append(ReplicatedRows(rows, plan, positions, ends.rank, tiles, strips))
    return tuple(found)


def _consecutive(positions: range | int, count: int) -> range:
    """The positions of the query, one for each of its rows."""
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
    if len(positions) != count:
        raise ValueError(
            f"positions must be one for each row of query; got {positions!r} for {count} rows"
        )
    return positions


def _nbytes_of_groups(arguments: tuple[Any, ...], _: Any) -> int:
    plan: AttentionPlan = arguments[0]
    return 4096 * len(plan.pattern.branches) * (8 + plan.layout.world_size)


class _Strips(NamedTuple):
    table: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.table,)


def strips_on(
    plan: AttentionPlan, positions: range, rank: int, device: torch.device
) -> torch.Tensor:
    """The keys of a rank that the queries see, (1, kv_heads, strips, 3 + m) on the device."""

    def make() -> _Strips:
        strips = plan.replicated_strips(positions, rank)
        table = torch.tensor(strips, dtype=torch.int64)
        # There may be none: of a rank whose keys all lie behind the query, or a row without any.
        shape = 1, plan.num_kv_heads, len(strips[0]), 3 + len(positions)
        return _Strips(table.view(shape).to(device))

    return TABLES.get(plan, (positions, rank, device), device, make).table


@cache_by_size(16 << 20, _nbytes_of_groups)
def _groups(plan: AttentionPlan, positions: range, rank: int) -> tuple[TileGroup, ...]:
    return plan.replicated_groups(positions, rank)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: ReplicatedCall
) -> tuple[torch.Tensor, torch.Tensor]:
    TABLES.start_call()
    with kernels_on(query.device):
        found = [_of_rows(query, key, value, some) for some in call.planned]
        out, lse = found[0]
        if len(found) > 1:
            out, lse = out.new_empty(query.shape), lse.new_empty(query.shape[:3])
            for some, (of_some, lse_of_some) in zip(call.planned, found, strict=True):
                out[some.rows], lse[some.rows] = of_some, lse_of_some
        out, lse = merged_over_ranks(call.exchange, out, lse)
        for some in call.planned:
            zero_keys = some.plan.replicated_zero_keys(some.positions)
            merge_zero_keys(zero_keys, out[some.rows], lse[some.rows], some.tiles.heads_per_kv)
    return out.to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _of_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, some: ReplicatedRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the keys of this rank: out (batch, m, heads, head_dim) and lse (batch, m, heads).

    By the kernels of a cache, since keys of a sharded sequence are strips of rows, too; or by
    tiles.
    """
    rows, tiles, strips = some.rows, some.tiles, some.strips
    query, key, value = (readable(x[rows], tiles.selection) for x in (query, key, value))
    dtype, sums = accumulate_dtype(query.dtype), Accumulator(query.device)
    with sums:
        if strips is not None and strips.shape[2]:
            count = strips.shape[2]
            begun = kernels.decode.begin_strips(
                query,
                key,
                value,
                kernels.decode.Strips(strips, count, 0),
                key.shape[1] * count,
                tiles.scale,
            )
            return begun.merged(dtype)
        batch, length, num_heads, _ = query.shape
        out = torch.zeros(query.shape, dtype=dtype, device=query.device)
        lse = out.new_full((batch, num_heads, length), -torch.inf)
        inputs, result = compute.Inputs(query, key, value), compute.Result(out, lse)
        for group in some.groups:
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
