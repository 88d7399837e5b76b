"""transformers' models with this package's attention: as with theirs, and on any ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT, IN_FLOAT32, SUMMED_IN_FLOAT32
from support.transformers_models import (
    CACHE,
    DENSE,
    LAYOUTS,
    LENGTH,
    PATTERN,
    assert_step,
    backward_step,
    batch_of,
    call,
    check_gradients,
    check_ranks,
    make,
    on_group,
    on_ranks,
    shard_of,
    step,
    summed,
)
from torch import nn

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations import transformers_generate
from ring_dilated_attention.integrations.transformers import (
    attention_forward,
    batch_layout,
    remove_attention,
    set_attention,
    set_layout,
    shard_batch,
)
from ring_dilated_attention.nn import keep_attention

# --- as transformers' own attention, and on any ranks as on one

LATENT = {  # in which rows of values are half as wide as those of keys
    "num_key_value_heads": 4,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 12),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **{"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    "first_k_dense_replace": 2,
}
DECODERS: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("Qwen2", "Qwen3", "Olmo2")},
    **{key: {"sliding_window": None} for key in ("Mistral", "Mixtral")},
    "DeepseekV3": LATENT,
    "GPT2": {"head": "LMHeadModel", "scale_attn_by_inverse_layer_idx": True},
}
KINDS = ["plain", "packed", "padded", "packed and padded"]
CASES = [("Llama", kind) for kind in KINDS] + [(family, "padded") for family in DECODERS]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_as_transformers_and_on_any_ranks(family, kind):
    """Logits, loss and gradients: dense against eager attention, a pattern on ranks against one."""
    model, batch = make(family, **DECODERS.get(family, {})).eval(), batch_of(kind)
    errors = IN_FLOAT32, SUMMED_IN_FLOAT32
    if family == "Mixtral":  # its experts compute in float32 at most
        model, errors = model.float(), (SUMMED_IN_FLOAT32, 10 * SUMMED_IN_FLOAT32)
    if family == "Llama":
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.21
    if kind != "packed and padded":  # which transformers cannot
        set_attention(model, DENSE)
        logits, loss, gradients = step(model, batch)
        remove_attention(model, "eager")
        assert not hasattr(model.config, "ring_dilated_attention")
        want_logits, want_loss, want = step(model, batch, use_cache=False)
        valid = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
        assert relative_error(logits[valid], want_logits[valid]) < errors[0]
        assert relative_error(loss, want_loss) < errors[0]
        check_gradients(gradients, want, errors[1])
    set_attention(model, PATTERN)
    for name in LAYOUTS if family == "Llama" else ["zigzag 3"]:
        check_ranks(model, LAYOUTS[name], batch, *errors)
    if family == "DeepseekV3":
        with pytest.raises(ValueError, match="no DilatedCache"), torch.no_grad():
            model(batch["input_ids"][:1], use_cache=True)


def test_documents_of_padded_rows_are_sequences_on_their_own():
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("packed and padded", rows=3)
    logits = model(**batch).logits
    for row, count in enumerate((LENGTH, LENGTH - 12, 3)):
        for start, stop in ((0, 1), (1, min(10, count)), (10, min(27, count)), (27, count)):
            if start < stop:
                alone = model(batch["input_ids"][row : row + 1, start:stop]).logits
                assert relative_error(logits[row : row + 1, start:stop], alone) < IN_FLOAT32


@pytest.mark.parametrize("fill", [0, 1])
def test_positions_of_padding_are_anything(fill):
    """transformers gives it 0 or 1."""
    model = make()
    set_attention(model, PATTERN)
    batch = batch_of("packed and padded", rows=3)
    valid = batch["attention_mask"].bool()
    want = model(**batch).logits
    batch["position_ids"] = torch.where(valid, batch["position_ids"], fill)
    assert relative_error(model(**batch).logits[valid], want[valid]) < EXACT
    batch = {name: tensor[1:] for name, tensor in batch.items()}
    assert relative_error(model(**batch).logits[valid[1:]], want[1:][valid[1:]]) < EXACT


def test_a_decoder_may_be_told_to_see_both_ways():
    model = make()
    set_attention(model, DENSE)
    batch = batch_of("padded")
    got = model(**batch, is_causal=False).logits
    causal = model(**batch).logits
    assert getattr(model(**batch), CACHE) is None
    remove_attention(model)
    valid = batch["attention_mask"].bool()
    assert relative_error(got[valid], model(**batch, is_causal=False).logits[valid]) < IN_FLOAT32
    assert relative_error(got[valid], causal[valid]) > 1e-2


def test_attention_reads_transformers_tensors_in_place(monkeypatch):
    """No heads are repeated and nothing is copied on the way."""
    seen = []

    def attend(query, key, value, pattern, **options):
        seen.append((query, key, value))
        return query

    monkeypatch.setattr(transformers_generate, "dilated_attention", attend)
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
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *call: ran.append(1))
    assert_step(model, batch, loss, want)
    assert len(ran) == 2  # once more in backward
    handle.remove()
    outcomes = on_ranks(model, layout, batch, backward_step)
    assert relative_error(sum(loss for loss, _ in outcomes), loss) < IN_FLOAT32
    check_gradients(summed(outcomes), want, SUMMED_IN_FLOAT32)


def test_half_precision():
    """As far from float64 as transformers' own attention in bfloat16 is, at most twice."""
    batch, model = batch_of("padded"), make().bfloat16()
    valid = batch["attention_mask"].bool()
    exact = copy.deepcopy(model).double()
    set_attention(exact, DENSE)
    want = exact(**batch).logits[valid]
    plain = make(attn_implementation="sdpa").bfloat16()(**batch).logits[valid]
    allowed = 2 * relative_error(plain, want)
    set_attention(model, DENSE)
    got = model(**batch).logits
    assert got.dtype == torch.bfloat16
    assert relative_error(got[valid], want) < allowed
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(model.float()(**batch).logits[valid], want) < allowed


