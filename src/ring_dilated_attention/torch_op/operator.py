"""Dilated attention as operators of torch: what autograd, torch.compile and CUDA graphs see.

``ring_dilated_attention::forward`` and ``ring_dilated_attention::backward`` are the one path of
every call: eager or compiled, alone or in a group. An operator takes tensors and plain values only,
so everything else is written down as `FlatOptions` and looked up again when the operator runs. What
waits for other ranks happens inside the operators alone, so tracing a call involves no other rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeAlias

import torch

from ..choice import ROWS
from ..engine import (
    HeadExchange,
    Peers,
    kernels_on,
    merge_sink,
    ring_backward,
    ring_forward,
    ring_received,
    row_sums,
    rows_of_heads,
)
from ..exchange import Exchange, exchange_named, own_exchange, refuse_capture, settle, together
from ..parallel import is_dtensor
from ..pattern import in_brief, shape_in_brief
from ..plan import costs
from ..resolve import FlatOptions, Resolved, check_integers, plan_rows, resolve, split_of
from ..tiles import accumulate_dtype
from .agreed import KNOWN_LENGTHS, refuse_in_graphs
from .derivatives import LIBRARY, define, implement, once_differentiable

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def validate_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, same_length: bool = True
) -> None:
    """Raise a `TypeError` or `ValueError` unless these can be a query, key and value.

    With `same_length` the query must have as many rows as the keys.
    """
    given = {"query": query, "key": key, "value": value}
    for name, tensor in given.items():
        validate_tensor(name, tensor)
    if not query.dtype == key.dtype == value.dtype:
        got = ", ".join(f"{name} {x.dtype}" for name, x in given.items())
        raise ValueError(
            f"query, key and value must have one dtype; got {got}. Cast them, or make the call "
            "under torch.autocast"
        )
    if not query.device == key.device == value.device:
        got = ", ".join(f"{name} {x.device}" for name, x in given.items())
        raise ValueError(f"query, key and value must have one device; got {got}")
    problem = _shape_problem(query.shape, key.shape, value.shape, same_length)
    if problem is not None:
        got = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        raise ValueError(
            f"{problem}; got {got}. Shapes are (batch, local_sequence, heads, head_dim)"
        )


def validate_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise a `TypeError` or `ValueError` unless this can be the query, key or value `name`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
    if is_dtensor(tensor):
        raise TypeError(f"{name} is a DTensor; pass its shard, {name}.to_local()")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{name} must be a dense (torch.strided) tensor; got {kind}")
    if tensor.ndim != 4:
        raise ValueError(
            f"{name} must have 4 dimensions (batch, local_sequence, heads, head_dim); "
            f"got shape {shape_in_brief(tensor)}"
        )
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        raise TypeError(f"the dtype of {name} must be one of {allowed}; got {tensor.dtype}")


def _shape_problem(
    query: torch.Size, key: torch.Size, value: torch.Size, same_length: bool
) -> str | None:
    for dim, what in ((0, "batch size"), (1, "local sequence length"), (3, "head_dim")):
        if (dim != 1 or same_length) and not query[dim] == key[dim] == value[dim]:
            return f"query, key and value must have the same {what}"
    if key[1] != value[1] or key[2] != value[2]:
        return "key and value must have the same shape"
    if query[0] == 0 or query[2] == 0 or key[2] == 0 or query[3] == 0:
        return "batch, heads, kv_heads and head_dim must be >= 1"
    if query[2] % key[2]:
        return "heads must be a multiple of kv_heads"
    return None


def validate_sink(sink: torch.Tensor, query: torch.Tensor, *, detached: bool = False) -> None:
    """Raise a `TypeError` or `ValueError` unless this can be the sinks of a query's heads."""
    if not isinstance(sink, torch.Tensor) or is_dtensor(sink):
        raise TypeError(f"sink must be a tensor (heads,), not a DTensor; got {in_brief(sink)}")
    heads = query.shape[2]
    if sink.shape != (heads,) or sink.device != query.device:
        raise ValueError(
            f"sink must have one number for each query head, shape {(heads,)}, on {query.device}; "
            f"got shape {shape_in_brief(sink)} on {sink.device}"
        )
    if sink.dtype not in (torch.float32, query.dtype):
        raise TypeError(
            f"the dtype of sink must be torch.float32 or that of query, {query.dtype}; got "
            f"{sink.dtype}"
        )
    if detached:
        raise ValueError("a sink needs branch_gradients='exact'; got 'detached'")


