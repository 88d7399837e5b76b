"""What is refused: of models by `set_attention`, of calls by the model, on one rank and on all."""

import copy
import inspect
import re
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.transformers_models import (
    CACHE,
    DENSE,
    LAYOUTS,
    LENGTH,
    PATTERN,
    batch_of,
    call,
    check_refused_calls,
    make,
    on_ranks,
    restarts,
)
from torch import nn
from transformers import masking_utils
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils import TransformersKwargs

from ring_dilated_attention import SequenceLayout, SoloExchange
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import (
    attention_forward,
    remove_attention,
    set_attention,
    set_layout,
)
from ring_dilated_attention.integrations.transformers_call import SETTINGS, check_loss
from ring_dilated_attention.integrations.transformers_support import HARMLESS

IDS = torch.zeros(2, LENGTH, dtype=torch.int64)

# --- models, before the first forward


def t5():
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return transformers.T5Model(transformers.T5Config(vocab_size=61, **small))


MODELS: dict[str, Any] = {
    "cross-attention": (t5, "a type that it was tested with, .*; got 't5'"),
    "keywords that attention does not get": (lambda: make("StableLm"), "with, .*; got 'stablelm'"),
    "biases": (
        lambda: make("BigBird", attention_type="original_full"),
        "tested with, .*; got 'big_bird'",
    ),
}


@pytest.mark.parametrize(("build", "message"), MODELS.values(), ids=MODELS)
def test_set_attention_refuses_models(build, message):
    model = build()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"set_attention does not support .*{message}"):
        set_attention(model, DENSE)
    assert model.config._attn_implementation == before
    assert not hasattr(model, SETTINGS)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
HYBRID = {"layer_types": ["conv", "full_attention"]}
ON_RANKS: dict[str, Any] = {
    "a head of sequences": (
        lambda: make(head="ForSequenceClassification"),
        "one of ForCausalLM, .*; others go on model.base_model; got LlamaForSequenceClassif",
    ),
    "dynamic frequencies": (
        lambda: make(rope_parameters=DYNAMIC, max_position_embeddings=16),
        "rope_type 'dynamic' in rotary_emb",
    ),
    "layers that mix positions": (partial(make, "Lfm2", **HYBRID), "in DECODERS .*; got 'lfm2'"),
}


@pytest.mark.parametrize(("build", "message"), ON_RANKS.values(), ids=ON_RANKS)
def test_ranks_refuse_models_that_a_shard_would_change(build, message):
    model = build()
    set_attention(model, PATTERN)

    def run(ends):
        with pytest.raises(ValueError, match=f"on 2 ranks: .*{message}"):
            set_attention(copy.deepcopy(model), PATTERN, group=ends)

    run_loopback(2, run)


SETTING_REFUSALS: dict[str, Any] = {
    "model": ({"model": nn.Identity()}, "must be a transformers.PreTrainedModel"),
    "pattern": ({"pattern": 3}, "pattern must be a DilatedPattern, as in"),
    "group": ({"group": 3}, "group must be"),
    "mesh": ({"group": SoloExchange(), "mesh": SoloExchange()}, "as group or as mesh, not as both"),
    "layout": ({"layout": 3}, "layout must be a SequenceLayout or None, got 3"),
    "is_causal": ({"is_causal": True}, "is_causal and scale are the model's own"),
    "exchange": ({"exchange": "quick"}, "exchange must be one of"),
    "backend": ({"backend": "quick"}, "backend must be one of"),
    "head_slice": ({"head_slice": (2, 2, 4)}, "head_slice must be "),
    "no pattern": ({"pattern": None}, "pattern must be given: the config of this LlamaForCausalLM"),
    "wrapped": (
        {"model": nn.Sequential(make())},
        "before it is wrapped, got Sequential",
    ),
}


