"""Models go around faults of torch's compiler: while they are compiled, and not otherwise."""

import pytest
import torch
from torch._inductor import config

from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig, slide

pytestmark = [
    pytest.mark.skipif(
        not hasattr(config.triton, "mix_order_reduction"), reason="torch is older than the fault"
    ),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize("miscounts", [False, True])
def test_slides_of_changing_lengths(miscounts, monkeypatch):
    """The class token is a row more than there are tiles."""
    monkeypatch.setattr(slide, "MISCOUNTS_ROWS", miscounts)
    torch.manual_seed(0)
    shape = SlideEncoderConfig(
        in_dim=8,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        ffn_dim=16,
        segment_lengths=[8, None],
        dilation_rates=[1, 2],
    )
    encoder, settings = SlideEncoder(shape), []

    def backend(graph, inputs):
        settings.append(config.triton.mix_order_reduction)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend=backend, fullgraph=True)
    with config.patch({"triton.mix_order_reduction": True}):
        for length in (40, 41, 57):
            features, places = torch.randn(1, length, 8), torch.randint(0, 9, (1, length, 2))
            want = encoder(features, places)
            if not settings:
                assert config.triton.mix_order_reduction  # nothing is compiled yet
            got = compiled(features, places)
            torch.testing.assert_close(got.tiles, want.tiles)
            got.cls.sum().backward()
    assert settings == [not miscounts] * 2  # one graph for all lengths but the first
    torch._dynamo.reset()
