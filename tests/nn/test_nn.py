"""Attention modules and the language model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
from support.small_models import SHAPE
from support.tolerances import assert_close_to
from torch import nn

from ring_dilated_attention import DilatedPattern, SequenceLayout, Window
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import (
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    RotaryEmbedding,
)

PATTERN = DilatedPattern([6, 11, None], [1, 2, 3])
DENSE: dict[str, Any] = {"segment_lengths": [None], "dilation_rates": [1]}
TOKENS = torch.zeros(1, 4, dtype=torch.int64)
SMALL: dict[str, Any] = {"segment_lengths": [6, 11, None], "dilation_rates": [1, 2, 3]}
LAYERED: dict[str, Any] = {
    "segment_lengths": (),
    "dilation_rates": (),
    "patterns": [
        DilatedPattern.window(4),
        DilatedPattern([Window(3), 11, None], [1, 2, 3], head_branches="split"),
    ],
}


def small_config(**changes: Any) -> LongNetConfig:
    return LongNetConfig(**{**SHAPE, "num_kv_heads": 2, **SMALL, **changes})


def small_model(**changes: Any) -> LongNet:
    torch.manual_seed(0)
    return LongNet(small_config(**changes)).double()


# --- MultiheadDilatedAttention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_pattern_equals_torch_multihead_attention(is_causal: bool, bias: bool) -> None:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(24, 3, bias=bias, dtype=torch.float64, **DENSE)
    theirs = nn.MultiheadAttention(24, 3, bias=bias, batch_first=True, dtype=torch.float64)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.out_proj.weight.copy_(module.out_proj.weight)
        if bias:
            for projection in (*projections, module.out_proj):
                nn.init.normal_(projection.bias)
            theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
            theirs.out_proj.bias.copy_(module.out_proj.bias)
    query, key, value = (torch.randn(2, 13, 24, dtype=torch.float64) for _ in range(3))
    mask = nn.Transformer.generate_square_subsequent_mask(13, dtype=torch.float64)
    expected, _ = theirs(
        query, key, value, need_weights=False, attn_mask=mask if is_causal else None
    )
    out, weights = module(query, key, value, is_causal=is_causal)
    assert weights is None
    assert relative_error(out, expected) < 1e-12


def test_initial_weights_are_magnetos() -> None:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(256, 4, num_kv_heads=2, gamma_init=3.0, **SMALL)
    for linear, gain in (
        (module.q_proj, 1.0),
        (module.k_proj, 1.0),
        (module.v_proj, 3.0),
        (module.out_proj, 3.0),
    ):
        std = gain * (2 / (linear.in_features + linear.out_features)) ** 0.5
        assert linear.weight.std().item() == pytest.approx(std, rel=0.02)
        assert not linear.bias.any()


def test_rope_is_applied_to_query_and_key() -> None:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(24, 4, num_kv_heads=2, **DENSE)
    seen = []

    def zero(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return torch.zeros_like(x)

    x = torch.randn(1, 9, 24)
    out, _ = module(x, x, x, rope=zero)
    assert seen == [(1, 9, 4, 6), (1, 9, 2, 6)]
    # Equal scores: every row is the mean of the values.
    mean = module.v_proj(x).mean(1, keepdim=True).unflatten(-1, (2, 6)).repeat_interleave(2, 2)
    assert_close_to(out, module.out_proj(mean.flatten(2)).expand(1, 9, 24), terms=24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"need_weights": True}, "need_weights must be False: .* got True"),
        ({"attn_mask": torch.zeros(9, 9)}, "attn_mask must be None; use is_causal"),
        ({"key": torch.zeros(9, 24)}, r"key must have shape .* 24\); got \(9, 24\)"),
        ({"layout": SequenceLayout.contiguous(9, 2)}, "2 ranks"),
    ],
)
def test_forward_refuses(arguments: dict[str, Any], message: str) -> None:
    module = MultiheadDilatedAttention(24, 4, **SMALL)
    x = torch.zeros(1, 9, 24)
    with pytest.raises(ValueError, match=message):
        module(**{"query": x, "key": x, "value": x, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide embed_dim 24; got 5"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads 4; got 3"),
        ({"segment_lengths": [0]}, "segment length must be >= 1, got 0"),
        ({"layer_norm": True, "layer_norm_eps": 0}, "layer_norm_eps .* got 0"),
        ({"gamma_init": -1.0}, "gamma_init must be finite and above 0; got -1.0"),
        ({"exchange": "quick"}, "exchange must be one of 'auto', 'ring', 'gather'"),
    ],
)
def test_construction_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadDilatedAttention(**{"embed_dim": 24, "num_heads": 4, **DENSE, **arguments})


# --- RotaryEmbedding


def test_rotation_turns_pairs_by_their_angle() -> None:
    rope = RotaryEmbedding(4, theta=100.0)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).view(1, 1, 1, 4)
    for position in (0, 3, 2**27 + 1):
        turned = rope(torch.tensor([position]))(x).flatten()
        angles = torch.tensor([position, position / 10], dtype=torch.float64)
        assert_close_to(turned, torch.cat([angles.cos(), angles.sin()]))


def test_rotation_keeps_dtype_and_refuses_other_shapes() -> None:
    rotation = RotaryEmbedding(8)(torch.arange(5))
    assert rotation(torch.zeros(1, 5, 2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    for shape in ((1, 4, 2, 8), (1, 5, 2, 6), (5, 2, 8)):
        with pytest.raises(ValueError, match=r"needs shape \(batch, 5, heads, 8\); got"):
            rotation(torch.zeros(shape))


@pytest.mark.parametrize(
    ("head_dim", "theta", "message"),
    [(7, 10.0, "even head_dim; got 7"), (8, 1.0, "above 1; got 1.0"), (0, 10.0, ">= 1, got 0")],
)
def test_rotary_embedding_refuses(head_dim: int, theta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(head_dim, theta=theta)


# --- LongNet


def test_config_is_a_value() -> None:
    config = small_config(segment_lengths=(6, 11, None))
    assert config == small_config()
    assert hash(config) == hash(small_config())
    assert config.pattern == PATTERN
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3  # type: ignore[misc]


def test_blocks_have_patterns_of_their_own() -> None:
    model, one_by_one = small_model(**LAYERED), small_model()
    for block, pattern in zip(one_by_one.blocks, LAYERED["patterns"], strict=True):
        block.attention.pattern = pattern  # type: ignore[union-attr]
    tokens = torch.randint(0, 256, (2, 24))
    for each in (model, one_by_one):
        each.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for got, want in zip(model.parameters(), one_by_one.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)  # type: ignore[arg-type]
    saved = json.loads(json.dumps(dataclasses.asdict(model.config)))
    assert LongNetConfig(**saved) == model.config
    with pytest.raises(ValueError, match="a pattern of its own"):
        model.config.pattern  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be >= 1, got 0"),
        ({"num_layers": 1.5}, TypeError, "num_layers must be an int, got 1.5"),
        ({"num_heads": 3}, ValueError, "num_heads must divide embed_dim 32; got 3"),
        ({"num_heads": 32, "num_kv_heads": 1}, ValueError, "even head_dim; got 1"),
        ({"rope_theta": 0}, ValueError, "rope_theta must be finite and above 0; got 0"),
        ({"norm_eps": "x"}, TypeError, "norm_eps must be a number, got 'x'"),
        ({"patterns": [PATTERN] * 2}, ValueError, "patterns or segment_lengths, not both; got"),
        ({**LAYERED, "patterns": [PATTERN]}, ValueError, "patterns must be 2 .* got 1"),
        ({**LAYERED, "patterns": PATTERN}, ValueError, "patterns must be 2 .* got type"),
        ({**LAYERED, "head_branches": "split"}, ValueError, "patterns or head_branches, not both"),
    ],
)
def test_config_refuses(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        small_config(**changes)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"tokens": torch.zeros(1, 4)}, TypeError, "tokens must be int64; got torch.float32"),
        ({"tokens": TOKENS[0]}, ValueError, r"got \(4,\)"),
        ({"tokens": TOKENS - 1}, IndexError, "index out of range"),
        ({"labels": TOKENS.int()}, TypeError, "labels must be int64; got .*int32"),
        ({"labels": TOKENS[:, 1:]}, ValueError, r"the shape of tokens, \(1, 4\); got \(1, 3\)"),
        ({"layout": "zigzag"}, TypeError, "layout must be .*'zigzag'"),
        ({"layout": SequenceLayout.zigzag(5, 1)}, ValueError, "rank 0 a shard of 5 positions"),
    ],
)
def test_model_refuses(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        small_model()(**{"tokens": TOKENS, **given})


@pytest.mark.parametrize("wrong", ["width", "dtype", "rope"])
def test_a_layer_that_refuses_on_one_rank_does_on_all(wrong: str) -> None:
    """Else the others would wait, and take its next sequence for this one."""
    torch.manual_seed(0)
    layer = MultiheadDilatedAttention(16, 4, segment_lengths=[4, None], dilation_rates=[1, 3])
    layout, sequences = SequenceLayout.contiguous(8, 2), torch.randn(2, 1, 8, 16)
    want = layer(*[sequences[1]] * 3)[0]

    def rank_main(ends: Any) -> tuple[str, torch.Tensor]:
        first, second = (layout.shard(x, ends.rank, 1) for x in sequences)
        options: dict[str, Any] = {"group": ends, "layout": layout}
        if ends.rank:
            bad = {"width": first[..., :5], "dtype": first.half(), "rope": first}[wrong]
            rope = (lambda _: 1 / 0) if wrong == "rope" else None
            with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)) as caught:
                layer(bad, bad, bad, rope=rope, **options)
        else:
            with pytest.raises(ValueError, match="refused on other ranks: rank 1: ") as caught:
                layer(first, first, first, **options)
        return str(caught.value), layer(second, second, second, **options)[0]

    (_, one), (_, two) = run_loopback(2, rank_main)
    assert_close_to(torch.cat([one, two], 1), want, terms=16)


# --- in torch's containers


def in_torchs_layer(norm_first: bool) -> tuple[Any, Any]:
    """A layer of torch's, and a copy whose attention is ours, with the same weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first
    ).double()
    own: Any = copy.deepcopy(layer)
    own.self_attn = MultiheadDilatedAttention(32, 4, **DENSE).double()
    theirs, ours = layer.self_attn.state_dict(), own.self_attn.state_dict()
    for kind in ("weight", "bias"):
        projections = theirs[f"in_proj_{kind}"].chunk(3)
        for name, values in zip(("q_proj", "k_proj", "v_proj"), projections, strict=True):
            ours[f"{name}.{kind}"].copy_(values)
        ours[f"out_proj.{kind}"].copy_(theirs[f"out_proj.{kind}"])
    return layer, own


