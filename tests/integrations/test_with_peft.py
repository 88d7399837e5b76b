"""peft: adapters before and after `set_attention`, on ranks, merged, saved and loaded."""

import copy

import pytest
import torch
from support.bounds import EXACT, IN_FLOAT32
from support.transformers_models import (
    CACHE,
    FINITE,
    LAYOUTS,
    LENGTH,
    PATTERN,
    backward_step,
    batch_of,
    check_gradients,
    make,
    on_group,
    prompt,
    ready,
    shard_of,
    summed,
)
from transformers import AutoModelForCausalLM

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import (
    DilatedCache,
    set_attention,
    set_layout,
)

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(  # peft reads its old name of transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

ORDERS = ["set_attention first", "get_peft_model first"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def lora(**options):
    options = {"r": 3, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def adapted(order, base=None, pattern=PATTERN):
    """A model with adapters that are not zero, in float64."""
    base = make() if base is None else base
    if order == ORDERS[0]:
        set_attention(base, pattern)
    model = peft.get_peft_model(base, lora())
    if order == ORDERS[1]:
        set_attention(model, pattern)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator).double()
    return model


@pytest.mark.parametrize("order", ORDERS)
def test_any_ranks_have_one_loss_and_gradient(order):
    model, batch = adapted(order), batch_of("packed and padded")
    layout = SequenceLayout.zigzag(LENGTH, 3)

    def run(ends):
        own = copy.deepcopy(model)
        target = own if order == ORDERS[1] else own.get_base_model()
        set_attention(target, PATTERN, group=ends)
        set_layout(own, layout)
        return backward_step(own, shard_of(batch, layout, ends))

    loss, want = backward_step(model, batch)
    outcomes = run_loopback(3, run)
    assert relative_error(sum(loss for loss, _ in outcomes), loss) < IN_FLOAT32  # theirs is float32
    check_gradients(summed(outcomes), want, IN_FLOAT32)


@pytest.mark.parametrize("order", ORDERS)
def test_a_loss_of_a_shard_is_refused_behind_adapters_too(order):
    model, layout = adapted(order), LAYOUTS["zigzag 2"]

    def run(own, ends):
        shard = shard_of(batch_of("plain"), layout, ends)
        with pytest.raises(ValueError, match="labels need shift_labels"):
            own(**{**shard, "shift_labels": None})

    on_group(model, 2, run, layout=layout)


def test_a_merged_model_is_the_same_and_saves_its_pattern(tmp_path):
    model, batch = adapted(ORDERS[1]), batch_of("packed")
    want = model(**batch).logits
    merged = model.merge_and_unload()
    assert relative_error(merged(**batch).logits, want) < IN_FLOAT32
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative_error(loaded(**batch).logits, merged(**batch).logits) < EXACT


def test_adapters_of_a_saved_model_come_back_with_its_pattern(tmp_path):
    """adapter_config.json names the folder of the base model, whose config has the pattern."""
    base = make()
    set_attention(base, PATTERN)
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model, batch = adapted("none", base), batch_of("packed")
    model.save_pretrained(tmp_path / "adapter")
    want = model(**batch).logits
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(loaded(**batch).logits, want)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert torch.equal(loaded(**batch).logits, want)
    set_attention(loaded)  # the base's pattern
    with pytest.raises(ValueError, match="but attn_implementation is 'sdpa'"):
        peft.AutoPeftModelForCausalLM.from_pretrained(
            tmp_path / "adapter", attn_implementation="sdpa"
        )


def test_generation_with_adapters_has_a_dilated_cache():
    model = adapted("none", ready(pattern=FINITE)).eval()
    options = {"max_new_tokens": 8, "do_sample": False}
    out = model.generate(input_ids=prompt(), return_dict_in_generate=True, **options)
    assert isinstance(out.past_key_values, DilatedCache)
    slow = model.generate(input_ids=prompt(), use_cache=False, **options)
    assert torch.equal(out.sequences, slow)
    cache = DilatedCache(model)
    assert torch.equal(model.generate(input_ids=prompt(), **{CACHE: cache}, **options), slow)
    generated = on_group(
        model, 2, lambda own, ends: own.generate(input_ids=prompt(), **options), pattern=None
    )
    assert all(torch.equal(tokens, slow) for tokens in generated)


def test_virtual_tokens_are_right_alone_and_refused_on_ranks():
    """Prompt tuning puts tokens before the sequence, and makes a mask of floats of that of rows."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    base, batch = make(), batch_of("padded")
    model = peft.get_peft_model(base, config).double()
    set_attention(model, PATTERN)
    embeds = torch.cat([model.get_prompt(2), base.get_input_embeddings()(batch["input_ids"])], 1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (3, 0), value=1)
    want = base(inputs_embeds=embeds, attention_mask=mask).logits
    assert relative_error(model(**batch).logits[mask == 1], want[mask == 1]) < EXACT
    with pytest.raises(ValueError, match="on 2 ranks adapters must not add virtual tokens"):
        on_group(model, 2, lambda own, ends: None)


@pytest.mark.skipif(
    not hasattr(peft.LoraConfig, "alora_invocation_tokens"), reason="peft has no aLoRA yet"
)
def test_an_adapter_that_is_active_from_a_token_on_is_refused_on_ranks():
    """Where the token is, is known on the rank that holds it alone."""
    model = peft.get_peft_model(make(), lora(alora_invocation_tokens=[7, 8])).double()
    set_attention(model, PATTERN)
    batch, layout = batch_of("plain"), LAYOUTS["zigzag 2"]
    model(**batch)

    def run(own, ends):
        with pytest.raises(ValueError, match="adapter 'default' with alora_invocation_tokens"):
            own(**shard_of(batch, layout, ends))

    on_group(model, 2, run, layout=layout)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # peft's name
def test_prefix_tuning_has_a_cache_of_its_own_and_is_refused():
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make(), config).double()
    set_attention(model, PATTERN)
    with pytest.raises(ValueError, match="must be a DilatedCache"):
        model(input_ids=prompt())
