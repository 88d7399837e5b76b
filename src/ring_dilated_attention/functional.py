"""`dilated_attention` and `attention_received`: validate, then call the operator.

All of it is plain enough for torch.compile to trace with ``fullgraph=True`` and dynamic lengths:
what is cached, looked up or shared with other ranks happens when the operator runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .choice import ROWS
from .documents import Integers, ints_or_tensor
from .engine import autocast_dtype
from .exchange import Group, group_name
from .options import (
    AttentionOptions,
    OptionFields,
    check_options,
    group_of_options,
    read_options,
)
from .parallel import Placed, group_of_dtensors, is_dtensor
from .pattern import DilatedPattern, in_brief
from .resolve import FlatOptions, flat_options
from .tiles import accumulate_dtype
from .torch_op import (
    LENGTHS,
    RECEIVED,
    call_forward,
    check_padding_mask,
    tell_ranks,
    validate_sink,
    validate_tensors,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # torch needs it; typing has it from Python 3.11 on


class _CallFields(OptionFields, total=False):
    documents: Integers | None
    lengths: Integers | None
    key_padding_mask: torch.Tensor | None
    sink: torch.Tensor | None


@overload
def dilated_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: DilatedPattern,
    options: AttentionOptions | None = None, *, return_lse: Literal[False] = False,
    **fields: Unpack[_CallFields],
) -> torch.Tensor: ...  # fmt: skip


@overload
def dilated_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: DilatedPattern,
    options: AttentionOptions | None = None, *, return_lse: Literal[True],
    **fields: Unpack[_CallFields],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    options: AttentionOptions | None = None,
    *,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    key_padding_mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    **fields: Unpack[OptionFields],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact dilated attention of a sequence sharded over the ranks of a group.

    A head's output at a position is one softmax over the union of all branches' keys there, where a
    key of two branches counts twice (LongNet, Ding et al. 2023, arXiv 2307.02486, eq. 9-10; see
    `DilatedPattern`). The gradient is the true gradient of that function. A position that no branch
    covers gets output 0, lse -inf and gradient 0. Every rank of the group makes the same call with
    its own shard; backward runs on every rank too, on empty shards included.

    Query, key and value may be DTensors: whole tensors, of which ranks hold parts. Where they are
    sharded over the sequence, Shard(1), these ranks are the group, and positions are those of the
    whole tensors, evenly cut or not; other dimensions of the mesh may replicate them, or shard the
    batch, Shard(0), or the heads, Shard(2). Then out, lse and gradients are DTensors placed alike,
    `lengths` are those of the whole batch, and `key_padding_mask` is a DTensor too.

    Args:
        query: (batch, local_sequence, heads, head_dim); float64, float32, bfloat16 or float16.
        key: (batch, local_sequence, kv_heads, head_dim), of the same dtype and device; kv_heads
            divides heads, and KV head j serves the query heads from j * heads / kv_heads on.
        value: the shape, dtype and device of `key`.
        pattern: which keys each head sees.
        options: group, layout, causality and the others, see `AttentionOptions`; None: its
            defaults, on one process.
        documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole sequence of n
            positions (not in this rank's shard): ints, or a 1-D int32 or int64 tensor, as
            ``cu_seqlens`` elsewhere; a CUDA tensor makes the call wait for the device. Each is cut
            into segments on its own, a segment length of None is the whole document, and attention
            never crosses a border; ranks may hold any parts of any documents. They may be empty, so
            ``cu_seqlens`` may be padded at the end with n. All rows of the batch have the same.
            Under torch.compile, another number of ints is another graph, of a tensor it is not.
            None: one document.
        lengths: (batch,) ints, or a tensor as above: row b of the batch holds that many valid
            positions of the whole sequence, 0 to n, and padding behind them: part of no segment,
            not computed, output 0, lse -inf and gradient 0, whatever the tensors hold there. With
            `documents`, which may then end anywhere from the longest length on, each row's are cut
            off at its length. Rows of one length are computed together, others one after another.
            None: no padding.
        key_padding_mask: in place of `lengths`, the local shard of a boolean mask, (batch,
            local_sequence): True where a position is PADDING, as in `nn.MultiheadAttention` (the
            opposite of a mask of valid positions). It must be a right padding of the whole
            sequence; anything else is refused. It makes the call wait for the device and costs two
            small collectives, which `lengths` saves.
        sink: (heads,), in float32 or the dtype of the inputs, on their device; learned as a rule.
            One more key of each head, of that score (not scaled, not capped) and value 0, in every
            query's softmax (gpt-oss): ``lse' = logaddexp(lse, sink)`` and ``out' = out * exp(lse -
            lse')``. Where there is no other key, out is 0 and lse the sink; padding has no
            gradient. Every rank passes the same; a rank's gradient is the share of the rows (with
            ``exchange="heads"``: of the heads) that it computes, and the sum over the ranks is the
            gradient, as of any weight (DDP and FSDP average: scale the loss as for the others). Not
            with DTensors, nor with detached branch gradients. None: no sink.
        return_lse: whether to return the lse too. Default False.
        fields: fields of `AttentionOptions` by name, in place of those of `options`.

    Returns:
        out (batch, local_sequence, heads, head_dim) in the dtype of the inputs; with `return_lse`
        also lse (batch, heads, local_sequence), natural logarithm, float32 (float64 for float64
        inputs), with its gradient, as for a z-loss or to merge results by hand (where branch
        gradients are detached, it is a constant). Under autocast the inputs are cast as they are
        for `scaled_dot_product_attention`.

    Raises:
        TypeError, ValueError: an argument is not allowed, or the ranks disagree about one; raised
            on every rank of the group, naming the ranks at fault.
        ExchangeError: a rank is missing, has failed in the middle of a call, or makes another call
            than the rest; raised on every rank, in backward too. After a rank was lost the group
            cannot be used any more; after calls that differ it can.
        NotImplementedError: an input has a tangent: there is no forward-mode derivative.
        RuntimeError: a CUDA graph is being captured, and there are several ranks.
    """
    name = "dilated_attention"
    group = group_of_options(name, options, fields)
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        if sink is not None:
            raise TypeError("a sink goes with plain tensors: pass the shards, x.to_local()")
        return _of_dtensors(
            (query, key, value), pattern, group, options, fields,
            documents, lengths, key_padding_mask, return_lse,
        )  # fmt: skip
    group_name(group)  # raises where there is nobody to tell
    query, key, value = autocast_inputs(query, key, value)
    try:
        check_options(pattern=pattern, return_lse=return_lse)
        given = read_options(name, options, fields)
        validate_tensors(query, key, value)
        if sink is not None:
            detached = given.branch_gradients == "detached" and pattern.mixes_branches
            validate_sink(sink, query, detached=detached)
        packed = documents, lengths, key_padding_mask
        inputs = (query, key, value) if sink is None else (query, key, value, sink)
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        flat, *traced = _in_plain_types(query, key, pattern, given, *packed, gradients=gradients)
    except Exception as failure:
        tell_ranks(failure, group, query)
        raise
    if key_padding_mask is not None:
        flat, traced[0] = _with_mask(flat, key_padding_mask)
    if flat.exchange == "auto" and flat.group and not _are_known(query.shape, flat, traced):
        flat = flat._replace(exchange=ROWS)
    out, lse, *_ = call_forward(query, key, value, sink, *traced, *flat)
    return (out, lse) if return_lse else out


