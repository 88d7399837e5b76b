"""What `set_attention` supports, as tables, and the pattern that a model's config keeps.

`check_model` walks `MODELS` before the first forward; `check_arguments` walks `ARGUMENTS` before
each call, for what only a call shows. Each row says what is refused, and why.

``config.json`` gets two entries. ``attn_implementation`` names this package's attention, so that
transformers itself refuses to load the model where nobody has registered that name. The other one
has the pattern with all its options.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..pattern import DilatedPattern, in_brief

NAME = "ring_dilated_attention"
"""What ``attn_implementation`` has to be; the entry of a config that holds the pattern; and the
argument by which a call's settings go from the model to its attention modules."""

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers' models call a KV cache: from version 5.24 on, and before."""

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Documents as transformers' models take them; linear attention reads them too."""
TOLD = "GatedDeltaNet"
"""Name of the linear attention that ``cu_seq_lens_q`` and ``seq_idx`` tell the documents."""

_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # the latter: GPT-2, BERT as a decoder
_HEADS = (*_NEXT_TOKEN, "ForMaskedLM", "ForTokenClassification")
_ENCODERS = tuple(
    f"{name}Model"
    for name in (
        *("Bert", "Camembert", "DistilBert", "Electra", "Ernie"),
        *("Roberta", "XLMRoberta", "XLMRobertaXL"),
    )
)
"""Tested on several ranks. Others count positions in a shard, as ESM does for its rotations, or
scale by the length of a shard."""
_IMAGES = ("ViTModel", "SiglipVisionModel")
"""Models of images tested on ranks: behind their embeddings nothing but attention mixes tokens."""
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe"}
_WHOLE_ATTENTION = {"full_attention", "linear_attention", "attention"}
"""Kinds of layers in configs: without attention, and those without a mask of their own."""
_OPTIONS = ("sliding_window", "attn_logit_softcapping", "sinks")
"""Attributes of attention modules (the first one also of their config) that change attention."""
_GETS_NO_ARGUMENTS = {"OPTAttention", "StableLmAttention", "NemotronAttention"}
"""Attention whose model does not hand keyword arguments down to it."""
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")


# --- parts of a model


def without_head(model: Any) -> Any:
    """The model under a head; the model itself, if it has none.

    transformers' `base_model` is the attribute that `base_model_prefix` names, and the whole model,
    with its head, where that names none of it: then the model that it holds is taken.
    """
    base = model.base_model
    held = _held_models(model) if base is model and type(model).__name__.endswith(_HEADS) else []
    return held[0] if len(held) == 1 else base


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


def learns_next(model: Any) -> bool:
    """Whether a model learns the next token from each one."""
    return type(model).__name__.endswith(_NEXT_TOKEN)


def takes_images(base: Any) -> bool:
    """Whether a model takes images and nothing else."""
    return getattr(base, "main_input_name", None) == "pixel_values"


def with_embeddings(base: Any) -> Any:
    """The part of a model of images that has the embeddings: in older versions, one level down."""
    return base if hasattr(base, "embeddings") else base.vision_model


def rotates_in_dimensions(model: Any) -> bool:
    """Whether a model without its head has position ids of several dimensions (M-RoPE)."""
    rope = getattr(model.config, "rope_parameters", None)
    return isinstance(rope, dict) and "mrope_section" in rope


def _held_models(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.children() if isinstance(module, PreTrainedModel)]


class Positions(NamedTuple):
    """The position ids by which a model numbers tokens.

    Attributes:
        first: of a row's first token: 0, but padding_idx + 1 in RoBERTa and its like.
        most: number of position embeddings; None: no limit, as of rotations.
    """

    first: int = 0
    most: int | None = None

    @classmethod
    def of(cls, base: Any) -> Positions:
        """Those of a model without its head."""
        for path, module in base.named_modules():
            if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _POSITIONS:
                first = 0 if module.padding_idx is None else module.padding_idx + 1
                known = getattr(base.config, "max_position_embeddings", None)
                return cls(first, min(module.num_embeddings, known or module.num_embeddings))
        return ANY_POSITIONS


ANY_POSITIONS = Positions()


# --- models: each function returns what it finds, as text; "" where it finds nothing


def _crossing(model: Any, base: Any) -> str:
    flags = ("is_encoder_decoder", "add_cross_attention")
    return ", ".join(f"config.{x}=True" for x in flags if getattr(model.config, x, False))


def _attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if hasattr(module, "is_causal") or type(module).__name__.endswith("Attention")
    ]


