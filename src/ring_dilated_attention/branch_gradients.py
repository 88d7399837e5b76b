"""Dilated attention whose branch weights are constants to autograd.

The one softmax over the keys of all branches is a mix of the branches' own: branch i weighs
``alpha_i = exp(lse_i - lse)``. torchscale computes these weights without a gradient, so weights
trained with it have seen another gradient than the true one: branch i's backward is that of its own
attention, for ``dout_i = alpha_i * dout``. The result of forward is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch

from .functional import dilated_attention
from .pattern import DilatedPattern, check_choice
from .tiles import accumulate_dtype

BRANCH_GRADIENTS = ("exact", "detached")
"""Valid values of a module's `branch_gradients`: ``exact`` is `dilated_attention`, ``detached`` is
`detached_dilated_attention`."""


@overload
def detached_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Any,
) -> torch.Tensor: ...


@overload
def detached_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def detached_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`dilated_attention` with no gradient through the weights that mix the branches.

    Each branch is a call of its own: a row that two branches of a rank need travels twice, and
    autograd holds as many outs and lses as there are branches. Where every head runs one branch
    only (a single branch, or ``head_branches="split"``) nothing is mixed, and this is one call of
    `dilated_attention`. Activation checkpointing with `keep_attention` keeps what autograd holds.

    Args:
        query: (batch, local_sequence, heads, head_dim).
        key: (batch, local_sequence, kv_heads, head_dim).
        value: the same shape as `key`.
        pattern: the branches, each of which is computed by itself.
        return_lse: whether to return the log-sum-exp, too.
        options: its other keyword arguments.

    Returns:
        What `dilated_attention` returns; half precision is mixed in float32 and rounded once.

    Raises:
        TypeError, ValueError: an argument is not supported, or the ranks disagree about one;
            raised on every rank, naming the ranks at fault.
    """
    if (
        not isinstance(pattern, DilatedPattern)  # dilated_attention says so
        or pattern.head_branches == "split"
        or len(pattern.branches) == 1
    ):
        out, lse = dilated_attention(query, key, value, pattern, return_lse=True, **options)
        return (out, lse) if return_lse else out
    outs, lses = [], []
    for branch in _single_branches(pattern):
        out, lse = dilated_attention(query, key, value, branch, return_lse=True, **options)
        outs.append(out)
        lses.append(lse)
    lse = torch.logsumexp(torch.stack(lses), 0)
    # Where nothing is seen, (-inf) - (-inf) would be NaN.
    seen = lse.masked_fill(torch.isneginf(lse), 0)
    dtype = outs[0].dtype
    mixed = torch.zeros((), dtype=accumulate_dtype(dtype), device=lse.device)
    for out, branch_lse in zip(outs, lses, strict=True):
        alpha = torch.exp(branch_lse - seen).transpose(1, 2).unsqueeze(-1)
        mixed = mixed + alpha * out
    mixed = mixed.to(dtype)
    return (mixed, lse) if return_lse else mixed


def branch_function(branch_gradients: str) -> Callable[..., Any]:
    """What computes attention for a module's `branch_gradients`, one of `BRANCH_GRADIENTS`.

    Raises:
        ValueError: the value is unknown.
    """
    check_choice("branch_gradients", branch_gradients, BRANCH_GRADIENTS)
    return detached_dilated_attention if branch_gradients == "detached" else dilated_attention


def _single_branches(pattern: DilatedPattern) -> Iterator[DilatedPattern]:
    """The pattern of each branch by itself."""
    for segment_length, rate in pattern.branches:
        yield DilatedPattern(
            [segment_length],
            [rate],
            head_offsets=pattern.head_offsets,
            zero_keys=pattern.zero_keys,
        )
