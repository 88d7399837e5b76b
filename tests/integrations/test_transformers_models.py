"""Models other than decoders of text: encoders, models of images, parts of models of several."""

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
    check_gradients,
    check_ranks,
    check_refused_calls,
    encoder,
    make,
    on_group,
    restarts,
    shard_of,
    summed,
    vision,
)
from torch import nn

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import (
    DilatedCache,
    remove_attention,
    set_attention,
    set_layout,
    shard_batch,
)

# --- encoders

FAMILIES = ["Bert", "Camembert", "DistilBert", "Electra", "Ernie", "Roberta", "XLMRoberta"]
COUNTS_FROM_2 = ("Camembert", "Roberta", "XLMRoberta")
PADDING = 1
ZIGZAG = SequenceLayout.zigzag(LENGTH, 3)


def learnt(kind="plain", labels=61, family="Bert"):
    """A batch whose labels are those of some tokens themselves."""
    batch = batch_of(kind)
    tokens = batch["input_ids"].clamp(min=PADDING + 1)
    valid = batch.get("attention_mask", torch.ones_like(tokens)).bool()
    batch["input_ids"] = tokens.where(valid, PADDING)
    chosen = torch.arange(LENGTH) % 3 == 0
    batch["labels"] = (tokens % labels).where(chosen & valid, -100)
    if "packed" in kind and family in COUNTS_FROM_2:
        batch["position_ids"] = batch["position_ids"] + PADDING + 1
    if family not in ("DistilBert", *COUNTS_FROM_2):
        batch["token_type_ids"] = (torch.arange(LENGTH) > 15).long().expand(2, -1)
    return batch


@pytest.mark.parametrize(
    ("family", "kind"),
    [(x, "padded") for x in FAMILIES] + [(x, "packed and padded") for x in ("Bert", "Roberta")],
)
def test_any_ranks_have_one_loss_and_gradient(family, kind):
    model, batch = encoder(family), learnt(kind, family=family)
    if kind == "padded":  # also what transformers computes
        valid = batch["attention_mask"].bool()
        set_attention(model, DENSE)
        got = model(**batch).logits[valid]
        remove_attention(model)
        assert relative_error(got, model(**batch).logits[valid]) < EXACT
    set_attention(model, PATTERN)
    check_ranks(model, ZIGZAG, batch, EXACT, EXACT, shift_labels=False)


def test_positions_of_roberta_do_not_begin_at_zero():
    """transformers gives no position to padding, wherever it is; alone, so do we."""
    model, ids = encoder("Roberta"), learnt()["input_ids"]
    ids[0, 7] = PADDING  # in the text
    want = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    set_attention(model, DENSE)
    assert relative_error(model(input_ids=ids).logits, want) < EXACT
    counted = torch.arange(LENGTH)[None]
    assert relative_error(model(input_ids=ids, position_ids=counted + 2).logits, want) > 1e-3
    with pytest.raises(ValueError, match=r"count up from 2 and restart at 2 .* must have 2; got 0"):
        model(input_ids=ids, position_ids=counted)
    message = r"skips token 1 when|refused on other ranks"
    check_refused_calls(model, message, {"input_ids": ids}, layout=ZIGZAG)


@pytest.mark.parametrize(("family", "more"), [("Bert", 0), ("Roberta", 1)])
def test_a_sequence_beyond_the_position_embeddings_is_an_error_on_every_rank(family, more):
    model, ids = encoder(family, max_position_embeddings=LENGTH + more), learnt()["input_ids"]
    set_attention(model, PATTERN)
    if family == "Bert":
        model(ids)
        ids = torch.cat([ids] * 2, 1)
    layout = SequenceLayout.zigzag(ids.shape[1], 2)
    message = r"embeddings of 4. positions, .* input needs"
    check_refused_calls(model, message, {"input_ids": ids}, layout=layout)


@pytest.mark.parametrize(("family", "error"), [("Bert", EXACT), ("Llama", IN_FLOAT32)])
def test_token_classification(family, error):
    changes = {"num_key_value_heads": 2} if family == "Llama" else {}
    model = encoder(family, "ForTokenClassification", **changes).eval()  # Llama's has dropout
    set_attention(model, PATTERN)
    batch = learnt("padded", labels=5, family="DistilBert")
    check_ranks(model, ZIGZAG, batch, error, 10 * error, shift_labels=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift_labels": torch.zeros(2, 1)}, r"shard_batch\(..., shift_labels=False\)"),
        ({"num_items_in_batch": None}, "labels need num_items_in_batch"),
        ({"return_dict": False}, "needs return_dict=True; got False"),
    ],
)
def test_a_loss_of_a_shard_is_refused(changes, message):
    model = encoder()
    set_attention(model, PATTERN)
    check_refused_calls(
        model, message, learnt(), layout=ZIGZAG, changes=changes, shift_labels=False
    )


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


