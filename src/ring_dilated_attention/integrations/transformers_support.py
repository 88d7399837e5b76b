"""Tables of the models and arguments that `set_attention` supports, and the pattern in a config.

`check_model` walks the tables of models once, `check_arguments` that of arguments before each call.
A model type that is in no table is refused. To support another one, put its name into a table and
run ``benchmarks/every_language_model.py`` with it, which compares it with its own attention.

``config.json`` gets two entries. ``attn_implementation`` names this package's attention, so that
transformers itself refuses to load the model where nobody has registered that name. The other one
has the pattern with all its options.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from ..pattern import DilatedPattern, check_choice, in_brief

NAME = "ring_dilated_attention"
"""Value of ``attn_implementation``; the entry of a config that holds the pattern; and the argument
by which a call's settings go from the model to its attention modules."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the KV cache among a model's arguments: from version 5.24 on, and before."""

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Documents as transformers' models take them; linear attention reads them too."""


Layers: TypeAlias = Literal["full", "all"]
LAYERS: tuple[str, ...] = get_args(Layers)
"""Which layers take the pattern: those of full attention, or those with windows and chunks too."""


# --- models, by the ``model_type`` of their classes


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


DECODERS = _types(
    "afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet codegen cohere "
    "cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama dory dots1 ernie4_5 "
    "ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text "
    "gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox "
    "gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium "
    "hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna "
    "llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 "
    "minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo "
    "olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss "
    "smollm3 solar_open starcoder2 vaultgemma youtu"
)
"""Causal decoders: on any number of ranks, with a KV cache."""

WITH_TABLES = _types("biogpt codegen ctrl gpt2 gpt_bigcode gptj")
"""Decoders that look positions up in a table, of config.max_position_embeddings."""

HYBRIDS = _types(
    "jamba lara_mini lfm2 lfm3 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text "
    "qwen3_next recurrent_gemma zaya"
)
"""Decoders some of whose layers mix positions by convolutions or recurrences: on one process."""

PACKED_HYBRIDS = _types("qwen3_5_moe_text qwen3_5_text qwen3_next")
"""Hybrids whose other layers read the documents in ``cu_seq_lens_q`` and ``seq_idx``; those of the
others run over borders."""

ON_ONE_PROCESS = HYBRIDS | _types(
    "albert bert bert-generation camembert data2vec-text distilbert electra ernie esm esmc "
    "eurobert glm4v_text gte jina_embeddings_v3 modernbert nomic_bert qwen2_5_vl_text "
    "qwen2_vl_text qwen3_vl_moe_text qwen3_vl_text roberta roberta-prelayernorm roc_bert "
    "ultrabert xlm-roberta xlm-roberta-xl"
)
"""Hybrids; encoders; and models whose position ids have several dimensions (M-RoPE)."""

FROM_PADDING_IDX = _types(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl"
)
"""Encoders that look positions up in a table from config.pad_token_id + 1 on."""

REFUSED = {
    "an indexer chooses its keys": _types("axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4"),
    "it has biases in its scores": _types("bloom inkling_text inkling2_text mpt t5"),
    "it computes its masks": _types("doge"),
}
"""Models that have what no pattern has."""

HEADS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of models whose heads treat every token alone and learn the next one."""


def kind_of(model: Any) -> str:
    """The model type of the class of transformers that a model is derived from; "" for others.

    The class decides, not the config: code of others may take a config of transformers' and have
    attention of its own.
    """
    classes = (x for x in type(model).__mro__ if x.__module__.startswith("transformers.models."))
    kind: str = getattr(getattr(next(classes, None), "config_class", None), "model_type", "")
    return kind if kind in DECODERS or kind in ON_ONE_PROCESS else ""


def base_of(model: Any) -> Any:
    """A model without its head; itself where it has none."""
    base = model.base_model  # the model itself where its name for that is wrong, as Llama 4's is
    return getattr(model, "model", model) if base is model else base


def without_adapters(model: Any, ranks: int = 1) -> Any:
    """The model of transformers inside of a PeftModel; any other model as it is."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    has_tokens = getattr(model, "_is_prompt_learning", False)
    if ranks > 1 and has_tokens:
        raise ValueError(
            f"on {ranks} ranks adapters must not add virtual tokens, which would come before "
            f"every shard; got {model.peft_type}: use LoRA or another adapter of weights"
        )
    return model.base_model if has_tokens else model.base_model.model


def check_pattern(base: Any, pattern: DilatedPattern, layers: Layers) -> None:
    """Raise a ValueError where no layer would take a pattern."""
    kinds = list(getattr(base.config, "layer_types", None) or ())
    if not kinds and getattr(base.config, "sliding_window", None) is not None:
        kinds = ["sliding_attention"]
    local = [x.startswith(("sliding", "chunked")) for x in kinds]
    dense = DilatedPattern.dense().branches
    if local and all(local) and layers == "full" and pattern.branches != dense:
        raise ValueError(
            f"no layer of this {type(base).__name__} has full attention, so none would take the "
            f"pattern {pattern}: pass layers='all', or set config.sliding_window = None before the "
            "model is made"
        )


def _by_length(model: Any) -> str:
    """Rotations that go by the longest position, of which a shard has its own."""
    for path, module in model.named_modules():
        rope = getattr(module, "rope_type", None)
        for name in rope.values() if isinstance(rope, dict) else [rope]:
            if name in ("dynamic", "longrope"):
                return f"rope_type {name!r} in {path}"
    return ""