def _several_parts(model: Any, base: Any) -> str:
    """Models of several sequences: padding, documents and positions of one mean nothing to others.

    They have attention in several models of transformers, or by several kinds of config.
    """
    modules, configs, owners = dict(model.named_modules()), set(), {}
    for path, module in _attention_modules(model):
        while path and not isinstance(modules[path], PreTrainedModel):
            path = path.rpartition(".")[0]
        owners[f"model.{path}".rstrip(".")] = modules[path]
        configs.add(type(getattr(module, "config", None)))
    if len(owners) < 2 and len(configs - {type(None)}) < 2:
        return ""
    listed = ", ".join(f"{path} ({type(module).__name__})" for path, module in owners.items())
    inner = [p for p in owners if not any(q.startswith(f"{p}.") for q in owners) and p != "model"]
    inner.sort(key=lambda p: "input_ids" not in inspect.signature(owners[p].forward).parameters)
    advice = f"; call it with one of them, as set_attention({inner[0]}, pattern)" if inner else ""
    return f"several with attention, {listed}{advice}"


def _forward_of(model: Any, base: Any) -> str:
    parameters = inspect.signature(base.forward).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_more and {"attention_mask", "position_ids"} <= parameters.keys():
        return ""
    return f"{type(base).__name__}.forward({', '.join(parameters)})"


def _layer_types(model: Any) -> list[str]:
    return list(getattr(model.config, "layer_types", None) or ())


def _no_attention(model: Any, base: Any) -> str:
    kinds = set(_layer_types(model))
    return f"config.layer_types {sorted(kinds)}" if kinds and kinds <= _WITHOUT_ATTENTION else ""


def _other_attention(model: Any, base: Any) -> str:
    """Options of attention and the layers that have them: "sliding_window=4096 in layers 0, 2"."""
    found: dict[str, dict[str, None]] = {}  # layers as keys: once each, in order
    kinds = _layer_types(model)
    for index, kind in enumerate(kinds):
        if kind.endswith("attention") and kind not in _WHOLE_ATTENTION:
            found.setdefault(kind, {})[str(index)] = None
    for path, module in _attention_modules(base):
        layer = next((part for part in path.split(".") if part.isdecimal()), path)
        for name in _OPTIONS:
            value = getattr(module, name, None)
            if name == _OPTIONS[0] and not kinds and not hasattr(module, name):
                value = getattr(getattr(module, "config", None), name, None)  # as Mistral's
            if value is not None and type(module).__name__ != "MoshiAttention":  # has no use for it
                got = name if isinstance(value, Tensor) else f"{name}={value}"
                found.setdefault(got, {})[layer] = None
    return "; ".join(f"{got} in layers {', '.join(layers)}" for got, layers in found.items())


def _no_interface(model: Any, base: Any) -> str:
    return "" if any(hasattr(x, "is_causal") for x in base.modules()) else "attention of its own"


def _no_arguments(model: Any, base: Any) -> str:
    kinds = {type(module).__name__ for module in base.modules()}
    return ", ".join(sorted(kinds & _GETS_NO_ARGUMENTS))


def _window_mask(model: Any, base: Any) -> str:
    """Masks of windows or chunks that a forward makes whether a layer has them or not."""
    try:
        source = inspect.getsource(type(base).forward)
    except (OSError, TypeError):  # a class typed in at a prompt; the first forward refuses its mask
        return ""
    found = re.search(r'"\w+": (create_(sliding|chunked)\w+)\(', source)
    return f"{found[1]} in {type(base).__name__}.forward" if found else ""


def _other_head(model: Any, base: Any) -> str:
    heads = () if takes_images(base) else _HEADS
    return "" if base is model or type(model).__name__.endswith(heads) else type(model).__name__


def _hidden_base(model: Any, base: Any) -> str:
    held = _held_models(model) if base is model and not takes_images(base) else []
    prefix = f"base_model_prefix {model.base_model_prefix!r}"
    return f"{prefix} and a {type(held[0]).__name__} by another name" if held else ""


def _is_encoder(base: Any) -> bool:
    return not all(getattr(module, "is_causal", True) for module in base.modules())


def _other_encoder(model: Any, base: Any) -> str:
    kinds = {kind.__name__ for kind in type(base).__mro__}  # fully_shard makes a subclass
    known = kinds & {*(_IMAGES if takes_images(base) else _ENCODERS)}
    return "" if known or not _is_encoder(base) else type(base).__name__


def _pooler(model: Any, base: Any) -> str:
    held = with_embeddings(base) if takes_images(base) else base
    parts = {"pooler": "a pooler", "head": "attention that pools"} if _is_encoder(base) else {}
    return ", ".join(x for name, x in parts.items() if getattr(held, name, None) is not None)


