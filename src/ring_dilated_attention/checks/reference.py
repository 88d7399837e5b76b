"""The definition, computed the plain way, a dense, one-device oracle in any precision; and errors.

It shares no code with the plan: visibility is worked out position by position, and gradients come
from autograd. O(n^2) memory; for tests and small twins of large runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.nn.functional as F

from ..documents import Integers, as_ints, packed_rows
from ..options import BranchGradients, check_options
from ..pattern import DilatedPattern, Window
from ..torch_op import validate_sink, validate_tensors

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def key_counts(
    pattern: DilatedPattern,
    length: int,
    num_kv_heads: int,
    *,
    is_causal: bool = False,
    documents: Sequence[int] | None = None,
) -> _Pair:
    """How many branches show each key to each query, and how many zero keys each query sees.

    Args:
        pattern: the branches.
        length: number of positions n.
        num_kv_heads: number of KV heads H.
        is_causal: whether a query sees only keys at positions <= its own; no zero keys then, which
            lie behind every query.
        documents: cumulative lengths ``[0, ..., n]`` of packed documents; None: one document.

    Returns:
        int64 (H, n, n): entry (h, q, k) counts the branches of head h in which q and k lie in the
        same segment, both at that head's offset modulo the rate, or in which k lies in the window
        of q, a multiple of the rate away. int64 (H, n): a segment of w
        positions, at most its document's length, has ceil(w / r) places of a head's keys; those
        behind its end are zero keys. All are 0 unless the pattern has `zero_keys`.
    """
    position = torch.arange(length)
    borders = torch.tensor([0, length] if documents is None else list(documents))
    document = torch.searchsorted(borders, position, right=True) - 1
    in_document = position - borders[document]
    counts = torch.zeros(num_kv_heads, length, length, dtype=torch.int64)
    zero_keys = torch.zeros(num_kv_heads, length, dtype=torch.int64)
    away = position - position[:, None]  # of each key from each query
    for index, (segment_length, rate) in enumerate(pattern.branches):
        if isinstance(segment_length, Window):
            near = (away >= -segment_length.left) & (away <= segment_length.right)
            shown = near & (away % rate == 0) & (document[:, None] == document)
            for head, _ in pattern.heads(index, num_kv_heads):
                counts[head] += shown
            continue
        w = length if segment_length is None else segment_length
        segment, in_segment = in_document // w, in_document % w
        together = (document[:, None] == document) & (segment[:, None] == segment)
        places = -(-(borders[document + 1] - borders[document]).clamp(max=w) // rate)
        for head, offset in pattern.heads(index, num_kv_heads):
            chosen = in_segment % rate == offset
            shown = together & chosen[:, None] & chosen
            counts[head] += shown
            zero_keys[head] += chosen * (places - shown.sum(1))
    if is_causal:
        counts *= position[:, None] >= position
    return counts, zero_keys * (pattern.zero_keys and not is_causal)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    branch_gradients: BranchGradients = "exact",
    head_slice: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dilated attention of a whole sequence by brute force; differentiable by autograd.

    One softmax over the multiset of visible keys (LongNet, arXiv 2307.02486, eq. 9-10): a key
    that c branches show enters with weight c * exp(score), and zero keys with exp(0) each.

    Args:
        query: (batch, n, heads, head_dim); float64, float32, bfloat16 or float16.
        key: (batch, n, kv_heads, head_dim), of the same dtype and device; kv_heads divides heads.
        value: like `key`.
        pattern: the branches.
        is_causal: whether a query sees only keys at positions <= its own.
        scale: factor on the scores; None: head_dim ** -0.5.
        softcap: c, for scores of c * tanh(score / c); None: scores are not capped.
        sink: (heads,), the scores of one more key of each head, of value 0; None: there is none.
        documents: cumulative lengths of packed documents, ``[0, ..., n]``; None: one document.
        lengths: valid positions of each row of the batch: row b is what the sequence of its first
            ``lengths[b]`` positions would be, with the documents cut off there; None: all.
        branch_gradients: ``"detached"`` mixes the results of branches with weights that autograd
            does not see; see `dilated_attention`.
        head_slice: (start, stop, total): the KV heads are heads start to stop (excluded) of a layer
            with total of them. None: they are all.

    Returns:
        out (batch, n, heads, head_dim) and lse (batch, heads, n), in the dtype of the inputs; 0
        and -inf, or with a sink that, where a query sees nothing. In padding that is a constant.

    Raises:
        TypeError, ValueError: an argument is not allowed, as for `dilated_attention`.
    """
    check_options(
        pattern=pattern, is_causal=is_causal, scale=scale, softcap=softcap,
        branch_gradients=branch_gradients,
    )  # fmt: skip
    validate_tensors(query, key, value)
    detached = branch_gradients == "detached" and pattern.mixes_branches
    if sink is None:
        sink = query.new_full((query.shape[2],), -torch.inf)
    else:
        validate_sink(sink, query, detached=detached)
    pattern = pattern.of_heads(head_slice, key.shape[2])
    borders = None if documents is None else tuple(as_ints("documents", documents))
    valid = None if lengths is None else tuple(as_ints("lengths", lengths))
    packed_rows(borders or (), valid or (), *query.shape[:2])  # raises unless they fit
    sinks = sink.to(query.dtype)[:, None].expand(len(query), -1, query.shape[1])
    if valid is not None:  # padding may be NaN, which times 0 is NaN
        padding = torch.arange(query.shape[1]) >= torch.tensor(valid)[:, None]
        mask = padding[..., None, None].to(query.device)
        query, key, value = (x.masked_fill(mask, 0.0) for x in (query, key, value))
        sinks = torch.where(mask[:, None, :, 0, 0], sinks.detach(), sinks)

    _, length, kv_heads, _ = key.shape
    group = query.shape[2] // kv_heads
    keys, values = (x.repeat_interleave(group, 2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, keys)
    scores = scores * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    def attend(branches: DilatedPattern) -> _Pair:
        counts, zero_keys = (
            x.repeat_interleave(group, 1).to(query.device)
            for x in _counts(branches, length, kv_heads, is_causal, borders, valid)
        )
        covered = counts.sum(-1) > 0
        # Rows that see nothing get a harmless finite row, so that no NaN enters the gradient.
        counted = scores + torch.where(covered[..., None], counts.to(scores.dtype).log(), 0.0)
        # One more column: a score of 0 and a value of 0, counted once for each zero key.
        zero_scores = zero_keys.to(scores.dtype).log().expand(scores.shape[:3])
        columns = counted, zero_scores[..., None], sinks[..., None]
        lse = torch.logsumexp(torch.cat(columns, -1), -1)
        weights = torch.exp(counted - lse[..., None]) * covered[..., None]
        out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        return out, torch.where(covered, lse, sinks)

    if not detached:
        return attend(pattern)
    # Each branch is weighed by its share of the softmax, which is a constant.
    found = zip(*map(attend, pattern.single_branches()), strict=True)
    outs, lses = (torch.stack(each) for each in found)
    lses = lses.detach()
    lse = lses.logsumexp(0)
    weights = torch.exp(lses - lse.masked_fill(torch.isneginf(lse), 0))
    return (weights.transpose(2, 3).unsqueeze(-1) * outs).sum(0), lse


def _counts(
    pattern: DilatedPattern,
    length: int,
    num_kv_heads: int,
    is_causal: bool,
    documents: Sequence[int] | None,
    lengths: Sequence[int] | None,
) -> _Pair:
    """`key_counts` of rows of a batch: (rows, H, n, n) and (rows, H, n).

    There is one row for all of the batch without `lengths`, else each has its own: that of a
    sequence of its valid positions, and nothing where there is padding.
    """
    found = []
    for valid in lengths or [length]:
        borders = [*(x for x in documents or [0] if x < valid), valid]
        of_row = key_counts(pattern, valid, num_kv_heads, is_causal=is_causal, documents=borders)
        found.append([F.pad(x, (0, length - valid) * (x.ndim - 1)) for x in of_row])
    counts, zero_keys = (torch.stack(each) for each in zip(*found, strict=True))
    return counts, zero_keys


@contextmanager
def nan_in_uninitialized_memory() -> Iterator[None]:
    """`torch.empty` returns NaN, so that whatever is read before it is written shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch fills only while deterministic algorithms are asked for.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; 0 for two equal tensors, inf for any NaN."""
    actual, expected = actual.double(), expected.double()
    difference = torch.linalg.vector_norm(actual - expected).item()
    if difference == 0:
        return 0.0
    size = torch.linalg.vector_norm(expected).item()
    error = difference / size if size else torch.inf
    return error if error == error else torch.inf
