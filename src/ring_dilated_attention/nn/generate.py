"""Generation by a language model: read a prompt into caches, then one step for each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decode import CapturedStep, DilatedKVCache, Step, cached_attention, steps_by_kernel
from ..documents import Integers
from ..exchange import Exchange, Group, agree, one_group, resolve_exchange, together
from ..functional import autocast_inputs
from ..layout import SequenceLayout
from ..options import check_options
from ..parallel import is_dtensor, is_fully_sharded
from ..pattern import check_int, check_positive_int, in_brief
from ..torch_op import sum_over_ranks, telling_ranks
from .attention import MultiheadDilatedAttention
from .block import Attend, Block
from .config import LongNetConfig
from .modules import runs_hooks
from .positions import (
    RotaryEmbedding,
    agreed_positions,
    check_tokens,
    device_of,
    whole_length,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # torch needs it; typing has it from Python 3.11 on

_NAME = "LongNet.generate"

CHECKED_STEPS = 32
"""Steps between looks at the tokens: whether the ranks drew the same ones, and logits are finite.
Each look waits for the device and costs a small collective."""

CAPTURED_TOKENS = 32
"""Tokens from which on a step is captured: warming up and capturing take as long as 10 steps."""

MOST_SEED = 2**62 - 1
"""Of what `torch.Generator` takes, a part that is the same for signed and unsigned numbers."""

_LEAST = 1e-300
"""In place of a random time of 0, which would give the only token of a row a quotient of inf."""


class GenerateOptions(TypedDict, total=False):
    """The options of `LongNet.generate` and `LongNet.stream`: keyword arguments.

    Attributes:
        temperature: as for `Sampler`; 0, the default, always takes the most likely token.
        top_k: as for `Sampler`; None, the default: all tokens.
        top_p: as for `Sampler`; None, the default: all tokens.
        stop_token: a row that has produced it goes on with this token alone, and generation
            ends when all rows have; checking that waits for the device in every step. None, the
            default: there is none.
        seed: of the draws, from 0, the default, to 2**62 - 1; they are the same on any number
            of ranks.
        lengths: (batch,) ints: row b of the prompt has that many tokens, at least 1, and
            padding behind them; new tokens follow the last one. None: no padding.
        group: the ranks that share each prompt: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process. All of them compute the same new tokens.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which positions of the prompt each rank holds; None means contiguous equal
            shards.
        sharded: whether the ranks share the rows of each cache; None, the default: where a
            cache is large. See `DilatedKVCache`.
        capture: whether a step is captured in a CUDA graph, which is replayed for each token,
            several times as fast: needs caches that each rank holds whole. None, the default:
            on a CUDA device, outside of autocast, from 32 tokens on, where caches are whole,
            weights are no DTensors, no module has hooks and the decoding kernels compute
            attention (float32 or half precision, `backend` "auto" or "triton").
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_token: int | None
    seed: int
    lengths: Integers | None
    group: Group
    mesh: Group
    layout: SequenceLayout | None
    sharded: bool | None
    capture: bool | None


