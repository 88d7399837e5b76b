"""transformers' models with this package's attention: as with theirs, and on any ranks."""

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import masking_utils
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils import TransformersKwargs

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checkpoint import keep_attention
from ring_dilated_attention.integrations import transformers as ours
from ring_dilated_attention.integrations.transformers import (
    attention_forward,
    remove_attention,
    set_attention,
    set_layout,
    shard_batch,
)
from ring_dilated_attention.integrations.transformers_call import Call, Settings
from ring_dilated_attention.testing import relative_error, run_loopback, run_ranks

DENSE = DilatedPattern.dense()
PATTERN = DilatedPattern([8, 19, None], [1, 2, 3])
LENGTH = 41
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "ring_dilated_attention",
}


def make(family="Llama", seed=0, head="ForCausalLM", **changes):
    """A small model with weights large enough to tell positions apart, in float64."""
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}{head}")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def restarts(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def batch_of(kind, rows=2, length=LENGTH, seed=0):
    """A whole batch: plain, packed (alike in all rows), padded, or both."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(0, 61, (rows, length), generator=generator)}
    batch["labels"] = batch["input_ids"].clone()
    if "padded" in kind:
        valid = torch.tensor([length, length - 12, 3][:rows])[:, None]
        batch["attention_mask"] = (torch.arange(length) < valid).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    if "packed" in kind:
        batch["position_ids"] = restarts(1, 9, 17, length - 27).expand(rows, -1)
    return batch


def step(model, batch, **options):
    """Logits, loss and gradients."""
    result = model(**batch, **options)
    gradients = torch.autograd.grad(result.loss, list(model.parameters()), allow_unused=True)
    return result.logits.detach(), result.loss.detach(), [g for g in gradients if g is not None]


def check_gradients(got, want, error):
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert relative_error(mine, theirs) < error or (mine - theirs).abs().max() < error * 1e-2


# --- one device: the same as transformers' own


@pytest.mark.parametrize("theirs", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Qwen3"])
def test_dense_is_what_transformers_computes(family, kind, theirs):
    model = make(family, **({"sliding_window": None} if family == "Mistral" else {}))
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.21
    set_attention(model, DENSE)
    batch = batch_of(kind)
    logits, loss, gradients = step(model, batch)
    remove_attention(model, theirs)
    want_logits, want_loss, want = step(model, batch, use_cache=False)
    valid = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
    assert relative_error(logits[valid], want_logits[valid]) < 1e-6
    assert relative_error(loss, want_loss) < 1e-6
    check_gradients(gradients, want, 1e-5)


def test_packed_rows_are_documents_on_their_own():
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("packed", rows=1)
    packed = model(**batch).logits
    for start, stop in ((0, 1), (1, 10), (10, 27), (27, 41)):
        alone = model(batch["input_ids"][:, start:stop]).logits
        assert relative_error(packed[:, start:stop], alone) < 1e-6


def test_padded_rows_are_sequences_on_their_own():
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("packed and padded", rows=3)
    logits = model(**batch).logits
    for row, count in enumerate((LENGTH, LENGTH - 12, 3)):
        part = {
            "input_ids": batch["input_ids"][row : row + 1, :count],
            "position_ids": batch["position_ids"][row : row + 1, :count],
        }
        assert relative_error(logits[row : row + 1, :count], model(**part).logits) < 1e-6


@pytest.mark.parametrize("fill", [0, 1])
def test_positions_of_padding_are_anything(fill):
    """transformers gives it 0 or 1."""
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("packed and padded", rows=3)
    valid = batch["attention_mask"].bool()
    want = model(**batch).logits
    batch["position_ids"] = torch.where(valid, batch["position_ids"], fill)
    assert relative_error(model(**batch).logits[valid], want[valid]) < 1e-9
    batch = {name: tensor[1:] for name, tensor in batch.items()}
    assert relative_error(model(**batch).logits[valid[1:]], want[1:][valid[1:]]) < 1e-9


def test_borders_of_flash_attention_are_honoured():
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("packed", rows=1)
    want = model(**batch).logits
    borders = torch.tensor([0, 1, 10, 27, 41], dtype=torch.int32)
    flash: dict[str, Any] = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    flash |= {"max_length_q": 17, "max_length_k": 17}
    assert torch.equal(model(**batch, **flash).logits, want)
    batch["position_ids"] = restarts(LENGTH)  # rotations are relative: they may count on
    assert relative_error(model(**batch, **flash).logits, want) < 1e-5
    del batch["position_ids"]
    assert relative_error(model(**batch, **flash).logits, want) < 1e-5
    assert relative_error(model(**batch).logits, want) > 1e-2


def test_encoders_see_both_ways():
    model = make("Bert", head="Model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    set_attention(model, DENSE)
    batch = batch_of("padded")
    valid = batch["attention_mask"].bool()
    del batch["labels"]
    got = model(**batch).last_hidden_state[valid]
    set_attention(model, PATTERN)
    sharded = on_ranks(
        model, SequenceLayout.zigzag(LENGTH, 2), batch, lambda m, b: m(**b).last_hidden_state
    )
    whole = model(**batch).last_hidden_state
    remove_attention(model)
    assert relative_error(got, model(**batch).last_hidden_state[valid]) < 1e-5
    layout = SequenceLayout.zigzag(LENGTH, 2)
    assert relative_error(layout.unshard(sharded, 1)[valid], whole[valid]) < 1e-5


def test_a_decoder_may_be_told_to_see_both_ways():
    model = make()
    set_attention(model, DENSE)
    batch = batch_of("padded")
    got = model(**batch, is_causal=False).logits
    causal = model(**batch).logits
    assert model(**batch).past_key_values is None
    remove_attention(model)
    valid = batch["attention_mask"].bool()
    assert relative_error(got[valid], model(**batch, is_causal=False).logits[valid]) < 1e-6
    assert relative_error(got[valid], causal[valid]) > 1e-2


def test_attention_reads_transformers_tensors_in_place(monkeypatch):
    """No heads are repeated and nothing is copied on the way."""
    seen = []

    def attend(query, key, value, pattern, **options):
        seen.append((query, key, value))
        return query

    monkeypatch.setattr(ours, "dilated_attention", attend)
    query = torch.randn(2, 9, 4, 16)[..., :8].transpose(1, 2)
    key, value = torch.randn(2, 2, 9, 2, 16)[..., :8].transpose(2, 3)
    out, weights = attention_forward(
        nn.Identity(), query, key, value, None, is_causal=True, ring_dilated_attention=call()
    )
    assert weights is None
    assert out.shape == (2, 9, 4, 8)
    for mine, theirs in zip(seen[0], (query, key, value), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
        assert mine.shape == theirs.transpose(1, 2).shape


@pytest.mark.filterwarnings(  # its new name came with transformers 5.23
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("kwargs", [None, {"context_fn": keep_attention}, {"use_reentrant": True}])
def test_gradient_checkpointing_changes_nothing(kwargs):
    batch, layout = batch_of("packed and padded"), SequenceLayout.zigzag(LENGTH, 2)
    model = make()
    set_attention(model, PATTERN)
    model.train()
    _, loss, want = step(model, batch)
    if kwargs is not None:
        kwargs = {"use_reentrant": False, **kwargs}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    ran = []
    forward = model.model.layers[0].mlp.forward

    def counted(x):
        ran.append(1)
        return forward(x)

    model.model.layers[0].mlp.forward = counted
    assert_step(model, batch, loss, want)
    assert len(ran) == 2  # once more in backward
    del model.model.layers[0].mlp.forward
    outcomes = on_ranks(model, layout, batch, backward_step)
    assert relative_error(sum(loss for loss, _ in outcomes), loss) < 1e-6
    check_gradients([sum(g) for g in zip(*(g for _, g in outcomes), strict=True)], want, 1e-5)


def backward_step(model, batch):
    """`step` by backward(), which reentrant checkpointing needs."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def assert_step(model, batch, loss, gradients):
    got, found = backward_step(model, batch)
    assert relative_error(got, loss) < 1e-12
    check_gradients(found, gradients, 1e-10)


