"""Models that generate in tests, and what they should."""

from typing import Any

import torch

from ring_dilated_attention.nn import LongNet, LongNetConfig

VOCABULARY = 31


def make_model(seed: int = 0, **changes: Any) -> LongNet:
    config = {
        "vocab_size": VOCABULARY,
        "num_layers": 2,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
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