def other_layers(model: Any, base: Any) -> str:
    """Layers other than attention that mix positions, or attention of some positions."""
    others = sorted(set(_layer_types(model)) - {"full_attention"})
    mixing = (
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.RNNBase)
    )
    return ", ".join([*others, *mixing])


def layers_across_documents(base: Any) -> list[str]:
    """Names of the layers other than attention that mix positions, by their classes or kinds."""
    owners = {
        type(module).__name__
        for module in base.modules()
        if any(isinstance(child, nn.Conv1d | nn.RNNBase) for child in module.children())
    }
    kinds = {*_layer_types(base)} & (_WITHOUT_ATTENTION - {"mlp", "moe"})
    return sorted(owners or kinds)


def _by_position(model: Any, base: Any) -> str:
    """Queries scaled by their position, and rotations that go by the longest position."""
    for path, module in model.named_modules():
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            return f"attn_temperature_tuning in {path}"
        rope = getattr(module, "rope_type", None)
        for name in rope.values() if isinstance(rope, dict) else [rope]:
            if name in ("dynamic", "longrope"):
                return f"rope_type {name!r} in {path}"
    return ""


class _Refused(NamedTuple):
    """Something that models must not have: of text, of images, or both; on several ranks, or ever.

    `find` returns it as text, from a model and that model without its head.
    """

    find: Callable[[Any, Any], str]
    why: str
    of: str = "text"
    on_ranks: bool = False


MODELS = (
    _Refused(_crossing, "models with cross-attention are not supported"),
    _Refused(_several_parts, "it is for a model of one sequence"),
    _Refused(
        _forward_of, "forward must take attention_mask, position_ids and further keyword arguments"
    ),
    _Refused(_no_attention, "there must be attention to replace"),
    _Refused(
        _other_attention,
        "the pattern alone decides what a head sees: windows, soft caps and sinks must be off, as "
        "by config.sliding_window=None",
    ),
    _Refused(_window_mask, "a mask of windows would be made, even if no layer has one"),
    _Refused(_no_arguments, "the model must hand keyword arguments down to its attention"),
    _Refused(_no_interface, "attention must come from transformers' AttentionInterface", "images"),
    _Refused(
        _other_head,
        f"a head must treat every token alone: one of {', '.join(_HEADS)}, or model.base_model "
        "with a head of your own",
        *("both", True),
    ),
    _Refused(
        _hidden_base,
        "base_model_prefix must name the attribute of the model without its head",
        on_ranks=True,
    ),
    _Refused(_other_encoder, f"the encoders are {', '.join((*_ENCODERS, *_IMAGES))}", "both", True),
    _Refused(
        _pooler,
        "the tokens of a shard must not be pooled: make it with add_pooling_layer=False, or with "
        "config.vision_use_head = False",
        *("both", True),
    ),
    _Refused(other_layers, "nothing but full attention may mix positions", on_ranks=True),
    _Refused(_by_position, "attention must not depend on the positions in a shard", on_ranks=True),
)


def check_model(model: Any, base: Any, ranks: int) -> None:
    """Raise a ValueError, which says what the model has, unless `set_attention` supports it.

    `base` is the model without its head, the same where it has none.
    """
    kinds = "both", "images" if takes_images(base) else "text"
    for find, why, of, on_ranks in MODELS:
        if of in kinds and (ranks > 1 or not on_ranks) and (found := find(model, base)):
            where = type(model).__name__ + (f" on {ranks} ranks" if ranks > 1 else "")
            raise ValueError(f"set_attention does not support {where}: {why}; got {found}")


# --- calls


class _Argument(NamedTuple):
    """An argument of a model's forward that must be as `wanted` in some calls.

    `calls` are "all", "ranks" (several), "images", "cached", or "cached ranks". Where `wanted` is
    a bool, the argument None means what the config says.
    """

    name: str
    wanted: bool | None
    why: str
    calls: str = "all"


IMAGE_MASKS = ("attention_mask", "pixel_attention_mask", "patch_attention_mask", "pixel_mask")
_NO_SIZES = "images of a batch are of one size, and none of their patches is padding"
ARGUMENTS = (
    _Argument("head_mask", None, "heads are not masked"),
    _Argument("encoder_hidden_states", None, "there is no cross-attention"),
    _Argument("encoder_attention_mask", None, "there is no cross-attention"),
    _Argument("output_attentions", False, "attention weights are never made"),
    _Argument("output_router_logits", False, "they would balance the experts of a shard", "ranks"),
    _Argument("output_router_logits", False, "they would be in another order", "cached"),
    _Argument("output_hidden_states", False, "they would be those of a shard", "cached ranks"),
    _Argument("return_dict", True, "hidden states are put in their order", "cached"),
    *(_Argument(name, None, _NO_SIZES, "images") for name in IMAGE_MASKS),
    *(_Argument(name, None, "an image has no KV cache", "images") for name in CACHE_NAMES),
)

