"""Attention of new positions to a KV cache by the decoding kernels: on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import kernels
from ..engine import compute, kernels_on
from ..plan import CachePlan
from ..tiles import select_backend, table_refusal
from .cache import DilatedKVCache
from .memo import HeldRows
from .step import Step

_NAME = "triton"


def kernel_computes(
    backend: str, device: torch.device, dtype: torch.dtype, count: int, head_dim: int
) -> bool:
    """Whether the decoding kernels compute a call.

    Args:
        backend: what the user asks for.
        device: of the query.
        dtype: of the query.
        count: new positions.
        head_dim: of the query.

    Raises:
        ValueError: they are asked for, and cannot; or `backend` is unknown.
    """
    if backend == _NAME:
        select_backend(backend, device, dtype, head_dim)
        if count > kernels.decode.MOST_NEW_ROWS:
            raise ValueError(
                f"backend={_NAME!r} decodes at most {kernels.decode.MOST_NEW_ROWS} new positions a "
                f"call; got {count}: give fewer, or backend='auto'"
            )
        return True
    refused = device.type != "cuda" or table_refusal(device, dtype, head_dim) is not None
    return backend == "auto" and not refused and count <= kernels.decode.MOST_NEW_ROWS


def steps_by_kernel(cache: DilatedKVCache, backend: str) -> bool:
    """Whether the decoding kernels compute a step of one position to a cache.

    Args:
        cache: of the dtype and head_dim of the query.
        backend: what the user asks for.

    Raises:
        ValueError: see `kernel_computes`.
    """
    keys = cache.keys
    return kernel_computes(backend, keys.device, keys.dtype, 1, keys.shape[2])


def begin_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: DilatedKVCache,
    scale: float,
    step: Step,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Begin what this rank's rows of the cache, and the new rows, add up to: it reads, and no more.

    Args:
        query: (batch, m, heads, head_dim).
        key: (batch, m, kv_heads, head_dim), of the same positions.
        value: like `key`.
        cache: without these positions.
        scale: factor on the scores.
        step: that of the model which this call is a part of.

    Returns:
        What ends it, and adds the positions to the cache: out (batch, m, heads, head_dim), in the
        dtype of the query, or float32 where ranks share the rows; lse (batch, m, heads), float32.
    """
    count = key.shape[1]
    query, key, value = _rows_of(query), _rows_of(key), _rows_of(value)
    held, device = _held(cache), query.device
    dtype = torch.float32 if cache.is_sharded else query.dtype
    with kernels_on(device):
        strips = step.strips(cache, held.branches, count)
        new = kernels.decode.NewRows(key, value, cache.lengths, cache.shard == 0)
        begun = kernels.decode.begin_strips(
            query, held.keys, held.values, strips, held.most_rows, scale, new=new
        )

    def end() -> tuple[torch.Tensor, torch.Tensor]:
        with kernels_on(device):
            found = begun.merged(dtype)
        cache.advanced(count)
        return found

    return end


def attend_to_strips(
    inputs: compute.Inputs,
    strips: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of queries to keys that lie in a sharded sequence, by the kernels of a cache.

    Args:
        inputs: (batch, m, heads, head_dim), and keys and values (batch, n, kv_heads, head_dim).
        strips: the keys that the queries see: see `ReplicatedRows`.
        scale: factor on the scores.
        out: (batch, m, heads, head_dim), is written.
        lse: (batch, heads, m), is written.
    """
    query, keys, values = inputs
    count = strips.shape[2]
    begun = kernels.decode.begin_strips(
        query, keys, values, kernels.decode.Strips(strips, count, 0), keys.shape[1] * count, scale
    )
    found, found_lse = begun.merged(out.dtype)
    out.copy_(found)
    lse.copy_(found_lse.transpose(1, 2))


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last stride is 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _held(cache: DilatedKVCache) -> HeldRows:
    """What the kernels need of a cache, made once for its plan and its tensors."""
    held = cache.memo.held
    if held is None or held.plan is not cache.plan or held.source is not cache.keys:
        plan = cache.plan
        keys, values = (
            x.unsqueeze(2).expand(-1, -1, plan.num_kv_heads, -1) for x in (cache.keys, cache.values)
        )
        most_rows = sum(branch.slots for branch in plan.branches)
        branches = _table(plan).to(cache.keys.device)
        cache.memo.held = held = HeldRows(plan, cache.keys, keys, values, branches, most_rows)
    return held


def _table(plan: CachePlan) -> torch.Tensor:
    """See `kernels.decode.strips_of_cache`."""
    rows = []
    for branch in plan.branches:
        offsets, bases = [-1] * plan.num_kv_heads, [0] * plan.num_kv_heads
        for place, (head, offset) in enumerate(branch.heads):
            offsets[head] = offset
            bases[head] = branch.first_row + place * branch.slots
        length = kernels.decode.NO_END if branch.segment_length is None else branch.segment_length
        rows.append([length, branch.dilation_rate, branch.slots, *offsets, *bases])
    return torch.tensor(rows, dtype=torch.int64)
