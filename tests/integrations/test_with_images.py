"""Vision models of transformers: the patches of an image are the sequence."""

import pytest
import torch
import transformers
from support.bounds import EXACT
from support.transformers_models import (
    DENSE,
    PATTERN,
    check_gradients,
    check_refused_on_ranks,
    on_group,
    summed,
)
from torch import nn

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.integrations.transformers import (
    remove_attention,
    set_attention,
    set_layout,
)

SIZE = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "image_size": 24, "patch_size": 4},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
TOKENS = {"ViT": 37, "Siglip": 36}  # ViT has a class token in front of 6 x 6 patches
IMAGES = torch.randn(2, 3, 24, 24, generator=torch.manual_seed(0)).double()


def vision(family, pools=False, **changes):
    """A small model in float64."""
    torch.manual_seed(0)
    options = {"attn_implementation": "sdpa", **SIZE, **changes}
    if family == "ViT":
        model = transformers.ViTModel(transformers.ViTConfig(**options), add_pooling_layer=pools)
    else:
        config = transformers.SiglipVisionConfig(**options, vision_use_head=pools)
        model = transformers.SiglipVisionModel(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("family", TOKENS)
def test_dense_is_what_transformers_computes(family, pools):
    model = vision(family, pools)
    want = model(IMAGES)
    set_attention(model, DENSE)
    got = model(IMAGES)
    assert relative_error(got.last_hidden_state, want.last_hidden_state) < EXACT
    if pools:
        assert relative_error(got.pooler_output, want.pooler_output) < EXACT
    set_attention(model, PATTERN)
    other = model(IMAGES).last_hidden_state
    assert relative_error(other, want.last_hidden_state) > 1e-2
    remove_attention(model, dense=True)
    assert torch.equal(model(IMAGES).last_hidden_state, want.last_hidden_state)


@pytest.mark.parametrize("head", ["ViTForImageClassification", "SiglipForImageClassification"])
def test_a_head_of_images_and_saving_it(tmp_path, head):
    torch.manual_seed(0)
    if head.startswith("ViT"):
        config = transformers.ViTConfig(**SIZE)
    else:
        config = transformers.SiglipConfig(vision_config=SIZE, text_config={"vocab_size": 50000})
    model = getattr(transformers, head)(config).double().eval()
    want = model(IMAGES).logits
    set_attention(model, DENSE)
    assert relative_error(model(IMAGES).logits, want) < EXACT
    set_attention(model, PATTERN)
    want = model(IMAGES).logits
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, head).from_pretrained(tmp_path)
    assert relative_error(loaded(IMAGES).logits, want) < EXACT
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'"):
        getattr(transformers, head).from_pretrained(tmp_path, attn_implementation="sdpa")


def step(model, weight):
    """Hidden states, and gradients of a loss of each of them alone."""
    hidden = model(IMAGES).last_hidden_state
    return hidden.detach(), torch.autograd.grad((hidden * weight).sum(), list(model.parameters()))


@pytest.mark.filterwarnings(  # its new name came with transformers 5.23
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("family", TOKENS)
def test_any_ranks_have_one_result_and_gradient(family, kind, recompute):
    model, tokens = vision(family), TOKENS[family]
    set_attention(model, PATTERN)
    if recompute:
        model.train()
        model.gradient_checkpointing_enable()
    weight = torch.randn(2, tokens, 32, generator=torch.manual_seed(1)).double()
    whole, want = step(model, weight)
    layout = getattr(SequenceLayout, kind)(tokens, 3)
    outcomes = on_group(
        model, 3, lambda own, ends: step(own, layout.shard(weight, ends.rank, 1)), layout=layout
    )
    assert relative_error(layout.unshard([x for x, _ in outcomes], 1), whole) < EXACT
    check_gradients(summed(outcomes), want, EXACT)


def test_tokens_that_ranks_share_evenly_need_no_layout():
    model = vision("Siglip")
    set_attention(model, PATTERN)
    shards = on_group(model, 3, lambda own, ends: own(IMAGES).last_hidden_state)
    assert relative_error(torch.cat(shards, 1), model(IMAGES).last_hidden_state) < EXACT


REFUSED = {
    "a pooler": (lambda: vision("ViT", True), "must not pool .*: make it with add_pooling_layer"),
    "attention that pools": (lambda: vision("Siglip", True), "config.vision_use_head = False"),
    "a head of images": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZE)),
        "a head must treat every token alone, .* call set_attention with the ViTModel in it",
    ),
    "another family": (
        lambda: transformers.Dinov2Model(transformers.Dinov2Config(**SIZE)),
        "the models of images are ViTModel and SiglipVisionModel; got Dinov2Model",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_on_ranks_what_mixes_tokens_is_refused(build, message):
    check_refused_on_ranks(build(), message)


def test_images_of_several_sizes_are_refused():
    """Siglip2 pads them; transformers takes the mask to the attention, which has none."""
    options = {"attn_implementation": "sdpa", **SIZE, "num_patches": 36, "vision_use_head": False}
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**options)).double()
    batch = {
        "pixel_values": torch.randn(2, 30, 48).double(),
        "pixel_attention_mask": torch.ones(2, 30, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[5, 6], [5, 6]]),
    }
    want = model(**batch).last_hidden_state
    set_attention(model, DENSE)
    assert relative_error(model(**batch).last_hidden_state, want) < EXACT
    batch["pixel_attention_mask"][1, 20:] = 0
    batch["spatial_shapes"][1] = torch.tensor([4, 5])
    with pytest.raises(ValueError, match="pixel_attention_mask must be 1, got 10 others; call the"):
        model(**batch)


def test_bad_calls_are_errors_on_every_rank():
    model = vision("ViT")
    set_attention(model, PATTERN)
    with pytest.raises(ValueError, match="a model of images must have no attention_mask"):
        model(IMAGES, attention_mask=torch.ones(2, 37))
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(IMAGES, output_attentions=True)

    def run(own, ends):
        with pytest.raises(ValueError, match=r"37 tokens, .*set_layout\(model, Seq"):
            own(IMAGES)
        set_layout(own, SequenceLayout.contiguous(37, 2))
        with pytest.raises(ValueError, match=r"pixel_values is .* on rank 0, .* on rank 1"):
            own(IMAGES + ends.rank)
        own(IMAGES)

    on_group(model, 2, run)