class TokenGenerator(nn.Module):
    """The part of `LongNet` around its blocks: the embedding, the logits, and generation.

    `generate` and `stream` are loops of `make_caches`, `prefill`, `step` and a `Sampler`, of which
    other loops can be written.
    """

    config: LongNetConfig
    embedding: nn.Embedding
    rope: RotaryEmbedding
    blocks: nn.ModuleList
    norm: nn.LayerNorm
    chunk_rows: int | None

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream in front of the first block.

        Args:
            tokens: int64, shape (batch, rows).

        Returns:
            Shape (batch, rows, embed_dim).
        """
        embedded: Tensor = self.embedding(tokens) * math.sqrt(self.config.embed_dim)
        return autocast_inputs(embedded)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, from the residual stream behind the last block.

        Args:
            hidden: shape (batch, rows, embed_dim).

        Returns:
            Shape (batch, rows, vocab_size).
        """
        return F.linear(self.norm(hidden), self.embedding.weight)

    def make_caches(self, batch: int, **options: Any) -> list[DilatedKVCache]:
        """A KV cache for each block, on the model's device, in its dtype or that of autocast.

        Args:
            batch: rows of the batch.
            options: `max_length`, `max_rewind`, `group`, `mesh` and `sharded` of `DilatedKVCache`.

        Raises:
            TypeError, ValueError: an argument is not allowed.
        """
        if is_fully_sharded(self):
            raise ValueError(
                f"{type(self).__name__.removeprefix('FSDP')} under fully_shard does not generate: "
                "its weights are gathered for forward alone. Load its state dict into a model "
                "without fully_shard"
            )
        config, weight = self.config, self.embedding.weight
        (like,) = autocast_inputs(weight[:0])
        caches = []
        for layer in (block.attention for block in _blocks(self)):
            own, heads = layer.head_slice, config.num_kv_heads or config.num_heads
            caches.append(
                DilatedKVCache(
                    layer.pattern,
                    batch,
                    heads if own is None else own.stop - own.start,
                    config.embed_dim // config.num_heads,
                    dtype=like.dtype,
                    device=weight.device,
                    head_slice=own,
                    **options,
                )
            )
        return caches

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        caches: Sequence[DilatedKVCache],
        *,
        lengths: Integers | None = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Read a prompt: logits of the token that follows it; the caches then hold the prompt.

        `forward`, whose keys and values each block hands to its cache and drops. Without gradients.
        Every rank of the caches' group makes the call, with its shard.

        Args:
            tokens: the local shard of the prompt, int64, shape (batch, local_sequence).
            caches: of `make_caches`; what they held is dropped.
            lengths: (batch,) ints, or a 1-D int32 or int64 tensor: row b has that many tokens, at
                least 1, of the whole prompt, and padding behind them. None: no padding.
            layout: which positions each rank holds; None means contiguous equal shards.

        Returns:
            Logits, shape (batch, vocab_size), of each row's last token; the same on every rank.

        Raises:
            TypeError, ValueError: an argument is not allowed, or the ranks disagree about one;
                raised on every rank.
        """
        blocks, ends = _blocks_with(self, caches), caches[0].exchange
        positions, _, known = agreed_positions(tokens, ends, layout, lengths=lengths)
        options: dict[str, Any] = {"lengths": known, "layout": layout}
        for cache in caches:  # else, if a block fails, some would hold the prompt before
            cache.reset()

        def attend(block: Block, cache: DilatedKVCache, *heads: Tensor) -> Tensor:
            query, key, value = autocast_inputs(*heads)
            out = block.attention.attend(query, key, value, is_causal=True, group=ends, **options)
            cache.prefill(key, value, **options)
            return out

        attends = [partial(attend, *pair) for pair in zip(blocks, caches, strict=True)]
        hidden = _through(self, tokens, positions[None], blocks, caches, attends)
        total = whole_length(tokens, ends.world_size, layout)
        lasts = [n - 1 for n in known or [total] * len(tokens)]
        layout = layout or SequenceLayout.contiguous(total, ends.world_size)
        return self.logits(_last_rows(hidden, lasts, layout, ends)[:, None])[:, 0]

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: Sequence[DilatedKVCache]) -> Tensor:
        """Read the next tokens of every row: logits of what follows; the caches then hold them.

        Without gradients. Positions come from the caches' `lengths`, on their device, and nothing
        waits for it. Several tokens per row, as in speculative decoding, cost little more than one;
        `DilatedKVCache.rewind` takes back those that are rejected. After a step that failed, begin
        again with `prefill`: some of the caches may hold its tokens.

        Args:
            tokens: int64, shape (batch, m), m from 1 on: of the next m positions of every row, the
                same on every rank.
            caches: after `prefill`, or empty ones: then the first token begins a document.

        Returns:
            Logits, shape (batch, m, vocab_size); the same on every rank.

        Raises:
            TypeError, ValueError: an argument is not allowed, or a document becomes longer than the
                `max_length` of its cache.

        Examples:
            >>> config = LongNetConfig(num_layers=1, embed_dim=8, num_heads=2, ffn_dim=8,
            ...                        segment_lengths=[64, None], dilation_rates=[1, 4])
            >>> model = LongNet(config)
            >>> caches = model.make_caches(1, max_length=100)
            >>> logits = model.prefill(torch.tensor([[1, 2, 3]]), caches)
            >>> model.step(logits.argmax(-1, keepdim=True), caches).shape
            torch.Size([1, 1, 256])
        """
        blocks = _blocks_with(self, caches)
        check_tokens(tokens, "(batch, m)")
        if not tokens.shape[1]:
            raise ValueError(
                f"a step must have one token at least; got tokens of shape {tuple(tokens.shape)}"
            )
        held = {cache.known_lengths for cache in caches}
        if len(held) > 1:
            raise ValueError(
                "the caches of all blocks must hold the same positions; got "
                f"{' and '.join(str(list(x[:8])) for x in sorted(held))}: rewind, select and reset "
                "them all, and call prefill after a step that failed"
            )
        positions = caches[0].lengths.unsqueeze(1)
        if tokens.shape[1] > 1:
            positions = positions + torch.arange(tokens.shape[1], device=positions.device)
        shared = Step()
        attends = [
            partial(
                cached_attention, cache=cache, scale=layer.scale, backend=layer.backend, step=shared
            )
            for layer, cache in zip((x.attention for x in blocks), caches, strict=True)
        ]
        return self.logits(_through(self, tokens, positions, blocks, caches, attends))

    def stream(
        self, tokens: Tensor, max_new_tokens: int, **options: Unpack[GenerateOptions]
    ) -> Iterator[Tensor]:
        """What `generate` returns, token by token: an iterator of (batch,) int64 tensors.

        Arguments are checked and the prompt is read before this returns; each token is computed
        when it is asked for, under the autocast of that moment, which must be that of this call
        where weights are float32: caches have its dtype. Every rank takes equally many. The model,
        its weights and hooks too, must stay as it is until the last one: some of it was copied.
        """
        given: dict[str, Any] = dict(options)
        ends = resolve_exchange(one_group(given.pop("group", None), given.pop("mesh", None)))
        stop, sharded, capture, lengths, layout = (
            given.pop(name, None)
            for name in ("stop_token", "sharded", "capture", "lengths", "layout")
        )
        device, vocabulary = device_of(tokens), self.config.vocab_size
        with together(_NAME, ends, device) as agreed:
            check_positive_int("max_new_tokens", max_new_tokens)
            check_tokens(tokens, "(batch, local_sequence)")
            if capture is not None and not isinstance(capture, bool):
                raise TypeError(f"capture must be a bool or None, got {in_brief(capture)}")
            if stop is not None and not 0 <= check_int("stop_token", stop) < vocabulary:
                raise ValueError(f"stop_token must be from 0 to {vocabulary - 1}; got {stop}")
            check_options(layout=layout)
            prompt = whole_length(tokens, ends.world_size, layout)
            if not len(tokens) or not prompt:
                raise ValueError(
                    f"the prompt must have a token; got tokens of shape {tuple(tokens.shape)}"
                )
            # What is left are its options; it refuses others.
            sampler = Sampler(vocabulary, device=device, **given)
            caches = self.make_caches(
                len(tokens), max_length=prompt + max_new_tokens, group=ends, sharded=sharded
            )
            in_graph = _captures(capture, self, caches, max_new_tokens)
            agreed.on(
                {
                    "max_new_tokens": max_new_tokens,
                    "stop_token": stop,
                    "sharded": sharded,
                    "capture": capture,
                    **{x: getattr(sampler, x) for x in ("temperature", "top_k", "top_p", "seed")},
                }
            )
        logits = self.prefill(tokens, caches, lengths=lengths, layout=layout)
        take: Callable[[Tensor], Tensor] = partial(self.step, caches=caches)
        if in_graph:
            at = caches[0].lengths
            try:
                take = CapturedStep(take, at.new_zeros(len(at), 1), caches)  # of whatever tokens
            except RuntimeError as error:
                raise RuntimeError(
                    f"{_NAME} cannot capture a step in a CUDA graph, as where a module waits for "
                    f"the device. This process has to start again: give capture=False. {error}"
                ) from error
        return _drawn(take, ends, logits, sampler, max_new_tokens, stop)

    def generate(
        self, tokens: Tensor, max_new_tokens: int, **options: Unpack[GenerateOptions]
    ) -> Tensor:
        """Continue prompts.

        The prompt is read once, and one step with a KV cache follows for each token: the tokens are
        those that `forward` of the whole text would give. `embed`, the blocks, the norm and
        `logits` compute them: hooks of the model as a whole, and a `forward` of a subclass, are not
        called. The text may become longer than those that the model was trained on. Without
        gradients.

        Args:
            tokens: the local shard of the prompt, int64, shape (batch, local_sequence).
            max_new_tokens: how many tokens to add to each row, at least 1.
            options: see `GenerateOptions`.

        Returns:
            The new tokens, int64, shape (batch, new), the same on every rank; new is
            `max_new_tokens`, or less where every row has produced `stop_token`.

        Raises:
            TypeError, ValueError: an argument is not allowed, or the ranks disagree about one, or
                about the tokens that they draw; raised on every rank.
            ValueError: logits are not finite, or are -inf for all tokens that may be drawn.
            RuntimeError: a step cannot be captured: a module waits for the device, say.

        Examples:
            >>> config = LongNetConfig(num_layers=1, embed_dim=8, num_heads=2, ffn_dim=8,
            ...                        segment_lengths=[64], dilation_rates=[1])
            >>> LongNet(config).generate(torch.tensor([[1, 2, 3]]), 5, temperature=0.8).shape
            torch.Size([1, 5])
        """
        return torch.stack([*self.stream(tokens, max_new_tokens, **options)], 1)


def _blocks(model: TokenGenerator) -> list[Block]:
    """The blocks; raises a `ValueError` for attention that does not go through a cache."""
    blocks = cast("list[Block]", model.blocks)
    for index, block in enumerate(blocks):
        layer = block.attention
        if not hasattr(layer, "attend"):  # a wrapper of torch's hands attributes on
            raise ValueError(
                f"blocks[{index}].attention must be a MultiheadDilatedAttention to generate; got a "
                f"{type(layer).__name__}"
            )
        if getattr(layer.attend, "__func__", None) is not MultiheadDilatedAttention.attend:
            raise ValueError(
                f"a {type(layer).__name__} has an attend of its own, which a step with a KV cache "
                "does not call: generate by forward of the whole text, or change project or "
                "combine in its place"
            )
        if model.chunk_rows is not None:  # on every rank, however many rows it has
            block.refuse_own_call()
    return blocks


def _blocks_with(model: TokenGenerator, caches: Sequence[DilatedKVCache]) -> list[Block]:
    """The blocks; raises unless each has a cache of its own, of its pattern."""
    if not isinstance(caches, Sequence) or not all(isinstance(x, DilatedKVCache) for x in caches):
        raise TypeError(f"caches must be those of make_caches; got {in_brief(caches)}")
    blocks = _blocks(model)
    if not len(blocks) == len(caches) == len({id(cache) for cache in caches}):
        raise ValueError(
            f"each of {len(blocks)} blocks needs a cache of its own; got {len(caches)} caches, "
            f"{len({id(cache) for cache in caches})} of them different"
        )
    for block, cache in zip(blocks, caches, strict=True):
        layer, plan = block.attention, cache.plan
        if layer.head_slice is not None or plan.pattern is not layer.pattern:  # in every step
            pattern = layer.pattern.of_heads(layer.head_slice, plan.num_kv_heads)
            if plan.pattern != pattern:
                raise ValueError(
                    f"a cache must have the pattern of its block, {pattern}; got one of "
                    f"{plan.pattern}: make the caches with make_caches of this model, and anew "
                    "when its patterns have changed"
                )
    return blocks


def _through(
    model: TokenGenerator,
    tokens: Tensor,
    positions: Tensor,
    blocks: Sequence[Block],
    caches: Sequence[DilatedKVCache],
    attends: Sequence[Attend],
) -> Tensor:
    """The residual stream behind the blocks, each with its attention; positions (1 or batch, m)."""
    rotation = model.rope(positions)
    hidden = telling_ranks(caches[0].exchange, model.embed, tokens)
    for block, cache, attend in zip(blocks, caches, attends, strict=True):
        before = cache.known_lengths
        hidden = block(
            hidden, rotation.cos, rotation.sin, chunk_rows=model.chunk_rows, attend=attend
        )
        if cache.known_lengths == before:
            raise ValueError(
                f"the forward of a {type(block.attention).__name__} leaves its argument attend "
                "aside, by which attention goes through the KV cache: generate by forward of the "
                "whole text, or call it"
            )
    return hidden


def _last_rows(
    hidden: Tensor, lasts: Sequence[int], layout: SequenceLayout, ends: Exchange
) -> Tensor:
    """The row of each sequence at one of these positions, on all ranks: (batch, embed_dim)."""
    found = hidden.new_zeros(len(lasts), hidden.shape[2])
    positions = layout.positions(ends.rank, device=hidden.device)
    row, local = (torch.tensor(lasts, device=hidden.device)[:, None] == positions).nonzero().mT
    found[row] = hidden[row, local]
    return sum_over_ranks(found, "LongNet.prefill", ends) if ends.world_size > 1 else found


def _captures(
    capture: bool | None, model: nn.Module, caches: Sequence[DilatedKVCache], max_new_tokens: int
) -> bool:
    """Whether steps are captured in a CUDA graph: as asked for, or where it helps (None)."""
    cache, modules = caches[0], list(model.modules())
    device = cache.keys.device
    layers = [x for x in modules if isinstance(x, MultiheadDilatedAttention)]
    reasons = {
        f"a CUDA device, not {device}": device.type == "cuda",
        "caches that each rank holds whole, sharded=False": not any(x.is_sharded for x in caches),
        "modules without hooks, which would not be called for each token": not any(
            map(runs_hooks, modules)
        ),
        "the decoding kernels: float16, bfloat16 or float32, and backend='auto' or 'triton'": all(
            steps_by_kernel(cache, layer.backend) for layer in layers
        ),
    }
    missing = [reason for reason, is_met in reasons.items() if not is_met]
    if capture and missing:
        raise ValueError(f"capture=True needs {' and '.join(missing)}; or give capture=False")
    helps = (
        max_new_tokens >= CAPTURED_TOKENS
        and not torch.is_autocast_enabled(device.type)
        and not any(map(is_dtensor, model.parameters()))
    )
    return not missing and (helps if capture is None else capture)


def _drawn(
    take: Callable[[Tensor], Tensor],
    ends: Exchange,
    logits: Tensor,
    sampler: Sampler,
    max_new_tokens: int,
    stop: int | None,
) -> Iterator[Tensor]:
    """Tokens, one (batch,) tensor a step."""
    finished: Tensor | None = None
    tokens: Tensor | None = None
    unchecked: list[tuple[Tensor, Tensor]] = []
    for left in range(max_new_tokens, 0, -1):
        with torch.no_grad():
            if tokens is not None:
                logits = take(tokens.unsqueeze(1)).squeeze(1)
            largest = logits.amax(-1)  # a NaN is larger than all numbers
            tokens = sampler(logits)
        if stop is not None:
            if finished is not None:
                tokens = tokens.masked_fill(finished, stop)
            finished = tokens == stop
        unchecked.append((tokens, largest))
        is_last = left == 1 or (finished is not None and bool(finished.all()))
        if is_last or len(unchecked) == CHECKED_STEPS:
            _look_at(unchecked, ends)
            unchecked.clear()
        yield tokens.clone()  # whoever changes it in place does not change the text
        if is_last:
            return


def _look_at(steps: Sequence[tuple[Tensor, Tensor]], ends: Exchange) -> None:
    """Raise, on every rank, unless ranks drew the same tokens from logits with finite maxima."""
    tokens, largest = map(torch.stack, zip(*steps, strict=True))
    failure = None
    if not largest.isfinite().all():
        failure = ValueError(
            "logits are not finite, so that no token can be drawn: look at the weights, and at the "
            "dtype"
        )
    drawn = {"the last tokens drawn": tokens.tolist()} if ends.world_size > 1 else {}
    agree(_NAME, ends, None if failure else drawn, failure, tokens.device)


class Sampler:
    """Draws a token for every row of logits.

    `temperature` comes first, then `top_k`, then `top_p`, as elsewhere. Draws are computed in
    float64 from the state of a generator of its own: equal logits give equal tokens on every rank.

    Args:
        vocab_size: number of tokens.
        temperature: logits are divided by it; 0, the default, always takes the most likely token,
            whatever the other options are.
        top_k: draw among this many most likely tokens only, at most `vocab_size`, and those as
            likely as the last of them. None, the default: all.
        top_p: draw among the fewest most likely tokens whose probabilities add up to at least this,
            in (0, 1]. None, the default: all.
        seed: of the draws, from 0 to 2**62 - 1.
        device: where the logits are; None: torch's default.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> sampler = Sampler(4, temperature=0.8, top_k=1)
        >>> sampler(torch.tensor([[0.0, 3.0, 1.0, 2.0]]))
        tensor([1])
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        vocab_size = check_positive_int("vocab_size", vocab_size)
        self.temperature = _check_number("temperature", temperature)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and >= 0; got {temperature!r}")
        if top_k is not None and check_positive_int("top_k", top_k) > vocab_size:
            raise ValueError(f"top_k must be at most {vocab_size}; got {top_k}")
        if top_p is not None and not 0 < _check_number("top_p", top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}")
        if not 0 <= check_int("seed", seed) <= MOST_SEED:
            raise ValueError(f"seed must be from 0 to {MOST_SEED}; got {seed}")
        device = torch.get_default_device() if device is None else torch.device(device)
        self.top_k, self.top_p, self.seed = top_k, top_p, seed
        self._vocab_size = vocab_size
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw tokens.

        Args:
            logits: shape (batch, vocab_size), floating, finite for one token at least; -inf where a
                token must not be drawn.

        Returns:
            Tokens, int64, shape (batch,).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        # A random race: a token of probability p ends after a time that is exponential with rate p,
        # and wins with probability p. One of probability 0 never ends.
        shares = self.probabilities(logits)
        times = torch.empty_like(shares).exponential_(generator=self._generator)
        return shares.div_(times.clamp_min_(_LEAST)).argmax(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """With which probability each token is drawn, at a temperature above 0.

        Args:
            logits: as for a draw.

        Returns:
            float64, shape (batch, vocab_size).
        """
        # Less the largest: a quotient by a cold temperature may be -inf, but never inf, and large
        # logits that are nearly equal keep the digits in which they differ.
        logits = logits.double() - logits.amax(-1, keepdim=True)
        if self.top_k is not None and self.top_k < self._vocab_size:
            lowest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        shares = (logits / self.temperature).softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return shares
        falling, order = shares.sort(descending=True, stable=True)
        # Those that the more likely ones alone reach top_p without.
        falling.masked_fill_(falling.cumsum(-1) - falling >= self.top_p, 0)
        shares.scatter_(-1, order, falling)
        return shares.div_(shares.sum(-1, keepdim=True))


def _check_number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {in_brief(value)}")
    return float(value)