def test_half_precision():
    model = make().bfloat16()
    set_attention(model, DENSE)
    batch = batch_of("padded")
    got = model(**batch).logits
    assert got.dtype == torch.bfloat16
    valid = batch["attention_mask"].bool()
    want = make().to(torch.bfloat16).float()
    set_attention(want, DENSE)
    assert relative_error(got[valid], want(**batch).logits[valid]) < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(want(**batch).logits[valid], got[valid]) < 0.05


# --- many ranks


def on_ranks(model, layout, batch, function):
    """What ``function(model, shard)`` returns on each rank; `model` has its settings."""
    settings = model._ring_dilated_attention

    def run(ends):
        own = copy.deepcopy(model)
        set_attention(own, settings.pattern, group=ends, layout=layout)
        return function(own, shard_batch(batch, layout, ends.rank))

    return run_loopback(layout.world_size, run)


LAYOUTS = {
    "zigzag 2": SequenceLayout.zigzag(LENGTH, 2),
    "zigzag 3": SequenceLayout.zigzag(LENGTH, 3),
    "uneven": SequenceLayout([[(30, 41), (0, 3)], [(3, 4)], [(4, 30)]]),
}


@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "packed and padded"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_ranks_have_one_loss_and_gradient(name, kind):
    layout, model, batch = LAYOUTS[name], make(), batch_of(kind)
    set_attention(model, PATTERN)
    logits, loss, want = step(model, batch)
    outcomes = on_ranks(model, layout, batch, step)
    valid = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
    whole = layout.unshard([shard for shard, _, _ in outcomes], 1)
    assert relative_error(whole[valid], logits[valid]) < 1e-6
    assert relative_error(sum(loss for _, loss, _ in outcomes), loss) < 1e-6
    check_gradients([sum(g) for g in zip(*(g for *_, g in outcomes), strict=True)], want, 1e-5)