_OPTIONS = (
    "int[] segment_lengths, int[] dilation_rates, str head_offsets, str head_branches, "
    "bool zero_keys, bool is_causal, float? scale, "
    "SymInt[] layout, str group, str exchange, str backend, "
    "float? workspace, bool needs_gradients, SymInt[] documents, SymInt[] lengths, "
    "bool detached, int[] head_slice, int[] windows, float? softcap, int num_kv_heads"
)
FORWARD = define(
    "forward(Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor? measured, "
    f"Tensor? borders, {_OPTIONS}) -> (Tensor out, Tensor lse, Tensor identity, Tensor[] of_heads)",
)
"""(query, key, value, sink, measured, borders, *options) -> (out, lse, identity, of_heads): out as
query, lse (batch, heads, local_sequence), both contiguous; identity int64 () on the CPU, the number
of the call among those of its group, (0,) without a group; of_heads is empty, or what backward
needs of an all-to-all by heads: all rows of this rank's heads of query, key and value, (rows,
batch, heads, head_dim), and their out and lse. measured and borders are None, or integers (1-D, on
the CPU) that are not known while a graph is traced: in place of the options lengths and documents.
The other arguments are those that `dilated_attention` has validated."""
BACKWARD = define(
    "backward(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, Tensor identity, Tensor? sink, Tensor? measured, Tensor? borders, "
    f"{_OPTIONS}) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsink)",
)
"""(dout, dlse, query, key, value, out, lse, identity, sink, measured, borders, *options) ->
(dquery, dkey, dvalue, dsink), contiguous, each as its input. dlse is like lse, or None: nothing
depends on it. dsink is this rank's share: the gradient is the sum over the ranks; (0,) without a
sink. After an all-to-all by heads, query, key, value, out and lse are those of this rank's heads,
and dsink is 0 but for these."""


RECEIVED = define(
    "received(Tensor query, Tensor key, Tensor lse, Tensor weights, Tensor? measured, "
    f"Tensor? borders, {_OPTIONS}) -> Tensor",
)
"""(query, key, lse, weights, measured, borders, *options) -> sums over the queries of softmax
weights times `weights`, (sets, batch, heads, local_sequence), in the dtype of lse. weights (sets,
batch, local_sequence), of any floating dtype; the others as of `FORWARD`, and its lse."""