@pytest.mark.parametrize("known", [GIVEN, {"position_ids": restarts(10, LENGTH - 10)}])
def test_linear_attention_gets_the_documents(known, monkeypatch):
    """flash-linear-attention, which keeps them apart, is not installed: what the layer is given."""
    model, given = make("Qwen3Next", **LINEAR).float(), []
    layer = model.model.layers[0].linear_attn
    set_attention(model, DENSE)

    def forward(hidden_states, **options):
        given.append(options)
        return hidden_states

    monkeypatch.setattr(layer, "forward", forward)
    model(input_ids=batch_of("plain")["input_ids"][:1], **known)
    borders, index = given[0]["cu_seq_lens_q"].tolist(), given[0]["seq_idx"]
    assert borders == known.get("cu_seq_lens_q", torch.tensor([0, 10, LENGTH])).tolist()
    assert torch.equal(index, (torch.arange(LENGTH) >= 10).int()[None])
    with pytest.raises(ValueError, match=r"Qwen3NextGatedDeltaNet .* would not keep these"):
        model(input_ids=IDS.expand(2, -1), position_ids=restarts(10, LENGTH - 10).expand(2, -1))


@pytest.mark.parametrize(
    ("family", "options", "layers"),
    [
        ("MiniMax", {"layer_types": LINEAR["layer_types"], "head_dim": 8}, "linear_attention"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ShortConv"),
    ],
)
@pytest.mark.parametrize("known", [GIVEN, {"position_ids": restarts(10, LENGTH - 10)}])
def test_layers_that_run_over_documents_are_refused(family, options, layers, known):
    model = make(family, **options).float()
    set_attention(model, DENSE)
    model(input_ids=IDS)
    with pytest.raises(ValueError, match=f"{layers} of .* would not keep these documents apart"):
        model(input_ids=IDS, **known)


def test_borders_of_empty_documents():
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("plain", rows=1)
    want = model(**batch, position_ids=restarts(10, LENGTH - 10)).logits
    batch.update(GIVEN, position_ids=restarts(10, LENGTH - 10))
    assert relative_error(model(**batch).logits, want) < SUMMED_IN_FLOAT32
    check_ranks(model, ZIGZAG, batch)


def test_seq_idx_alone_says_nothing_to_attention():
    model = make()
    set_attention(model, PATTERN)
    batch = {"input_ids": batch_of("plain")["input_ids"][:1]}
    batch["seq_idx"] = (torch.arange(LENGTH) > 9).int()[None]
    message = "seq_idx names documents for layers other than att"
    with pytest.raises(ValueError, match=message):
        model(**batch)
    check_refused_calls(model, message, batch, layout=ZIGZAG)


def test_options_of_shard_batch_are_the_same_on_every_rank():
    batch, layout = learnt(), SequenceLayout.zigzag(LENGTH, 2)

    def run(ends):
        with pytest.raises(ValueError, match="shift_labels is True on rank 0, False on rank 1"):
            shard_batch(batch, layout, ends, shift_labels=not ends.rank)
        with pytest.raises(TypeError, match="batch must be a Mapping"):
            shard_batch([batch], layout, ends)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="shift_labels must be a bool; got 1"):
            shard_batch(batch, layout, ends, shift_labels=1)  # type: ignore[arg-type]

    run_loopback(2, run)


# --- images

TOKENS = {"ViT": 37, "Siglip": 36}  # ViT has a class token in front of 6 x 6 patches
IMAGES = torch.randn(2, 3, 24, 24, generator=torch.manual_seed(0)).double()


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("family", TOKENS)
def test_images_are_as_by_transformers(family, pools):
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


@pytest.mark.parametrize("family", TOKENS)
def test_a_head_of_images_and_saving_it(tmp_path, family):
    torch.manual_seed(0)
    config = vision(family).config.to_dict()
    if family == "Siglip":
        config = {"vision_config": config, "text_config": {"vocab_size": 50000}}
    kind = getattr(transformers, f"{family}ForImageClassification")
    model = kind(getattr(transformers, f"{family}Config")(**config)).double().eval()
    want = model(IMAGES).logits
    set_attention(model, DENSE)
    assert relative_error(model(IMAGES).logits, want) < EXACT
    set_attention(model, PATTERN)
    want = model(IMAGES).logits
    model.save_pretrained(tmp_path)
    assert relative_error(kind.from_pretrained(tmp_path)(IMAGES).logits, want) < EXACT
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'"):
        kind.from_pretrained(tmp_path, attn_implementation="sdpa")


