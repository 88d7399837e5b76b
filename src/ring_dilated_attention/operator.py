"""Dilated attention as operators of torch: what autograd, torch.compile and CUDA graphs see.

``ring_dilated_attention::forward`` and ``ring_dilated_attention::backward`` are the one path of
every call: eager or compiled, alone or in a group. An operator takes tensors and plain values only,
so everything else is written down as an `Options` and looked up again when the operator runs. What
waits for other ranks happens inside the operators alone, so tracing a call involves no other rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .agreement import Shared, refuse_capture, settle
from .caches import INT_BYTES, cache_by_size
from .calls import Call, Scope
from .derivatives import apply_function, once_differentiable, refuse_tangents
from .device_tables import TABLES
from .exchange import Exchange, exchange_named
from .flops import count_flops_of
from .layout import SequenceLayout
from .packed import PackedRows, packed_rows
from .pattern import DilatedPattern
from .plan import AttentionPlan, plan_attention
from .plan.documents import SHOWN, in_words
from .ring import RingCall, attention_backward, attention_forward
from .tiles import Selection, accumulate_dtype, select_backend


class Options(NamedTuple):
    """A call of `dilated_attention` without its tensors, in types that an operator takes.

    Attributes:
        segment_lengths: of the pattern; 0 is the whole document.
        dilation_rates: of the pattern.
        head_offsets: of the pattern.
        head_branches: of the pattern.
        zero_keys: of the pattern.
        is_causal: see `dilated_attention`.
        scale: see `dilated_attention`.
        layout: `SequenceLayout.flat`; empty is contiguous equal shards.
        group: what `group_name` calls the group.
        exchange: see `dilated_attention`.
        backend: see `dilated_attention`.
        workspace: see `dilated_attention`.
        needs_gradients: whether autograd records this call.
        documents: cumulative lengths; empty: one document.
        lengths: valid positions of each batch row; empty: all positions of all rows.
    """

    segment_lengths: list[int]
    dilation_rates: list[int]
    head_offsets: str
    head_branches: str
    zero_keys: bool
    is_causal: bool
    scale: float | None
    layout: list[int]
    group: str
    exchange: str
    backend: str
    workspace: float | None
    needs_gradients: bool
    documents: Sequence[int] = ()
    lengths: Sequence[int] = ()


_OPTIONS = (
    "int[] segment_lengths, int[] dilation_rates, str head_offsets, str head_branches, "
    "bool zero_keys, bool is_causal, float? scale, "
    "SymInt[] layout, str group, str exchange, str backend, "
    "float? workspace, bool needs_gradients, SymInt[] documents, SymInt[] lengths"
)
_Library: Any = torch.library.Library  # its methods have no annotations
_library = _Library("ring_dilated_attention", "DEF")
_library.define(
    f"forward(Tensor query, Tensor key, Tensor value, {_OPTIONS}) "
    "-> (Tensor out, Tensor lse, Tensor identity)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"Tensor identity, {_OPTIONS}) -> (Tensor dquery, Tensor dkey, Tensor dvalue)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

FORWARD = torch.ops.ring_dilated_attention.forward.default
"""(query, key, value, *options) -> (out, lse, identity): out as query, lse (batch, heads,
local_sequence), both contiguous; identity int64 (1,) on the CPU, the number of the call among those
of its group, (0,) without a group. The arguments are those that `dilated_attention` has
validated."""
BACKWARD = torch.ops.ring_dilated_attention.backward.default
"""(dout, query, key, value, out, lse, identity, *options) -> (dquery, dkey, dvalue), contiguous,
each as its input."""


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
    Saved: Q_i, K_i, V_i, O_i, L_i.

    Backward, given dO_i, with delta_i = rowsum(dO_i * O_i), for s = 0 .. p-1:
        start   as in forward: K_ij, V_ij are exchanged again                     [P2P, input dtype]
        tile    P = exp(scale Q_t K_t^T - L_i);  dS = scale P * (dO_t V_t^T - delta_i)
                dQ_i += dS K_t;  dK_t = dS^T Q_t;  dV_t = P^T dO_t
        home    s = 0: dK_i += dK_t, dV_i += dV_t
                s > 0: send dK_ij, dV_ij to their owner j = i-s; receive dK_ki, dV_ki from
                k = i+s and add them to dK_i, dV_i               [P2P, input dtype or float32]

    Since the merged softmax is one softmax, every tile uses the same L_i and delta_i, and gradients
    only add up. Transfers of step s+1 (ring), or of all steps (gather), run behind the tiles of
    step s; the way home of step s runs behind the tiles of step s+1, and those of the last two
    behind local tiles held back for them. A ring does all this for a few heads at a time. Gradients
    of remote rows go home in the dtype of the inputs, in which kernels return them; in float32
    where many tiles add to a row. float32 is float64 for float64 inputs. The lse is returned for
    use outside of autograd: it is marked non-differentiable.
    """

    @staticmethod
    def forward(  # noqa: D102
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, identity = FORWARD(query, key, value, *options)
        return out, lse, identity

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: D102
        query, key, value, options = inputs
        out, lse, identity = output
        ctx.save_for_backward(query, key, value, out, lse, identity)
        ctx.options = options
        ctx.ends = exchange_named(options.group)  # keeps it for backward, which goes by its name
        ctx.mark_non_differentiable(lse, identity)

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, dout: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        options = ctx.options
        gradients = once_differentiable(
            "dilated_attention", lambda *x: BACKWARD(*x, *options), dout, *ctx.saved_tensors
        )
        return *gradients, None


def _autograd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    refuse_tangents("dilated_attention", query, key, value)
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        out, lse, identity = apply_function(
            RingDilatedAttention, query, key, value, Options(*options), in_operator=True
        )
        return out, lse, identity
    with torch._C._AutoDispatchBelowAutograd():
        out, lse, identity = FORWARD(query, key, value, *options)
    return out, lse, identity


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    named = Options(*options)
    ends = exchange_named(named.group)
    TABLES.start_call()
    refuse_capture("dilated_attention", ends, query.device)
    with ends.calls.enter("dilated_attention", "forward") as scope:
        agree_on_call(scope, ends, query, key, named)
        calls = _ring_calls(query, key, named, ends)
        identity = _identity(named.group, query, scope.call)
        if len(calls) == 1:
            return *attention_forward(query, key, value, calls[0].call), identity
        out, lse, _ = _fake_forward(query, key, value, *options)
        for rows, call in calls:
            out[rows], lse[rows] = attention_forward(query[rows], key[rows], value[rows], call)
        return out, lse, identity


def _identity(group: str, query: torch.Tensor, call: Call | None = None) -> torch.Tensor:
    """The number of a call, where there is a group; where there is none, nothing to wait for."""
    if not group:
        return query.new_empty(0, dtype=torch.int64)
    if call is None:
        return query.new_empty(1, dtype=torch.int64, device="cpu")
    return torch.tensor([call.number])


def _backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    identity: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    named = Options(*options)
    ends = exchange_named(named.group)
    TABLES.start_call()
    refuse_capture("dilated_attention", ends, query.device)
    forward = int(identity) if named.group else 0
    with ends.calls.enter("dilated_attention", "backward", forward) as scope:
        settle(scope, ends, query.device)
        calls = _ring_calls(query, key, named, ends)
        if len(calls) == 1:
            return attention_backward(dout, query, key, value, out, lse, calls[0].call)
        dquery, dkey, dvalue = _fake_backward(dout, query, key, value)
        for rows, call in calls:
            dquery[rows], dkey[rows], dvalue[rows] = attention_backward(
                dout[rows], query[rows], key[rows], value[rows], out[rows], lse[rows], call
            )
        return dquery, dkey, dvalue


def _fake_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, num_heads, _ = query.shape
    lse = query.new_empty((batch, num_heads, length), dtype=accumulate_dtype(query.dtype))
    return query.new_empty(query.shape), lse, _identity(Options(*options).group, query)


def _fake_backward(
    dout: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
# torch.library.register_autograd does the same and takes 30 us longer, on every call.
_library.impl("forward", _autograd, "Autograd")
torch.library.register_fake(FORWARD, _fake_forward, lib=_library)
torch.library.register_fake(BACKWARD, _fake_backward, lib=_library)


class _RowsCall(NamedTuple):
    """The call of some rows of a batch: those that are equally long."""

    rows: slice
    call: RingCall


def _ring_calls(
    query: torch.Tensor, key: torch.Tensor, options: Options, ends: Exchange
) -> list[_RowsCall]:
    """Look up what the options stand for, which the ranks have agreed on.

    Returns:
        The calls that make up this one, in the same order on every rank: one, unless the rows of
        the batch differ in length.
    """
    length, num_heads, head_dim = query.shape[1:]
    backend = _select(options.backend, query.device, query.dtype, head_dim)
    calls = []
    for packed in _packed_rows(options, query, ends.world_size):
        plan = _plan(
            tuple(options.segment_lengths),
            tuple(options.dilation_rates),
            options.head_offsets,
            options.head_branches,
            options.zero_keys,
            tuple(options.layout) or length,
            ends.world_size,
            options.is_causal,
            num_heads,
            key.shape[2],
            packed.borders,
        )
        gathers = plan.gathers if options.exchange == "auto" else options.exchange == "gather"
        call = RingCall(
            plan.rank(ends.rank),
            ends,
            backend,
            head_dim**-0.5 if options.scale is None else options.scale,
            gathers,
            options.workspace,
        )
        calls.append(_RowsCall(packed.rows, call))
    return calls


def agree_on_call(
    scope: Scope,
    ends: Exchange,
    query: torch.Tensor,
    key: torch.Tensor,
    options: Options,
    **others: str,
) -> None:
    """Raise on every rank unless the ranks' calls are the same, and can be made.

    Args:
        scope: the call.
        ends: this rank's end of the group.
        query: of this rank's call.
        key: of this rank's call.
        options: of this rank's call.
        others: what takes the place of an option, in words.

    Raises:
        ValueError: the layout, the documents, the lengths or the backend do not fit the call, on
            this rank or another, or the ranks' calls differ; raised on every rank.
        ExchangeError: see `settle`.
    """
    shared, failure = None, None
    try:
        _check_layout(tuple(options.layout), query.shape[1], ends)
        if not others:  # else documents may end where lengths that are not known yet say
            _packed_rows(options, query, ends.world_size)
        _select(options.backend, query.device, query.dtype, query.shape[3])
        if ends.world_size > 1:
            shared = _shared(query, key, options)
            if others:
                shared = Shared.of({**shared.words, **others})
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    settle(scope, ends, query.device, shared, failure)


def _packed_rows(options: Options, query: torch.Tensor, world_size: int) -> tuple[PackedRows, ...]:
    """The rows of the batch that can be computed together, and their documents."""
    batch, length = query.shape[:2]
    total = _layout(tuple(options.layout)).length if options.layout else length * world_size
    return packed_rows(tuple(options.documents), tuple(options.lengths), batch, total)


def _check_layout(flat: tuple[int, ...], local_length: int, ends: Exchange) -> None:
    if flat:
        held = f"its query has a local sequence length of {local_length}"
        _layout(flat).check_shard(ends.rank, ends.world_size, local_length, held)


def _shared(query: torch.Tensor, key: torch.Tensor, options: Options) -> Shared:
    """What must be equal on all ranks."""
    hashable = (tuple(x) if isinstance(x, Sequence) and not isinstance(x, str) else x
                for x in options)  # fmt: skip
    return _in_words(query.shape, key.shape[2], query.dtype, query.device.type, *hashable)


def _nbytes_in_words(arguments: tuple[Any, ...], shared: Shared) -> int:
    lists = (len(x) for x in arguments if isinstance(x, tuple))
    return INT_BYTES * sum(lists) + 2 * len(shared.text)


@cache_by_size(4 << 20, _nbytes_in_words)
def _in_words(
    shape: tuple[int, ...], num_kv_heads: int, dtype: torch.dtype, device: str, *values: Any
) -> Shared:
    options = Options(*values)
    batch, length, num_heads, head_dim = shape
    layout = _layout(tuple(options.layout)) if options.layout else None
    pattern = _pattern(*values[:5])
    return Shared.of(
        {
            "batch": batch,
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "dtype": str(dtype),
            "device": device,
            "pattern": str(pattern),
            "layout": f"{layout!r} ({layout.digest[:8]})"
            if layout
            else f"{length} positions on each rank",
            "documents": _digest(options.documents),
            "lengths": _digest(options.lengths),
            "is_causal": options.is_causal,
            "scale": options.scale,
            "exchange": options.exchange,
            "backend": options.backend,
            "needs gradients": options.needs_gradients,
        }
    )


@lru_cache(maxsize=64)
def _select(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Selection:
    return select_backend(name, device, dtype, head_dim)


def _digest(numbers: Sequence[int]) -> str:
    if not numbers:
        return "None"
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).hexdigest()
    return in_words(numbers) + f" ({digest})" * (len(numbers) > SHOWN)


def _nbytes_of_plan(arguments: tuple[Any, ...], plan: AttentionPlan) -> int:
    """Roughly what a plan and its schedules take when they have been used."""
    segment_lengths, borders = arguments[0], arguments[10]
    world_size: int = arguments[6]
    return 4096 * (len(segment_lengths) * (8 + world_size) + len(borders))


@cache_by_size(64 << 20, _nbytes_of_plan)
def _plan(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_offsets: str,
    head_branches: str,
    zero_keys: bool,
    layout: tuple[int, ...] | int,  # an int: equal shards of so many positions
    world_size: int,
    is_causal: bool,
    num_heads: int,
    num_kv_heads: int,
    borders: tuple[int, ...],
) -> AttentionPlan:
    return plan_attention(
        _pattern(segment_lengths, dilation_rates, head_offsets, head_branches, zero_keys),
        _layout(layout)
        if isinstance(layout, tuple)
        else SequenceLayout.contiguous(layout * world_size, world_size),
        is_causal=is_causal,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        documents=borders,
        length=borders[-1],
    )


@lru_cache(maxsize=64)
def _pattern(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_offsets: str,
    head_branches: str,
    zero_keys: bool,
) -> DilatedPattern:
    return DilatedPattern(
        [length or None for length in segment_lengths],
        dilation_rates,
        head_offsets=head_offsets,
        head_branches=head_branches,
        zero_keys=zero_keys,
    )


def _nbytes_of_layout(arguments: tuple[Any, ...], layout: SequenceLayout) -> int:
    return 4 * INT_BYTES * len(arguments[0])


@cache_by_size(4 << 20, _nbytes_of_layout)
def _layout(flat: tuple[int, ...]) -> SequenceLayout:
    return SequenceLayout.from_flat(flat)


count_flops_of(torch.ops.ring_dilated_attention.forward, torch.ops.ring_dilated_attention.backward)
