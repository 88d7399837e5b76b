"""Every kind of language model in transformers, small, by `set_attention` and by its own attention.

    python benchmarks/every_language_model.py --out models.json
    python benchmarks/every_language_model.py llama gpt2 roberta

A model with random weights takes a batch of two rows, one of them padded on the right. With
`DilatedPattern.dense()` its logits, and the gradients of a weighted sum of them, must be those of
its own eager attention, on one process and on three ranks (threads of this process); with segments
of four positions its logits must change, else its attention was not replaced. Layers keep their
windows and chunks, of eight positions. A causal model generates with a KV cache, alone and on the
ranks, by the logits of its own. What is not supported must be refused. Exits with 1 if a model is
wrong, silently.

Models that a configuration of this size does not make are named, not counted. Needs transformers.
"""

from __future__ import annotations

import copy
import inspect
import json
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.exchange import Exchange, run_loopback
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    **{"vocab_size": 97, "num_experts_per_tok": 2, "rotary_dim": 4},
    **{"attn_layer_period": 2, "attn_layer_offset": 1},  # of hybrids
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **{"local_attention": 16, "use_sliding_window": True, "max_window_layers": 2},
    **{"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "n_shared_experts": 1},
    **{"no_rope_layer_interval": 2, "global_attn_every_n_layers": 2, "floor_scale": 8},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "n_group": 1, "topk_group": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 16},
}
"""Options of configurations; each takes those that it has."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("cohere_compass_text", "gemma3_text", "gemma4_unified_text"), MIXED),
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**MIXED, "num_kv_shared_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Of single kinds."""
KV_HEADS = (2, 4)
"""The first that a model can have: some have as many as query heads."""
LENGTH, SHORT = 23, 17
NEW = 10
"""Tokens generated, past the end of a chunk."""
RANKS = 3
MOST_PARAMETERS = 30_000_000
MOST_SECONDS = 120
TOLERANCE = 1e-5
"""Of float64 logits and gradients, relative to the largest; transformers' own attention and norms
round to float32 in between."""
CHANGED = 1e-3
WHERE = ("alone", "ranks", "generates")


class Found(NamedTuple):
    """Logits of a model, and gradients by parameter; zero where there is none."""

    logits: Tensor
    gradients: list[Tensor]


def all_kinds() -> Iterator[tuple[str, Any]]:
    """The model types that have a causal or a masked language model, with the class that has it."""
    heads = (
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
        (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
    )
    for names, head in heads:
        for kind in sorted(names):
            yield kind, head


def make(kind: str, head: Any, kv_heads: int) -> Any:
    """A small model with random weights, whose attention is transformers' own."""
    sizes = {**SIZES, "num_key_value_heads": kv_heads}
    made = transformers.CONFIG_MAPPING[kind]
    fields = {name for each in made.__mro__ for name in inspect.get_annotations(each)}
    fields |= {*inspect.signature(made).parameters, *getattr(made, "attribute_map", {})}
    options = {name: value for name, value in sizes.items() if name in fields}
    options |= OPTIONS.get(kind, {})
    with torch.device("meta"):
        count = sum(
            parameter.numel() for parameter in head.from_config(made(**options)).parameters()
        )
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = head.from_config(made(**options)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # others take no float64
    return model


def run(model: Any, batch: dict[str, Tensor], weights: Tensor) -> Found:
    """Forward, and backward of the weighted sum of the logits."""
    logits = model(**batch, use_cache=False).logits
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    filled = (
        torch.zeros_like(x) if g is None else g for x, g in zip(parameters, gradients, strict=True)
    )
    return Found(logits.detach(), list(filled))


class Comparison:
    """A model, a batch, and what its own attention makes of them.

    Args:
        model: by `make`.
    """

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, SIZES["vocab_size"], (2, LENGTH), generator=generator)
        self.mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [SHORT]])).long()
        self.batch = {"input_ids": tokens * self.mask, "attention_mask": self.mask}
        shape = *tokens.shape, SIZES["vocab_size"]
        weights = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.weights = weights * self.mask[:, :, None]
        self._model = model
        self._want = run(copy.deepcopy(model), self.batch, self.weights)
        if self._want.logits.isnan().any():  # of eager attention, where a window is all padding
            model.set_attn_implementation("sdpa")
            self._want = run(copy.deepcopy(model), self.batch, self.weights)

    def alone(self) -> str:
        """What is wrong on one process; empty: nothing."""
        model = copy.deepcopy(self._model)
        set_attention(model, DilatedPattern.dense())
        wrong = self._against(run(model, self.batch, self.weights))
        set_attention(model, DilatedPattern([4], [1]), layers="all")
        changed = self._error(run(model, self.batch, self.weights).logits)
        return wrong or ("" if changed > CHANGED else "attention is not replaced")

    def sharded(self) -> str:
        """What is wrong on several ranks; empty: nothing."""
        layout = SequenceLayout.zigzag(LENGTH, RANKS)

        def rank(ends: Exchange) -> Found:
            model = copy.deepcopy(self._model)
            set_attention(model, DilatedPattern.dense(), group=ends, layout=layout)
            weights = layout.shard(self.weights, ends.rank, 1)
            return run(model, shard_batch(self.batch, layout, ends), weights)

        found = run_loopback(RANKS, rank)
        logits = layout.unshard([each.logits for each in found], 1)
        gradients = [sum(x) for x in zip(*(each.gradients for each in found), strict=True)]
        return self._against(Found(logits, gradients))

    def generated(self) -> str:
        """What is wrong with generation, on one process and on several ranks; empty: nothing."""

        def tokens_and_logits(model: Any) -> tuple[Tensor, Tensor]:
            model.generation_config.eos_token_id = None
            found = model.generate(
                **{"input_ids": self.batch["input_ids"][:1], "attention_mask": self.mask[:1]},
                **{"max_new_tokens": NEW, "do_sample": False, "use_cache": True},
                **{"return_dict_in_generate": True, "output_logits": True},
            )
            return found.sequences, torch.stack(found.logits)

        def rank(ends: Exchange | None) -> tuple[Tensor, Tensor]:
            model = copy.deepcopy(self._model)
            set_attention(model, DilatedPattern.dense(), group=ends)
            return tokens_and_logits(model)

        alone = rank(None)
        tokens, logits = tokens_and_logits(copy.deepcopy(self._model))
        worst = 0.0
        for got, found in [alone, *run_loopback(RANKS, rank)]:
            if not torch.equal(got, tokens):
                return "other tokens"
            worst = max(worst, float((found - logits).abs().max() / logits.abs().max()))
        return "" if worst < TOLERANCE else f"generates by logits that differ by {worst:.1e}"

    def _error(self, logits: Tensor) -> float:
        difference = (logits - self._want.logits) * self.mask[:, :, None]
        return float(difference.abs().max() / self._want.logits.abs().max())

    def _against(self, found: Found) -> str:
        largest = max(float(x.abs().max()) for x in self._want.gradients)
        errors = [
            float((a - b).abs().max()) / largest
            for a, b in zip(found.gradients, self._want.gradients, strict=True)
        ]
        worst = max(self._error(found.logits), *errors)
        return "" if worst < TOLERANCE else f"differs by {worst:.1e}"


