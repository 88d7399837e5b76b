"""Prov-GigaPath's weights in `SlideEncoder`: what its own code computes with them.

With `GIGAPATH` in the environment, that is its own code; else the stand-in of `slide_models`.
"""

import argparse
from typing import Any

import pytest
import torch
from support.bounds import EXACT
from support.slide_models import FEATURES, gigapath, slide
from torch import nn

from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig

SLIDES = (40, 1, 23)


def ours(model, state=None, **options):
    attention = model.encoder.layers[0].self_attn
    fields = {
        "num_heads": attention.num_heads,
        "segment_lengths": list(attention.args.segment_length),
        "dilation_rates": list(attention.args.dilated_ratio),
    }
    weights = model.state_dict() if state is None else state
    return SlideEncoder.from_gigapath(
        weights, global_pool=model.global_pool, **{**fields, **options}
    )


def loss_of(vectors):
    return sum((scale * x.sin()).sum() for scale, x in enumerate(vectors, 1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("global_pool", [False, True])
def test_vectors_and_gradients_are_those_of_their_code(global_pool, packed):
    model = gigapath(global_pool=global_pool)
    encoder = ours(model)
    given = [slide(tiles, seed=tiles) for tiles in SLIDES]
    given = [(x, where + torch.arange(where.shape[1])[:, None] % 256) for x, where in given]
    alone = [(model(*x)[0], *model(*x, all_layer_embed=True)) for x in given]
    wanted = [torch.cat(each) for each in zip(*alone, strict=True)]
    if packed:
        features, where = (torch.cat(each, 1) for each in zip(*given, strict=True))
        found = encoder(features, where, documents=[0, 40, 41, 64], all_layers=True)
        vectors = [found.cls, *found.layers]
    else:
        each = [encoder(*x, all_layers=True) for x in given]
        vectors = [torch.cat([x.cls[:, 0] for x in each])]
        vectors += torch.cat([x.layers[:, :, 0] for x in each], 1)
    for got, want in zip(vectors, wanted, strict=True):
        assert relative_error(got, want) < 1e-10
    loss_of(vectors).backward()
    loss_of(wanted).backward()
    theirs = {name: x.grad for name, x in model.named_parameters()}
    named = dict(encoder.named_parameters(), **encoder.state_dict(keep_vars=True))
    for key, parameter in zip(encoder.to_gigapath(), named.values(), strict=True):
        want = theirs[key]
        assert (parameter.grad - want).norm() < EXACT * max(want.norm(), 1), key


def test_weights_go_back():
    model = gigapath()
    encoder = ours(model)
    back = encoder.to_gigapath()
    assert back.keys() == model.state_dict().keys()
    assert all(map(torch.equal, map(back.get, model.state_dict()), model.state_dict().values()))
    encoder.cls_token.data.zero_()
    assert model.cls_token.abs().min() > 0  # a copy
    with pytest.raises(ValueError, match="to_gigapath needs a SlideEncoder made by from_gigapath"):
        SlideEncoder(SlideEncoderConfig(num_layers=1, embed_dim=32, ffn_dim=8)).to_gigapath()


def test_a_file_as_published_and_one_of_a_fine_tuned_model(tmp_path):
    """With what a training program has beside it, a prefix, and what their code does not read."""
    model = gigapath(global_pool=True)
    (want,), file = model(*slide(9)), tmp_path / "slide_encoder.pth"
    state = {**model.state_dict(), "mask_token": torch.zeros(3), "pos_embed": torch.zeros(1, 2)}
    torch.save({"model": state, "args": argparse.Namespace(epochs=3)}, file)
    assert relative_error(ours(model, file)(*slide(9)).cls[0], want) < 1e-10
    whole = nn.ModuleDict({"classifier": nn.Linear(3, 2), "slide_encoder": model})
    torch.save(whole.state_dict(), file)
    encoder = ours(model, str(file), checkpoint="full")
    assert relative_error(encoder(*slide(9)).cls[0], want) < 1e-10
    assert encoder.checkpoint == "full"
    assert all(p.requires_grad and p.dtype == torch.float64 for p in encoder.parameters())


def test_shapes_follow_from_the_weights():
    config = ours(gigapath()).config
    assert (config.in_dim, config.num_layers) == (FEATURES, 2)
    state = gigapath().state_dict()
    fields: dict[str, Any] = {"num_heads": 4}
    default = SlideEncoder.from_gigapath(state, **fields).config
    assert default.segment_lengths == SlideEncoderConfig().segment_lengths
    assert default.dilation_rates == SlideEncoderConfig().dilation_rates
    # As prov-gigapath's get_optimal_segment_length has them for its fine-tuning, and larger tiles.
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"max_wsi_size": 250_000}, (1024, 4870, 23170, 110217, 524288)),
        ({"tile_size": 512}, (1024, 4096, 16384, 65536, 262144)),
    ]
    for given, lengths in cases:
        config = SlideEncoder.from_gigapath(state, **fields, **given).config
        assert config.segment_lengths == lengths
        assert config.tile_size == given.get("tile_size", 256)


def changed(without="", **added):
    return {k: x for k, x in (gigapath().state_dict() | added).items() if k != without}


REFUSED = {
    "another": (lambda: {"weight": 0}, r"no key ends with 'patch_embed.*; got keys weight"),
    "none": (dict, "got keys none"),
    "norm": (
        lambda: changed("encoder.layer_norm.bias"),
        r"encoder lack encoder\.layer_norm\.bias$",
    ),
    "no layers": (
        lambda: changed("encoder.layers.0.ffn.fc1.weight"),
        r"lack encoder\.layers\.0\.ffn\.fc1\.weight",
    ),
    "positions": (
        lambda: changed(**{"encoder.embed_positions.weight": torch.zeros(2)}),
        r"slide encoder also have encoder\.embed_positions\.weight$",
    ),
}


@pytest.mark.parametrize(("state", "message"), REFUSED.values(), ids=REFUSED)
def test_other_weights_are_refused(state, message):
    with pytest.raises(ValueError, match=message):
        SlideEncoder.from_gigapath(state(), num_heads=4)


def test_no_code_of_a_file_runs(tmp_path):
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "x.pth")
    with pytest.raises(Exception, match="Weights only load failed"):
        SlideEncoder.from_gigapath(tmp_path / "x.pth")
