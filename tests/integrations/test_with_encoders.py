"""Masked language models and token classification, on one process and on ranks.

Row of the audit of what composes: BertForMaskedLM was refused, though it treats tokens alone.
"""

import copy

import pytest
import torch
import transformers
from support.bounds import EXACT, IN_FLOAT32, SUMMED_IN_FLOAT32
from support.transformers_models import DENSE, LENGTH, PATTERN, batch_of, make, on_ranks, step
from torch import nn

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import (
    remove_attention,
    set_attention,
    shard_batch,
)

FAMILIES = ["Bert", "Camembert", "DistilBert", "Electra", "Ernie", "Roberta", "XLMRoberta"]
COUNTS_FROM_2 = ("Camembert", "Roberta", "XLMRoberta")
PADDING = 1
ZIGZAG = SequenceLayout.zigzag(LENGTH, 3)


def encoder(family="Bert", head="ForMaskedLM", **changes):
    """A small encoder without dropout, in float64, whose weights tell positions apart."""
    names = {
        **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},  # DistilBert's
        **{"dropout": 0.0, "attention_dropout": 0.0},
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 48, "embedding_size": 32, "vocab_size": 61},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        **{"pad_token_id": PADDING, "num_labels": 5, "attn_implementation": "sdpa"},
    }
    config = getattr(transformers, f"{family}Config")(**{**names, **changes})
    torch.manual_seed(0)
    options = {"add_pooling_layer": False} if head == "Model" and family == "Bert" else {}
    model = getattr(transformers, f"{family}{head}")(config, **options)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


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