def image_step(model, weight):
    """Hidden states, and gradients of a loss of each of them alone."""
    hidden = model(IMAGES).last_hidden_state
    return hidden.detach(), torch.autograd.grad((hidden * weight).sum(), list(model.parameters()))


@pytest.mark.filterwarnings(  # its new name came with transformers 5.23
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("family", TOKENS)
def test_images_on_any_ranks(family, kind):
    model, tokens = vision(family), TOKENS[family]
    set_attention(model, PATTERN)
    if kind == "zigzag":
        model.train()
        model.gradient_checkpointing_enable()
    weight = torch.randn(2, tokens, 32, generator=torch.manual_seed(1)).double()
    whole, want = image_step(model, weight)
    layout = getattr(SequenceLayout, kind)(tokens, 3)
    outcomes = on_group(
        model,
        3,
        lambda own, ends: image_step(own, layout.shard(weight, ends.rank, 1)),
        layout=layout,
    )
    assert relative_error(layout.unshard([x for x, _ in outcomes], 1), whole) < EXACT
    check_gradients(summed(outcomes), want, EXACT)


def test_tokens_that_ranks_share_evenly_need_no_layout():
    model = vision("Siglip")
    set_attention(model, PATTERN)
    shards = on_group(model, 3, lambda own, ends: own(IMAGES).last_hidden_state)
    assert relative_error(torch.cat(shards, 1), model(IMAGES).last_hidden_state) < EXACT


def test_images_of_several_sizes_are_refused():
    """Siglip2 pads them; transformers takes the mask to the attention, which takes all ones."""
    model = vision("Siglip2Vision", num_patches=36, vision_use_head=False)
    batch = {
        "pixel_values": torch.randn(2, 30, 48).double(),
        "pixel_attention_mask": torch.ones(2, 30, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[5, 6], [5, 6]]),
    }
    want = model(**batch).last_hidden_state
    set_attention(model, DENSE)
    assert relative_error(model(**batch).last_hidden_state, want) < EXACT
    batch["pixel_attention_mask"][0, -1] = 0
    with pytest.raises(ValueError, match="pixel_attention_mask must be None: images of a batch"):
        model(**batch)


def test_bad_calls_of_images_are_errors_on_every_rank():
    model = vision("ViT")
    set_attention(model, PATTERN)
    with pytest.raises(ValueError, match="attention_mask must be None"):
        model(IMAGES, attention_mask=torch.zeros(2, 37))
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
        r"model.model.vision_tower \(CLIPVisionModel\), model.model.language_model \(LlamaModel\); "
        r"call it with one of them, as set_attention\(model.model.language_model, pattern\)$",
    ),
    "without its head": (
        lambda: llava()[0].model,
        r"set_attention\(model.language_model, pattern\)$",
    ),
    "CLIP": (clip, r"as set_attention\(model.text_model, pattern\)$"),
    "a part of several": (git, r"^(?!.*set_attention\(model.git, ).*several with attention"),
}


@pytest.mark.parametrize(("build", "message"), WHOLE.values(), ids=WHOLE)
def test_a_model_of_several_is_refused(build, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        set_attention(model, DENSE)
    assert model.config._attn_implementation != "ring_dilated_attention"


def test_the_whole_model_computes_its_loss_on_ranks():
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


def test_the_towers_of_clip_have_attention_each():
    """The padding of the text means nothing to the image."""
    torch.manual_seed(0)
    model, given = in_double(clip()), padded(text_and_image())
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


def test_a_saved_part_comes_back_by_the_name_of_its_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    name = "ring_dilated_attention"
    model, given = llava()
    set_attention(model.model.language_model, PATTERN)
    want = logits(model, given)
    model.save_pretrained(tmp_path)
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    for options in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises(ValueError, match=r"part of another, \{'text_config': 'ring_dil"):
            load(tmp_path, **options)
    whole = load(tmp_path, dtype=torch.float64, attn_implementation=name)
    with pytest.raises(ValueError, match=r"no settings reached CLIP.*\{'text_config': 'ring_dil"):
        logits(whole, given)
    part = load(tmp_path, dtype=torch.float64, attn_implementation={"text_config": name})
    assert relative_error(logits(part.eval(), given), want) < SUMMED_IN_FLOAT32
