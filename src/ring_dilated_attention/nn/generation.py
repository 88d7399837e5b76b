"""Generation by a language model: read a prompt into caches, then one step for each token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ..decode import DilatedKVCache, Step
from ..documents import Integers
from ..exchange import Exchange, Group, agree, all_gather, resolve_exchange, settle
from ..functional import autocast_inputs
from ..layout import SequenceLayout
from ..parallel import is_fully_sharded
from ..pattern import check_int, check_positive_int, in_brief
from .longnet_inputs import (
    agreed_positions,
    check_tokens,
    check_vocabulary,
    checked_lengths,
    device_of,
    whole_length,
)
from .rope import wide_rotation
from .row_step import RowStep
from .sampling import Sampler, SamplerOptions
from .step_block import Residual, StepBlock
from .step_caches import check_batch, check_caches, check_prompt, drop_all, memory_for, take_back
from .step_capture import TakeStep, captured_step, captures, check_capture

if TYPE_CHECKING:
    from .attention import MultiheadDilatedAttention
    from .block import Attend
    from .longnet_block import LongNetBlock
    from .token_generator import TokenGenerator

_NAME = "LongNet.generate"
CHECKED_STEPS = 32
"""Steps between looks at the tokens: whether the ranks drew the same ones, and logits are finite.
Each look waits for the device and costs a small collective."""


class GivenPrompt(NamedTuple):
    """A prompt as `LongNet.generate` takes it."""

    tokens: Tensor
    lengths: Integers | None
    documents: Integers | None
    layout: SequenceLayout | None


class Wanted(NamedTuple):
    """What `LongNet.generate` is asked for besides how to draw."""

    max_new_tokens: int
    stop_token: int | None
    sharded: bool | None
    capture: bool | None


def make_caches(
    model: TokenGenerator,
    batch: int,
    max_length: int | None,
    max_rewind: int,
    group: Group,
    sharded: bool | None,
) -> list[DilatedKVCache]:
    """See `LongNet.make_caches`."""
    if is_fully_sharded(model):
        raise ValueError(
            f"{type(model).__name__.removeprefix('FSDP')} under fully_shard does not generate: its "
            "weights are gathered for forward alone. Load its state dict into a model without "
            "fully_shard"
        )
    config, weight = model.config, model.embedding.weight
    (like,) = autocast_inputs(weight[:0])

    def made(layer: MultiheadDilatedAttention) -> DilatedKVCache:
        own, heads = layer.head_slice, config.num_kv_heads or config.num_heads
        return DilatedKVCache(
            layer.pattern,
            batch,
            heads if own is None else own.stop - own.start,
            config.embed_dim // config.num_heads,
            max_length=max_length,
            max_rewind=max_rewind,
            dtype=like.dtype,
            device=weight.device,
            group=group,
            sharded=sharded,
            head_slice=own,
        )

    with memory_for(max_length):
        return [made(block.attention) for block in _blocks(model)]


@torch.no_grad()
def prefill(
    model: TokenGenerator,
    tokens: Tensor,
    caches: Sequence[DilatedKVCache],
    lengths: Integers | None,
    documents: Integers | None,
    layout: SequenceLayout | None,
) -> Tensor:
    """See `LongNet.prefill`."""
    check_caches(model, caches)
    ends = caches[0].exchange
    check = partial(check_prompt, model, tokens, caches)
    found = agreed_positions(tokens, documents, ends, layout, lengths, check)
    rotation = model.rope(found.rotary[None])
    hidden = model.embed(tokens)
    options: dict[str, Any] = {
        "documents": found.documents,
        "lengths": found.lengths,
        "layout": layout,
    }
    try:
        for block, cache in zip(_blocks(model), caches, strict=True):
            hidden = block(
                hidden,
                rotation.cos,
                rotation.sin,
                chunk_rows=model.chunk_rows,
                attend=_attend_and_keep(block, cache, options),
            )
    except BaseException:
        drop_all(caches)
        raise
    total = whole_length(tokens, ends.world_size, layout)
    lasts = [n - 1 for n in found.lengths or [total] * len(tokens)]
    layout = layout or SequenceLayout.contiguous(total, ends.world_size)
    return model.logits(_last_rows(hidden, lasts, layout, ends)[:, None])[:, 0]


def _attend_and_keep(block: LongNetBlock, cache: DilatedKVCache, options: dict[str, Any]) -> Attend:
    """Attention of a prompt, whose keys and values the cache then has."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = autocast_inputs(query, key, value)
        out = block.attention.attend(
            query, key, value, is_causal=True, group=cache.exchange, **options
        )
        cache.prefill(key, value, **options)
        return out

    return attend