def attention_received(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    pattern: DilatedPattern,
    options: AttentionOptions | None = None,
    *,
    queries: torch.Tensor | None = None,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    key_padding_mask: torch.Tensor | None = None,
    **fields: Unpack[OptionFields],
) -> torch.Tensor:
    """The attention that each key receives: softmax weights of `dilated_attention`, summed up.

    Key j receives ``sum_i queries[i] P[i, j]``, where ``P[i, j] = exp(scale q_i k_j - lse_i)``
    counts once for each branch that shows query i the key j. P is never formed: memory is O(n), and
    the time that of one backward, for as many sets of queries as a head is wide. Every rank of the
    group makes the same call with its own shard. There is no gradient.

    Without `queries` the sum over all keys is the number of queries that see any, less what zero
    keys and sinks take.

    Args:
        query: as of the call of `dilated_attention`.
        key: as of the call of `dilated_attention`.
        lse: (batch, heads, local_sequence), as that call returned it with ``return_lse=True``, in
            which a sink is counted.
        pattern: which keys each head sees.
        options: those of that call; None: the defaults.
        queries: a weight for each query, (batch, local_sequence), or (sets, batch, local_sequence)
            for several sums; floating, rounded to the dtype of `query`. 1 at the class token and 0
            elsewhere gives its row of P. None: 1 for every query.
        documents: as of that call.
        lengths: as of that call. Padding gives and receives nothing.
        key_padding_mask: as of that call.
        fields: fields of `AttentionOptions` by name, in place of those of `options`. Ranks exchange
            rows by ring or gather, also where that call exchanged heads.

    Returns:
        (batch, heads, local_sequence), for each query head, at the positions of the keys; with sets
        (sets, batch, heads, local_sequence). float32, float64 for float64 inputs. Of bfloat16 or
        float16 inputs, weights and sums of tiles are rounded to these: 1% or 0.1% at most; weights
        below 3e-8 are 0 in float16.

    Raises:
        TypeError, ValueError, ExchangeError, RuntimeError: as `dilated_attention`; DTensors are
            refused: pass the shards.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 100, 4, 16).unbind(0)
        >>> pattern = DilatedPattern([16, None], [1, 4])
        >>> out, lse = dilated_attention(query, key, value, pattern, return_lse=True)
        >>> attention_received(query, key, lse, pattern).sum(2)
        tensor([[100., 100., 100., 100.]])
    """
    name = "attention_received"
    group = group_of_options(name, options, fields)
    group_name(group)  # raises where there is nobody to tell
    query, key = autocast_inputs(query, key)
    try:
        check_options(pattern=pattern)
        given = read_options(name, options, fields)
        validate_tensors(query, key, key)
        weights = _checked_queries(query, lse, queries)
        packed = documents, lengths, key_padding_mask
        flat, *traced = _in_plain_types(query, key, pattern, given, *packed)
    except Exception as failure:
        tell_ranks(failure, group, query)
        raise
    if key_padding_mask is not None:
        flat, traced[0] = _with_mask(flat, key_padding_mask)
    by_rows = flat.exchange if flat.exchange in ("ring", "gather") else ROWS
    flat = flat._replace(exchange=by_rows, detached=False)
    found: torch.Tensor = RECEIVED(
        query.detach(), key.detach(), lse.detach(), weights.detach(), *traced, *flat
    )
    return found[0] if queries is None or queries.dim() == 2 else found