def outcome_of(kind: str, head: Any) -> dict[str, str]:
    """What becomes of a model alone, on ranks, and when it generates; `why` is of the first wrong.

    ``"right"``, ``"refused"``, ``"wrong"``, ``"crashed"`` or ``"not made"``.
    """
    comparison, why = None, ""
    for kv_heads in KV_HEADS:
        try:
            comparison = comparison or Comparison(make(kind, head, kv_heads))
        except Exception as error:
            why = why or in_a_line(error)
    if comparison is None:
        return {**dict.fromkeys(WHERE, "not made"), "why": why}
    found, why = dict.fromkeys(WHERE, ""), ""
    compares = (comparison.alone, comparison.sharded, comparison.generated)
    is_causal = head is transformers.AutoModelForCausalLM
    for where, compare in zip(WHERE[: 2 + is_causal], compares, strict=False):
        try:
            wrong = compare()
            found[where] = "wrong" if wrong else "right"
        except Exception as error:  # a refusal, or a crash, which is not silent
            refusal = isinstance(error, ValueError | TypeError | NotImplementedError)
            found[where] = "refused" if refusal else "crashed"
            wrong = in_a_line(error)
        why = why or wrong
    return {**found, "why": why}


def in_a_line(error: Exception) -> str:
    """An error, short."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]


def too_long(*_: Any) -> None:
    """Tell who waits for a model."""
    raise RuntimeError(f"takes more than {MOST_SECONDS} s")


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="model types; none: all")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Compare all models, or those that are named."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, too_long)
    outcomes = []
    for kind, head in all_kinds():
        if kinds and kind not in kinds:
            continue
        signal.alarm(MOST_SECONDS)
        outcome = outcome_of(kind, head)
        signal.alarm(0)
        name = head.__name__.removeprefix("AutoModelFor")
        outcomes.append({"head": name, "kind": kind, **outcome})
        cells = (x.ljust(8) for x in outcome.values())
        print(kind.ljust(24), name.ljust(9), *cells, flush=True)
    for where in WHERE:
        print(where, dict(Counter(each[where] for each in outcomes)))
    if out:
        found = {"transformers": transformers.__version__, "torch": torch.__version__}
        out.write_text(json.dumps({**found, "models": outcomes}, indent=1) + "\n")
    sys.exit(any("wrong" in each.values() for each in outcomes))


if __name__ == "__main__":
    typer.run(main)
