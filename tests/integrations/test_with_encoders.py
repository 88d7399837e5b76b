"""Masked language models and token classification, on one process and on ranks."""

import pytest
import torch
import transformers
from support.bounds import EXACT, IN_FLOAT32, SUMMED_IN_FLOAT32
from support.transformers_models import (
    DENSE,
    LENGTH,
    PATTERN,
    batch_of,
    check_ranks,
    check_refused_calls,
    check_refused_on_ranks,
    make,
    restarts,
)
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


@pytest.mark.parametrize("kind", ["padded", "packed and padded"])
@pytest.mark.parametrize("family", FAMILIES)
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


REFUSED = {
    "a pooler": (lambda: encoder("Roberta", "Model"), "must not pool .* add_pooling_layer=False"),
    "a head of sentences": (
        lambda: encoder(head="ForNextSentencePrediction"),
        "a head must treat every token alone: one of ForCausalLM, LMHeadModel, ForMaskedLM",
    ),
    "positions of a shard": (lambda: encoder("Esm"), "the encoders are .*; got EsmModel"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_on_ranks_what_mixes_tokens_is_refused(build, message):
    check_refused_on_ranks(build(), message)


# --- what collators return


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
        with pytest.raises(TypeError, match="batch must be a dict of a model's"):
            shard_batch([batch], layout, ends)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="shift_labels must be a bool, got 1"):
            shard_batch(batch, layout, ends, shift_labels=1)  # type: ignore[arg-type]

    run_loopback(2, run)
