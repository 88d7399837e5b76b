"""The shape of a language model as a frozen dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pattern import (
    DilatedPattern,
    HeadBranches,
    HeadOffsets,
    check_positive_float,
    check_positive_int,
)
from .checks import check_head_sizes
from .rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """The shape of a `LongNet`; two models with equal configs have the same parameters.

    Args:
        vocab_size: number of tokens; 256, the default, for bytes.
        num_layers: number of blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads per block; divides `embed_dim`, and the head size must be even.
        num_kv_heads: key and value heads, a divisor of `num_heads`; None, the default, means
            `num_heads`.
        ffn_dim: width of the hidden layer of the MLP.
        segment_lengths: one per branch of the pattern, in positions; None means the whole document.
        dilation_rates: one per branch of the pattern, in positions.
        head_offsets: offset of KV head h of H in a branch of rate r: ``"interleaved"``, the
            default, is h mod r (the LongNet paper), ``"blocked"`` is h // ceil(H / r)
            (torchscale).
        head_branches: ``"all"``, the default: every head runs every branch (the paper);
            ``"split"``: the heads are cut into one contiguous group per branch.
        rope_theta: base of the rotary wavelengths. Default 10,000.
        norm_eps: epsilon of the layer norms. Default 1e-5.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range; the message names it.
    """

    vocab_size: int = 256
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_dim: int
    segment_lengths: Sequence[int | None]
    dilation_rates: Sequence[int]
    head_offsets: HeadOffsets = "interleaved"
    head_branches: HeadBranches = "all"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "ffn_dim"):
            check_positive_int(name, getattr(self, name))
        *_, head_dim = check_head_sizes(self.embed_dim, self.num_heads, self.num_kv_heads)
        check_positive_float("norm_eps", self.norm_eps)
        RotaryEmbedding(head_dim, theta=check_positive_float("rope_theta", self.rope_theta))
        pattern = self.pattern
        # Lists (from JSON, say) become tuples, so that configs hash and compare by value.
        object.__setattr__(self, "segment_lengths", pattern.segment_lengths)
        object.__setattr__(self, "dilation_rates", pattern.dilation_rates)

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern of every block."""
        return DilatedPattern(
            self.segment_lengths,
            self.dilation_rates,
            head_offsets=self.head_offsets,
            head_branches=self.head_branches,
        )
