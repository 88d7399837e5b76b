"""`dilated_attention`: validate, agree with the other ranks, plan (cached), run."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple, overload

import torch

from .agreement import agree
from .exchange import Exchange, Group, resolve_exchange
from .layout import SequenceLayout
from .pattern import DilatedPattern, check_choice
from .plan import AttentionPlan, plan_attention
from .ring import RingCall, RingDilatedAttention
from .tiles import TileBackend, select_backend

EXCHANGES = ("auto", "ring", "gather")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@overload
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    exchange: str = "auto",
    backend: str = "auto",
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
    group: Group = None,
    layout: SequenceLayout | None = None,
    exchange: str = "auto",
    backend: str = "auto",
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
    group: Group = None,
    layout: SequenceLayout | None = None,
    exchange: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact dilated attention of a sequence sharded over the ranks of a group.

    A head's result at a position is one softmax over the multiset union of the keys that the
    pattern's branches show it there (LongNet, Ding et al. 2023, arXiv 2307.02486, eq. 9-10; see
    `DilatedPattern`), and the gradient is the true gradient of that function. A position that no
    branch covers gets output 0, lse -inf and gradient 0. Every rank of the group makes the same
    call with its own shard; backward runs on every rank too, on empty shards included.

    Args:
        query: (batch, local_sequence, heads, head_dim); float64, float32, bfloat16 or float16.
        key: (batch, local_sequence, kv_heads, head_dim), of the same dtype and device; kv_heads
            divides heads, and KV head j serves the query heads from j * heads / kv_heads on.
        value: like `key`.
        pattern: which keys each head sees.
        is_causal: whether a query sees only keys at positions <= its own.
        scale: factor on the scores; None: head_dim ** -0.5.
        group: the ranks that share the sequence: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`,
            or None for one process that holds it all.
        layout: which rank holds which positions; None: contiguous equal shards.
        exchange: ``"ring"`` keeps one message in flight behind the running compute, and the rows
            of at most two remote shards; ``"gather"`` starts all transfers at once and holds
            them all; ``"auto"`` gathers when all of them are at most the size of a shard.
        backend: who computes the tiles, one of `tiles.BACKENDS`: ``"auto"`` takes a fused kernel
            where one can, else plain torch code; anything else is used or refused.
        return_lse: whether to return the lse too.

    Returns:
        out (batch, local_sequence, heads, head_dim) in the dtype of the inputs; with `return_lse`
        also lse (batch, heads, local_sequence), natural logarithm, float32 (float64 for float64
        inputs), outside of autograd. Under autocast the inputs are cast as they are for
        `scaled_dot_product_attention`.

    Raises:
        TypeError, ValueError: an argument is not allowed, or the ranks disagree about one; raised
            on every rank of the group, naming the ranks at fault.
    """
    ends = resolve_exchange(group)
    query, key, value = _autocast(query, key, value)
    request, failure = None, None
    try:
        request = _validate(
            query,
            key,
            value,
            pattern,
            is_causal,
            scale,
            ends,
            layout,
            exchange,
            backend,
            return_lse,
        )
    except (TypeError, ValueError) as error:
        failure = error
    device = query.device if isinstance(query, torch.Tensor) else torch.device("cpu")
    agree("dilated_attention", ends, request and request.shared, failure, device)
    assert request is not None
    plan = request.plan()
    gathers = plan.gathers if exchange == "auto" else exchange == "gather"
    call = RingCall(
        plan.rank(ends.rank),
        ends,
        request.backend,
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        ends.world_size - 1 if gathers else 1,
    )
    out, lse = RingDilatedAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Request(NamedTuple):
    """A valid call: what the plan depends on, and what all ranks must agree on."""

    pattern: DilatedPattern
    layout: SequenceLayout | int  # an int: equal shards of so many rows
    world_size: int
    is_causal: bool
    num_heads: int
    num_kv_heads: int
    backend: TileBackend
    shared: dict[str, Any]

    def plan(self) -> AttentionPlan:
        layout = self.layout
        if isinstance(layout, int):
            layout = _equal_shards(layout * self.world_size, self.world_size)
        return _plan(self.pattern, layout, self.is_causal, self.num_heads, self.num_kv_heads)