HARMLESS = frozenset(
    {
        "position_ids",  # the model's rotations have them
        *("use_cache", "cache_position", "return_dict"),
        *("output_hidden_states", "output_router_logits"),
        *("num_items_in_batch", "labels", "shift_labels"),
        "seq_idx",  # of layers other than attention
    }
)
"""Keyword arguments of a model that reach its attention and mean nothing there. Whatever attention
is given and is not here is refused."""


def check_arguments(
    module: Any, given: dict[str, Any], pattern: DilatedPattern, ranks: int, *calls: str
) -> None:
    """Raise a ValueError for arguments that mean nothing here, or a model that was changed.

    `module` is the model without its head, `given` are the arguments of its forward, and `calls`
    says of which kinds this call is, "cached" or "images".
    """
    config, several = module.config, ranks > 1
    if config._attn_implementation != NAME:
        raise ValueError(
            "set_attention was called, but the model's attn_implementation now is "
            f"{config._attn_implementation!r}: call remove_attention(model) first, or set it back "
            f"to {NAME!r}"
        )
    if (noted := saved(config)) != pattern:
        raise ValueError(
            f"set_attention gave this model the pattern {pattern}, but its config has "
            f"{noted or 'none'}: models that share one config object share its pattern; make each "
            "with copy.deepcopy(config), or call set_attention again"
        )
    kinds = {"all", *calls, *(["ranks", *(f"{x} ranks" for x in calls)] if several else ())}
    for name, wanted, why, of_calls in ARGUMENTS:
        value = given.get(name)
        if isinstance(wanted, bool):
            value = bool(getattr(config, name, wanted) if value is None else value)
        if of_calls in kinds and value is not wanted:
            where = f"on {ranks} ranks " if "ranks" in of_calls else ""
            cached = "with a KV cache " if "cached" in of_calls else ""
            got = type(value).__name__ if isinstance(value, Tensor) else in_brief(value)
            raise ValueError(f"{where}{cached}{name} must be {wanted}: {why}; got {got}")
    if several and (found := _unlike_tokens(module)):
        raise ValueError(f"on {ranks} ranks every token must be treated alone; got {found}")


def _unlike_tokens(base: Any) -> str:
    """Adapters and noise that a shard would change; they may come behind `set_attention`."""
    embeddings = base.get_input_embeddings() if base.training else None
    if alpha := getattr(embeddings, "neftune_noise_alpha", None):
        return f"neftune_noise_alpha {alpha!r}, noise whose size goes by the length of a shard"
    peft = sys.modules.get("peft")
    kind = peft and peft.tuners.tuners_utils.BaseTunerLayer
    layers: list[Any] = [x for x in base.modules() if isinstance(x, kind)] if kind else []
    for layer in layers:
        for name, variant in getattr(layer, "lora_variant", {}).items():
            if type(variant).__name__.startswith("ALora") and name in layer.active_adapters:
                return f"adapter {name!r} with alora_invocation_tokens, which are on one rank"
    if peft and layers and tuple(int(x) for x in peft.__version__.split(".")[:2]) < (0, 21):
        # It calls the model's forward past the hook of its head, which checks the loss.
        return f"adapters of peft {peft.__version__}: peft 0.21 or later is needed"
    return ""


# --- the pattern in a config

_LOAD = "import ring_dilated_attention.integrations.transformers before from_pretrained"
_PATTERN = ("segment_lengths", "dilation_rates", "head_offsets", "head_branches", "zero_keys")


def write(config: Any, pattern: DilatedPattern) -> None:
    """Note a pattern in a config of transformers, which is changed in place."""
    config.attn_implementation = NAME
    entry = {name: getattr(pattern, name) for name in _PATTERN}  # every option; JSON has no tuples
    entry = {name: list(x) if isinstance(x, tuple) else x for name, x in entry.items()}
    setattr(config, NAME, {"pattern": entry, "load": _LOAD})


def erase(config: Any) -> None:
    """Take out of a config what `write` has put there."""
    for name in ("attn_implementation", NAME):
        vars(config).pop(name, None)


def saved(config: Any) -> DilatedPattern | None:
    """The pattern that a config holds; None: there is none.

    The entry is that of `write`, or arguments of `DilatedPattern` alone, with its defaults.

    Raises:
        ValueError: the entry is neither.
    """
    entry = vars(config).get(NAME)
    if entry is None:
        return None
    try:
        return DilatedPattern(**entry.get("pattern", entry))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"config.{NAME} holds no pattern as set_attention writes it: "
            f"{type(error).__name__}: {error}"
        ) from None