class RingDilatedAttention(torch.autograd.Function):
    """The derivative of ``ring_dilated_attention::forward``; every tensor is sharded over n.

    Rank i holds Q_i, O_i (B, n_i, H, D) and K_i, V_i (B, n_i, K, D). K_ij, V_ij are the rows of
    rank j that queries of rank i need: (2, B, R_ij, D), R_ij counted by the plan, each row once.
    The tiles t of rank i cover, once, every (query, visible key) of its queries: those of step 0
    read K_i, V_i, those of step s read K_ij, V_ij with j = i - s (mod p).

    Forward, for s = 0 .. p-1:
        start   receive K_ij, V_ij from j = i-s-1; send K_ki, V_ki to k = i+s+1   [P2P, input dtype]
        tile    O_t, L_t = softmax(scale Q_t K_t^T) V_t, and its lse
        merge   L_i = logaddexp(L_i, L_t); O_i = O_i e^(L_old-L_i) + O_t e^(L_t-L_i)    [float32]
    and then, where the pattern has zero keys and a query sees m of them:
        zeros   a tile with O_t = 0 and L_t = log m, merged alike
        sink    with a sink S (H,): one more, with O_t = 0 and L_t = S
    Saved: Q_i, K_i, V_i, O_i, L_i.

    Backward, given dO_i, with delta_i = rowsum(dO_i * O_i), for s = 0 .. p-1:
        start   as in forward: K_ij, V_ij are exchanged again                     [P2P, input dtype]
        tile    P = exp(scale Q_t K_t^T - L_i);  dS = scale P * (dO_t V_t^T - delta_i)
                dQ_i += dS K_t;  dK_t = dS^T Q_t;  dV_t = P^T dO_t
        return  s = 0: dK_i += dK_t, dV_i += dV_t
                s > 0: send dK_ij, dV_ij to their owner j = i-s; receive dK_ki, dV_ki from
                k = i+s and add them to dK_i, dV_i               [P2P, input dtype or float32]

        sink    dS_i = sum over batch and rows of e^(S - L_i) (dL_i - delta_i); dS = sum_i dS_i

    Where branch weights are taken for constants, delta is that of the tile's branch: rowsum(dO_i *
    its own O_i), which is worked out again; L_i is the merged one.

    A gradient dL_i of the lse adds P * dL_i to P * (dO_t V_t^T - delta_i). The same kernels do
    that for one more column: of 1 in V_t, of dL_i in dO_i, and of 0 in O_i.

    Since the merged softmax is one softmax, every tile uses the same L_i and delta_i, and gradients
    only add up. Transfers of step s+1 (ring), or of all steps (gather), run behind the tiles of
    step s; gradients of step s are returned behind the tiles of step s+1. A ring does all this for
    a few heads at a time. Gradients of remote rows are returned in the dtype of the inputs, in
    which kernels return them; in float32 where many tiles add to a row. float32 is float64 for
    float64 inputs.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: D102
        query, key, value, sink, measured, borders, options = inputs
        out, lse, identity, of_heads = output
        if of_heads:
            rows, own_out, own_lse = of_heads
            query, key, value = rows_of_heads(rows, own_out.shape[2])
            saved = query, key, value, own_out, own_lse
        else:
            saved = query, key, value, out, lse
        ctx.save_for_backward(*saved, identity, sink, measured, borders)
        ctx.like = out.shape
        ctx.options = FlatOptions(*options)
        ctx.ends = own_exchange(ctx.options.group)  # kept for backward, which goes by its name
        # Weights of branches that are constants are made of an lse that is one.
        constants = (lse, identity) if ctx.options.detached else (identity,)
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)  # a gradient of lse costs something

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *rest: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        options, saved = ctx.options, ctx.saved_tensors
        dout = saved[3].new_zeros(ctx.like) if dout is None else dout

        def gradient(*x: Any) -> Any:
            return BACKWARD(*x, *options)

        *found, dsink = once_differentiable("dilated_attention", gradient, dout, dlse, *saved)
        gradients = *found, None if saved[6] is None else dsink
        return *gradients, None, None, None


_Four: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    named = _options(*options)
    ends = exchange_named(named.group)
    refuse_capture("dilated_attention", ends, query.device)
    with ends.calls.enter("dilated_attention", "forward") as scope:
        with together(scope, ends, query.device, later=True) as agreed:
            resolved = resolve(named, query, ends)
            agreed.shared = resolved.shared
        identity = _identity(named.group, query, scope.call.number)
        tensors, of_heads = [query, key, value], []
        if resolved.heads is None:
            out, lse = _by_rows(ring_forward, tensors, ends, resolved)
            if sink is not None:
                merge_sink(sink, out, lse)
        else:
            swap = HeadExchange(resolved.heads, ends)
            with kernels_on(query.device):
                rows = swap.to_heads(*tensors)
                heads = resolved.heads.query_heads
                own = rows_of_heads(rows, heads.stop - heads.start)
                own_out, own_lse = _by_rows(ring_forward, own, ends, resolved)
                if sink is not None:
                    merge_sink(sink[heads], own_out, own_lse)
                (out,) = swap.to_rows(own_out)
                (lse,) = swap.to_rows(own_lse.transpose(1, 2).unsqueeze(-1))
            lse = lse.squeeze(-1).transpose(1, 2).contiguous()
            if named.needs_gradients:
                of_heads = [rows, own_out, own_lse]
        return out, lse, identity, of_heads


def _by_rows(
    ring: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    ends: Exchange,
    resolved: Resolved,
) -> Sequence[torch.Tensor]:
    """Compute the rows of a batch: those that are equally long together, the others in turn."""
    whole: list[torch.Tensor] = []
    among: Any = ends
    if resolved.heads is not None:
        among = Peers(ends, resolved.heads.peers)
    for rows, call in resolved.planned:
        if len(resolved.planned) == 1:
            return ring(*tensors, call, among)
        found = ring(*[x[rows] for x in tensors], call, among)
        whole = whole or [x.new_empty((len(tensors[0]), *x.shape[1:])) for x in found]
        for result, part in zip(whole, found, strict=True):
            result[rows] = part
    return whole


def _identity(group: str, query: torch.Tensor, number: int = 0) -> torch.Tensor:
    """The number of a call, where there is a group; else nothing to wait for."""
    if not group:
        return query.new_empty(0, dtype=torch.int64)
    return torch.scalar_tensor(number, dtype=torch.int64)


_ONE_MORE = 8  # columns that make room for one: kernels take multiples of 8


def _with_dlse(dlse: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """dout, query, key, value and out whose backward is that of dout and dlse: see above."""
    dout, query, key, value, out = tensors
    room = 0, _ONE_MORE - 1
    column = dlse.transpose(1, 2).unsqueeze(-1).to(dout.dtype)
    pad = torch.nn.functional.pad
    return [
        pad(torch.cat((dout, column), -1), room),
        *(pad(x, (0, _ONE_MORE)) for x in (query, key)),
        pad(pad(value, (0, 1), value=1.0), room),
        pad(out, (0, _ONE_MORE)),
    ]


def _sink_gradient(
    sink: torch.Tensor, tensors: Sequence[torch.Tensor], dlse: torch.Tensor | None, call: Resolved
) -> torch.Tensor:
    """The gradient of `merge_sink` of the rows that a rank computes; padding has none.

    Args:
        sink: (heads,) of the heads that it computes.
        tensors: dout and out (batch, rows, heads, head_dim), lse (batch, heads, rows).
        dlse: like lse.
        call: says which rows are padding.
    """
    dout, out, lse = (x.contiguous() for x in tensors)
    slope = torch.empty_like(lse)
    row_sums(dout, out, slope)
    slope = slope.neg_() if dlse is None else dlse - slope
    for rows, one in call.planned:
        plan = one.plan.plan
        if plan.documents[-1] < plan.layout.length:
            positions = plan.layout.positions(one.plan.index, device=lse.device)
            slope[rows].masked_fill_(positions >= plan.documents[-1], 0)
    return (torch.exp(sink.to(lse.dtype)[:, None] - lse) * slope).sum((0, 2))


def _backward(dout: torch.Tensor, dlse: torch.Tensor | None, *inputs: Any) -> _Four:
    query, key, value, out, lse, identity, sink, *options = inputs
    named = _options(*options)
    if KNOWN_LENGTHS:
        KNOWN_LENGTHS.clear()
    ends = exchange_named(named.group)
    refuse_capture("dilated_attention", ends, query.device)
    forward = int(identity) if named.group else 0
    part = "backward" if dlse is None else "backward of lse, too,"
    with ends.calls.enter("dilated_attention", part, forward) as scope:
        settle(scope, ends, query.device, later=True)
        tensors, head_dim = [dout, query, key, value, out, lse], query.shape[3]
        if dlse is not None:
            if named.exchange == "auto":  # which must not choose again, of a larger head_dim
                share = resolve(named, dout, ends).heads
                choice = ROWS if share is None else f"heads:{len(share.units)}"
                named = named._replace(exchange=choice)
            named = named._replace(scale=head_dim**-0.5 if named.scale is None else named.scale)
            tensors[:5] = _with_dlse(dlse, tensors[:5])
        resolved = resolve(named, tensors[0], ends)
        heads = slice(None)
        if resolved.heads is None:
            found = _by_rows(ring_backward, tensors, ends, resolved)
        else:
            swap = HeadExchange(resolved.heads, ends)
            heads = resolved.heads.query_heads
            with kernels_on(query.device):
                (tensors[0],) = rows_of_heads(swap.to_heads(tensors[0]))
                found = _by_rows(ring_backward, tensors, ends, resolved)
                found = swap.to_rows(*found)
        dsink = dout.new_empty(0) if sink is None else torch.zeros_like(sink)
        if sink is not None:
            dout, *_, out, lse = tensors
            of_lse = None if dlse is None else dout[..., head_dim].transpose(1, 2)
            dsink[heads] = _sink_gradient(sink[heads], (dout, out, lse), of_lse, resolved)
        if dlse is not None:
            found = [x[..., :head_dim].contiguous() for x in found]
        dquery, dkey, dvalue = found
        return dquery, dkey, dvalue, dsink


def _received(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    """P^T w is the gradient of value where w is that of out: a column of these for each w.

    Query heads of a KV head, whose gradients add up, have columns of their own. Where all of them
    are more columns than a head has, backward runs several times.
    """
    named, name = _options(*options), "attention_received"
    ends = exchange_named(named.group)
    refuse_capture(name, ends, query.device)
    batch, length, heads, head_dim = query.shape
    shape = batch, length, key.shape[2], heads // key.shape[2]  # KV heads, and members of each
    columns = [(member, w) for member in range(shape[3]) for w in range(len(weights))]
    with ends.calls.enter(name, "forward") as scope:
        with together(scope, ends, query.device, later=True) as agreed:
            resolved = resolve(named, query, ends)
            if resolved.shared is not None:
                agreed.on({**resolved.shared.words, "sets of queries": len(weights)})
        found = lse.new_empty(len(weights), *shape)
        for start in range(0, len(columns), head_dim):
            some = columns[start : start + head_dim]
            dout = query.new_zeros(*shape, head_dim)
            for column, (member, w) in enumerate(some):
                dout[:, :, :, member, column] = weights[w][:, :, None]
            tensors = dout.flatten(2, 3), query, key, lse
            (dvalue,) = _by_rows(ring_received, tensors, ends, resolved)
            for column, (member, w) in enumerate(some):
                found[w, :, :, :, member] = dvalue[..., column]
        by_head: torch.Tensor = found.flatten(3).transpose(2, 3).contiguous()
        return by_head


implement(
    RECEIVED, _received, lambda _, __, lse, weights, *___: lse.new_empty(len(weights), *lse.shape)
)


def _options(measured: Any, borders: Any, *options: Any) -> FlatOptions:
    """The options of an operator, in which integers in tensors take their place."""
    named = FlatOptions._make([tuple(x) if type(x) is list else x for x in options])
    if measured is not None:
        refuse_in_graphs("lengths in a tensor", "pass a list of ints")
        named = named._replace(lengths=tuple(measured.tolist()))
    if borders is not None:
        refuse_in_graphs("documents in a tensor", "pass a list of ints")
        named = named._replace(documents=tuple(borders.tolist()))
    return named


def _fake_forward(
    query: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    batch, length, num_heads, head_dim = query.shape
    named = FlatOptions(*inputs[5:])  # behind key, value, sink, measured and borders
    ends = exchange_named(named.group)
    if query.is_meta and type(query) is torch.Tensor:  # of fake tensors, integers may be symbols
        check_integers(named, query.shape, ends)
    of_heads, wide = [], accumulate_dtype(query.dtype)
    if named.exchange == "auto":
        split = split_of(named, query.shape, query.dtype, ends.world_size)
    else:  # of the heads alone: positions may be symbols
        of_shape = batch, 1, num_heads, head_dim
        split = split_of(named._replace(layout=()), of_shape, query.dtype, ends.world_size)
    if split is not None and named.needs_gradients:
        rows = named.rows_of(split.members(ends.rank), length)
        units = len(split.units_of(ends.rank))
        heads = units * num_heads // split.units
        of_heads = [
            query.new_empty(rows, batch, heads + 2 * units, head_dim),
            query.new_empty(batch, rows, heads, head_dim),
            query.new_empty(batch, heads, rows, dtype=wide),
        ]
    lse = query.new_empty((batch, num_heads, length), dtype=wide)
    return query.new_empty(query.shape), lse, _identity(named.group, query), of_heads


def _fake_backward(dout: torch.Tensor, *inputs: Any) -> _Four:
    batch, length, _, head_dim = dout.shape
    sink, _, _, *options = inputs[7:]  # behind dlse, the five tensors of forward, and identity
    of_keys = batch, length, FlatOptions(*options).num_kv_heads, head_dim
    dsink = dout.new_empty(0) if sink is None else torch.empty_like(sink)
    return dout.new_empty(dout.shape), dout.new_empty(of_keys), dout.new_empty(of_keys), dsink


call_forward = implement(
    FORWARD, _forward, _fake_forward, RingDilatedAttention, "dilated_attention"
)
implement(BACKWARD, _backward, _fake_backward)


def _mapped(info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
    """torch.func.vmap of `FORWARD`, one call after the other, as torch does it for other results.

    Its own loop takes no operator that returns a list of tensors.
    """
    pairs = [*zip(inputs, in_dims, strict=True)]
    found = [
        FORWARD(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs))
        for i in range(info.batch_size)
    ]
    *tensors, of_heads = zip(*found, strict=True)
    lists = [torch.stack(each) for each in zip(*of_heads, strict=True)]
    return (*map(torch.stack, tensors), lists), (0, 0, 0, [0] * len(lists))


torch.library.register_vmap(FORWARD, _mapped, lib=LIBRARY)


# --- Floating-point operations: what `FlopCounterMode` counts for a call. Useful operations of this
# rank, as the plan counts them: 4 * head_dim for each (query, key) pair of a head in forward,
# 10 * head_dim in backward. What a kernel throws away (masked scores of a causal tile) is no work.


def _forward_flops(query: torch.Tensor, key: torch.Tensor, *rest: Any, **_: Any) -> int:
    """Operations of `FORWARD`, whose arguments these are; shape and dtype of tensors count.

    Numbers in `measured` and `borders` are not known: every position counts, in one document.
    """
    flat = FlatOptions(*rest[4:])
    shape = tuple(map(int, query.shape))
    ends = exchange_named(flat.group)
    flops = 0
    split = split_of(flat, shape, query.dtype, ends.world_size)
    for rows, plan in plan_rows(flat, shape, ends.world_size):
        one = plan.rank(ends.rank) if split is None else split.plan_of(plan, ends.rank)
        batch = len(range(shape[0])[rows])
        size = costs.TensorSize(batch=batch, head_dim=shape[3], element_size=1)
        flops += costs.flops_by_rank(one.plan, size)[one.index]
    return flops


def _backward_flops(dout: torch.Tensor, dlse: Any, *inputs: Any, **_: Any) -> int:
    """Operations of `BACKWARD`: scores again, and a product each for dq, dk, dv and d scores."""
    return _forward_flops(dout, *inputs[1:3], *inputs[6:]) // 2 * 5


_COUNTER = "torch.utils.flop_counter"


def _register_flops(counter: Any) -> None:
    operators = torch.ops.ring_dilated_attention
    counter.register_flop_formula(operators.forward, get_raw=True)(_forward_flops)
    counter.register_flop_formula(operators.backward, get_raw=True)(_backward_flops)


class _AfterImport(MetaPathFinder):
    """Finds the counter as the other finders do, once, and registers formulas when it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if name != _COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _register_flops(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Importing the counter imports Triton, which reads TRITON_INTERPRET then, or warns that there is
# none. So the formulas are registered when somebody else has imported it: now, or later.
if _COUNTER in sys.modules:
    _register_flops(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _AfterImport())