def check_model(model: Any, base: Any, ranks: int) -> None:
    """Raise a ValueError, which says what the model has, unless `set_attention` supports it.

    `base` is the model without its head, the same where it has none.
    """
    kind, name = kind_of(base), type(model).__name__
    if not kind:
        found = getattr(base.config, "model_type", None)
        reasons = [f" ({reason})" for reason, kinds in REFUSED.items() if found in kinds]
        got = f"{found!r}{''.join(reasons)}"
        why = (
            "a model must be of a type that it was tested with, see DECODERS and ON_ONE_PROCESS in "
            "integrations/transformers_support.py; of a model of images and text, give it the "
            "language model, as model.model.language_model"
        )
    elif ranks == 1:
        return
    elif kind not in DECODERS:
        got = f"{kind!r}"
        why = (
            "only the types in DECODERS share sequences; pass group=None and each rank its batches"
        )
    elif base is not model and not name.endswith(HEADS):
        got, why = name, f"a head must be one of {', '.join(HEADS)}; others go on model.base_model"
    elif got := _by_length(base):
        why = "rotations must not depend on the length of a shard"
    if got:
        where = name + (f" on {ranks} ranks" if ranks > 1 else "")
        raise ValueError(f"set_attention does not support {where}: {why}; got {got}")


# --- arguments of calls


_FROM_PADDING = "where a model counts positions from pad_token_id + 1"
_OWN_ROWS = "it numbers each row itself; give each document a row of its own, padded on the right"
ARGUMENTS: tuple[tuple[str, bool | None, str, str], ...] = (
    ("head_mask", None, "", "heads are not masked"),
    ("encoder_hidden_states", None, "", "there is no cross-attention"),
    ("encoder_attention_mask", None, "", "there is no cross-attention"),
    ("output_attentions", False, "", "attention weights are never made"),
    ("output_router_logits", False, "on ranks", "they would balance the experts of a shard"),
    ("output_router_logits", False, "with a KV cache", "they would be in another order"),
    ("output_hidden_states", False, "with a KV cache", "they would be in another order"),
    ("position_ids", None, _FROM_PADDING, _OWN_ROWS),
    ("cu_seq_lens_q", None, _FROM_PADDING, _OWN_ROWS),
)
"""Arguments of a model: name, required value, calls in which it is required ("": all), and reason.
Where the required value is a bool, None stands for the value in the config."""

HARMLESS = frozenset(
    {
        "position_ids",  # the model's rotations have them
        *("use_cache", "cache_position", "return_dict", "deterministic"),
        *("output_hidden_states", "output_router_logits"),
        *("num_items_in_batch", "labels", "shift_labels"),
        "seq_idx",  # of layers other than attention
    }
)
"""Keyword arguments of a model that reach its attention and mean nothing there. Whatever attention
is given and is not here is refused."""


def check_arguments(
    module: Any,
    given: dict[str, Any],
    told: tuple[DilatedPattern, Layers],
    ranks: int,
    is_cached: bool,
) -> None:
    """Raise a ValueError for arguments that mean nothing here, or a model that was changed.

    `module` is the model without its head, and `given` are the arguments of its forward; `told` is
    what `set_attention` wrote into its config.
    """
    config = module.config
    now, held = config._attn_implementation, saved(config)
    if (now, held) != (NAME, told):
        got = "no pattern" if held is None else f"the pattern {held[0]} for {held[1]} layers"
        raise ValueError(
            f"set_attention gave this model the pattern {told[0]} for {told[1]} layers, but its "
            f"config now has the attn_implementation {now!r} and {got}: models that share a config "
            "object share its pattern, so make each with copy.deepcopy(config); for other "
            "attention call remove_attention(model)"
        )
    applies = {"": True, "on ranks": ranks > 1, "with a KV cache": is_cached}
    applies[_FROM_PADDING] = kind_of(module) in FROM_PADDING_IDX
    for name, wanted, when, why in ARGUMENTS:
        value = given.get(name)
        if wanted is not None:
            value = bool(getattr(config, name, wanted) if value is None else value)
        if applies[when] and value is not wanted:
            got = type(value).__name__ if isinstance(value, Tensor) else in_brief(value)
            raise ValueError(f"{name} must be {wanted} {when}: {why}; got {got}")


# --- the pattern in a config

_LOAD = "import ring_dilated_attention.integrations.transformers before from_pretrained"
_PATTERN = ("segment_lengths", "dilation_rates", "head_offsets", "head_branches", "zero_keys")


def write(config: Any, pattern: DilatedPattern, layers: Layers) -> None:
    """Note a pattern in a config of transformers, which is changed in place."""
    config.attn_implementation = NAME
    entry = {name: getattr(pattern, name) for name in _PATTERN}  # every option; JSON has no tuples
    entry = {name: list(x) if isinstance(x, tuple) else x for name, x in entry.items()}
    setattr(config, NAME, {"pattern": entry, "layers": layers, "load": _LOAD})


def erase(config: Any) -> None:
    """Take out of a config what `write` has put there."""
    for name in ("attn_implementation", NAME):
        vars(config).pop(name, None)


def saved(config: Any) -> tuple[DilatedPattern, Layers] | None:
    """The pattern that a config holds, and which layers take it; None: there is none.

    The entry is that of `write`, or arguments of `DilatedPattern` alone, with its defaults.

    Raises:
        ValueError: the entry is neither.
    """
    entry = vars(config).get(NAME)
    if entry is None:
        return None
    try:
        layers = entry.get("layers", "full")
        check_choice("layers", layers, LAYERS)
        return DilatedPattern(**entry.get("pattern", entry)), layers
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"config.{NAME} holds no pattern as set_attention writes it: "
            f"{type(error).__name__}: {error}"
        ) from None