def _last_rows(
    hidden: Tensor, lasts: Sequence[int], layout: SequenceLayout, ends: Exchange
) -> Tensor:
    """The rows at these positions of the whole sequence, one of each row of the batch.

    Args:
        hidden: this rank's rows, shape (batch, local_sequence, embed_dim).
        lasts: the position of each row of the batch.
        layout: which positions each rank holds.
        ends: this rank's end of the group.

    Returns:
        Shape (batch, embed_dim), the same bits on every rank.
    """
    places = [
        next((p.rank, p.local + last - p.start) for p in layout.pieces if p.start <= last < p.stop)
        for last in lasts
    ]
    own = [(row, local) for row, (rank, local) in enumerate(places) if rank == ends.rank]
    last = hidden.new_zeros(len(lasts), hidden.shape[2])
    if own:
        rows, locals_ = torch.tensor(own, device=hidden.device).unbind(1)
        last[rows] = hidden[rows, locals_]
    if ends.world_size == 1:
        return last
    with ends.calls.enter("LongNet.prefill", "last rows") as scope:
        settle(scope, ends, hidden.device)
        by_rank = torch.stack(all_gather(ends, last))
    ranks = torch.tensor([rank for rank, _ in places], device=hidden.device)
    return by_rank[ranks, torch.arange(len(lasts), device=hidden.device)]


def step_blocks(model: TokenGenerator, *, joins: bool = False) -> list[StepBlock]:
    """A model's blocks for `step`; see `StepBlock` for `joins`."""
    return [StepBlock(x, chunk_rows=model.chunk_rows, joins=joins) for x in _blocks(model)]


