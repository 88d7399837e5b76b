"""What a language model offers for generation: caches, prefill, step, and loops of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..decode import DilatedKVCache
from ..documents import Integers
from ..exchange import Group, one_group
from ..layout import SequenceLayout
from .generation import GivenPrompt, Wanted, make_caches, prefill, step, step_blocks, stream
from .rope import RotaryEmbedding
from .sampling import SamplerOptions
from .token_ends import TokenEnds


class TokenGenerator(TokenEnds):
    """The part of `LongNet` that generates.

    `generate` and `stream` are loops of `make_caches`, `prefill`, `step` and a `Sampler`, of which
    other loops can be written.
    """

    rope: RotaryEmbedding
    blocks: nn.ModuleList
    chunk_rows: int | None

    def make_caches(
        self,
        batch: int,
        *,
        max_length: int | None = None,
        max_rewind: int = 0,
        group: Group = None,
        mesh: Group = None,
        sharded: bool | None = None,
    ) -> list[DilatedKVCache]:
        """A KV cache for each block, on the model's device, in its dtype or that of autocast.

        Args:
            batch: rows of the batch.
            max_length: the most positions of a document, those of the prompt included; None, the
                default: any number, not for patterns with a segment length of None.
            max_rewind: the most positions that `DilatedKVCache.rewind` may take back at a time.
            group: the ranks that generate together: a ProcessGroup, a 1-D DeviceMesh, or None for
                one process.
            mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
            sharded: whether the ranks share the rows of each cache; None, the default: where a
                cache is large. See `DilatedKVCache`.

        Raises:
            TypeError, ValueError: an argument is not allowed.
        """
        group = one_group(group, mesh)
        return make_caches(self, batch, max_length, max_rewind, group, sharded)

    def prefill(
        self,
        tokens: Tensor,
        caches: Sequence[DilatedKVCache],
        *,
        lengths: Integers | None = None,
        documents: Integers | None = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Read a prompt: logits of the token that follows it; the caches then hold the prompt.

        `forward`, whose keys and values each block hands to its cache and drops. Without gradients.
        Every rank of the caches' group makes the call, with its shard. If a block fails, all of the
        caches are empty.

        Args:
            tokens: the local shard of the prompt, int64, shape (batch, local_sequence).
            caches: of `make_caches`; what they held is dropped.
            lengths: (batch,) ints, or a 1-D int32 or int64 tensor: row b has that many tokens, at
                least 1, of the whole prompt, and padding behind them. None: no padding.
            documents: cumulative lengths of documents packed in the whole prompt, as for `forward`;
                the last one of each row goes on, and may then end behind the longest row. None: one
                document.
            layout: which positions each rank holds; None means contiguous equal shards.

        Returns:
            Logits, shape (batch, vocab_size), of each row's last token; the same on every rank.

        Raises:
            TypeError, ValueError: an argument is not allowed, or the ranks disagree about one;
                raised on every rank.
        """
        return prefill(self, tokens, caches, lengths, documents, layout)

    def step(self, tokens: Tensor, caches: Sequence[DilatedKVCache]) -> Tensor:
        """Read the next tokens of every row: logits of what follows; the caches then hold them.

        Without gradients. Positions come from the caches' `lengths`, on their device, and nothing
        waits for it. Several tokens per row, as in speculative decoding, cost little more than one;
        `DilatedKVCache.rewind` takes back those that are rejected. A step that fails leaves the
        caches as they were, so that it can be tried again; one of m tokens, m > 1, only where the
        `max_rewind` of the caches is at least m - 1.

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
        return step(self, step_blocks(self), tokens, caches)

    def stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        allowed: Tensor | None = None,
        stop_token: int | None = None,
        seed: int = 0,
        lengths: Integers | None = None,
        documents: Integers | None = None,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
        sharded: bool | None = None,
        capture: bool | None = None,
    ) -> Iterator[Tensor]:
        """What `generate` returns, token by token: an iterator of (batch,) int64 tensors.

        Arguments are checked and the prompt is read before this returns; each token is computed
        when it is asked for, under the autocast of that moment, which must be that of this call
        where weights are float32: caches have its dtype. Every rank takes equally many. The model,
        its weights and hooks too, must stay as it is until the last one: some of it was copied.
        """
        group = one_group(group, mesh)
        options = SamplerOptions(temperature, top_k, top_p, allowed, seed)
        prompt = GivenPrompt(tokens, lengths, documents, layout)
        wanted = Wanted(max_new_tokens, stop_token, sharded, capture)
        return stream(self, prompt, options, wanted, group)

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        allowed: Tensor | None = None,
        stop_token: int | None = None,
        seed: int = 0,
        lengths: Integers | None = None,
        documents: Integers | None = None,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
        sharded: bool | None = None,
        capture: bool | None = None,
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
            temperature: logits are divided by it before a token is drawn; 0, the default, always
                takes the most likely token.
            top_k: draw among this many most likely tokens only (and those as likely as the last of
                them). None, the default: all.
            top_p: draw among the fewest most likely tokens whose probabilities, after `temperature`
                and `top_k`, add up to at least this, in (0, 1]. None, the default: all.
            allowed: (vocab_size,) bool: the tokens that may be drawn. None, the default: all.
            stop_token: a row that has produced it goes on with this token alone, and generation
                ends when all rows have; checking that waits for the device in every step. None, the
                default: there is none.
            seed: of the draws, from 0 to 2**62 - 1; the same draws on any number of ranks.
            lengths: (batch,) ints: row b of the prompt has that many tokens, at least 1, and
                padding behind them; new tokens follow the last one. None: no padding.
            documents: cumulative lengths of documents packed in the whole prompt, as for `forward`;
                the last one of each row is continued. None: one document.
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
        group = one_group(group, mesh)
        options = SamplerOptions(temperature, top_k, top_p, allowed, seed)
        prompt = GivenPrompt(tokens, lengths, documents, layout)
        wanted = Wanted(max_new_tokens, stop_token, sharded, capture)
        return torch.stack([*stream(self, prompt, options, wanted, group)], 1)
