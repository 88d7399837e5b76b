"""Small models of transformers, batches for them, and the ranks that they run on."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ring_dilated_attention import AttentionOptions, DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch
from ring_dilated_attention.integrations.transformers_call import Call, Settings
from ring_dilated_attention.integrations.transformers_generate import cache_name
from support.bounds import EXACT, IN_FLOAT32, SUMMED_IN_FLOAT32

CACHE = cache_name(transformers.LlamaForCausalLM)
"""What this version of transformers calls a KV cache."""

DENSE = DilatedPattern.dense()
PATTERN = DilatedPattern([8, 19, None], [1, 2, 3])
FINITE = DilatedPattern([8, 19], [1, 2])
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


def encoder(family="Bert", head="ForMaskedLM", **changes):
    """A small encoder without dropout, in float64, whose weights tell positions apart."""
    names = {
        **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},  # DistilBert's
        **{"dropout": 0.0, "attention_dropout": 0.0},
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 48, "embedding_size": 32, "vocab_size": 61},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        **{"pad_token_id": 1, "num_labels": 5, "attn_implementation": "sdpa"},
    }
    config = getattr(transformers, f"{family}Config")(**{**names, **changes})
    torch.manual_seed(0)
    options = {"add_pooling_layer": False} if head == "Model" and family == "Bert" else {}
    model = getattr(transformers, f"{family}{head}")(config, **options)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def ready(family="Llama", pattern=PATTERN, **changes):
    """A model to generate with, which no token stops."""
    changes |= {"sliding_window": None} if family == "Mistral" else {}
    model = make(family, **changes).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    set_attention(model, pattern)
    return model


def prompt(rows=2, length=LENGTH, seed=0):
    """Tokens other than that of padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 61, (rows, length), generator=generator)


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


def summed(outcomes):
    """The sums over ranks of their gradients, the last of what each rank returns."""
    return [sum(gradients) for gradients in zip(*(x[-1] for x in outcomes), strict=True)]


def backward_step(model, batch):
    """`step` by backward(), which reentrant checkpointing needs; of parameters that are trained."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]


def assert_step(model, batch, loss, gradients):
    got, found = backward_step(model, batch)
    assert relative_error(got, loss) < EXACT
    check_gradients(found, gradients, EXACT)


def shard_of(batch, layout, group):
    """A rank's part, whose losses add up over the ranks to that of the whole batch."""
    shard = shard_batch(batch, layout, group)
    if "labels" in batch:
        shard["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
    return shard


def on_group(model, ranks, function, pattern=PATTERN, layout=None):
    """What ``function(own, ends)`` returns on each rank, of a copy that has settings."""

    def run(ends):
        own = copy.deepcopy(model)
        set_attention(own, pattern, group=ends, layout=layout)
        return function(own, ends)

    return run_loopback(ranks, run)


def on_ranks(model, layout, batch, function):
    """What ``function(own, shard)`` returns on each rank, of copies with the model's pattern."""

    def run(own, ends):
        return function(own, shard_of(batch, layout, ends))

    return on_group(model, layout.world_size, run, None, layout)


def check_ranks(model, layout, batch, error=IN_FLOAT32, of_gradients=SUMMED_IN_FLOAT32):
    """Check that logits, loss and gradients on ranks are those of one process; return the loss."""
    logits, loss, want = step(model, batch)
    outcomes = on_ranks(model, layout, batch, step)
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    whole = layout.unshard([shard for shard, _, _ in outcomes], 1)
    assert relative_error(whole[valid], logits[valid]) < error
    assert relative_error(sum(loss for _, loss, _ in outcomes), loss) < error
    check_gradients(summed(outcomes), want, of_gradients)
    return loss


def check_refused_calls(model, message, batch, *, layout=None, changes=None):
    """Check that the call of every rank is refused, of a model that has its settings."""

    def run(own, shard):
        with pytest.raises(ValueError, match=message):
            own(**{**shard, **(changes or {})})

    on_ranks(model, layout or LAYOUTS["zigzag 2"], batch, run)


LAYOUTS = {
    "zigzag 2": SequenceLayout.zigzag(LENGTH, 2),
    "zigzag 3": SequenceLayout.zigzag(LENGTH, 3),
    "uneven": SequenceLayout([[(30, 41), (0, 3)], [(3, 4)], [(4, 30)]]),
}


def call(pattern=DENSE):
    return Call(Settings(pattern, AttentionOptions()))
