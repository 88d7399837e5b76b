"""`dilated_attention`: validate, then call the operator.

All of it is plain enough for torch.compile to trace with ``fullgraph=True`` and dynamic lengths:
what is cached, looked up or shared with other ranks happens when the operator runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args, overload

import torch

from .documents import Integers, ints_or_tensor
from .engine import autocast_dtype
from .exchange import Group, group_name, one_group
from .layout import SequenceLayout
from .parallel import Placed, group_of_dtensors, is_dtensor
from .pattern import DilatedPattern, check_choice, in_brief
from .resolve import Options
from .tiles import BACKENDS, Backend
from .torch_op import (
    FORWARD,
    LENGTHS,
    check_padding_mask,
    lengths_of_call,
    tell_ranks,
    validate_tensors,
)

Schedule: TypeAlias = Literal["auto", "ring", "gather"]
BranchGradients: TypeAlias = Literal["exact", "detached"]
BRANCH_GRADIENTS: tuple[str, ...] = get_args(BranchGradients)
EXCHANGES: tuple[str, ...] = get_args(Schedule)
MOST_SCALE = 2.0**64
"""Scores of ordinary inputs times this are finite in float32; beyond, they would turn into NaN."""


@overload
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    key_padding_mask: torch.Tensor | None = None,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    exchange: Schedule = "auto",
    backend: Backend = "auto",
    workspace: float | None = None,
    branch_gradients: BranchGradients = "exact",
    head_slice: Sequence[int] | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    key_padding_mask: torch.Tensor | None = None,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    exchange: Schedule = "auto",
    backend: Backend = "auto",
    workspace: float | None = None,
    branch_gradients: BranchGradients = "exact",
    head_slice: Sequence[int] | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    key_padding_mask: torch.Tensor | None = None,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    exchange: Schedule = "auto",
    backend: Backend = "auto",
    workspace: float | None = None,
    branch_gradients: BranchGradients = "exact",
    head_slice: Sequence[int] | None = None,
    return_lse: bool = False,
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
        is_causal: whether a query sees only keys at positions <= its own.
        scale: factor on the scores, between ``-2**64`` and ``2**64``; None: ``head_dim ** -0.5``.
        documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole sequence of n
            positions (not in this rank's shard): ints, or a 1-D int32 or int64 tensor, as
            ``cu_seqlens`` elsewhere; a CUDA tensor makes the call wait for the device. Each is cut
            into segments on its own, a segment length of None is the whole document, and attention
            never crosses a border; ranks may hold any parts of any documents. All rows of the batch
            have the same documents. Under torch.compile, another number of documents is another
            graph where they are ints, and not where they are a tensor. None: one document.
        lengths: (batch,) ints, or a tensor as above: row b of the batch holds that many valid
            positions of the whole sequence, 0 to n, and padding behind them. A row gives exactly
            what a sequence of its length would give: padding is part of no segment, and nothing is
            computed for it. It gets output 0, lse -inf and gradient 0, whatever the tensors hold
            there. With `documents`, which may then end anywhere from the longest length on, each
            row's are cut off at its length. Rows of one length are computed together, others one
            after another. None: no padding.
        key_padding_mask: in place of `lengths`, the local shard of a boolean mask, (batch,
            local_sequence): True where a position is PADDING, as in `nn.MultiheadAttention` (the
            opposite of a mask of valid positions). It must be a right padding of the whole
            sequence; anything else is refused. It makes the call wait for the device and costs two
            small collectives, which `lengths` saves.
        group: the ranks that share the sequence: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`,
            or None if this process holds the whole sequence.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which rank holds which positions; None: contiguous equal shards.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"``, the default, gathers where they take no more memory than query and out.
        backend: kernels that compute the tiles: ``"auto"``, the default, takes the fastest that
            supports the tensors; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``, ``"flash"``,
            ``"efficient"``, ``"triton"`` and ``"eager"`` take that one or raise.
        workspace: bound on the temporary memory of kernels, in multiples of the size of query (a
            single head of a single segment may need more). None: about a quarter in forward and a
            half in backward, or 64 MiB or what 131,072 rows take if that is more.
        branch_gradients: ``"exact"`` is the gradient of the whole function; ``"detached"`` takes
            the weights that mix the branches, ``exp(lse of the branch - lse)``, for constants, as
            torchscale does: weights trained with it have seen that gradient. Forward is the same;
            backward computes each branch's own result again.
        head_slice: (start, stop, total): the call's KV heads are heads start to stop (excluded) of
            a layer with total of them, and have their offsets and branches; for tensor parallelism.
            The ranks of a group hold the same heads. None: the call has all heads.
        return_lse: whether to return the lse too.

    Returns:
        out (batch, local_sequence, heads, head_dim) in the dtype of the inputs; with `return_lse`
        also lse (batch, heads, local_sequence), natural logarithm, float32 (float64 for float64
        inputs), outside of autograd. Under autocast the inputs are cast as they are for
        `scaled_dot_product_attention`.

    Raises:
        TypeError, ValueError: an argument is not allowed, or the ranks disagree about one; raised
            on every rank of the group, naming the ranks at fault.
        ExchangeError: a rank is missing, has failed in the middle of a call, or makes another call
            than the rest; raised on every rank, naming that rank and its call. Backward raises it
            too. After a rank was lost the group cannot be used any more; after calls that differ it
            can.
        NotImplementedError: an input has a tangent: there is no forward-mode derivative.
        RuntimeError: a CUDA graph is being captured, and there are several ranks.
    """
    group = one_group(group, mesh)
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        options_of_call = {
            "is_causal": is_causal, "scale": scale, "documents": documents, "lengths": lengths,
            "key_padding_mask": key_padding_mask, "group": group, "layout": layout,
            "exchange": exchange, "backend": backend, "workspace": workspace,
            "branch_gradients": branch_gradients, "return_lse": return_lse,
            "head_slice": head_slice,
        }  # fmt: skip
        return _of_dtensors(query, key, value, pattern, options_of_call)
    name = group_name(group)
    query, key, value = autocast_inputs(query, key, value)
    try:
        validate_options(pattern, is_causal, scale, layout, exchange, backend, return_lse)
        validate_workspace(workspace)
        check_choice("branch_gradients", branch_gradients, BRANCH_GRADIENTS)
        validate_tensors(query, key, value)
        if layout is None and query.shape[1] == 0:
            raise ValueError(f"the sequence is empty: query has shape {tuple(query.shape)}")
        needs_gradients = torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        )
        (known, borders), (counted, measured) = (
            ints_or_tensor("documents", documents),
            ints_or_tensor("lengths", lengths),
        )
        options = Options(
            *flat_pattern(pattern),
            is_causal,
            flat_scale(scale),
            [] if layout is None else list(layout.flat),
            name,
            exchange,
            backend,
            None if workspace is None else float(workspace),
            needs_gradients,
            documents=known or [],
            lengths=counted or [],
            detached=branch_gradients == "detached" and pattern.mixes_branches,
            head_slice=list(pattern.slice_for(head_slice, key.shape[2]) or ()),
        )
        if key_padding_mask is not None:
            _validate_mask(key_padding_mask, query, lengths)
    except Exception as failure:
        tell_ranks(failure, group, query)
        raise
    if key_padding_mask is not None and torch.compiler.is_compiling():
        measured = LENGTHS(key_padding_mask, options.layout, name)
    elif key_padding_mask is not None:
        found = lengths_of_call(key_padding_mask, query, key, options, layout)
        options = options._replace(lengths=found)
    out, lse, _ = FORWARD(query, key, value, measured, borders, *options)
    return (out, lse) if return_lse else out


