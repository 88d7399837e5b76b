"""Draw tokens by their logits: greedily, or by temperature, top-k and top-p."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..pattern import check_int, check_positive_int, in_brief, shape_in_brief

MOST_SEED = 2**62 - 1
"""Of what `torch.Generator` takes, a part that is the same for signed and unsigned numbers."""

_TIMES = 8192
"""Random numbers that are made together, unless one draw needs more."""

_COLDEST, _HOTTEST = 1e-300, 1e300
"""Temperatures beyond these draw as these do: products with them neither vanish nor overflow."""

_SMALLEST = 1e-300
"""In place of a random number 0, which would leave the only token of a row with a time of inf."""


class SamplerOptions(NamedTuple):
    """The arguments of a `Sampler`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    allowed: Tensor | None = None
    seed: int = 0


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
        allowed: (vocab_size,) bool: the tokens that may be drawn. None, the default: all.
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
        allowed: Tensor | None = None,
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
        banned = None if allowed is None else _banned(allowed, vocab_size)
        self._banned = banned.to(device) if banned is not None and banned.any() else None
        self._generator = torch.Generator(device).manual_seed(seed)
        self._times: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw among the tokens that are allowed.

        Args:
            logits: shape (batch, vocab_size), floating, finite for one of these tokens at least.

        Returns:
            Tokens, int64, shape (batch,).
        """
        logits = self.allowed(logits)
        return self.draw(logits, logits.amax(-1, keepdim=True))

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits, (batch, vocab_size), in which tokens that are not allowed have -inf."""
        return logits if self._banned is None else logits.masked_fill(self._banned, -torch.inf)

    def draw(self, logits: Tensor, largest: Tensor) -> Tensor:
        """Draw by logits of `allowed`.

        Args:
            logits: shape (batch, vocab_size).
            largest: of each row, shape (batch, 1).

        Returns:
            Tokens, int64, shape (batch,).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        # A random race: a token of probability p ends after a time that is exponential with rate p,
        # and wins with probability p. One of probability 0 never ends. Only the order of p / time
        # matters, so that of their logarithms, with any constant added, times the temperature.
        cut = self._most_likely(logits, largest)
        if self._cuts_shares:
            cut = cut.masked_fill(self._shares(cut) == 0, -torch.inf)
        factor = min(max(self.temperature, _COLDEST), _HOTTEST)
        return torch.sub(cut, self._log_times(cut.shape), alpha=factor).argmax(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """With which probability each token is drawn, at a temperature above 0.

        Args:
            logits: shape (batch, vocab_size), floating; -inf where a token is not allowed.

        Returns:
            float64, shape (batch, vocab_size).
        """
        return self._shares(self._most_likely(logits, logits.amax(-1, keepdim=True)))

    @property
    def _cuts_shares(self) -> bool:
        return self.top_p is not None and self.top_p < 1

    def _most_likely(self, logits: Tensor, largest: Tensor) -> Tensor:
        """Logits less the largest, float64, those beyond `top_k` -inf.

        They are at most 0: a quotient by a cold temperature may be -inf, but never inf, and large
        logits that are nearly equal keep the digits in which they differ.
        """
        logits = logits.double() - largest
        if self.top_k is not None and self.top_k < self._vocab_size:
            lowest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        return logits

    def _shares(self, cut: Tensor) -> Tensor:
        """Probabilities, by logits of `_most_likely`."""
        shares = (cut / self.temperature).softmax(-1)
        if not self._cuts_shares:
            return shares
        falling, order = shares.sort(descending=True, stable=True)
        # Those that the more likely ones alone reach top_p without.
        assert self.top_p is not None
        falling.masked_fill_(falling.cumsum(-1) - falling >= self.top_p, 0)
        shares.scatter_(-1, order, falling)
        return shares.div_(shares.sum(-1, keepdim=True))

    def _log_times(self, shape: torch.Size) -> Tensor:
        """Logarithms of exponential times: float64, of this shape."""
        if not self._times or self._times[-1].shape != shape:
            count = max(1, _TIMES // max(1, shape.numel()))
            with torch.inference_mode(False):  # for draws in any mode
                device = self._generator.device
                times = torch.empty((count, *shape), dtype=torch.float64, device=device)
                times.uniform_(_SMALLEST, 1, generator=self._generator).log_().neg_().log_()
                self._times = list(times.unbind())
        return self._times.pop()


def _check_number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {in_brief(value)}")
    return float(value)


def _banned(allowed: Tensor, vocab_size: int) -> Tensor:
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        raise TypeError(f"allowed must be a tensor of bool; got {in_brief(allowed)}")
    if allowed.shape != (vocab_size,):
        raise ValueError(f"allowed must have shape ({vocab_size},); got {shape_in_brief(allowed)}")
    if not allowed.any():
        raise ValueError("allowed must have a token that may be drawn; got none")
    return ~allowed
