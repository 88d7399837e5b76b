"""Small models and their inputs, and how often each operator is called."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention.nn import LongNet, LongNetConfig, SlideEncoder, SlideEncoderConfig
from ring_dilated_attention.nn.slides import Slide

LENGTH = 23
SHAPE: dict[str, Any] = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "ffn_dim": 48}


class Count(TorchDispatchMode):
    """Counts how often operators run; what checkpointing takes from its cache does not run."""

    def __init__(self):
        super().__init__()
        self.runs = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[func] = self.runs.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def make_model(checkpoint="none", chunk_rows=None, dtype=torch.float64, *, blocks=1, layers=2):
    torch.manual_seed(0)
    config = LongNetConfig(
        **{**SHAPE, "num_layers": layers},
        num_kv_heads=2,
        segment_lengths=(6, 11, None),
        dilation_rates=(1, 2, 3),
    )
    model = LongNet(config, checkpoint=checkpoint, checkpoint_blocks=blocks, chunk_rows=chunk_rows)
    return model.to(dtype)


def make_text():
    text = torch.randint(0, 256, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1], text[:, 1:]


def small(**changes):
    values = {
        "in_dim": 12,
        **SHAPE,
        "segment_lengths": [6, 17, 29, None],
        "dilation_rates": [1, 2, 4, 3],
    }
    return SlideEncoderConfig(**{**values, **changes})


def encoder(seed=0, **options):
    changes = {key: options.pop(key) for key in list(options) if key in small().__dict__}
    torch.manual_seed(seed)
    model = SlideEncoder(small(**changes), **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def slide(tiles=40, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, tiles, 12, dtype=torch.float64, generator=generator)
    return features, torch.randint(0, 50, (batch, tiles, 2), generator=generator) * 256


def cohort(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Slide(
            f"slide {number}",
            torch.randn(tiles, 12, dtype=torch.float64, generator=generator),
            torch.randint(0, 50_000, (tiles, 2), generator=generator),
            (256.0, 448.5, 100.0)[number % 3],
        )
        for number, tiles in enumerate(sizes)
    ]


def own_tiles(layout, rank, *tensors):
    rows = layout.positions(rank)
    return [x[:, rows[rows > 0] - 1] for x in tensors]