def _of_dtensors(
    query: Any, key: Any, value: Any, pattern: DilatedPattern, options: dict[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`dilated_attention` of DTensors: that of this rank's shards."""
    group, placed = options["group"], None
    try:
        placed = Placed.of(query, key, value, group, options["layout"])
        local = {
            **options,
            "group": placed.group,
            "layout": placed.layout,
            "lengths": placed.rows_of("lengths", options["lengths"]),
            "key_padding_mask": placed.local_mask(options["key_padding_mask"]),
            "head_slice": placed.head_slice(options["head_slice"], key),
            "return_lse": True,
        }
    except Exception as failure:
        known = group if placed is None else placed.group
        if placed is None and known is None:
            known = group_of_dtensors(query, key, value)
        if known is not None:
            tell_ranks(failure, known, query)
        raise
    shards = query.to_local(), key.to_local(), value.to_local()
    out, lse = dilated_attention(*shards, pattern, **local)
    whole = placed.out(out)
    return (whole, placed.lse(lse)) if options["return_lse"] else whole


def detached_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    **options: Any,
) -> Any:
    """`dilated_attention` with ``branch_gradients="detached"``: torchscale's gradient.

    Args:
        query: (batch, local_sequence, heads, head_dim).
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the same shape as `key`.
        pattern: which keys each head sees.
        options: the other keyword arguments of `dilated_attention`.

    Returns:
        What `dilated_attention` returns.

    Raises:
        TypeError, ValueError: an argument is not supported, or the ranks disagree about one;
            raised on every rank, naming the ranks at fault.
    """
    return dilated_attention(query, key, value, pattern, branch_gradients="detached", **options)


def flat_pattern(pattern: DilatedPattern) -> tuple[list[int], list[int], str, str, bool]:
    """The first fields of `Options`."""
    return (
        [0 if length is None else length for length in pattern.segment_lengths],
        list(pattern.dilation_rates),
        pattern.head_offsets,
        pattern.head_branches,
        pattern.zero_keys,
    )


def flat_scale(scale: float | None) -> float | None:
    """The scale of `Options`: not -0.0, which is equal to 0.0."""
    return None if scale is None else float(scale) + 0.0


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast casts the inputs of scaled_dot_product_attention: all but float64."""
    first = tensors[0]
    dtype = autocast_dtype(first.device.type) if isinstance(first, torch.Tensor) else None
    if dtype is None or not all(isinstance(t, torch.Tensor) for t in tensors):
        return tensors  # what is no tensor, `validate_tensors` says
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def validate_options(
    pattern: DilatedPattern,
    is_causal: bool,
    scale: float | None,
    layout: SequenceLayout | None,
    exchange: str,
    backend: str,
    return_lse: bool,
) -> None:
    """Raise a `TypeError` or `ValueError` unless `dilated_attention` allows these options."""
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(
            "pattern must be a DilatedPattern, as in DilatedPattern([2048, None], [1, 4]), got "
            f"{in_brief(pattern)}"
        )
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {in_brief(is_causal)}")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be a bool, got {in_brief(return_lse)}")
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise TypeError(
            "layout must be a SequenceLayout or None, got "
            f"{in_brief(layout)}; SequenceLayout.zigzag(length, ranks) makes one"
        )
    if scale is not None:
        # Tuples, not unions: torch.compile of torch 2.8 does not know those.
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale must be a float or None, got {in_brief(scale)}")
        if not -MOST_SCALE <= scale <= MOST_SCALE:
            raise ValueError(
                f"scale must be finite and lie between -2**64 and 2**64; got {in_brief(scale)}"
            )
    check_choice("exchange", exchange, EXCHANGES)
    check_choice("backend", backend, BACKENDS)


def validate_workspace(workspace: float | None) -> None:
    """Raise a `TypeError` or `ValueError` unless `dilated_attention` allows it."""
    if workspace is None:
        return
    if isinstance(workspace, bool) or not isinstance(workspace, (int, float)):
        raise TypeError(f"workspace must be a float or None, got {in_brief(workspace)}")
    if not 0 < workspace <= sys.float_info.max:
        raise ValueError(f"workspace must be > 0 and finite, got {in_brief(workspace)}")


def _validate_mask(mask: torch.Tensor, query: torch.Tensor, lengths: Integers | None) -> None:
    if lengths is not None:
        raise ValueError("pass lengths or key_padding_mask, not both")
    check_padding_mask(mask, query.shape[0], query.shape[1], query.device)