@pytest.mark.parametrize(("changes", "message"), SETTING_REFUSALS.values(), ids=SETTING_REFUSALS)
def test_set_attention_refuses_values(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        set_attention(**{"model": make(), "pattern": DENSE, **changes})


# --- what attention is given


def attend(**changes):
    q = torch.randn(1, 4, 9, 8)
    module = changes.pop("module", nn.Identity())
    arguments = {"query": q, "key": q, "value": q, "attention_mask": None, "is_causal": True}
    arguments["ring_dilated_attention"] = call()
    return attention_forward(module, **{**arguments, **changes})


HONOURED = {"query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"}
HONOURED |= {"sliding_window", "s_aux", "softcap"}


def arguments_of_attention():
    """All that transformers' own models give their attention by name."""
    names = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    for path in (Path(transformers.__file__).parent / "models").rglob("modeling_*.py"):
        for text in re.findall(r"attention_interface\((.*?)\n +\)", path.read_text(), re.DOTALL):
            names |= set(re.findall(r"^ +(\w+)=", text, re.MULTILINE))
    return names


def test_every_argument_of_attention_is_honoured_or_refused():
    names = arguments_of_attention()
    assert {"sliding_window", "softcap", "s_aux", "output_attentions", "cu_seq_lens_q"} <= names
    for name in sorted(names | {"head_mask", "position_bias", "quick"}):
        if name in HARMLESS or name in HONOURED:
            continue
        with pytest.raises(ValueError, match=rf"does not support {name} \(Tensor\)"):
            attend(**{name: torch.ones(1)})
        attend(**{name: None})
    want = attend()[0].shape
    for name in HARMLESS:
        assert attend(**{name: torch.ones(1)})[0].shape == want
    assert attend(output_attentions=False)[0].shape == want
    parameters = inspect.signature(attention_forward).parameters
    assert set(parameters) == HONOURED | {"module", "kwargs"}


ATTENTION_REFUSALS: dict[str, Any] = {
    "settings": ({"ring_dilated_attention": None}, "call .*set_attention"),
    "attention_mask": (
        {"attention_mask": torch.ones(1, 1, 9, 9)},
        "a mask must be a right padding, .* got a Tensor",
    ),
    "dropout": ({"dropout": 0.1}, "attention dropout is refused .* got 0.1"),
    "key": ({"key": torch.ones(1, 4, 12, 8), "value": torch.ones(1, 4, 12, 8)}, "be a Dilat"),
    "value": ({"value": torch.ones(1, 4, 9, 16)}, "same head_dim"),
    "cross": ({"module": SimpleNamespace(is_cross_attention=True)}, "only self-attention"),
}


@pytest.mark.parametrize(
    ("changes", "message"), ATTENTION_REFUSALS.values(), ids=ATTENTION_REFUSALS
)
def test_attention_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"or_mask_function": lambda b, h, q, k: q >= 0}, "Got the mask or_masks"),
        ({"block_sequence_ids": IDS[:1]}, "Got the mask or_masks"),
        ({"position_ids": restarts(20, 21)}, r"call set_attention\(model, pattern\) first"),
        ({"allow_is_causal_skip": False}, "Got the mask causal_mask_function"),
    ],
)
def test_other_masks_are_refused(arguments, message):
    config = make().config
    arguments = {"attention_mask": None, CACHE: None, **arguments}
    if (
        not arguments.keys()
        <= inspect.signature(masking_utils.create_causal_mask).parameters.keys()
    ):
        pytest.skip("an older transformers has no such mask")
    with pytest.raises(ValueError, match=message):
        masking_utils.create_causal_mask(config, torch.ones(1, LENGTH, 32), **arguments)


def test_dropout_is_refused_in_training_alone():
    model = make(attention_dropout=0.25)
    set_attention(model, DENSE)
    model.eval()
    model(IDS)
    model.train()
    with pytest.raises(ValueError, match=r"attention dropout is refused .* got 0\.25"):
        model(IDS)


# --- what the model is given


