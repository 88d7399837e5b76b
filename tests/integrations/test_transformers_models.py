"""Models other than plain decoders: encoders, hybrids, the language model beside images."""

import copy

import pytest
import torch
import transformers
from support.bounds import EXACT, IN_FLOAT32, SUMMED_IN_FLOAT32
from support.transformers_models import (
    CACHE,
    DENSE,
    LENGTH,
    PATTERN,
    batch_of,
    check_ranks,
    check_refused_calls,
    encoder,
    make,
    restarts,
    shard_of,
)
from torch import nn

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import DilatedCache, set_attention

# --- encoders, on one process

ZIGZAG = SequenceLayout.zigzag(LENGTH, 3)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Roberta"])
def test_an_encoder_is_as_by_transformers_and_refused_on_ranks(family):
    model, batch = encoder(family), batch_of("padded")
    valid = batch["attention_mask"].bool()
    batch["input_ids"] = batch["input_ids"].clamp(min=2).where(valid, 1)
    want = model(**batch)
    set_attention(model, DENSE)
    got = model(**batch)
    assert relative_error(got.logits[valid], want.logits[valid]) < EXACT
    assert relative_error(got.loss, want.loss) < IN_FLOAT32
    set_attention(model, PATTERN)
    assert relative_error(model(**batch).logits[valid], want.logits[valid]) > 1e-2

    def run(ends):
        with pytest.raises(ValueError, match=r"on 2 ranks: only the types in DEC.* group=None"):
            set_attention(copy.deepcopy(model), PATTERN, group=ends)

    run_loopback(2, run)


# --- documents


