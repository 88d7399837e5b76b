"""torch's ``fake`` groups: a dry run of one rank of many."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import world
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.nn import LongNet, LongNetConfig


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield world()
    dist.destroy_process_group()


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_shapes_are_those_of_a_rank(four_ranks, exchange):
    layout = SequenceLayout.zigzag(101, 4)
    shape = 1, layout.local_length(1), 4, 8
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    pattern = DilatedPattern([16, None], [1, 3])
    options: Any = {"group": four_ranks, "layout": layout, "exchange": exchange, "is_causal": True}
    out = dilated_attention(query, key, value, pattern, **options)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert [x.shape for x in (out, *gradients)] == [torch.Size(shape)] * 4
    assert all(x.isfinite().all() for x in (out, *gradients))


def test_a_model_runs(four_ranks):
    config = LongNetConfig(
        segment_lengths=[16, None], dilation_rates=[1, 4], num_layers=2, embed_dim=32, num_heads=4,
        ffn_dim=64,
    )  # fmt: skip
    model, tokens = LongNet(config), torch.randint(config.vocab_size, (1, 24))
    model.loss(tokens, tokens, group=four_ranks).backward()
    assert all(p.grad is not None for p in model.parameters())