def step(
    model: TokenGenerator,
    blocks: Sequence[StepBlock],
    tokens: Tensor,
    caches: Sequence[DilatedKVCache],
) -> Tensor:
    """See `LongNet.step`; `blocks` are the model's."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return step(model, blocks, tokens, caches)
    check_caches(model, caches)
    check_tokens(tokens, "(batch, m)")
    check_batch(tokens, caches)
    count = tokens.shape[1]
    if not count:
        raise ValueError(
            f"a step must have one token at least; got tokens of shape {tuple(tokens.shape)}"
        )
    positions = caches[0].lengths.unsqueeze(1)
    if count > 1:
        positions = positions + torch.arange(count, device=positions.device)
    rotation, shared = wide_rotation(model.rope, positions), Step()
    try:
        hidden = model.embed(tokens)
    except IndexError:  # of a CPU, where looking costs nothing
        check_vocabulary(tokens, model.embedding)
        raise
    before = [cache.known() for cache in caches]
    try:
        residual = Residual(hidden)
        for block, cache in zip(blocks, caches, strict=True):
            residual = block(residual, rotation, cache, shared)
        return model.logits(residual.total())
    except BaseException:
        take_back(caches, before, count)
        raise


def _blocks(model: TokenGenerator) -> list[LongNetBlock]:
    return cast("list[LongNetBlock]", model.blocks)


def stream(
    model: TokenGenerator,
    prompt: GivenPrompt,
    options: SamplerOptions,
    wanted: Wanted,
    group: Group,
) -> Iterator[Tensor]:
    """See `LongNet.stream`."""
    ends = resolve_exchange(group)
    device = device_of(prompt.tokens)
    sampler, shared, failure, longest = None, None, None, 0
    try:
        longest = _check_wanted(model, prompt, wanted, ends)
        sampler = Sampler(model.config.vocab_size, device=device, **options._asdict())
        shared = {**wanted._asdict(), **_described(options)}
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    agree(_NAME, ends, shared, failure, device)
    assert sampler is not None
    most = longest + wanted.max_new_tokens
    caches = make_caches(model, len(prompt.tokens), most, 0, ends, wanted.sharded)
    in_graph = captures(wanted.capture, model, caches, wanted.max_new_tokens)
    logits = prefill(model, prompt.tokens, caches, *prompt[1:])
    take: TakeStep = partial(step, model, step_blocks(model, joins=True), caches=caches)
    # One token needs no step, and so no copies of weights.
    if wanted.max_new_tokens > 1 and RowStep.fits(model, caches):
        take = RowStep(model, caches, take)
    if in_graph:
        take = captured_step(_NAME, take, len(logits), caches)
    return _drawn(take, caches[0].exchange, logits, sampler, wanted)


def _check_wanted(
    model: TokenGenerator, prompt: GivenPrompt, wanted: Wanted, ends: Exchange
) -> int:
    """Raise unless the arguments are allowed; the positions of the longest prompt."""
    check_positive_int("max_new_tokens", wanted.max_new_tokens)
    check_tokens(prompt.tokens, "(batch, local_sequence)")
    check_capture(wanted.capture, model, prompt.tokens.device, wanted.sharded)
    vocabulary = model.config.vocab_size
    stop = wanted.stop_token
    if stop is not None and not 0 <= check_int("stop_token", stop) < vocabulary:
        raise ValueError(f"stop_token must be from 0 to {vocabulary - 1}; got {stop}")
    if prompt.layout is not None and not isinstance(prompt.layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None; got {in_brief(prompt.layout)}")
    total = whole_length(prompt.tokens, ends.world_size, prompt.layout)
    if not len(prompt.tokens) or not total:
        raise ValueError(
            f"the prompt must have a token; got tokens of shape {tuple(prompt.tokens.shape)}"
        )
    if prompt.lengths is None:
        return total
    return max(checked_lengths(prompt.lengths, len(prompt.tokens), total))


def _described(options: SamplerOptions) -> dict[str, Any]:
    """What must be equal on all ranks."""
    words = options._asdict()
    if options.allowed is not None:
        words["allowed"] = _digest(options.allowed)
    return words


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.cpu().numpy().tobytes(), digest_size=4).hexdigest()


def _drawn(
    take: TakeStep,
    ends: Exchange,
    logits: Tensor,
    sampler: Sampler,
    wanted: Wanted,
) -> Iterator[Tensor]:
    """Tokens, one (batch,) tensor a step."""
    stop = wanted.stop_token
    finished: Tensor | None = None
    unchecked: list[Tensor] = []
    largest: list[Tensor] = []  # logits of those steps: a NaN is larger than all numbers
    device, tokens = logits.device, None
    for left in range(wanted.max_new_tokens, 0, -1):
        with _without_autograd(device):
            if tokens is not None:
                logits = take(tokens.unsqueeze(1)).squeeze(1)
            logits = sampler.allowed(logits)
            largest.append(logits.amax(-1, keepdim=True))
            tokens = sampler.draw(logits, largest[-1])
        all_finished = False
        if stop is not None:
            if finished is not None:
                tokens = tokens.masked_fill(finished, stop)
            finished = tokens == stop
            all_finished = bool(finished.all())
        unchecked.append(tokens)
        is_last = left == 1 or all_finished
        if is_last or len(unchecked) == CHECKED_STEPS:
            _look_at(unchecked, largest, ends)
            unchecked, largest = [], []
        # Whoever changes it in place does not change the text; and autograd may keep it.
        yield tokens.clone()
        if is_last:
            return


def _without_autograd(device: torch.device) -> AbstractContextManager[Any]:
    """Inference mode, in which an operation on a few rows takes a CPU about a tenth less time.

    Not under autocast, whose copies of weights a later training step may use.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.no_grad()
    return torch.inference_mode()


def _look_at(tokens: list[Tensor], largest: list[Tensor], ends: Exchange) -> None:
    """Raise, on every rank, unless ranks drew the same tokens from logits with finite maxima."""
    failure = None
    if not torch.stack(largest).isfinite().all():
        failure = ValueError(
            "logits are not finite, or -inf for all tokens that are allowed, so that none can be "
            "drawn: look at the weights, and at the dtype"
        )
    shared = None
    if failure is None:
        shared = (
            {"the last tokens drawn": _digest(torch.stack(tokens))} if ends.world_size > 1 else {}
        )
    agree(_NAME, ends, shared, failure, tokens[0].device)
