"""Models of transformers that are made of several: their language models, and what is refused."""

import copy

import pytest
import torch
import transformers
from support.bounds import SUMMED_IN_FLOAT32
from support.transformers_models import CACHE, DENSE, PATTERN, make
from torch import nn

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.integrations.transformers import DilatedCache, set_attention

LAYERS = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4}
TEXT = {**LAYERS, "num_hidden_layers": 2, "num_key_value_heads": 2}
TEXT |= {"vocab_size": 99, "max_position_embeddings": 128}
VISION = {**LAYERS, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
PATCHES = 16  # of an image
IMAGE, START = 98, 96  # tokens


def in_double(model):
    model = model.double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def batch(length=30):
    """Two rows of text around an image of 16 tokens; nothing is padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 90, (2, length), generator=generator)
    ids[:, 1] = START
    ids[:, 2 : 2 + PATCHES] = IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llava():
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    model = in_double(transformers.LlavaForConditionalGeneration(config))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    return model, {**batch(), "pixel_values": images}


def qwen(family="Qwen2VL"):
    """A model whose positions have three dimensions, which it computes from the images."""
    torch.manual_seed(0)
    vision = {
        **{"depth": 1, "num_heads": 4, "hidden_size": 32, "patch_size": 4},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    vision |= {"embed_dim": 32, "mlp_ratio": 2} if family == "Qwen2VL" else {}
    if family != "Qwen2VL":
        vision |= {"out_hidden_size": 32, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = getattr(transformers, f"{family}Config")(
        vision_config=vision,
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope},
        **{"image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": START},
        vision_end_token_id=95,
    )
    model = in_double(getattr(transformers, f"{family}ForConditionalGeneration")(config))
    given = batch()
    return model, {
        **given,
        "pixel_values": torch.randn(2 * 64, 3 * 2 * 16, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * 2),
        "mm_token_type_ids": (given["input_ids"] == IMAGE).int(),
    }


def logits(model, given):
    """Of valid tokens, without a cache, and as if there had been no call before."""
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    with torch.no_grad():
        found = model(**given, use_cache=False).logits
    return found * given["attention_mask"][..., None]


def padded(given):
    mask = given["attention_mask"].clone()
    mask[0, 23:] = 0
    return {**given, "attention_mask": mask}


MADE = {"llava": llava, "qwen2": qwen, "qwen2.5": lambda: qwen("Qwen2_5_VL")}


@pytest.mark.parametrize("name", MADE)
def test_a_language_model_beside_images_is_as_its_own_attention(name):
    model, given = MADE[name]()
    text = {key: given[key].clone() for key in ("input_ids", "attention_mask")}
    text["input_ids"][text["input_ids"] == IMAGE] = 5
    cases = [given, padded(given), text, padded(text)]
    want = [logits(model, case) for case in cases]
    options = {
        **{"max_new_tokens": 4, "do_sample": False, "eos_token_id": None},
        "suppress_tokens": [95, START, 97, IMAGE],
    }
    tokens = model.generate(**given, **options)
    language = model.model.language_model
    set_attention(language, DENSE)
    for case, expected in zip(cases, want, strict=True):
        assert relative_error(logits(model, case), expected) < SUMMED_IN_FLOAT32
    assert torch.equal(model.generate(**given, **options, use_cache=False), tokens)
    if name == "llava":
        cached = model.generate(**given, **options, **{CACHE: DilatedCache(language)})
        assert torch.equal(cached, tokens)
    else:
        with pytest.raises(ValueError, match=r"got \(4, 2, 30\) \(.* M-RoPE, .* use_cache=False"):
            model.generate(**given, **options, **{CACHE: DilatedCache(language)})
    set_attention(language, PATTERN)
    assert relative_error(logits(model, given), want[0]) > 1e-3


def test_documents_of_positions_in_dimensions():
    """The first of four dimensions is that of the text, which says where a document begins."""
    model, given = qwen()
    language = model.model.language_model
    set_attention(language, DENSE)
    ids = given["input_ids"][:1]
    text = torch.cat([torch.arange(11), torch.arange(19)])[None]
    with torch.no_grad():
        packed = language(ids, position_ids=text[None].expand(4, 1, -1)).last_hidden_state
        parts = [language(x).last_hidden_state for x in ids.split([11, 19], 1)]
    assert relative_error(packed, torch.cat(parts, 1)) < SUMMED_IN_FLOAT32
    with pytest.raises(ValueError, match=r"row 0, position 0 .* must have 0; got 3"):
        language(ids, position_ids=text[None].expand(4, 1, -1) + 3)


def test_the_model_numbers_tokens_where_it_has_the_whole_sequence():
    model, given = make(attn_implementation="sdpa").model, []
    ids = torch.arange(12)[None]
    want = model(ids).last_hidden_state
    whole, turned = SequenceLayout.contiguous(12, 1), SequenceLayout([[(5, 12), (0, 5)]])
    for layout in (None, whole, turned):
        set_attention(model, DENSE, layout=layout)
        layout = layout or whole
        handle = model.register_forward_pre_hook(
            lambda module, args, named: given.append(named["position_ids"]), with_kwargs=True
        )
        got = model(layout.shard(ids, 0, 1)).last_hidden_state
        assert relative_error(got, layout.shard(want, 0, 1)) < SUMMED_IN_FLOAT32
        handle.remove()
    assert given[:2] == [None, None]
    assert torch.equal(given[2], turned.positions(0)[None])


def clip(family="CLIP"):
    text = {**TEXT, "projection_size": 32, "eos_token_id": 98}
    del text["num_key_value_heads"]
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=VISION)
    return getattr(transformers, f"{family}Model")(config)


def git():
    vision = transformers.GitVisionConfig(**VISION).to_dict()
    return transformers.GitForCausalLM(transformers.GitConfig(vision_config=vision, **LAYERS))


WHOLE = {
    "llava": (
        lambda: llava()[0],
        r"model.model.vision_tower \(CLIPVisionModel\), model.model.language_model \(LlamaModel\): "
        r".* set_attention\(model.model.language_model, pattern\), and give generate "
        rf"{CACHE}=DilatedCache\(model.model.language_model\)",
    ),
    "without its head": (
        lambda: llava()[0].model,
        r"set_attention\(model.language_model, pattern\)$",
    ),
    "positions in dimensions": (lambda: qwen()[0], "and give generate use_cache=False$"),
    "CLIP": (clip, r"as set_attention\(model.text_model, pattern\)$"),
    "CLIPSeg": (lambda: clip("CLIPSeg"), "CLIPSegModel is made of several models"),
    "a part of several": (git, r"^(?!.*set_attention\(model.git, ).*made of several models"),
    "parts that are no models": (
        lambda: OfOldVersions(transformers.LlamaConfig(**TEXT)),
        r"model.text \(ModuleList\), model.images .*not supported",
    ),
}


class OfOldVersions(transformers.LlamaModel):
    """Parts of several configs that are no models themselves."""

    def __init__(self, config):
        super().__init__(config)
        self.text, self.images = copy.deepcopy(self.layers), copy.deepcopy(self.layers)
        del self.layers
        for layer in self.images:
            layer.self_attn.config = transformers.CLIPVisionConfig()


@pytest.mark.parametrize(("build", "message"), WHOLE.values(), ids=WHOLE)
def test_a_model_of_several_is_refused(build, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        set_attention(model, DENSE)
    assert model.config._attn_implementation != "ring_dilated_attention"


def test_the_towers_of_clip_have_attention_each():
    """The padding of the text means nothing to the image."""
    torch.manual_seed(0)
    model, given = in_double(clip()), padded(batch())
    given["pixel_values"] = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    want = model(**given)
    set_attention(model.text_model, DENSE)
    set_attention(model.vision_model, DENSE)
    got = model(**given)
    assert relative_error(got.image_embeds, want.image_embeds) < SUMMED_IN_FLOAT32
    assert relative_error(got.text_embeds, want.text_embeds) < SUMMED_IN_FLOAT32


def test_masks_that_contradict_the_layers_are_refused():
    """Gemma's layers are then bidirectional, and the mask that it asks for is causal."""
    gemma = make("Gemma", head="Model", head_dim=8, use_bidirectional_attention=True)
    bert = make("Bert", head="Model").eval()
    for model in (gemma, bert):
        set_attention(model, DENSE)
    ids = torch.arange(30).expand(2, -1)
    bert(ids)
    bert.encoder.layer[1].attention.self.is_causal = True
    causal = "has is_causal=False, .* asks for a causal mask"
    for model, mask, message in (
        (gemma, None, causal),
        (gemma, torch.ones_like(ids), causal),
        (bert, None, "has is_causal=True, .* asks for a bidirectional mask"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=mask)


def test_a_decoder_whose_config_is_bidirectional():
    """transformers then hands ``is_causal=False`` to its layers, and the masks agree."""
    model = make(head="Model", attn_implementation="eager", is_causal=False)
    ids = torch.arange(12)[None]
    want = model(ids).last_hidden_state  # eager rounds to float32
    set_attention(model, DENSE)
    assert relative_error(model(ids).last_hidden_state, want) < SUMMED_IN_FLOAT32


@pytest.mark.parametrize(
    ("build", "needs"), [(llava, rf"{CACHE}=DilatedCache"), (qwen, "use_cache=False")]
)
def test_generate_says_that_the_cache_is_that_of_the_part(build, needs):
    model, given = build()
    set_attention(model.model.language_model, DENSE)
    with pytest.raises(ValueError, match=rf"language_model, give generate {needs}"):
        model.generate(**given, max_new_tokens=2)


NAME = "ring_dilated_attention"


def test_a_saved_part_comes_back_by_the_name_of_its_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    model, given = llava()
    set_attention(model.model.language_model, PATTERN)
    want = logits(model, given)
    model.save_pretrained(tmp_path)
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    for options in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises(ValueError, match=rf"part of another, \{{'text_config': '{NAME}'\}}"):
            load(tmp_path, **options)
    whole = load(tmp_path, dtype=torch.float64, attn_implementation=NAME)
    with pytest.raises(
        ValueError, match=rf"no settings reached CLIP.*\{{'text_config': '{NAME}'\}}"
    ):
        logits(whole, given)
    part = load(tmp_path, dtype=torch.float64, attn_implementation={"text_config": NAME})
    assert relative_error(logits(part.eval(), given), want) < SUMMED_IN_FLOAT32