PADDING = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)


@pytest.mark.parametrize("container", ["layer", "encoder", "encoder, replaced"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
def test_attention_in_torchs_containers(container: str, norm_first: bool) -> None:
    """In evaluation too, where torch would take a fused kernel with weights that we lack."""
    theirs, ours = in_torchs_layer(norm_first)
    mask = "src_mask"
    if container != "layer":
        attention, mask = ours.self_attn, "mask"
        theirs = nn.TransformerEncoder(theirs, 2)
        ours = nn.TransformerEncoder(ours, 2) if container == "encoder" else copy.deepcopy(theirs)
        for layer in ours.layers:
            layer.self_attn = copy.deepcopy(attention)
    rows = torch.randn(2, 9, 32, dtype=torch.float64)
    causal = {mask: CAUSAL, "is_causal": True}
    for is_training, is_grad in itertools.product((False, True), (False, True)):
        ours.train(is_training), theirs.train(is_training)
        for options in ({}, {"src_key_padding_mask": PADDING}, causal):
            with torch.set_grad_enabled(is_grad):
                have, want = ours(rows, **options), theirs(rows, **options)
            valid = ~PADDING if "src_key_padding_mask" in options else ~PADDING[:1].expand(2, 9)
            torch.testing.assert_close(have[valid], want[valid], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"src_mask": CAUSAL}, "attn_mask must be None"),  # is_causal is not said
        ({"src_mask": CAUSAL + 1, "is_causal": True}, "attn_mask must be None"),
        ({"src_mask": CAUSAL[:, :-1], "is_causal": True}, "attn_mask must be None"),
        ({"src_key_padding_mask": PADDING * 0.5}, "key_padding_mask must be boolean"),
        ({"src_key_padding_mask": PADDING.flip(1)}, "must be a right padding"),
    ],
)
def test_other_masks_of_torchs_containers_are_refused(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        in_torchs_layer(False)[1](torch.randn(2, 9, 32, dtype=torch.float64), **options)


# --- the attention of a block is called as a module


def wrapped_by_hand(attention: Any, calls: list[int]) -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, *args: Any, **options: Any) -> Any:
            calls.append(1)
            return self.inner(*args, **options)

    return Wrapper()