@pytest.mark.parametrize("kind", ["plain", "packed and padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_ranks_have_one_loss_and_gradient(family, kind):
    model, batch = encoder(family), learnt(kind, family=family)
    set_attention(model, DENSE)
    if kind == "plain":  # also what transformers computes
        got = model(**batch).logits
        remove_attention(model)
        assert relative_error(got, model(**batch).logits) < EXACT
    set_attention(model, PATTERN)
    logits, loss, want = step(model, batch)
    outcomes = on_ranks(model, ZIGZAG, batch, step, shift_labels=False)
    valid = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
    whole = ZIGZAG.unshard([shard for shard, _, _ in outcomes], 1)
    assert relative_error(whole[valid], logits[valid]) < EXACT
    assert relative_error(sum(loss for _, loss, _ in outcomes), loss) < EXACT
    for mine, theirs in zip(zip(*(g for *_, g in outcomes), strict=True), want, strict=True):
        assert relative_error(sum(mine), theirs) < EXACT or theirs.abs().max() < EXACT


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

    def refused(own, shard):
        with pytest.raises(ValueError, match=r"skips token 1 when|refused on other ranks"):
            own(**shard)

    on_ranks(model, ZIGZAG, {"input_ids": ids}, refused)


def test_a_sequence_beyond_the_position_embeddings_is_an_error_on_every_rank():
    for family in ("Bert", "Roberta"):
        model = encoder(family, max_position_embeddings=LENGTH + (family == "Roberta"))
        batch = {"input_ids": learnt()["input_ids"]}
        set_attention(model, PATTERN)
        if family == "Bert":
            model(**batch)
            batch = {"input_ids": torch.cat([batch["input_ids"]] * 2, 1)}
        length = batch["input_ids"].shape[1]

        def refused(own, shard):
            with pytest.raises(ValueError, match=r"embeddings of 4. positions, .* input needs"):
                own(**shard)

        on_ranks(model, SequenceLayout.zigzag(length, 2), batch, refused)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_token_classification(family):
    changes = {"num_key_value_heads": 2} if family == "Llama" else {}
    model = encoder(family, "ForTokenClassification", **changes).eval()  # Llama's has dropout
    set_attention(model, PATTERN)
    batch = learnt("padded", labels=5, family="DistilBert")
    _, loss, want = step(model, batch)
    outcomes = on_ranks(model, ZIGZAG, batch, step, shift_labels=False)
    error = IN_FLOAT32 if family == "Llama" else EXACT  # its norms are in float32
    assert relative_error(sum(loss for _, loss, _ in outcomes), loss) < error
    for mine, theirs in zip(zip(*(g for *_, g in outcomes), strict=True), want, strict=True):
        assert relative_error(sum(mine), theirs) < 10 * error or theirs.abs().max() < error


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

    def refused(own, shard):
        with pytest.raises(ValueError, match=message):
            own(**{**shard, **changes})

    on_ranks(model, ZIGZAG, learnt(), refused, shift_labels=False)


REFUSED = {
    "a pooler": (lambda: encoder("Roberta", "Model"), "must not pool .* add_pooling_layer=False"),
    "a head of sentences": (
        lambda: encoder(head="ForNextSentencePrediction"),
        "a head must treat every token alone: one of ForCausalLM, LMHeadModel, ForMaskedLM",
    ),
    "positions of a shard": (
        lambda: encoder("Esm"),
        "the encoders are .*; got EsmModel",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_on_ranks_what_mixes_tokens_is_refused(name):
    build, message = REFUSED[name]
    model = build()
    set_attention(model, PATTERN)

    def run(ends):
        with pytest.raises(ValueError, match=message):
            set_attention(copy.deepcopy(model), PATTERN, group=ends)

    run_loopback(2, run)


def test_an_encoder_is_saved_with_its_pattern(tmp_path):
    model = encoder()
    set_attention(model, PATTERN)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert relative_error(loaded(**learnt()).logits, model(**learnt()).logits) < EXACT


# --- what collators return


@pytest.mark.parametrize("options", [{}, {"return_seq_idx": True}, {"return_position_ids": False}])
def test_a_flattening_collator(options):
    """DataCollatorWithFlattening: cu_seq_lens with position_ids, with seq_idx, and alone."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)
    documents = [{"input_ids": [3 + i % 50 for i in range(n)]} for n in (9, 1, 17, 14)]
    batch = dict(collate(documents))
    model = make()
    set_attention(model, PATTERN)
    plain = transformers.DataCollatorWithFlattening()(documents)
    _, loss, want = step(model, dict(plain))
    found, got, gradients = step(model, batch)
    assert relative_error(got, loss) < IN_FLOAT32
    outcomes = on_ranks(model, ZIGZAG, batch, step)
    whole = ZIGZAG.unshard([logits for logits, _, _ in outcomes], 1)
    assert relative_error(whole, found) < IN_FLOAT32
    for mine, here, theirs in zip(
        zip(*(g for *_, g in outcomes), strict=True), gradients, want, strict=True
    ):
        assert relative_error(sum(mine), theirs) < SUMMED_IN_FLOAT32
        assert relative_error(here, theirs) < SUMMED_IN_FLOAT32


def test_seq_idx_alone_says_nothing_to_attention():
    model = make()
    set_attention(model, PATTERN)
    batch = {"input_ids": batch_of("plain")["input_ids"][:1]}
    batch["seq_idx"] = (torch.arange(LENGTH) > 9).int()[None]
    with pytest.raises(ValueError, match="seq_idx names documents for layers other than att"):
        model(**batch)

    def refused(own, shard):
        with pytest.raises(ValueError, match="seq_idx names documents"):
            own(**shard)

    on_ranks(model, ZIGZAG, batch, refused)


def test_options_of_shard_batch_are_the_same_on_every_rank():
    batch, layout = learnt(), SequenceLayout.zigzag(LENGTH, 2)

    def run(ends):
        with pytest.raises(ValueError, match="shift_labels is True on rank 0, False on rank 1"):
            shard_batch(batch, layout, ends, shift_labels=not ends.rank)
        with pytest.raises(TypeError, match="batch must be a dict of a model's"):
            shard_batch([batch], layout, ends)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="shift_labels must be a bool, got 1"):
            shard_batch(batch, layout, ends, shift_labels=1)  # type: ignore[arg-type]

    run_loopback(2, run)
