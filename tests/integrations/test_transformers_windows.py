"""Models whose layers have windows, chunks, sinks or soft caps: as by their own attention."""

from typing import Any

import pytest
import torch
import transformers
from support.bounds import IN_FLOAT32, SUMMED_IN_FLOAT32
from support.transformers_models import (
    CACHE,
    DENSE,
    LAYOUTS,
    LENGTH,
    PATTERN,
    SMALL,
    batch_of,
    check_gradients,
    check_ranks,
    on_group,
    prompt,
    step,
)
from torch import nn

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.integrations.transformers import (
    DilatedCache,
    remove_attention,
    set_attention,
)
from ring_dilated_attention.pattern import Window

WIDTH = 8
LAYERS = ["sliding_attention", "full_attention"]
MIXED = {"layer_types": LAYERS, "sliding_window": WIDTH}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
GEMMA_4 = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8, "head_dim": 8}
LLAMA_4 = {
    **{"attention_chunk_size": WIDTH, "no_rope_layers": [1, 0], "floor_scale": 4, "head_dim": 8},
    **{"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
}
CAPS = {"attn_logit_softcapping": 2.0, "head_dim": 8}
EAGER = {"attn_implementation": "eager"}  # of which sinks and caps are; it rounds to float32
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WIDTH},
    "ministral": {**MIXED, "head_dim": 8},
    "qwen2": {**MIXED, "use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WIDTH, **MOE},
    "gemma2": {**MIXED, **CAPS, **EAGER},
    "gemma3_text": {**MIXED, "head_dim": 8},
    "gemma4_text": {**MIXED, **GEMMA_4},
    "gpt_oss": {**MIXED, **EXPERTS, **EAGER, "head_dim": 8},
    "llama4_text": {**LLAMA_4, **EXPERTS},
    "cohere2": MIXED,
    "exaone4": MIXED,
    "olmo3": MIXED,
    "modernbert-decoder": {**MIXED, "pad_token_id": 0},
    "modernbert": {**MIXED, "local_attention": 2 * WIDTH, "pad_token_id": 0},
}
DECODERS = [kind for kind in KINDS if kind != "modernbert"]
SHARED: dict[str, Any] = {"layer_types": 2 * LAYERS, "num_hidden_layers": 4}
SHARED |= {"num_kv_shared_layers": 2}
NO_PADDING = ["gemma2"]  # its eager attention is NaN where a float64 query sees padding alone
KEPT = ["gemma3_text", "gpt_oss", "llama4_text"]  # one with windows, with sinks, with chunks


def local(kind, **changes):
    """A small model of a kind in float64, with its own attention."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("an older transformers has no such model")
    options = {**SMALL, "attn_implementation": "sdpa", **KINDS.get(kind, {}), **changes}
    config = transformers.CONFIG_MAPPING[kind](**options)
    head = "MaskedLM" if kind == "modernbert" else "CausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config).double().eval()
    model.set_experts_implementation("eager")  # others take no float64
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            nn.init.normal_(parameter, std=0.2)
    if model.can_generate():
        model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model


@pytest.mark.parametrize("kind", DECODERS)
def test_layers_keep_what_is_theirs_alone_and_on_ranks(kind):
    model, batch = local(kind), batch_of("plain" if kind in NO_PADDING else "padded")
    logits, loss, gradients = step(model, batch)
    set_attention(model, DENSE)
    found = step(model, batch)
    valid = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
    assert relative_error(found[0][valid], logits[valid]) < SUMMED_IN_FLOAT32
    assert relative_error(found[1], loss) < IN_FLOAT32
    check_gradients(found[2], gradients, SUMMED_IN_FLOAT32)
    check_ranks(model, LAYOUTS["zigzag 3"], batch_of("padded"))


@pytest.mark.parametrize("kind", KEPT)
def test_windows_and_chunks_of_documents(kind):
    model, batch = local(kind), batch_of("packed", rows=1)
    parts = [slice(0, 1), slice(1, 10), slice(10, 27), slice(27, LENGTH)]
    model.config.attn_temperature_tuning = False  # Llama 4 goes on counting, as it does by itself
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False
    want = torch.cat([model(batch["input_ids"][:, part]).logits for part in parts], 1)
    set_attention(model, DENSE)
    assert relative_error(model(**batch).logits, want) < SUMMED_IN_FLOAT32
    check_ranks(model, LAYOUTS["uneven"], batch)


def test_layers_that_share_keys_and_values():
    """Gemma 4 drops queries before such layers where it is asked for the last logits alone."""
    model, batch = local("gemma4_text", **SHARED), batch_of("padded")
    want, valid = model(**batch).logits, batch["attention_mask"].bool()
    last = model(batch["input_ids"], logits_to_keep=1, use_cache=False).logits
    set_attention(model, DENSE)
    assert relative_error(model(**batch).logits[valid], want[valid]) < SUMMED_IN_FLOAT32
    got = model(batch["input_ids"], logits_to_keep=1, use_cache=False).logits
    assert relative_error(got, last) < SUMMED_IN_FLOAT32


def test_symmetric_windows_of_an_encoder():
    model, batch = local("modernbert"), batch_of("padded")
    want, valid = model(**batch).logits, batch["attention_mask"].bool()
    set_attention(model, DENSE)
    assert relative_error(model(**batch).logits[valid], want[valid]) < SUMMED_IN_FLOAT32


# --- generation

NEW = 12
"""Tokens: past the end of a window, and of a chunk."""


def generated(model, ids, padding=0, **options):
    """Tokens, and the logits that chose them."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    found = model.generate(
        ids * mask,
        attention_mask=mask,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("kind", [*DECODERS, "shared"])
