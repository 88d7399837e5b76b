"""Inside a call of a transformers model with a KV cache: its attention, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..decode import cached_attention
from ..exchange import Exchange, all_gather, resolve_exchange, settle
from ..functional import autocast_inputs, dilated_attention
from ..layout import SequenceLayout
from .transformers_cache import DilatedCache
from .transformers_call import ARGUMENT, Call
from .transformers_heads import pattern_of_heads


@dataclass(frozen=True, eq=False)
class CachedCall(Call):
    """A call of a model with a cache.

    Attributes:
        cache: of the model.
        is_prompt: whether the cache is empty: the prompt is sharded, later tokens are not.
        layout: which positions of the prompt each rank holds; None: this process has them all.
        columns: tokens of each row, padding included.
        kept: number of columns at the end whose hidden states are returned; 0: all columns.
        firsts: of a prompt with padding, the first valid column of each row: the model is given it
            as the first one, and `lengths` counts from there. None: column 0.
        after: valid positions of each row after the call.
        valid: (batch, columns) of a prompt with padding, True where a column is valid.
    """

    cache: DilatedCache
    is_prompt: bool
    layout: SequenceLayout | None
    columns: int
    kept: int
    firsts: list[int] | None
    after: list[int]
    valid: Tensor | None


def attend_with_cache(
    call: CachedCall,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of a prompt, or of new tokens to a cache, which has their rows afterwards.

    Args:
        call: of the model.
        module: the attention module.
        tensors: query, key and value as transformers has them, (batch, heads, m, head_dim).
        is_causal: must be True.
        scale: factor on the scores; None: head_dim ** -0.5.

    Returns:
        (batch, m, heads, head_dim).

    Raises:
        ValueError: the layer is not causal, or its keys are not those that the cache was given.
    """
    layer = call.cache.taken(module, *tensors[1:])
    if not is_causal:
        raise ValueError(
            f"a KV cache is for causal attention; {type(module).__name__} has is_causal=False"
        )
    settings = call.settings
    query, key, value = autocast_inputs(*(x.transpose(1, 2) for x in tensors))
    pattern = pattern_of_heads(module, settings, query.shape[2], key.shape[2])
    kv = call.cache.of_layer(layer, key, pattern)
    if not call.is_prompt:
        return cached_attention(query, key, value, kv, scale=scale, backend=settings.backend)
    out = dilated_attention(
        query,
        key,
        value,
        pattern,
        is_causal=True,
        scale=scale,
        lengths=call.lengths,
        group=settings.group,
        layout=call.layout,
        exchange=settings.exchange,
        backend=settings.backend,
    )
    kv.prefill(key, value, layout=call.layout, lengths=call.lengths)
    return out


def restored(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The hook behind a decoder: hidden states in the order of the input, the same on every rank.

    Args:
        module: the model without its head.
        args: none.
        kwargs: what `prepared_with_cache` returned; of a call without a cache nothing is changed.
        output: of the forward.

    Returns:
        None, or `output` changed in place.
    """
    call = kwargs.get(ARGUMENT)
    if not isinstance(call, CachedCall):
        return None
    call.cache.finish(call.after, call.columns, call.valid)
    if not call.is_prompt or (call.layout is None and call.firsts is None):
        return None
    hidden = output.last_hidden_state
    first = torch.tensor(call.firsts or [0] * len(hidden), device=hidden.device)[:, None]
    every = (torch.arange(call.columns, device=hidden.device) - first) % call.columns
    wanted = every[:, -call.kept :]  # all of them, where that is 0
    if call.layout is not None:
        ends = resolve_exchange(call.settings.group)
        with ends.calls.enter(type(module).__name__, "hidden states") as scope:
            settle(scope, ends, hidden.device)
            output.last_hidden_state = _gathered(hidden, wanted, call.layout, ends)
        return output
    if getattr(output, "hidden_states", None) is not None:
        output.hidden_states = tuple(rows_at(x, every) for x in output.hidden_states)
    output.last_hidden_state = rows_at(hidden, wanted)
    return output


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Of each row of a batch, (batch, m, ...), the places that an index (batch, k) names."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
    return x.gather(1, index)


def _gathered(hidden: Tensor, wanted: Tensor, layout: SequenceLayout, ends: Exchange) -> Tensor:
    """Rows that ranks hold, on all of them, inside of a call.

    Few columns: each rank sends a row for each of them, and what came from its owner is taken. Many
    of them: whole shards are smaller.
    """
    if wanted.shape[1] * ends.world_size > layout.length:
        most = layout.max_local_length
        filling = hidden.new_zeros(len(hidden), most - hidden.shape[1], hidden.shape[2])
        shards = all_gather(ends, torch.cat([hidden, filling], 1))
        parts = [x[:, : layout.local_length(rank)] for rank, x in enumerate(shards)]
        return rows_at(layout.unshard(parts, 1), wanted)
    local, owner = (torch.zeros(layout.length, dtype=torch.int64) for _ in range(2))
    for rank in range(layout.world_size):
        positions = layout.positions(rank)
        owner[positions], local[positions] = rank, torch.arange(len(positions))
    owners, places = owner.to(wanted.device)[wanted], local.to(wanted.device)[wanted]
    own = rows_at(hidden, torch.where(owners == ends.rank, places, 0))
    result = torch.zeros_like(own)
    for rank, rows in enumerate(all_gather(ends, own)):
        result = torch.where((owners == rank)[..., None], rows, result)
    return result