@pytest.mark.parametrize("family", ["Qwen2", "Mistral", "Qwen3", "Olmo2", "Mixtral"])
def test_any_ranks_of_other_models(family):
    changes = {"sliding_window": None} if family in ("Mistral", "Mixtral") else {}
    model, batch, error = make(family, **changes), batch_of("packed"), 1e-6
    if family == "Mixtral":  # its experts compute in float32 at most
        model, error = model.float(), 1e-5
    set_attention(model, PATTERN)
    _, loss, want = step(model, batch)
    outcomes = on_ranks(model, LAYOUTS["zigzag 3"], batch, step)
    assert relative_error(sum(loss for _, loss, _ in outcomes), loss) < error
    gradients = [sum(g) for g in zip(*(g for *_, g in outcomes), strict=True)]
    check_gradients(gradients, want, 10 * error)


def test_no_layout_is_equal_shards_and_a_shard_gets_its_positions():
    model, batch = make(), {"input_ids": batch_of("plain")["input_ids"][:, :40]}
    set_attention(model, PATTERN)
    whole = model(**batch).logits

    def run(ends):
        own = copy.deepcopy(model)
        set_attention(own, PATTERN, group=ends)
        return own(batch["input_ids"][:, ends.rank * 20 :][:, :20]).logits

    assert relative_error(torch.cat(run_loopback(2, run), 1), whole) < 1e-6


def test_a_layout_for_each_length():
    model = make()
    set_attention(model, PATTERN)

    def run(ends):
        own = copy.deepcopy(model)
        set_attention(own, PATTERN, group=ends)
        errors = []
        for length in (17, 30):
            layout = SequenceLayout.zigzag(length, 3)
            batch = {"input_ids": batch_of("plain", length=length)["input_ids"]}
            set_layout(own, layout)
            got = own(**shard_batch(batch, layout, ends.rank)).logits
            want = layout.shard(copy.deepcopy(model)(**batch).logits, ends.rank, 1)
            errors.append(relative_error(got, want))
        return max(errors)

    assert max(run_loopback(3, run)) < 1e-6