LEFT = torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)
HOLE = torch.ones_like(IDS).index_fill(1, torch.tensor([7]), 0)
BORDERS = torch.tensor([0, 5, LENGTH])
TWICE: dict[str, Any] = {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS}
ONE_ROW: dict[str, Any] = {"input_ids": IDS[:1], **TWICE}
MODEL_REFUSALS: dict[str, Any] = {
    "left padding": (
        {"attention_mask": LEFT},
        r"attention_mask must be a right padding, .*: in row \d, position 0 is padding .* is not$",
    ),
    "a hole": ({"attention_mask": HOLE}, "in row 0, position 7 is padding"),
    "a 4-D mask": (
        {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)},
        r"other masks have no dilated attention. Got shape \(2, 1, 41, 41\)",
    ),
    "an additive mask": ({"attention_mask": torch.zeros(2, LENGTH)}, "torch.float32"),
    "a mask of documents": ({"attention_mask": LEFT + 1}, "0 and 1 only, .* up to 2"),
    "a mask of each layer": ({"attention_mask": {}}, "must be a tensor .* Got dict"),
    "rows packed otherwise": (
        {"position_ids": torch.cat([restarts(20, 21), restarts(21, 20)])},
        "every row of the batch .* to one row, .* in row 0, position 21 .* must have 0; got 1",
    ),
    "an offset": ({"position_ids": restarts(41) + 1}, "position 0 .* must have 0; got"),
    "a jump": ({"position_ids": restarts(41) * 2}, "position 1 .* must have 1; got 2"),
    "floats": ({"position_ids": restarts(41) * 1.0}, "int32 or int64 .*; got torch.float"),
    "three axes": (
        {"position_ids": torch.zeros(3, 2, LENGTH).long()},
        r"got torch.int64 \(3, 2, 41\)",
    ),
    "borders of rows": ({**TWICE, "cu_seq_lens_q": BORDERS}, "a batch of 1 row; got a batch of 2"),
    "borders of queries": ({"cu_seq_lens_q": BORDERS}, "must both be given, and equal"),
    "two borders": ({**ONE_ROW, "cu_seq_lens_k": BORDERS + 1}, "must both be given, and equal"),
    "a cache": (
        {CACHE: transformers.DynamicCache()},
        "the KV cache must be a DilatedCache, .* Got DynamicCache",
    ),
    "use_cache": ({"use_cache": True}, "a KV cache has no gradient"),
    "output_attentions": ({"output_attentions": True}, "output_attentions must be Fal"),
    "head_mask": ({"head_mask": torch.ones(4)}, "head_mask must be None"),
    "other hidden states": ({"encoder_hidden_states": torch.ones(2, 41, 32)}, "no cross-attention"),
    "a bias": ({"position_bias": 3.0}, r"does not support position_bias \(float\)"),
    "a window": ({"sliding_window": 8}, "has sliding_window=8 and a mask without a window, causal"),
    "no input": ({"input_ids": None}, "needs input_ids"),
    "an empty shard": ({"input_ids": IDS[:, :0]}, r"no empty shards.* \(2, 0\)"),
    "borders and padding": (
        {**ONE_ROW, "attention_mask": torch.arange(LENGTH)[None] < 30},
        "for batches without padding; got",
    ),
    "borders of a part": (
        {**ONE_ROW, "cu_seq_lens_q": BORDERS // 2, "cu_seq_lens_k": BORDERS // 2},
        "in the whole sequence",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MODEL_REFUSALS.values(), ids=MODEL_REFUSALS)
def test_the_model_refuses(changes, message):
    model = make()
    set_attention(model, PATTERN)
    model(**ONE_ROW, position_ids=restarts(5, 36))
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        model(**{"input_ids": IDS, **changes})


def test_every_argument_of_a_model_is_honoured_or_refused():
    """A new argument of transformers has to be put in one of these lists."""
    honoured = {"self", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "kwargs"}
    honoured |= {CACHE, "use_cache"}  # see test_transformers_generate.py
    for family in (transformers.LlamaModel, transformers.Qwen2Model, transformers.MistralModel):
        assert set(inspect.signature(family.forward).parameters) == honoured


def test_settings_belong_to_a_model():
    first, second = make(), make()
    with pytest.raises(
        ValueError,
        match=r"no settings reached LlamaAttention, .*: call .*set_attention\(model, pattern\)",
    ):
        first(IDS)
    set_attention(first, DENSE)
    set_attention(second, PATTERN)
    batch = batch_of("plain")
    dense, dilated = (model(batch["input_ids"]).logits for model in (first, second))
    assert relative_error(dilated, dense) > 1e-2
    set_attention(first, PATTERN)
    assert torch.equal(first(batch["input_ids"]).logits, dilated)
    copied = copy.deepcopy(first)  # process groups cannot be copied
    assert getattr(copied, SETTINGS) is getattr(first, SETTINGS)
    remove_attention(copied, dense=True)
    assert torch.equal(first(batch["input_ids"]).logits, dilated)
    with pytest.raises(ValueError, match="call set_attention first"):
        set_layout(first.model, None)
    with pytest.raises(TypeError, match="layout must be a SequenceLayout or None, got 3"):
        set_layout(first, 3)  # type: ignore[arg-type]
    set_layout(first, SequenceLayout.contiguous(9, 1))
    with pytest.raises(
        ValueError, match=r"gives rank 0 a shard of 9 positions, got input of shape \(2, 41\)"
    ):
        first(IDS)


def test_another_implementation_behind_our_back_is_refused():
    model = make(attn_implementation="eager")
    set_attention(model, DENSE)
    assert model.config._attn_implementation == "ring_dilated_attention"
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="now has the attn_implementation 'sdpa'"):
        model(IDS)
    remove_attention(model)
    assert model.generate(IDS[:1] + 5, max_new_tokens=2, do_sample=False).shape == (1, LENGTH + 2)
    with pytest.raises(ValueError, match="call set_attention first"):
        remove_attention(model)