@pytest.mark.parametrize("options", [{}, {"return_seq_idx": True}, {"return_position_ids": False}])
def test_a_flattening_collator(options):
    """DataCollatorWithFlattening: cu_seq_lens with position_ids, with seq_idx, and alone."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)
    documents = [{"input_ids": [3 + i % 50 for i in range(n)]} for n in (9, 1, 17, 14)]
    batch = dict(collate(documents))
    model = make()
    set_attention(model, PATTERN)
    want = model(**transformers.DataCollatorWithFlattening()(documents)).logits
    assert relative_error(model(**batch).logits, want) < SUMMED_IN_FLOAT32
    check_ranks(model, ZIGZAG, batch)
    batch["position_ids"] = restarts(LENGTH)  # rotations are relative: they may count on
    assert relative_error(model(**batch).logits, want) < SUMMED_IN_FLOAT32


IDS = torch.arange(LENGTH)[None]
LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
EMPTY = torch.tensor([0, 10, 10, LENGTH, LENGTH])
GIVEN = {"cu_seq_lens_q": EMPTY, "cu_seq_lens_k": EMPTY}
RESTARTS = {"position_ids": restarts(10, LENGTH - 10)}


@pytest.mark.parametrize(
    "family", ["Camembert", "Data2VecText", "Roberta", "RobertaPreLayerNorm", "XLMRobertaXL"]
)
def test_packed_documents_of_models_that_number_positions_themselves(family):
    """They count from pad_token_id + 1 = 2: row 1 of their table is that of padding."""
    model = encoder(family)
    set_attention(model, DENSE)
    model(IDS)
    ids = {"position_ids": torch.arange(LENGTH)[None] + 2}
    for known in (RESTARTS, ids, GIVEN):
        name = next(iter(known))
        message = rf"{name} must be None where .* pad_token_id \+ 1: .* a row of its own, .*; got T"
        with pytest.raises(ValueError, match=message):
            model(IDS, **known)


def test_linear_attention_gets_the_documents(monkeypatch):
    """F0. flash-linear-attention, which keeps them apart, is not installed: what it is given."""
    model, given = make("Qwen3Next", **LINEAR).float(), []
    layer = model.model.layers[0].linear_attn
    set_attention(model, DENSE)

    def forward(hidden_states, **options):
        given.append(options)
        return hidden_states

    monkeypatch.setattr(layer, "forward", forward)
    index = (IDS >= 10).int()
    model(input_ids=IDS, **GIVEN, seq_idx=index)
    assert given[0]["cu_seq_lens_q"] is EMPTY
    assert given[0]["seq_idx"] is index
    for known in (GIVEN, RESTARTS, {**RESTARTS, "seq_idx": index}):
        with pytest.raises(ValueError, match="Qwen3NextModel other than attention would not keep"):
            model(input_ids=IDS, **known)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("MiniMax", {"layer_types": LINEAR["layer_types"], "head_dim": 8}),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_layers_that_run_over_documents_are_refused(family, options):
    model = make(family, **options).float()
    set_attention(model, DENSE)
    model(input_ids=IDS)
    for known in (GIVEN, RESTARTS):
        with pytest.raises(ValueError, match=f"of {family}Model .* would not keep documents apart"):
            model(input_ids=IDS, **known)


def test_borders_of_empty_documents():
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("plain", rows=1)
    want = model(**batch, position_ids=restarts(10, LENGTH - 10)).logits
    batch.update(GIVEN, position_ids=restarts(10, LENGTH - 10))
    assert relative_error(model(**batch).logits, want) < SUMMED_IN_FLOAT32
    check_ranks(model, ZIGZAG, batch)
    batch["position_ids"] = restarts(11, LENGTH - 11)
    check_refused_calls(model, "same borders; got 10 in one", batch, layout=ZIGZAG)


def test_seq_idx_alone_says_nothing_to_attention():
    model = make()
    set_attention(model, PATTERN)
    batch = {"input_ids": batch_of("plain")["input_ids"][:1]}
    batch["seq_idx"] = (torch.arange(LENGTH) > 9).int()[None]
    message = "seq_idx names documents for layers other than att"
    with pytest.raises(ValueError, match=message):
        model(**batch)
    check_refused_calls(model, message, batch, layout=ZIGZAG)


# --- parts of models of several

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


def text_and_image(length=30):
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
    return model, {**text_and_image(), "pixel_values": images}


def qwen():
    """A model whose positions have three dimensions, which it computes from the images."""
    torch.manual_seed(0)
    vision = {
        **{"depth": 1, "num_heads": 4, "hidden_size": 32, "patch_size": 4},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    vision |= {"embed_dim": 32, "mlp_ratio": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLConfig(
        vision_config=vision,
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope},
        **{"image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": START},
        vision_end_token_id=95,
    )
    model = in_double(transformers.Qwen2VLForConditionalGeneration(config))
    given = text_and_image()
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


MADE = {"llava": llava, "qwen2": qwen}


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
        with pytest.raises(ValueError, match=r"is 'qwen2_vl_text': pass use_cache=False"):
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


def test_a_model_of_several_is_refused():
    model = llava()[0]
    with pytest.raises(ValueError, match=r"as model.model.language_model; got 'llava'"):
        set_attention(model, DENSE)
    assert model.config._attn_implementation != "ring_dilated_attention"


def test_the_whole_model_computes_its_loss_on_ranks():
    """F7. Its labels do not reach the part that has the ranks."""
    model, batch = llava()[0], batch_of("plain", rows=2)
    set_attention(model.model.language_model, PATTERN)
    want, layout = model(**batch).loss, ZIGZAG
    count = (batch["labels"][:, 1:] != -100).sum() / layout.world_size

    def run(ends):
        own = copy.deepcopy(model)
        set_attention(own.model.language_model, PATTERN, group=ends, layout=layout)
        shard = {**shard_of(batch, layout, ends), "num_items_in_batch": count}
        for name in ("shift_labels", "num_items_in_batch"):
            with pytest.raises(ValueError, match=f"ranks labels need {name}: .* got {name}=None"):
                own(**{**shard, name: None})
        return own(**shard).loss

    losses = run_loopback(layout.world_size, run)
    assert relative_error(sum(losses) / len(losses), want) < IN_FLOAT32


def test_masks_that_contradict_the_layers_are_refused():
    """Gemma's layers are then bidirectional, and the mask that it asks for is causal."""
    gemma = make("Gemma", head="Model", head_dim=8, use_bidirectional_attention=True)
    set_attention(gemma, DENSE)
    ids = torch.arange(30).expand(2, -1)
    for mask in (None, torch.ones_like(ids)):
        with pytest.raises(ValueError, match=r"a right padding, .* is_causal=False; got causal"):
            gemma(ids, attention_mask=mask)


def test_a_decoder_whose_config_is_bidirectional():
    """transformers then hands ``is_causal=False`` to its layers, and the masks agree."""
    model = make(head="Model", attn_implementation="eager", is_causal=False)
    ids = torch.arange(12)[None]
    want = model(ids).last_hidden_state  # eager rounds to float32
    set_attention(model, DENSE)
    assert relative_error(model(ids).last_hidden_state, want) < SUMMED_IN_FLOAT32


def test_generate_says_that_the_cache_is_that_of_the_part():
    model, given = llava()
    set_attention(model.model.language_model, DENSE)
    with pytest.raises(ValueError, match=r"pass DilatedCache\(that part\), or use_cache"):
        model.generate(**given, max_new_tokens=2)


def test_a_saved_part_comes_back_by_the_name_of_its_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    name = "ring_dilated_attention"
    model, given = llava()
    set_attention(model.model.language_model, PATTERN)
    want = logits(model, given)
    model.save_pretrained(tmp_path)
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    for options in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises(ValueError, match=r"part of another model, \{'text_config': 'ring_dil"):
            load(tmp_path, **options)
    whole = load(tmp_path, dtype=torch.float64, attn_implementation=name)
    with pytest.raises(ValueError, match=r"no settings reached CLIP.*\{'text_config': 'ring_dil"):
        logits(whole, given)
    part = load(tmp_path, dtype=torch.float64, attn_implementation={"text_config": name})
    assert relative_error(logits(part.eval(), given), want) < SUMMED_IN_FLOAT32