def train(rank, world_size, kind):
    """Losses of a few steps of AdamW, in float32; gradients are added up over ranks."""
    length = 96
    layout = SequenceLayout.zigzag(length, world_size)
    model = make().float()
    group = dist.group.WORLD if world_size > 1 else None
    set_attention(model, DilatedPattern([16, None], [1, 4]), group=group, layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for seed in (0, 1, 2, 0, 1, 2, 0, 1):
        batch = batch_of(kind, length=length, seed=seed)
        loss = model(**shard_batch(batch, layout, rank)).loss
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
        optimizer.step()
        losses.append(total)
    return torch.stack(losses)


@pytest.mark.parametrize("kind", ["plain", "packed and padded"])
def test_training_on_one_process_and_on_two(kind):
    (alone,) = run_ranks(train, 1, kind)
    assert alone[-1] < 0.8 * alone[0]
    for losses in run_ranks(train, 2, kind):
        assert ((losses - alone).abs() / alone).max() < 1e-5


@pytest.mark.filterwarnings(  # dynamo's own look at tensors behind a graph break
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
def test_compiled_alone():
    model = make()
    set_attention(model, PATTERN)
    for kind in ("plain", "packed and padded"):
        batch = batch_of(kind)
        _, loss, want = step(model, batch)
        # What documents and lengths are decides what is computed: that takes graph breaks.
        compiled = torch.compile(model, backend="aot_eager", fullgraph=kind == "plain")
        _, got, gradients = step(compiled, batch)
        assert relative_error(got, loss) < 1e-6
        check_gradients(gradients, want, 1e-5)


def compiled_loss(rank, world_size):
    layout = SequenceLayout.zigzag(LENGTH, world_size)
    model = make(num_hidden_layers=1)
    set_attention(model, PATTERN, group=dist.group.WORLD, layout=layout)
    compiled = torch.compile(model, backend="eager")
    shard = shard_batch(batch_of("packed and padded"), layout, rank)
    return compiled(**shard).loss.item(), model(**shard).loss.item()


def test_compiled_on_two_processes():
    for compiled, plain in run_ranks(compiled_loss, 2):
        assert compiled == pytest.approx(plain, rel=1e-6)


# --- what is not supported


def call(pattern=DENSE):
    settings = Settings(pattern, None, None, "auto", "auto")
    return {"x": Call(settings, None, None)}["x"]


def attend(**changes):
    q = torch.randn(1, 4, 9, 8)
    module = changes.pop("module", nn.Identity())
    arguments = {"query": q, "key": q, "value": q, "attention_mask": None, "is_causal": True}
    arguments["ring_dilated_attention"] = call()
    return attention_forward(module, **{**arguments, **changes})


HARMLESS = {
    "position_ids",
    "use_cache",
    "cache_position",
    "return_dict",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "labels",
    "shift_labels",
    "seq_idx",
}
HONOURED = {"query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"}


def arguments_of_attention():
    """All that transformers' own models give their attention by name."""
    names = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    for path in (Path(transformers.__file__).parent / "models").rglob("modeling_*.py"):
        for call in re.findall(r"attention_interface\((.*?)\n +\)", path.read_text(), re.DOTALL):
            names |= set(re.findall(r"^ +(\w+)=", call, re.MULTILINE))
    return names


def test_every_argument_of_attention_is_honoured_or_refused():
    names = arguments_of_attention()
    assert {"sliding_window", "softcap", "s_aux", "output_attentions", "cu_seq_lens_q"} <= names
    for name in sorted(names | {"head_mask", "position_bias", "quick"}):
        if name in HARMLESS or name in HONOURED:
            continue
        with pytest.raises(ValueError, match=rf"takes no {name} \(Tensor\)"):
            attend(**{name: torch.ones(1)})
        attend(**{name: None})
    want = attend()[0].shape
    for name in HARMLESS:
        assert attend(**{name: torch.ones(1)})[0].shape == want
    assert attend(output_attentions=False)[0].shape == want
    parameters = inspect.signature(attention_forward).parameters
    assert set(parameters) == HONOURED | {"module", "kwargs"}


ATTENTION_REFUSALS: dict[str, Any] = {
    "settings": ({"ring_dilated_attention": None}, "call .*set_attention.* got None"),
    "attention_mask": ({"attention_mask": torch.ones(1, 1, 9, 9)}, r"Tensor of shape \(1, 1, 9, 9"),
    "dropout": ({"dropout": 0.1}, "attention dropout is refused .* got 0.1"),
    "key": ({"key": torch.ones(1, 4, 12, 8), "value": torch.ones(1, 4, 12, 8)}, "without a KV"),
    "is_causal": ({"is_causal": None}, "must have is_causal"),
    "value": ({"value": torch.ones(1, 4, 9, 4)}, "same head_dim"),
}


@pytest.mark.parametrize("name", ATTENTION_REFUSALS)
def test_attention_refuses(name):
    changes, message = ATTENTION_REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_cross_attention_is_refused():
    module = nn.Identity()
    module.is_cross_attention = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="only self-attention"):
        attend(module=module)


IDS = torch.zeros(2, LENGTH, dtype=torch.int64)
LEFT = torch.ones(2, LENGTH, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)
HOLE = torch.ones(2, LENGTH, dtype=torch.int64).index_fill(1, torch.tensor([7]), 0)
BORDERS = torch.tensor([0, 5, LENGTH])
MODEL_REFUSALS: dict[str, Any] = {
    "left padding": ({"attention_mask": LEFT}, ValueError, "attention_mask must be a right pad"),
    "a hole": ({"attention_mask": HOLE}, ValueError, "in row 0, position 7 is padding"),
    "a 4-D mask": (
        {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)},
        ValueError,
        r"attention_mask must be bool or ints, .* shape \(2, 1, 41, 41\)",
    ),
    "an additive mask": ({"attention_mask": torch.zeros(2, LENGTH)}, ValueError, "torch.float32"),
    "a mask of documents": ({"attention_mask": LEFT + 1}, ValueError, "0 and 1 only .* got 2"),
    "a mask of each layer": ({"attention_mask": {}}, TypeError, "must be a tensor .* got dict"),
    "a short mask": ({"attention_mask": LEFT[:, 1:]}, ValueError, r"got \(2, 40\)"),
    "rows packed otherwise": (
        {"position_ids": torch.cat([restarts(20, 21), restarts(21, 20)])},
        ValueError,
        "same positions in every row of the batch; in row 0, position 21 .* must have 0; got 1",
    ),
    "an offset": ({"position_ids": restarts(41) + 1}, ValueError, "position 0 .* must have 0; got"),
    "a jump": ({"position_ids": restarts(41) * 2}, ValueError, "position 1 .* must have 1; got 2"),
    "floats": ({"position_ids": restarts(41) * 1.0}, TypeError, "int32 or int64; got torch.float"),
    "three axes": (
        {"position_ids": torch.zeros(3, 2, LENGTH).long()},
        ValueError,
        r"shape .*got \(3, 2",
    ),
    "borders of rows": (
        {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS},
        ValueError,
        "a batch of 1 row; got 2",
    ),
    "borders of queries": ({"cu_seq_lens_q": BORDERS}, ValueError, "must both be given"),
    "two borders": (
        {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS + 1},
        ValueError,
        "must be equal",
    ),
    "past_key_values": (
        {"past_key_values": transformers.DynamicCache()},
        ValueError,
        "past_key_values must be None: there is no KV cache",
    ),
    "use_cache": ({"use_cache": True}, ValueError, "use_cache must be False: .* got True"),
    "output_attentions": ({"output_attentions": True}, ValueError, "output_attentions must be Fal"),
    "head_mask": ({"head_mask": torch.ones(4)}, ValueError, "head_mask must be None"),
    "encoder_hidden_states": (
        {"encoder_hidden_states": torch.ones(2, 41, 32)},
        ValueError,
        "no cross-attention",
    ),
    "encoder_attention_mask": ({"encoder_attention_mask": LEFT}, ValueError, "no cross-attention"),
    "softcap": ({"softcap": 3.0}, ValueError, r"takes no softcap \(float\)"),
    "no input": ({"input_ids": None}, ValueError, "needs input_ids"),
    "an empty shard": ({"input_ids": IDS[:, :0]}, ValueError, r"no empty shards.* \(2, 0\)"),
}


