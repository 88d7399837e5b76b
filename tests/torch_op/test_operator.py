"""The operators under torch's dispatcher: tensors without data, inference mode."""

import pytest
import torch
from support.tolerances import assert_close_to

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.exchange import run_loopback

PATTERN = DilatedPattern([8, None], [1, 2])


def case(device="cpu"):
    """Query, key, value and dout."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 20, 2, 16, generator=generator).to(device) for _ in range(4)]


def test_dilated_attention_of_meta_tensors():
    """Nothing is computed: kernels of other devices will do, and no other rank is waited for."""

    def rank(ends):
        if ends.rank == 0:
            query, key, value, dout = case("meta")
            query.requires_grad_()
            options = {"group": ends, "backend": "flash", "return_lse": True}
            out, lse = dilated_attention(query, key, value, PATTERN, **options)
            out.backward(dout)
            assert out.is_meta
            assert lse.shape == (1, 2, 20)
            assert query.grad.is_meta

    run_loopback(2, rank)


@pytest.mark.parametrize(
    "options",
    [
        {"documents": [0, 5]},
        {"documents": torch.tensor([0, 9, 7, 20])},
        {"lengths": [21]},
        {"lengths": [3, 4]},
        {"layout": SequenceLayout.contiguous(21, 1)},
        {"layout": SequenceLayout.contiguous(20, 2)},
    ],
)
def test_dilated_attention_of_meta_tensors_with_integers_that_do_not_fit(options):
    """Refused as where something is computed."""
    said = []
    for device in ("cpu", "meta"):
        query, key, value, _ = case(device)
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            dilated_attention(query, key, value, PATTERN, **options)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_dilated_attention_where_autograd_is_off():
    """Inference mode, also where `enable_grad` makes no difference; and below autograd."""
    query, key, value, _ = case()
    expected = dilated_attention(query, key, value, PATTERN)
    leaf = query.clone().requires_grad_()
    with torch.inference_mode():
        outs = [
            dilated_attention(query.clone(), key.clone(), value.clone(), PATTERN),
            dilated_attention(leaf, key, value, PATTERN),
        ]
        with torch.enable_grad():
            outs.append(dilated_attention(leaf, key, value, PATTERN))
    with torch._C._AutoDispatchBelowAutograd():
        outs.append(dilated_attention(leaf, key, value, PATTERN))
    for out in outs:
        assert not out.requires_grad
        assert_close_to(out, expected, terms=20 * 16)


def test_a_call_passes_the_dispatcher_once():
    query, key, value, _ = case()
    with torch.profiler.profile() as profile:
        dilated_attention(query.requires_grad_(), key, value, PATTERN)
    names = [event.name for event in profile.events()]
    assert names.count("ring_dilated_attention::forward") == 1