def replaced_forward(attention: Any, calls: list[int]) -> None:
    attention.forward = wrapped_by_hand(attention.forward, calls).forward


def subclassed(attention: Any, calls: list[int]) -> None:
    class Own(MultiheadDilatedAttention):
        def forward(self, *args: Any, **options: Any) -> Any:
            calls.append(1)
            return super().forward(*args, **options)

    attention.__class__ = Own


def hooked(kind: str) -> Any:
    def hook(attention: Any, calls: list[int]) -> None:
        getattr(attention, kind)(lambda *_: calls.append(1))

    return hook


WATCHED = [
    *map(hooked, ("register_forward_hook", "register_forward_pre_hook")),
    *map(hooked, ("register_full_backward_hook", "register_full_backward_pre_hook")),
    *(replaced_forward, subclassed, wrapped_by_hand),
]


@pytest.mark.parametrize("watch", WATCHED)
@pytest.mark.parametrize("checkpoint", ["none", "full", "keep_attention"])
def test_attention_of_a_block_is_called_or_refused(checkpoint: Any, watch: Any) -> None:
    """Hooks, another forward and a wrapper run in every mode but chunk_rows, which refuses them."""
    calls: list[int] = []
    model = LongNet(small_config(), checkpoint=checkpoint).double()
    block: Any = model.blocks[0]
    want = model(TOKENS)
    block.attention = watch(block.attention, calls) or block.attention
    logits = model(TOKENS)
    logits.sum().backward()
    assert calls
    assert torch.equal(logits, want)
    model.chunk_rows = 2
    for is_grad in (True, False):
        with (
            torch.set_grad_enabled(is_grad),
            pytest.raises(ValueError, match=r"LongNetBlock\.attention, a .* chunk_rows uses its"),
        ):
            model(TOKENS)


@pytest.mark.parametrize(
    ("watch", "refusal"),
    [
        *((watch, None) for watch in (WATCHED[0], replaced_forward, subclassed)),
        (wrapped_by_hand, "must be a MultiheadDilatedAttention to generate; got a Wrapper"),
        (
            lambda attention, _: setattr(attention, "forward", lambda x, *_, **__: (x, None)),
            "leaves its argument attend aside",
        ),
        (
            lambda attention, _: setattr(attention, "attend", lambda query, *_, **__: query),
            "MultiheadDilatedAttention has an attend of its own",
        ),
    ],
)
def test_generate_calls_the_attention_of_a_block(watch: Any, refusal: str | None) -> None:
    calls: list[int] = []
    model = small_model()
    want = model.generate(TOKENS, 3)
    block: Any = model.blocks[0]
    block.attention = watch(block.attention, calls) or block.attention
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            model.generate(TOKENS, 3)
    else:
        assert torch.equal(model.generate(TOKENS, 3), want)
        assert len(calls) == 3  # the prompt, and two tokens