@pytest.mark.parametrize("name", MODEL_REFUSALS)
def test_the_model_refuses(name):
    changes, kind, message = MODEL_REFUSALS[name]
    model = make()
    set_attention(model, PATTERN)
    with pytest.raises(kind, match=message):
        model(**{"input_ids": IDS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_ids": restarts(5, 36)}, None),
        ({"position_ids": restarts(6, 35)}, r"must be the same borders; got \(0, 5, 41\) and"),
        ({"attention_mask": torch.arange(LENGTH)[None] < 30}, "for batches without padding; got"),
        ({"cu_seq_lens_q": BORDERS // 2, "cu_seq_lens_k": BORDERS // 2}, "in the whole sequence"),
    ],
)
def test_borders_must_fit(changes, message):
    model = make()
    set_attention(model, PATTERN)
    arguments = {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS, **changes}
    if message is None:
        model(IDS[:1], **arguments)
        return
    with pytest.raises(ValueError, match=message):
        model(IDS[:1], **arguments)


def test_every_argument_of_a_model_is_honoured_or_refused():
    """A new argument of transformers has to be put in one of these lists."""
    honoured = {"self", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "kwargs"}
    refused = {"past_key_values", "use_cache"}  # see MODEL_REFUSALS
    for family in (transformers.LlamaModel, transformers.Qwen2Model, transformers.MistralModel):
        assert set(inspect.signature(family.forward).parameters) == honoured | refused


OTHER_ATTENTION: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"sliding_window": 8},  # and a soft cap
    "GptOss": {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},  # and sinks
    "ModernBert": {"head": "Model", "pad_token_id": 0},
}


