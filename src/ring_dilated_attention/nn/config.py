"""The shapes of models as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ..options import BranchGradients, check_options
from ..pattern import (
    DilatedPattern,
    HeadBranches,
    HeadOffsets,
    Length,
    check_choice,
    check_positive_float,
    check_positive_int,
    in_brief,
)
from .heads import check_head_sizes
from .positions import RotaryEmbedding

Pooling: TypeAlias = Literal["cls", "mean"]


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
        segment_lengths: one per branch of the pattern, in positions; None means the whole document,
            a `Window` a sliding window; see `DilatedPattern`.
        dilation_rates: one per branch of the pattern, in positions.
        head_offsets: ``"interleaved"``, the default (the LongNet paper), or ``"blocked"``
            (torchscale); see `DilatedPattern`.
        head_branches: ``"all"``, the default (the paper), or ``"split"``; see `DilatedPattern`.
        patterns: one `DilatedPattern` per block, in place of a single one of `segment_lengths` to
            `head_branches`, which then keep their defaults. None, the default: all blocks have that
            one.
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
    segment_lengths: Sequence[Length] = ()
    dilation_rates: Sequence[int] = ()
    head_offsets: HeadOffsets = "interleaved"
    head_branches: HeadBranches = "all"
    patterns: Sequence[DilatedPattern] | None = None  # kept as a tuple
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _check(self, "vocab_size", "num_layers", "ffn_dim")
        *_, head_dim = check_head_sizes(self.embed_dim, self.num_heads, self.num_kv_heads)
        RotaryEmbedding(head_dim, theta=check_positive_float("rope_theta", self.rope_theta))

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern of every block; a `ValueError` where each has its own, of `patterns`."""
        return _one_pattern(self, head_branches=self.head_branches)


@dataclass(frozen=True, kw_only=True)
class SlideEncoderConfig:
    """The shape of a `SlideEncoder`.

    Default sizes, segment lengths and dilation rates are those of Prov-GigaPath's encoder. Head
    offsets, zero keys and gradients are LongNet's by default; Prov-GigaPath's are ``"blocked"``,
    True and ``"detached"``.

    Args:
        in_dim: width of the features of a tile.
        num_layers: number of blocks.
        embed_dim: width of the residual stream, a multiple of 4.
        num_heads: heads per block; divides `embed_dim`.
        ffn_dim: width of the hidden layer of the MLP.
        segment_lengths: one per branch of the pattern, in positions; None means the whole slide,
            a `Window` a sliding window; see `DilatedPattern`.
        dilation_rates: one per branch of the pattern, in positions.
        head_offsets: ``"interleaved"``, the default (the LongNet paper), or ``"blocked"``
            (torchscale); see `DilatedPattern`.
        zero_keys: whether segments with too few keys for a head are filled up with keys of score 0
            and value 0, as torchscale does; see `DilatedPattern`. Default False (the paper).
        patterns: one `DilatedPattern` per block, in place of a single one of `segment_lengths` to
            `zero_keys`, which then keep their defaults. None, the default: all blocks have that
            one.
        branch_gradients: ``"exact"``, the default, differentiates the whole function;
            ``"detached"`` has no gradient through the weights that mix the branches, as in
            torchscale.
        tile_size: side of a tile in units of the coordinates; GigaPath's are pixels, 256 per tile.
        grid_positions: whether the embedded position of a tile is that of a cell of a grid of whole
            tiles, second coordinate first, as in Prov-GigaPath. Default False: its exact place.
        pooling: what is the vector of a slide: ``"cls"``, the default, its class token, or
            ``"mean"``, the mean of its tiles (``global_pool`` of Prov-GigaPath).
        pooled_norm_eps: epsilon of one more layer norm, of the vector of the slide, as
            Prov-GigaPath has it, with 1e-6. None, the default: there is none.
        norm_eps: epsilon of the other layer norms.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range; the message names it.
    """

    in_dim: int = 1536
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 16
    ffn_dim: int = 3072
    segment_lengths: Sequence[Length] = (1024, 5792, 32768, 185363, 1048576)
    dilation_rates: Sequence[int] = (1, 2, 4, 8, 16)
    head_offsets: HeadOffsets = "interleaved"
    zero_keys: bool = False
    patterns: Sequence[DilatedPattern] | None = None  # kept as a tuple
    branch_gradients: BranchGradients = "exact"
    tile_size: float = 256.0
    grid_positions: bool = False
    pooling: Pooling = "cls"
    pooled_norm_eps: float | None = None
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _check(self, "in_dim", "num_layers", "ffn_dim")
        check_head_sizes(self.embed_dim, self.num_heads, None)
        if self.embed_dim % 4:
            raise ValueError(f"embed_dim must be a multiple of 4; got {self.embed_dim}")
        check_positive_float("tile_size", self.tile_size)
        check_choice("pooling", self.pooling, get_args(Pooling))
        if self.pooled_norm_eps is not None:
            check_positive_float("pooled_norm_eps", self.pooled_norm_eps)
        check_options(branch_gradients=self.branch_gradients)

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern of every block; a `ValueError` where each has its own, of `patterns`."""
        return _one_pattern(self, zero_keys=self.zero_keys)


def block_patterns(config: LongNetConfig | SlideEncoderConfig) -> tuple[DilatedPattern, ...]:
    """The pattern of each block."""
    return tuple(config.patterns or [config.pattern] * config.num_layers)


def _one_pattern(config: LongNetConfig | SlideEncoderConfig, **options: Any) -> DilatedPattern:
    if config.patterns is not None:
        raise ValueError("each block has a pattern of its own: look at patterns of this config")
    lengths, rates = config.segment_lengths, config.dilation_rates
    return DilatedPattern(lengths, rates, head_offsets=config.head_offsets, **options)


def _check(config: LongNetConfig | SlideEncoderConfig, *counts: str) -> None:
    for name in counts:
        check_positive_int(name, getattr(config, name))
    check_positive_float("norm_eps", config.norm_eps)
    # Lists (from JSON, say) become tuples, so that configs hash and compare by value.
    if config.patterns is not None:
        object.__setattr__(config, "patterns", _checked_patterns(config))
        return
    pattern = config.pattern
    object.__setattr__(config, "segment_lengths", pattern.segment_lengths)
    object.__setattr__(config, "dilation_rates", pattern.dilation_rates)


def _checked_patterns(config: LongNetConfig | SlideEncoderConfig) -> tuple[DilatedPattern, ...]:
    for name in ("segment_lengths", "dilation_rates", "head_offsets", "head_branches", "zero_keys"):
        given, default = (getattr(x, name, None) for x in (config, type(config)))
        if (tuple(given) if isinstance(given, list) else given) != default:
            raise ValueError(f"give patterns or {name}, not both; got {name}={in_brief(given)}")
        if default is not None:
            object.__setattr__(config, name, default)
    got: Any = config.patterns
    if isinstance(got, Sequence):
        found = [DilatedPattern(**x) if isinstance(x, Mapping) else x for x in got]  # of JSON
        are_whole = all(isinstance(x, DilatedPattern) and x.head_slice is None for x in found)
        if len(found) == config.num_layers and are_whole:
            return tuple(found)
    raise ValueError(
        f"patterns must be {config.num_layers} DilatedPatterns, one per block, each of all heads; "
        f"got {len(got) if isinstance(got, Sequence) else in_brief(got)}"
    )