# --- many ranks


def test_no_layout_is_equal_shards_and_a_shard_gets_its_positions():
    model, ids = make(), batch_of("plain")["input_ids"][:, :40]
    set_attention(model, PATTERN)
    shards = on_group(model, 2, lambda own, ends: own(ids[:, ends.rank * 20 :][:, :20]).logits)
    assert relative_error(torch.cat(shards, 1), model(ids).logits) < IN_FLOAT32


def test_a_layout_for_each_length():
    model = make()
    set_attention(model, PATTERN)

    def run(own, ends):
        for length in (17, 30):
            layout = SequenceLayout.zigzag(length, 3)
            batch = {"input_ids": batch_of("plain", length=length)["input_ids"]}
            set_layout(own, layout)
            got = own(**shard_batch(batch, layout, ends)).logits
            want = layout.shard(copy.deepcopy(model)(**batch).logits, ends.rank, 1)
            assert relative_error(got, want) < IN_FLOAT32

    on_group(model, 3, run)


@pytest.mark.filterwarnings(  # dynamo's own look at tensors behind a graph break
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
def test_compiled_alone():
    model = make(num_hidden_layers=1)
    set_attention(model, PATTERN)
    for kind in ("plain", "packed and padded"):
        batch = batch_of(kind)
        _, loss, want = step(model, batch)
        # What documents and lengths are decides what is computed: that takes graph breaks.
        compiled = torch.compile(model, backend="aot_eager", fullgraph=kind == "plain")
        _, got, gradients = step(compiled, batch)
        assert relative_error(got, loss) < IN_FLOAT32
        check_gradients(gradients, want, SUMMED_IN_FLOAT32)


def compiled_loss(rank, world_size):
    layout = SequenceLayout.zigzag(LENGTH, world_size)
    model = make(num_hidden_layers=1)
    set_attention(model, PATTERN, group=dist.group.WORLD, layout=layout)
    compiled = torch.compile(model, backend="eager")
    shard = shard_of(batch_of("packed and padded"), layout, dist.group.WORLD)
    return compiled(**shard).loss.item(), model(**shard).loss.item()


def test_compiled_on_two_processes():
    for compiled, plain in run_ranks(compiled_loss, 2):
        assert compiled == pytest.approx(plain, rel=IN_FLOAT32)


def test_a_batch_is_sharded_with_its_labels_shifted():
    layout = SequenceLayout([[(0, 2), (4, 5)], [(2, 4)]])
    tokens = torch.arange(5)[None]
    labels = torch.tensor([[-100, 1, 2, -100, 4]])
    borders = torch.tensor([0, 5])
    batch = {"input_ids": tokens, "labels": labels, "cu_seq_lens_q": borders}
    shard, other = run_loopback(2, lambda ends: shard_batch(batch, layout, ends))
    assert shard["input_ids"].tolist() == [[0, 1, 4]]
    assert shard["shift_labels"].tolist() == [[1, 2, -100]]
    assert other["shift_labels"].tolist() == [[-100, 4]]
    assert shard["cu_seq_lens_q"] is borders


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"bbox": torch.zeros(1, 5, 4)}, r"may hold input_ids, .*; got bbox"),
        (
            {"labels": torch.zeros(1, 4)},
            r"labels must be a tensor with the layout's 5 positions .*\(1, 4\)",
        ),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor with .* got type list"),
        ({"labels": [[1, 2]]}, "labels must be a tensor with .* got type list"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_on_every_rank(batch, message):
    layout = SequenceLayout([[(0, 2), (4, 5)], [(2, 4)]])

    def run(ends):
        given = {"input_ids": torch.zeros(1, 5)} if ends.rank else batch
        wanted = "was refused on other ranks: rank 0" if ends.rank else message
        with pytest.raises((TypeError, ValueError), match=wanted):
            shard_batch(given, layout, ends)

    run_loopback(2, run)


@pytest.mark.parametrize("kind", ["packed", "packed and padded"])
def test_packed_batches_are_dealt_by_document(kind):
    model, batch = make(), batch_of(kind)
    set_attention(model, PATTERN)
    borders = [0, 1, 10, 27, LENGTH]
    wanted = SequenceLayout.balanced(borders, 2, PATTERN, is_causal=True)
    layouts = on_group(model, 2, lambda own, _: batch_layout(own, batch))
    assert layouts == [wanted, wanted]
    assert wanted != SequenceLayout.zigzag(LENGTH, 2)
    check_ranks(model, wanted, batch)


def test_layouts_of_batches():
    model = make()
    set_attention(model, PATTERN)

    def of(batch, ranks=3):
        return on_group(model, ranks, lambda own, _: batch_layout(own, batch))[0]

    ids = torch.zeros(1, 300, dtype=torch.int64)
    zigzag = SequenceLayout.zigzag(300, 3)
    borders = torch.tensor([0, 10, 200, 300, 300])
    assert of({"input_ids": ids}) == zigzag
    packed = {"input_ids": ids, "cu_seq_lens_q": borders}
    assert of(packed) == SequenceLayout.balanced(borders.tolist(), 3, PATTERN, is_causal=True)
    assert of(packed, 1) == SequenceLayout.contiguous(300, 1)
    short = {"input_ids": ids[:, :4], "cu_seq_lens_q": torch.tensor([0, 2, 4])}
    assert of(short) == SequenceLayout.zigzag(4, 3)  # by document a rank would be empty
    with pytest.raises(ValueError, match="call set_attention first"):
        batch_layout(make(), packed)
    with pytest.raises(ValueError, match="the model needs input_ids"):
        batch_layout(model, {"labels": ids})


def test_a_batch_is_for_the_group_of_its_layout():
    layout, batch = SequenceLayout.zigzag(5, 2), {"input_ids": torch.zeros(1, 5)}
    with pytest.raises(ValueError, match="the layout is for 2 ranks; the group has 1"):
        shard_batch(batch, layout)
    with pytest.raises(TypeError, match="group must be a"):
        shard_batch(batch, layout, 3)  # type: ignore[arg-type]