@pytest.mark.parametrize("family", OTHER_ATTENTION)
def test_models_with_other_attention_are_refused(family):
    model = make(family, **OTHER_ATTENTION[family])
    set_attention(model, PATTERN)
    with pytest.raises(ValueError, match="of transformers' masks there are the causal one and"):
        model(input_ids=IDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"or_mask_function": lambda b, h, q, k: q >= 0}, "Got or_masks"),
        ({"and_mask_function": lambda b, h, q, k: q >= 0}, "Got and_masks"),
        ({"block_sequence_ids": IDS[:1]}, "Got or_masks"),
        ({"position_ids": restarts(20, 21)}, r"need set_attention\(model, pattern\) first"),
        ({"allow_is_causal_skip": False}, "Got causal_mask_function"),
    ],
)
def test_other_masks_are_refused(arguments, message):
    config = make().config
    arguments = {"attention_mask": None, "past_key_values": None, **arguments}
    if (
        not arguments.keys()
        <= inspect.signature(masking_utils.create_causal_mask).parameters.keys()
    ):
        pytest.skip("an older transformers has no such mask")
    with pytest.raises(ValueError, match=message):
        masking_utils.create_causal_mask(config, torch.ones(1, LENGTH, 32), **arguments)


def test_a_mask_over_a_cache_is_refused():
    with pytest.raises(ValueError, match=r"queries 3 to 4, keys 0 to 4"):
        ours.attention_mask(q_length=1, kv_length=4, q_offset=3)


def test_dropout_is_refused_in_training_alone():
    model = make(attention_dropout=0.25)
    set_attention(model, DENSE)
    model.eval()
    model(IDS)
    model.train()
    with pytest.raises(ValueError, match=r"attention dropout is refused .* got 0\.25"):
        model(IDS)


