"""Tokens: checked where a language model is given them, and drawn from its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..documents import Integers, as_ints, document_borders, in_words
from ..exchange import Group, place_in
from ..layout import SequenceLayout
from ..options import check_options
from ..pattern import check_int, check_positive_int, in_brief, shape_in_brief
from ..torch_op import agreed
from .rope import document_positions

MOST_SEED = 2**62 - 1
"""Of what `torch.Generator` takes, a part that is the same for signed and unsigned numbers."""

_LEAST = 1e-300
"""In place of a random time of 0, which would leave the only token of a row with a quotient of inf.
"""


class Positions(NamedTuple):
    """What agreed arguments of a model come to.

    Attributes:
        rotary: int64, shape (local_sequence,): of every local row, from the start of its document.
        documents: cumulative lengths, as ints; as they were given while torch.compile traces; None:
            one document.
        lengths: of each row of the batch; None: no padding.
    """

    rotary: Tensor
    documents: Integers | None
    lengths: list[int] | None


def agreed_positions(
    tokens: Tensor,
    documents: Integers | None,
    group: Group,
    layout: SequenceLayout | None,
    lengths: Integers | None = None,
    check: Callable[[], None] | None = None,
) -> Positions:
    """This rank's rotary positions, and the documents and lengths as ints.

    If any rank's tokens, documents or other arguments do not fit, an error on every rank: a rank
    that raised alone would leave the others waiting for it in the first attention.
    The arguments are those of `LongNet.forward` and `TokenGenerator.prefill`; `check` raises unless
    others fit.
    """
    positions, borders, valid, failure = None, documents, None, None
    rank, world_size = place_in(group)
    try:
        positions = _positions(tokens, rank, world_size, layout)
        if check is not None:
            check()
        total = whole_length(tokens, world_size, layout)
        if lengths is not None:
            valid = checked_lengths(as_ints("lengths", lengths), len(tokens), 1, total)
        if isinstance(documents, Tensor) and torch.compiler.is_compiling():
            # Attention checks the numbers, which are not known here.
            positions = document_positions(positions, documents)
        elif documents is not None:
            borders = as_ints("documents", documents)
            # Where rows have lengths of their own, documents may end before the padding does.
            known = document_borders(borders, max(valid) if valid else None, total)
            positions = document_positions(positions, known)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    # What else must be equal on all ranks, the first attention compares.
    positions = agreed(positions, "LongNet", group, failure, device_of(tokens))
    return Positions(positions, borders, valid)


def checked_lengths(lengths: Sequence[int], batch: int, least: int, most: int) -> list[int]:
    """The lengths; raises a `ValueError` unless they lie in [least, most], one for each row."""
    if len(lengths) != batch:
        raise ValueError(
            f"lengths must hold one number for each of {batch} rows; got {in_words(tuple(lengths))}"
        )
    if wrong := [n for n in lengths if not least <= n <= most]:
        raise ValueError(f"lengths must lie in [{least}, {most}]; got {wrong[0]}")
    return list(lengths)


def device_of(tokens: Tensor) -> torch.device:
    """Where tokens are, also where they are no tensor."""
    return tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")


def whole_length(tokens: Tensor, world_size: int, layout: SequenceLayout | None) -> int:
    """Positions of the whole sequence, of which `tokens` are the local shard."""
    return tokens.shape[1] * world_size if layout is None else layout.length


def check_tokens(tokens: Tensor, shape: str, name: str = "tokens") -> None:
    """Raise unless tokens, or labels, are int64 of two dimensions, `shape` in words."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tokens)}")
    if tokens.dtype != torch.int64:
        raise TypeError(f"{name} must be int64; got {tokens.dtype}")
    if tokens.dim() != 2:
        raise ValueError(f"{name} must have shape {shape}; got {shape_in_brief(tokens)}")


def _positions(tokens: Tensor, rank: int, world_size: int, layout: SequenceLayout | None) -> Tensor:
    """The global position of every local row: int64, shape (local_sequence,)."""
    check_tokens(tokens, "(batch, local_sequence)")
    rows = tokens.shape[1]
    if layout is None:
        return torch.arange(rank * rows, (rank + 1) * rows, device=tokens.device)
    check_options(layout=layout)
    layout.check_shard(rank, world_size, rows, f"got tokens of shape {tuple(tokens.shape)}")
    return layout.positions(rank, device=tokens.device)


def check_vocabulary(tokens: Tensor, embedding: nn.Module) -> None:
    """Raise a `ValueError` unless every token has an embedding; waits for the device.

    Only an `nn.Embedding` says how many tokens it has.
    """
    if not isinstance(embedding, nn.Embedding) or not tokens.numel():
        return
    least, most = (int(x) for x in tokens.aminmax())
    if least < 0 or most >= embedding.num_embeddings:
        raise ValueError(
            f"tokens must be from 0 to {embedding.num_embeddings - 1}, those of the model's "
            f"vocabulary; got {least if least < 0 else most}"
        )


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