def test_generation_is_as_with_its_own_caches(kind, padding):
    model = local("gemma4_text", **SHARED) if kind == "shared" else local(kind)
    padding, ids = 0 if kind in NO_PADDING else padding, prompt(length=21)
    tokens, logits = generated(model, ids, padding)

    def check(own, ends=None):
        got, found = generated(own, ids, padding)
        assert torch.equal(got, tokens)
        assert relative_error(found, logits) < SUMMED_IN_FLOAT32

    set_attention(model, DENSE)
    check(model)
    on_group(model, 2, check, DENSE)


@pytest.mark.parametrize("kind", KEPT)
def test_a_text_goes_on_by_many_tokens(kind):
    model, ids = local(kind), prompt()
    set_attention(model, PATTERN)
    cache = DilatedCache(model)
    with torch.no_grad():
        parts = [model(part, **{CACHE: cache}).logits for part in ids.split([19, 1, 12, 9], 1)]
        want = model(ids).logits
    assert relative_error(torch.cat(parts, 1), want) < SUMMED_IN_FLOAT32


def test_a_cache_keeps_the_rows_of_windows():
    model = local("gemma3_text")
    set_attention(model, DENSE)
    cache = DilatedCache(model, max_length=1000)
    with torch.no_grad():
        model(prompt(), **{CACHE: cache})
    kept = [layer.kv.keys.shape[1] // SMALL["num_key_value_heads"] for layer in cache.layers]
    assert kept[0] <= WIDTH
    assert kept[1] >= LENGTH


# --- whose pattern


def test_the_pattern_is_that_of_full_layers_or_of_all():
    ids = prompt()
    wide = local("mistral", sliding_window=None)
    model = local("mistral")
    want, full = model(ids).logits, wide(ids).logits
    set_attention(model, DENSE)
    assert relative_error(model(ids).logits, want) < SUMMED_IN_FLOAT32
    with pytest.raises(ValueError, match=r"no layer .* would take the pattern .* layers='all'"):
        set_attention(model, PATTERN)
    set_attention(model, DENSE, layers="all")
    assert relative_error(model(ids).logits, full) < SUMMED_IN_FLOAT32
    with pytest.raises(ValueError, match=r"pattern \(document, 1\) in all layers"):
        remove_attention(model)
    set_attention(model, DilatedPattern.window(WIDTH - 1), layers="all")
    assert relative_error(model(ids).logits, want) < SUMMED_IN_FLOAT32
    with pytest.raises(ValueError, match="layers must be one of 'full', 'all'; got 'some'"):
        set_attention(model, DENSE, layers="some")  # type: ignore[arg-type]


def test_dilated_global_layers_between_local_ones():
    model, logits = local("gemma3_text"), []
    for pattern in (PATTERN, DENSE):
        set_attention(model, pattern)
        cache = DilatedCache(model)
        with torch.no_grad():
            logits.append(model(prompt(), **{CACHE: cache}).logits)
        kept = [layer.kv.plan.pattern for layer in cache.layers]
        assert kept == [DilatedPattern.window(WIDTH - 1), pattern]
    assert relative_error(*logits) > 1e-3


def test_windows_are_saved_and_come_back(tmp_path):
    model, ids = local("gemma3_text"), prompt()
    pattern = DilatedPattern([Window(5), None], [1, 3])
    set_attention(model, pattern, layers="all")
    want = model(ids).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).double()
    assert relative_error(again(ids).logits, want) < IN_FLOAT32
    set_attention(again, DENSE)  # layers are as the config has them
    again.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).double()
    assert relative_error(again(ids).logits, want) > 1e-3
    set_attention(again, DENSE, layers="full")
    remove_attention(again)
    assert relative_error(again(ids).logits, local("gemma3_text")(ids).logits) < IN_FLOAT32