SETTING_REFUSALS: dict[str, Any] = {
    "model": ({"model": nn.Identity()}, TypeError, "must be a transformers.PreTrainedModel"),
    "pattern": ({"pattern": 3}, TypeError, "pattern must be a DilatedPattern, got 3"),
    "group": ({"group": 3}, TypeError, "group must be"),
    "layout": ({"layout": 3}, TypeError, "layout must be a SequenceLayout or None, got 3"),
    "exchange": ({"exchange": "quick"}, ValueError, "exchange must be one of"),
    "backend": ({"backend": "quick"}, ValueError, "backend must be one of"),
}


@pytest.mark.parametrize("name", SETTING_REFUSALS)
def test_set_attention_refuses(name):
    changes, kind, message = SETTING_REFUSALS[name]
    with pytest.raises(kind, match=message):
        set_attention(**{"model": make(), "pattern": DENSE, **changes})
    assert set(inspect.signature(set_attention).parameters) == set(SETTING_REFUSALS)


def test_models_with_other_arguments_are_refused():
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    t5 = transformers.T5Model(transformers.T5Config(vocab_size=61, **small))
    with pytest.raises(ValueError, match="cross-attention are not supported; got T5Model"):
        set_attention(t5, DENSE)
    bloom = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match=r"BloomModel.forward must take attention_mask, position"):
        set_attention(transformers.BloomForCausalLM(bloom), DENSE)


def test_settings_belong_to_a_model():
    first, second = make(), make()
    with pytest.raises(ValueError, match=r"no settings reached LlamaAttention: call .*set_attent"):
        first(IDS)
    set_attention(first, DENSE)
    set_attention(second, PATTERN)
    batch = batch_of("plain")
    dense, dilated = (model(batch["input_ids"]).logits for model in (first, second))
    assert relative_error(dilated, dense) > 1e-2
    set_attention(first, PATTERN)
    assert torch.equal(first(batch["input_ids"]).logits, dilated)
    copied = copy.deepcopy(first)  # process groups cannot be copied
    assert copied._ring_dilated_attention is first._ring_dilated_attention
    remove_attention(copied)
    assert torch.equal(first(batch["input_ids"]).logits, dilated)
    with pytest.raises(ValueError, match="call set_attention first"):
        set_layout(first.model, None)
    with pytest.raises(TypeError, match="layout must be a SequenceLayout or None, got 3"):
        set_layout(first, 3)  # type: ignore[arg-type]
    set_layout(first, SequenceLayout.contiguous(9, 1))
    with pytest.raises(ValueError, match=r"gives rank 0 9 positions, got input of shape \(2, 41\)"):
        first(IDS)


def test_another_implementation_behind_our_back_is_refused():
    model = make(attn_implementation="eager")
    set_attention(model, DENSE)
    assert model.config._attn_implementation == "ring_dilated_attention"
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation now is 'sdpa'"):
        model(IDS)
    remove_attention(model)
    assert model.generate(IDS[:1] + 5, max_new_tokens=2, do_sample=False).shape == (1, LENGTH + 2)
    with pytest.raises(ValueError, match="call set_attention first"):
        remove_attention(model)


MANY_RANKS_MODELS: dict[str, Any] = {
    "a head of sequences": (
        lambda: make(head="ForSequenceClassification"),
        "a ForCausalLM, or model.base_model",
    ),
    "sliding layers": (
        lambda: make("Qwen2", layer_types=["full_attention", "sliding_attention"]),
        r"layer_types must all be 'full_attention'; got \['sliding_attention'\]",
    ),
    "dynamic frequencies": (
        lambda: make(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            max_position_embeddings=16,
        ),
        "rotary_emb has rope_type 'dynamic'",
    ),
}