@lru_cache(maxsize=64)
def _plan(
    pattern: DilatedPattern, layout: SequenceLayout, is_causal: bool, heads: int, kv_heads: int
) -> AttentionPlan:
    return plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads, num_kv_heads=kv_heads
    )


@lru_cache(maxsize=64)
def _equal_shards(length: int, world_size: int) -> SequenceLayout:
    return SequenceLayout.contiguous(length, world_size)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast casts the inputs of scaled_dot_product_attention: all but float64."""
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return tensors  # `_validate` says so
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def _validate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    is_causal: bool,
    scale: float | None,
    ends: Exchange,
    layout: SequenceLayout | None,
    exchange: str,
    backend: str,
    return_lse: bool,
) -> _Request:
    for name, kind, argument in (
        ("pattern", DilatedPattern, pattern),
        ("is_causal", bool, is_causal),
        ("return_lse", bool, return_lse),
        ("layout", SequenceLayout | None, layout),
    ):
        if not isinstance(argument, kind):
            allowed = getattr(kind, "__name__", str(kind).split(".")[-1])
            raise TypeError(f"{name} must be a {allowed}, got {argument!r}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale must be a float or None, got {scale!r}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    check_choice("exchange", exchange, EXCHANGES)
    _validate_tensors(query, key, value)
    batch, local_length, num_heads, head_dim = query.shape
    chosen = select_backend(backend, query.device, query.dtype, head_dim)
    if layout is None:
        if local_length == 0:
            raise ValueError(f"the sequence is empty: query has shape {tuple(query.shape)}")
    elif layout.world_size != ends.world_size:
        raise ValueError(
            f"the layout is for {layout.world_size} ranks, the group has {ends.world_size}"
        )
    elif layout.local_length(ends.rank) != local_length:
        raise ValueError(
            f"the layout gives rank {ends.rank} {layout.local_length(ends.rank)} positions, "
            f"its query has a local sequence length of {local_length}"
        )
    shared = {
        "batch": batch,
        "heads": num_heads,
        "kv_heads": key.shape[2],
        "head_dim": head_dim,
        "dtype": str(query.dtype),
        "device": query.device.type,
        "pattern": str(pattern),
        "layout": f"{local_length} positions on each rank"
        if layout is None
        else f"{layout!r} ({layout.digest[:8]})",
        "is_causal": is_causal,
        "scale": scale,
        "exchange": exchange,
        "backend": backend,
        "needs gradients": torch.is_grad_enabled()
        and any(t.requires_grad for t in (query, key, value)),
    }
    return _Request(
        pattern,
        local_length if layout is None else layout,
        ends.world_size,
        is_causal,
        num_heads,
        key.shape[2],
        chosen,
        shared,
    )


def _validate_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {tensor!r}")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, local_sequence, heads, head_dim); "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in _DTYPES:
            allowed = ", ".join(str(d) for d in _DTYPES)
            raise TypeError(f"{name} must be one of {allowed}; got {tensor.dtype}")
    for what in ("dtype", "device"):
        if len({getattr(t, what) for t in tensors.values()}) > 1:
            got = ", ".join(f"{name} {getattr(t, what)}" for name, t in tensors.items())
            raise ValueError(f"query, key and value must have one {what}; got {got}")
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
    for dim, what in ((0, "batch size"), (1, "local sequence length"), (3, "head_dim")):
        if len({t.shape[dim] for t in tensors.values()}) > 1:
            raise ValueError(f"query, key and value must have the same {what}; got {shapes}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape; got {shapes}")
    if min(query.shape[0], query.shape[2], key.shape[2], query.shape[3]) == 0:
        raise ValueError(f"batch, heads, kv_heads and head_dim must be >= 1; got {shapes}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"heads must be a multiple of kv_heads; got {shapes}")
