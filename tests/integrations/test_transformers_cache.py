"""A DilatedCache refuses what it would get wrong; nothing is wrong in silence."""

import copy
from typing import Any

import pytest
import torch
import transformers
from support.bounds import EXACT
from support.transformers_models import (
    CACHE,
    FINITE,
    LENGTH,
    make,
    on_group,
    prompt,
    ready,
    restarts,
)
from transformers.models.llama import modeling_llama

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.integrations.transformers import (
    DilatedCache,
    remove_attention,
    set_attention,
    shard_batch,
)

IDS = prompt()
LEFT = (torch.arange(LENGTH) >= torch.tensor([[0], [4]])).long()
HOLE = torch.ones_like(LEFT).index_fill(1, torch.tensor([7]), 0)
NEXT = torch.ones(2, 1, dtype=torch.int64)


def filled(model, ids=IDS, **options):
    """A cache that has a prompt."""
    cache = DilatedCache(model, **options)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache


BORDERS = torch.tensor([0, LENGTH])
PROMPT_REFUSALS: dict[str, Any] = {
    "a hole": ({"attention_mask": HOLE}, "in row 0, column 7 must be 1"),
    "padded on the right": ({"attention_mask": LEFT.flip(1)}, "in row 1, column 37 must be 1"),
    "documents": ({"position_ids": restarts(20, 21)}, "in row 0, token 20 .* must have 20; got 0"),
    "padded otherwise": (
        {"attention_mask": LEFT, "position_ids": restarts(LENGTH)},
        "in row 1, token 4 of this call must have 0; got 4",
    ),
    "borders": (
        {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS},
        "attention_mask, position_ids; got cu_seq_lens_k, cu_seq_lens_q",
    ),
    "router logits": ({"output_router_logits": True}, "output_router_logits must be False"),
    "a tuple": ({CACHE: ()}, "the KV cache must be a DilatedCache.* Got tuple"),
    "no tokens": ({"input_ids": IDS[:, :0]}, "of a position at least"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states must be False"),
    "both ways": ({"is_causal": False}, "for causal attention; LlamaAttention has is_causal=False"),
}


@pytest.mark.parametrize("name", PROMPT_REFUSALS)
def test_prompts_that_are_refused(name):
    changes, message = PROMPT_REFUSALS[name]
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        ready()(**{"input_ids": IDS, "use_cache": True, **changes})


STEP_REFUSALS: dict[str, Any] = {
    "of the tokens alone": (
        {"attention_mask": NEXT},
        r"must be a tensor .*\(2, 42\), .* Got shape \(2, 1\)",
    ),
    "padding behind the prompt": (
        {"attention_mask": torch.cat([LEFT, NEXT - 1], 1)},
        "in row 0, column 41 must be 1",
    ),
    "another padding": (
        {"attention_mask": torch.ones(2, LENGTH + 1, dtype=torch.bool)},
        "in row 1, column 0 must be 0",
    ),
    "positions": ({"position_ids": NEXT * LENGTH}, "in row 1, token 0 .* must have 37; got 41"),
    "another batch": ({"input_ids": NEXT[:1]}, "of 2 rows the input must have 2 too, .* got 1"),
}


@pytest.mark.parametrize("name", STEP_REFUSALS)
def test_steps_that_are_refused_leave_the_cache_as_it_was(name):
    changes, message = STEP_REFUSALS[name]
    model = ready()
    with torch.no_grad():
        cache = model(IDS, attention_mask=LEFT, use_cache=True)[CACHE]
        want = model(NEXT, **{CACHE: copy.deepcopy(cache)}).logits
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": NEXT, CACHE: cache, **changes})
        mask = torch.cat([LEFT, NEXT], 1)
        positions = torch.tensor([[41], [37]])
        got = model(NEXT, **{CACHE: cache}, attention_mask=mask, position_ids=positions)
        assert torch.equal(got.logits, want)


GENERATE_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "static"}, "cache_implementation='static' and greedy"),
    ({CACHE: transformers.DynamicCache()}, r"be a DilatedCache.* Got DynamicCache"),
    ({"attention_mask": LEFT.flip(1)}, "padding_side = 'left'"),
    ({"num_beams": 3}, "beams on one process alone, with use_cache=False. .* and beam_search"),
    ({"prompt_lookup_num_tokens": 3}, "or sampling, and beams .*=None and assisted_generation"),
]