@pytest.mark.parametrize("name", MANY_RANKS_MODELS)
def test_many_ranks_refuse_models_that_a_shard_would_change(name):
    build, message = MANY_RANKS_MODELS[name]
    model = build()
    set_attention(model, PATTERN)

    def run(ends):
        with pytest.raises(ValueError, match=message):
            set_attention(copy.deepcopy(model), PATTERN, group=ends)

    run_loopback(2, run)


def test_many_ranks_refuse_layers_that_mix_positions():
    model = make()
    model.model.layers[1].mlp.mixer = nn.Conv1d(4, 4, 3)

    def run(ends):
        with pytest.raises(ValueError, match=r"layers.1.mlp.mixer is a Conv1d"):
            set_attention(copy.deepcopy(model), PATTERN, group=ends)

    run_loopback(2, run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift_labels": None}, "labels need shift_labels: .* Got shift_labels=None"),
        ({"num_items_in_batch": None}, "labels need num_items_in_batch"),
        ({"logits_to_keep": 1}, "logits_to_keep must be 0, .* got 1"),
        ({"output_router_logits": True}, "output_router_logits must be False"),
    ],
)
def test_many_ranks_refuse_the_loss_of_a_shard(changes, message):
    model = make()
    set_attention(model, PATTERN)

    def refused(own, shard):
        with pytest.raises(ValueError, match=message):
            own(**{**shard, **changes})

    on_ranks(model, LAYOUTS["zigzag 2"], batch_of("plain"), refused)


@pytest.mark.parametrize(
    ("changes", "here", "there"),
    [
        ({"use_cache": True}, "use_cache must be False", "was refused on other ranks: rank 1"),
        ({"labels": None}, None, None),
        ({"shift_labels": None}, "labels need shift_labels", "was refused on other ranks: rank 1"),
        ({"position_ids": restarts(41)[:, :20]}, *["position_ids is None on rank 0, given on"] * 2),
        ({"attention_mask": LEFT[:, 1:21]}, *["attention_mask is None on rank 0, given"] * 2),
    ],
)
def test_a_bad_call_is_an_error_on_every_rank(changes, here, there):
    model = make()
    set_attention(model, PATTERN)

    def run(own, shard):
        rank = own._ring_dilated_attention.group.rank
        if rank == 1:
            shard |= changes
        if here is None:
            own(**shard)
            return
        with pytest.raises(ValueError, match=here if rank else there):
            own(**shard)

    on_ranks(model, LAYOUTS["zigzag 2"], batch_of("plain"), run)


def test_bad_positions_of_one_rank_are_an_error_on_every_rank():
    model = make()
    set_attention(model, PATTERN)
    batch = {"input_ids": IDS, "position_ids": restarts(LENGTH)}

    def run(own, shard):
        rank = own._ring_dilated_attention.group.rank
        if rank == 1:
            shard["position_ids"] = shard["position_ids"] + 1
        with pytest.raises(ValueError, match="must have" if rank else "refused on other ranks"):
            own(**shard)

    on_ranks(model, LAYOUTS["zigzag 2"], batch, run)


def test_a_batch_is_sharded_with_its_labels_shifted():
    layout = SequenceLayout([[(0, 2), (4, 5)], [(2, 4)]])
    tokens = torch.arange(5)[None]
    labels = torch.tensor([[-100, 1, 2, -100, 4]])
    borders = torch.tensor([0, 5])
    shard = shard_batch(
        {"input_ids": tokens, "labels": labels, "cu_seq_lens_q": borders}, layout, 0
    )
    assert shard["input_ids"].tolist() == [[0, 1, 4]]
    assert shard["shift_labels"].tolist() == [[1, 2, -100]]
    assert shard["num_items_in_batch"].item() == 3
    assert shard["cu_seq_lens_q"] is borders
    with pytest.raises(ValueError, match=r"a batch may hold input_ids, .*; got token_type_ids"):
        shard_batch({"token_type_ids": tokens}, layout, 0)
    with pytest.raises(ValueError, match=r"labels must have the layout's 5 positions .*\(1, 4\)"):
        shard_batch({"labels": labels[:, :4]}, layout, 0)