def _checked_queries(
    query: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor | None
) -> torch.Tensor:
    """The weights of queries, (sets, batch, local_sequence).

    Raises:
        ValueError: they do not fit the query, or lse does not.
    """
    batch, length, heads, _ = query.shape
    rows = batch, length
    as_lse = (batch, heads, length), accumulate_dtype(query.dtype), query.device
    if not isinstance(lse, torch.Tensor) or (lse.shape, lse.dtype, lse.device) != as_lse:
        raise ValueError(
            "lse must be as dilated_attention(..., return_lse=True) returned it, shape {} in {} on "
            "{}; got {}".format(*as_lse, _as_given(lse))
        )
    if queries is None:
        return lse.new_ones(()).expand(1, *rows)
    if not (
        isinstance(queries, torch.Tensor)
        and queries.is_floating_point()
        and queries.device == query.device
        and queries.dim() in (2, 3)
        and queries.shape[-2:] == rows
    ):
        raise ValueError(
            "queries must be a floating weight for each query, shape (batch, local_sequence) "
            f"{rows} or (sets, batch, local_sequence), on {query.device}; got {_as_given(queries)}"
        )
    return queries if queries.dim() == 3 else queries[None]


def _as_given(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return in_brief(tensor)
    return f"shape {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"


def _in_plain_types(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: DilatedPattern,
    options: AttentionOptions,
    documents: Integers | None,
    lengths: Integers | None,
    mask: torch.Tensor | None,
    *,
    gradients: bool = False,
) -> tuple[FlatOptions, torch.Tensor | None, torch.Tensor | None]:
    """What an operator takes of a call, and its lengths and documents if they are traced.

    Raises:
        TypeError, ValueError: the sequence is empty, or an argument does not fit.
    """
    if options.layout is None and query.shape[1] == 0:
        raise ValueError(f"the sequence is empty: query has shape {tuple(query.shape)}")
    # Numbers of a tensor that torch.compile traces are not known: the tensor is passed on.
    known_documents, traced_documents = ints_or_tensor("documents", documents)
    known_lengths, traced_lengths = ints_or_tensor("lengths", lengths)
    flat = flat_options(
        pattern,
        options,
        key.shape[2],
        documents=known_documents,
        lengths=known_lengths,
        needs_gradients=gradients,
    )
    if mask is not None:
        if lengths is not None:
            raise ValueError("pass lengths or key_padding_mask, not both")
        check_padding_mask(mask, query.shape[0], query.shape[1], query.device)
    return flat, traced_lengths, traced_documents


def _with_mask(flat: FlatOptions, mask: torch.Tensor) -> tuple[FlatOptions, torch.Tensor | None]:
    """A call with the lengths that a padding mask stands for, and these if they are traced."""
    lengths = LENGTHS(mask, flat.layout, flat.group)
    if torch.compiler.is_compiling():
        return flat, lengths
    return flat._replace(lengths=lengths.tolist()), None  # FLOP counters see them


def _are_known(shape: Sequence[int], flat: FlatOptions, traced: Sequence[object]) -> bool:
    """Whether all numbers by which an exchange is chosen are known, while a graph is traced."""
    if any(x is not None for x in traced):
        return False
    if not torch.compiler.is_compiling():
        return not any(isinstance(x, torch.SymInt) for x in shape)
    numbers = (*shape, *flat.layout, *flat.documents, *flat.lengths)
    return all(torch.fx.experimental.symbolic_shapes.has_static_value(x) for x in numbers)


def _of_dtensors(
    tensors: Sequence[Any],
    pattern: DilatedPattern,
    group: Group,
    options: AttentionOptions | None,
    fields: Mapping[str, Any],
    documents: Integers | None,
    lengths: Integers | None,
    mask: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`dilated_attention` of DTensors: that of this rank's shards."""
    query, key, value = tensors
    known, placed = group, None
    try:
        given = read_options("dilated_attention", options, fields)
        placed = Placed.of(query, key, value, group, given.layout)
        known = placed.group
        given = replace(
            given,
            group=placed.group,
            layout=placed.layout,
            head_slice=placed.head_slice(given.head_slice, key),
        )
        lengths = placed.rows_of("lengths", lengths)
        mask = placed.local_mask(mask)
    except Exception as failure:
        if placed is None and known is None:
            known = group_of_dtensors(query, key, value)
        if known is not None:
            tell_ranks(failure, known, query)
        raise
    query, key, value = (x.to_local() for x in tensors)
    out, lse = dilated_attention(
        query, key, value, pattern, given, documents=documents, lengths=lengths,
        key_padding_mask=mask, return_lse=True,
    )  # fmt: skip
    whole = placed.out(out)
    return (whole, placed.lse(lse)) if return_lse else whole


def detached_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    options: AttentionOptions | None = None,
    **others: Any,
) -> Any:
    """`dilated_attention` with ``branch_gradients="detached"``, which is torchscale's gradient.

    Args:
        query: (batch, local_sequence, heads, head_dim).
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the same shape as `key`.
        pattern: which keys each head sees.
        options: of the call.
        others: the other keyword arguments.

    Returns:
        As `dilated_attention`.

    Raises:
        TypeError, ValueError: as `dilated_attention`.
    """
    detached: dict[str, Any] = {**others, "branch_gradients": "detached"}
    return dilated_attention(query, key, value, pattern, options, **detached)


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast casts the inputs of scaled_dot_product_attention: all but float64."""
    first = tensors[0]
    dtype = autocast_dtype(first.device.type) if isinstance(first, torch.Tensor) else None
    if dtype is None or not all(isinstance(t, torch.Tensor) for t in tensors):
        return tensors  # what is no tensor, `validate_tensors` says
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )
