"""Models that generate in tests, and what they should."""

from typing import Any

import torch
from hypothesis import strategies as st

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import LongNet, LongNetConfig
from support.small_models import SHAPE
from support.strategies import cached_patterns

VOCABULARY = 31
WORLD_SIZES = (1, 2, 3, 5)


def make_model(seed: int = 0, **changes: Any) -> LongNet:
    config = {
        "vocab_size": VOCABULARY,
        **SHAPE,
        "num_kv_heads": 2,
        "segment_lengths": [16, 40, None],
        "dilation_rates": [1, 2, 4],
    }
    torch.manual_seed(seed)
    model = LongNet(LongNetConfig(**{**config, **changes})).double()
    with torch.no_grad():  # else every token is followed by itself
        for weight in model.blocks.parameters():
            weight.mul_(3)
    return model


def greedy(model: LongNet, text: torch.Tensor, count: int) -> torch.Tensor:
    """By the full forward, token by token."""
    with torch.no_grad():
        for _ in range(count):
            text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    return text[:, -count:]


@st.composite
def generations(draw: st.DrawFn) -> dict[str, Any]:
    prompt, kv_heads, batch = (
        draw(st.integers(1, 80)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    world_size = draw(st.sampled_from(WORLD_SIZES))
    kind = draw(st.sampled_from(["contiguous", "zigzag"]))
    lengths = draw(st.none() | st.lists(st.integers(1, prompt), min_size=batch, max_size=batch))
    return {
        "pattern": draw(cached_patterns()),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "batch": batch,
        "prompt": prompt,
        "new": draw(st.lists(st.just(1) | st.integers(1, 60), min_size=1, max_size=8)),
        "world_size": world_size,
        "layout": SequenceLayout.named(kind, prompt, world_size, is_causal=True),
        "sharded": draw(st.booleans()),
        "lengths": lengths,
        "chunk_rows": draw(st.none() | st.integers(1, 50)),
        "seed": draw(st.integers(0, 1000)),
    }


def model_of(case: dict[str, Any]) -> LongNet:
    pattern = case["pattern"]
    model = make_model(
        case["seed"],
        num_heads=case["heads"],
        num_kv_heads=case["kv_heads"],
        embed_dim=4 * case["heads"],
        segment_lengths=pattern.segment_lengths,
        dilation_rates=pattern.dilation_rates,
        head_offsets=pattern.head_offsets,
        head_branches=pattern.head_branches,
    )
    model.chunk_rows = case["chunk_rows"]
    return model