@pytest.mark.parametrize(("changes", "message"), GENERATE_REFUSALS)
def test_generate_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ready().generate(
            IDS[:1] if "prompt_lookup_num_tokens" in changes else IDS, max_new_tokens=3, **changes
        )


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (ready, {"max_length": 0}, "max_length must be"),
        (
            lambda: make(attn_implementation="sdpa"),
            {},
            r"call set_attention\(model, pattern\) first",
        ),
        (
            lambda: ready("Lfm2", layer_types=["conv", "full_attention"]),
            {},
            "Lfm2ForCausalLM is 'lfm2': pass use_cache=False",
        ),
    ],
)
def test_making_a_cache_is_refused(build, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DilatedCache(build(), **options)


@torch.no_grad()
def test_a_cache_of_another_attention_is_refused():
    model = ready()
    cache = filled(model)
    set_attention(model, FINITE)
    with pytest.raises(ValueError, match="the model must have this pattern and group"):
        model(NEXT, **{CACHE: cache})
    remove_attention(model, dense=True)
    with pytest.raises(ValueError, match="this one has other attention: pass it"):
        model(NEXT, **{CACHE: cache})


# --- models that do something else with their keys


CHANGES: dict[str, Any] = {
    "repeated": lambda keys, values: (keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1)),
    "scaled": lambda keys, values: (keys * 2, values),
}


@pytest.mark.parametrize("name", CHANGES)
def test_keys_that_are_changed_on_their_way_are_refused(name, monkeypatch):
    model, update = ready(), DilatedCache.update

    def changed(self, *args, **kwargs):
        return CHANGES[name](*update(self, *args, **kwargs))

    monkeypatch.setattr(DilatedCache, "update", changed)
    with torch.no_grad(), pytest.raises(ValueError, match="LlamaAttention are not what its update"):
        model(IDS, use_cache=True)


def test_layers_that_share_a_cache_or_have_none_are_refused(monkeypatch):
    model = ready()
    model.model.layers[1].self_attn.layer_idx = 0
    with torch.no_grad(), pytest.raises(ValueError, match="layer 0 updates the KV cache twice"):
        model(NEXT, **{CACHE: model(IDS, use_cache=True)[CACHE]})

    def forgetful(self, key, value, layer_idx, **rest):
        return key, value

    monkeypatch.setattr(DilatedCache, "update", forgetful)
    with torch.no_grad(), pytest.raises(ValueError, match="not what its update"):
        model(IDS, use_cache=True)


@pytest.mark.filterwarnings(  # its new name came with transformers 5.23
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)
def test_a_cache_beside_gradient_checkpointing_is_right_or_refused():
    """Before transformers 5.24, layers in training mode drop the cache, gradients or not."""
    model = ready()
    with torch.no_grad():
        want = model(NEXT, **{CACHE: filled(model)}).logits
    model.gradient_checkpointing_enable()
    model.train()
    with torch.no_grad():
        if CACHE == "cache":
            cache = model(IDS, use_cache=True)[CACHE]
            assert torch.equal(model(NEXT, **{CACHE: cache}).logits, want)
            return
        with pytest.raises(ValueError, match="nor has gradient checkpointing"):
            model(IDS, use_cache=True)


def test_a_call_that_failed_in_the_middle_is_remembered(monkeypatch):
    model = ready()
    cache = filled(model)

    def broken(self, x):
        raise ZeroDivisionError

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama.LlamaMLP, "forward", broken)
            with pytest.raises(ZeroDivisionError):
                model(NEXT, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"layer 0 has \(42, 42\) rows .* failed \(res"):
            model(NEXT, **{CACHE: cache})
        cache.reset()
        want = model(IDS).logits
        assert relative_error(model(IDS, **{CACHE: cache}).logits, want) < EXACT


# --- what transformers calls


def test_what_a_cache_tells():
    model = ready(pattern=FINITE)
    cache = DilatedCache(model)
    assert (cache.get_seq_length(), cache.lengths, cache.batch_size, cache.nbytes) == (0, (), -1, 0)
    model.generate(IDS, attention_mask=LEFT, max_new_tokens=4, **{CACHE: cache})
    assert (cache.get_seq_length(), cache.lengths) == (LENGTH + 3, (44, 40))
    assert cache.get_mask_sizes(2, 0) == (LENGTH + 5, 0)
    assert cache.get_max_length() == -1
    assert not cache.is_compileable
    assert repr(cache).startswith("DilatedCache((8, 1) (19, 2), 44 columns, lengths [44, 40]")
    with pytest.raises(TypeError, match="shallow copy of a DilatedCache"):
        copy.copy(cache)


# --- ranks


def test_a_shard_instead_of_the_whole_prompt_is_an_error_on_every_rank():
    layout = SequenceLayout.zigzag(LENGTH, 2)

    def run(own, ends):
        hole = {"attention_mask": HOLE} if ends.rank else {}
        calls: list[tuple[Any, str]] = [
            (shard_batch({"input_ids": IDS}, layout, ends), "different ranks: input is"),
            ({"logits_to_keep": 0}, "on 2 ranks logits_to_keep must be 1 for a prompt .* got 0"),
            (hole, "must be 1" if ends.rank else "was refused on other ranks: rank 1"),
        ]
        for changes, message in calls:
            with torch.no_grad(), pytest.raises(ValueError, match=message):
                own(**{"input_ids": IDS, "use_cache": True, "logits_to_keep": 1, **changes})

    on_group(ready(), 2, run, layout=layout)