# --- on every rank


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift_labels": None}, "labels need shift_labels: .* got shift_labels=None"),
        ({"num_items_in_batch": None}, "labels need num_items_in_batch"),
        ({"labels": None}, "shift_labels need labels; .* label_smoothing_factor"),
        (
            {"num_items_in_batch": torch.tensor(80.5).bfloat16()},
            r"got torch.bfloat16, .* pass num_items_in_batch.item\(\)",
        ),
        ({"fused_lm_head": True}, r"trl computes the loss itself, .* use transformers' Trainer"),
        ({"logits_to_keep": 1}, r"logits_to_keep must be .* needs use_cache=True; got 1"),
        ({"output_router_logits": True}, "output_router_logits must be False"),
    ],
)
def test_many_ranks_refuse_the_loss_of_a_shard(changes, message):
    model = make()
    set_attention(model, PATTERN)
    check_refused_calls(model, message, batch_of("plain"), changes=changes)
    if "labels" in message:  # also where no loss_function is called, as by Liger's fused loss
        model.forward = MethodType(lambda own, input_ids, **_: own.model(input_ids), model)
        check_refused_calls(model, message, batch_of("plain"), changes=changes)


def test_a_loss_that_one_rank_refuses_is_an_error_in_the_next_call_of_others():
    """On a GPU, where later calls do not compare: others are in their next call by then."""
    model = make()
    set_attention(model, PATTERN)
    logits: Any = SimpleNamespace(device=torch.device("cpu"), is_cuda=True)

    def run(own, shard):
        settings = getattr(own, SETTINGS)
        settings.compared.add("num_items_in_batch")
        at_fault = settings.options.group.rank == 1
        count = torch.tensor(80.5).bfloat16() if at_fault else 80
        message = "which rounds it" if at_fault else "refused on other ranks: rank 1"
        with pytest.raises(ValueError, match=message):  # noqa: PT012
            check_loss(own, settings, logits, {**shard, "num_items_in_batch": count})
            own(**shard)

    on_ranks(model, LAYOUTS["zigzag 2"], batch_of("plain"), run)


@pytest.mark.parametrize("name", ["BioGpt", "CodeGen", "CTRL", "GPT2", "GPTBigCode", "GPTJ"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # GPTBigCode, with torch 2.14
def test_ranks_refuse_more_positions_than_a_table_has(name):
    head = "LMHeadModel" if name in ("CTRL", "GPT2") else "ForCausalLM"
    changes = {"max_position_embeddings": 40, "rotary_dim": 4, "attn_implementation": "eager"}
    model = make(name, head=head, **changes).eval()
    if not model._can_set_attn_implementation():  # CodeGen, GPT-J before transformers 5.24
        with pytest.raises(ValueError, match="cannot set the attention of a"):
            set_attention(model, PATTERN)
        return
    set_attention(model, PATTERN)
    model(IDS[:, :40])
    message = r"has embeddings of 40 positions .* needs 41"
    check_refused_calls(model, message, batch_of("plain"))
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(IDS, use_cache=True)


def test_many_ranks_refuse_noise_whose_size_goes_by_the_shard():
    """As transformers' Trainer tells the embeddings, whose hook adds NEFTune's noise."""
    model = make()
    set_attention(model, PATTERN)
    model.train().get_input_embeddings().neftune_noise_alpha = 5.0
    model(IDS)
    message = r"treated alone; got neftune_noise_alpha 5\.0"
    check_refused_calls(model, message, batch_of("plain"))


BAD_CALLS: list[tuple[Any, str | None, str | None]] = [
    (
        {"use_cache": True, "logits_to_keep": 1},
        "a KV cache has no gradient",
        "refused on other ranks: rank 1",
    ),
    ({"shift_labels": None}, "labels need shift_labels", "was refused on other ranks: rank 1"),
    ({"logits_to_keep": 1}, "logits_to_keep must be 1", "was refused on other ranks: rank 1"),
    ({"position_ids": None}, None, "position_ids is given on rank 0, None on rank 1"),
    ({"position_ids": IDS[:1, :20] + 50}, "must have", "refused on other ranks: rank 1"),
    ({"attention_mask": LEFT[:, 1:21]}, None, "attention_mask is None on rank 0, given"),
]


@pytest.mark.parametrize(("changes", "on_it", "on_others"), BAD_CALLS)
def test_a_bad_call_is_an_error_on_every_rank(changes, on_it, on_others):
    model, batch = make(), {**batch_of("plain"), "position_ids": restarts(LENGTH)}
    set_attention(model, PATTERN)

    def run(own, shard):
        at_fault = getattr(own, SETTINGS).options.group.rank == 1
        own(**shard)
        with pytest.raises((ValueError, RuntimeError), match=(at_fault and on_it) or on_others):
            own(**{**shard, **(changes if at_fault else {})})

    on_ranks(model, LAYOUTS["zigzag 2"], batch, run)
