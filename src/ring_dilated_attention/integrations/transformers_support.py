"""What `set_attention` supports, as tables, and the pattern that a model's config keeps.

`set_attention` walks `TEXT` or `IMAGES` before the first forward; `ARGUMENTS` is walked before each
call, for what only a call shows. Each row says what is refused, and why.

``config.json`` gets two entries. ``attn_implementation`` names this package's attention, so that
transformers itself refuses to load the model where nobody has registered that name. The other one
has the pattern with all its options.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..pattern import DilatedPattern, in_brief

NAME = "ring_dilated_attention"
"""What ``attn_implementation`` has to be; the entry of a config that holds the pattern; and the
argument by which a call's settings go from the model to its attention modules."""

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers' models call a KV cache: from version 5.24 on, and before."""

_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # the latter: GPT-2, BERT as a decoder
_HEADS_OF_TOKENS = (*_NEXT_TOKEN, "ForMaskedLM", "ForTokenClassification")
_ENCODERS = tuple(
    f"{name}Model"
    for name in (
        *("Bert", "Camembert", "DistilBert", "Electra", "Ernie"),
        *("Roberta", "XLMRoberta", "XLMRobertaXL"),
    )
)
"""Those that were looked at and tested on several ranks. Others count positions in a shard, as ESM
does for its rotations, or scale by what a shard holds."""
_IMAGES = ("ViTModel", "SiglipVisionModel")
"""The same of images: behind their embeddings nothing but attention mixes tokens."""
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe"}
_WHOLE_ATTENTION = {"full_attention", "linear_attention", "attention"}
"""What the configs of transformers call layers without attention, and which attention has no mask
of its own."""
_OPTIONS = ("sliding_window", "attn_logit_softcapping", "sinks")
"""Attributes of attention modules (the first one also of their config) that change attention."""
_WITHOUT_USE = ("MoshiAttention",)
"""Attention modules that have a window and do not use it."""
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")


def without_head(model: Any) -> Any:
    """What a model has under its head; the model itself, if it has none.

    transformers' `base_model` is the attribute that `base_model_prefix` names, and the whole model,
    with its head, where that names none of it: then the model that it holds is taken.
    """
    base = model.base_model
    held = _held_models(model) if base is model and _has_head_of_tokens(model) else []
    return held[0] if len(held) == 1 else base


def without_adapters(model: Any, ranks: int = 1) -> Any:
    """The model of transformers inside of a PeftModel, or what is given if it is none."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    if ranks > 1 and getattr(model, "_is_prompt_learning", False):
        raise ValueError(
            f"on {ranks} ranks adapters must not add virtual tokens, which would come before "
            f"every shard; got {model.peft_type}: use LoRA or another adapter of weights"
        )
    if isinstance(model, peft.PeftMixedModel):
        return model.base_model.model
    return model.get_base_model()


def learns_next(name: str) -> bool:
    """Whether a model, by the name of its class, learns the next token from each one."""
    return name.endswith(_NEXT_TOKEN)


def takes_images(base: Any) -> bool:
    """Whether images are what a model takes, and nothing else."""
    return getattr(base, "main_input_name", None) == "pixel_values"


def rotates_in_dimensions(model: Any) -> bool:
    """Whether a model without its head has position ids of several dimensions (M-RoPE)."""
    rope = getattr(model.config, "rope_parameters", None)
    return isinstance(rope, dict) and "mrope_section" in rope


def with_embeddings(base: Any) -> Any:
    """Of a model of images the part that has the embeddings: in older versions, one level down."""
    return base if hasattr(base, "embeddings") else base.vision_model


def _has_head_of_tokens(model: Any) -> bool:
    return type(model).__name__.endswith(_HEADS_OF_TOKENS)


def _held_models(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.children() if isinstance(module, PreTrainedModel)]


def _is_one_of(module: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)  # fully_shard's too


class Positions(NamedTuple):
    """Which position ids a model numbers its tokens with.

    Attributes:
        first: of a row's first token: 0, but padding_idx + 1 in RoBERTa and its like.
        most: how many there are embeddings for; None: any number, as of rotations.
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


# --- models: what each row finds, as text; nothing where it finds nothing of it


def _crossing(model: Any, base: Any) -> str:
    flags = ("is_encoder_decoder", "add_cross_attention")
    return ", ".join(f"config.{x}=True" for x in flags if getattr(model.config, x, False))


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "is_causal") or type(module).__name__.endswith("Attention"):
            yield path, module


def _several_parts(model: Any, base: Any) -> str:
    """The innermost models around attention, where there is more than one, and which to take.

    The padding, documents and positions of one of them mean nothing to the others.
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
    inner = {p: x for p, x in owners.items() if not any(q.startswith(f"{p}.") for q in owners)}
    texts = [p for p, x in inner.items() if "input_ids" in inspect.signature(x.forward).parameters]
    best = next((path for path in (*texts, *inner) if path != "model"), None)
    advice = f"; call it with one of them, as set_attention({best}, pattern)" if best else ""
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
            if value is not None and not _is_one_of(module, _WITHOUT_USE):
                got = name if isinstance(value, Tensor) else f"{name}={value}"
                found.setdefault(got, {})[layer] = None
    return "; ".join(f"{got} in layers {', '.join(layers)}" for got, layers in found.items())


def _other_head(model: Any, base: Any) -> str:
    return "" if base is model or _has_head_of_tokens(model) else type(model).__name__


def _hidden_base(model: Any, base: Any) -> str:
    held = _held_models(model) if base is model else []
    prefix = f"base_model_prefix {model.base_model_prefix!r}"
    return f"{prefix} and a {type(held[0]).__name__} by another name" if held else ""


def _is_encoder(base: Any) -> bool:
    return not all(getattr(module, "is_causal", True) for module in base.modules())


def _other_encoder(model: Any, base: Any) -> str:
    return type(base).__name__ if _is_encoder(base) and not _is_one_of(base, _ENCODERS) else ""


def _pooler(model: Any, base: Any) -> str:
    return "a pooler" if _is_encoder(base) and getattr(base, "pooler", None) is not None else ""


def other_layers(model: Any, base: Any) -> str:
    """Layers other than attention that mix positions, or attention of some positions."""
    others = sorted(set(_layer_types(model)) - {"full_attention"})
    mixing = (
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.RNNBase)
    )
    return ", ".join([*others, *mixing])


def _scaled_by_position(model: Any, base: Any) -> str:
    found = (
        f"attn_temperature_tuning in {path}"
        for path, module in model.named_modules()
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    )
    return ", ".join(found)


def _rotations_by_length(model: Any, base: Any) -> str:
    for path, module in model.named_modules():
        rope = getattr(module, "rope_type", None)
        for name in rope.values() if isinstance(rope, dict) else [rope]:
            if name in ("dynamic", "longrope"):
                return f"rope_type {name!r} in {path}"
    return ""


def _no_interface(model: Any, base: Any) -> str:
    known = any(hasattr(module, "is_causal") for module in base.modules())
    return "" if known else "attention of its own"


def _other_images(model: Any, base: Any) -> str:
    return "" if _is_one_of(base, _IMAGES) else f"a {type(base).__name__}"


def _head_of_images(model: Any, base: Any) -> str:
    return "" if base is model else f"a head around a {type(base).__name__}"


def _pools_images(model: Any, base: Any) -> str:
    parts = {"pooler": "a pooler", "head": "attention that pools"}
    held = with_embeddings(base)
    return ", ".join(x for name, x in parts.items() if getattr(held, name, None) is not None)


_NO_POOLING = "the tokens of a shard must not be pooled: make it with add_pooling_layer=False"
_Row = tuple[Callable[[Any, Any], str], str]
TEXT: tuple[_Row, ...] = (
    (_crossing, "models with cross-attention are not supported"),
    (_several_parts, "it is for a model of one sequence"),
    (_forward_of, "forward must take attention_mask, position_ids and further keyword arguments"),
    (_no_attention, "there must be attention to replace"),
    (
        _other_attention,
        "the pattern alone decides what a head sees: windows, soft caps and sinks must be off, as "
        "by config.sliding_window=None",
    ),
)
TEXT_ON_RANKS: tuple[_Row, ...] = (
    (
        _other_head,
        f"a head must treat every token alone: one of {', '.join(_HEADS_OF_TOKENS)}, or "
        "model.base_model with a head of your own",
    ),
    (_hidden_base, "base_model_prefix must name the attribute of the model without its head"),
    (_other_encoder, f"the encoders are {', '.join(_ENCODERS)}"),
    (_pooler, _NO_POOLING),
    (other_layers, "nothing but full attention may mix positions"),
    (_scaled_by_position, "queries must not be scaled by positions in their shard"),
    (_rotations_by_length, "rotations must not depend on the longest position of a shard"),
)
IMAGES: tuple[_Row, ...] = (
    (_no_interface, "attention must come from transformers' AttentionInterface"),
)
IMAGES_ON_RANKS: tuple[_Row, ...] = (
    (_other_images, f"the models of images are {' and '.join(_IMAGES)}"),
    (_head_of_images, "a head must treat every token alone: call it with the model in it"),
    (_pools_images, f"{_NO_POOLING}, or with config.vision_use_head = False"),
)


def check_model(model: Any, base: Any, ranks: int) -> None:
    """Raise a ValueError, which says what the model has, unless `set_attention` supports it.

    `base` is the model without its head, the same where it has none.
    """
    images, where = takes_images(base), f" on {ranks} ranks" if ranks > 1 else ""
    more = (IMAGES_ON_RANKS if images else TEXT_ON_RANKS) if where else ()
    for find, why in (*(IMAGES if images else TEXT), *more):
        if found := find(model, base):
            kind = type(model).__name__
            raise ValueError(f"set_attention does not support {kind}{where}: {why}; got {found}")


# --- calls


_ONES = "all ones"


class _Argument(NamedTuple):
    """An argument of a model's forward that is refused in some calls unless it is `wanted`.

    `calls` are "all", "ranks" (several), "images", "cached", or "cached ranks". Where `wanted` is
    a bool, the argument None means what the config says.
    """

    name: str
    wanted: bool | str | None
    why: str
    calls: str = "all"

    def refuses(self, value: Any) -> bool:
        """Whether the argument must not be this."""
        if self.wanted == _ONES:
            return isinstance(value, Tensor) and not bool((value == 1).all())
        return value is not None if self.wanted is None else bool(value) is not self.wanted


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
    _Argument("attention_mask", None, _NO_SIZES, "images"),
    _Argument("pixel_attention_mask", _ONES, _NO_SIZES, "images"),
    _Argument("patch_attention_mask", _ONES, _NO_SIZES, "images"),
    _Argument("pixel_mask", _ONES, _NO_SIZES, "images"),
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


def check_arguments(module: Any, given: dict[str, Any], ranks: int, *calls: str) -> None:
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
    kinds = {"all", *calls, *(["ranks", *(f"{x} ranks" for x in calls)] if several else ())}
    for row in ARGUMENTS:
        value = given.get(row.name)
        if isinstance(row.wanted, bool) and value is None:
            value = getattr(config, row.name, row.wanted)
        if row.calls in kinds and row.refuses(value):
            where = f"on {ranks} ranks " if "ranks" in row.calls else ""
            cached = "with a KV cache " if "cached" in row.calls else ""
            got = type(value).__name__ if isinstance(value, Tensor) else in_brief(value)
            raise ValueError(
                f"{where}{cached}{row.name} must be {row.wanted}: {row.why}; got {got}"
            )
    if several and (found := _unlike_tokens(module)):
        raise ValueError(f"on {ranks} ranks every token must be treated alone; got {found}")


def _unlike_tokens(base: Any) -> str:
    """Adapters and noise that a shard would change; they may come behind `set_attention`."""
    embeddings = base.get_input_embeddings() if base.training else None
    if alpha := getattr(embeddings, "neftune_noise_alpha", None):
        return f"neftune_noise_alpha {alpha!r}, noise whose size goes by the length of a shard"
    peft = sys.modules.get("peft")
    if peft is None:
        return ""
    kind = peft.tuners.tuners_utils.BaseTunerLayer
    layers: list[Any] = [module for module in base.modules() if isinstance(module, kind)]
    for layer in layers:
        for name, variant in getattr(layer, "lora_variant", {}).items():
            if type(variant).__name__.startswith("ALora") and name in layer.active_adapters:
                return f"adapter {name!r} with alora_invocation_tokens, which are on one rank"
    if layers and tuple(int(x) for x in peft.__version__.split(".")[:2]) < (0, 21):
        # It calls the model's forward past the hook of its head, which checks the loss.
        return f"adapters of peft {peft.__version__}: peft 0.21 or later is needed"
    return ""


def check_loss(name: str, given: dict[str, Any], ranks: int) -> None:
    """Raise a ValueError if a loss, or a choice of logits, would be that of a shard alone.

    `name` is the class of a model with a head, `given` are the arguments of its forward without a
    KV cache on `ranks` > 1.
    """
    has = {key for key, value in given.items() if value is not None}
    labels, shifts, kept = "labels" in has, learns_next(name), given.get("logits_to_keep")
    why = ""
    if labels and shifts and "shift_labels" not in has:
        why = (
            "labels need shift_labels: a shard's last label is on another rank; shard_batch gives "
            "it. Got shift_labels=None"
        )
    elif labels and "num_items_in_batch" not in has:
        why = (
            "labels need num_items_in_batch: what labels_per_rank returns, the labels of all ranks "
            "over the number of ranks. Got num_items_in_batch=None"
        )
    elif labels and not shifts and "shift_labels" in has:
        why = (
            f"the labels of {name} are those of the tokens themselves: make the batch with "
            "shard_batch(..., shift_labels=False); got shift_labels"
        )
    elif labels and not shifts and given.get("return_dict") is False:
        why = f"the loss of {name} needs return_dict=True; got False"
    elif not labels and "shift_labels" in has:
        why = (
            "shift_labels need labels; got labels=None. The Trainer takes them out for "
            "label_smoothing_factor and compute_loss_func, which shift the labels of a shard: "
            "compute such a loss from the logits and shift_labels, without giving them the model"
        )
    elif isinstance(kept, Tensor) or kept:
        why = (
            "logits_to_keep must be 0, since it counts the rows of a shard unless there is a KV "
            f"cache: generate, which passes it, needs use_cache=True on ranks; got {kept!r}"
        )
    if why:
        raise ValueError(f"on {ranks} ranks {why}")


# --- the pattern in a config

_LOAD = "import ring_dilated_attention.integrations.transformers before from_pretrained"
_PATTERN = ("segment_lengths", "dilation_rates", "head_offsets", "head_branches", "zero_keys")


def _pattern_entry(pattern: DilatedPattern) -> dict[str, Any]:
    """A pattern as JSON has it: every option by its name, tuples as lists."""
    values = ((name, getattr(pattern, name)) for name in _PATTERN)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values}


def write(config: Any, pattern: DilatedPattern) -> None:
    """Note a pattern in a config of transformers, which is changed in place."""
    config.attn_implementation = NAME
    setattr(config, NAME, {"pattern": _pattern_entry(pattern), "load": _LOAD})


def erase(config: Any) -> None:
    """Take out of a config what `write` has put there."""
    for name in ("attn_implementation", NAME):
        vars(config).pop(name, None)


def saved(config: Any) -> DilatedPattern | None:
    """The pattern that `write` has put into a config; None: there is none.

    Raises:
        ValueError: the entry is not one that `write` makes.
    """
    entry = vars(config).get(NAME)
    if entry is None:
        return None
    options = entry.get("pattern") if isinstance(entry, dict) else None
    if not isinstance(options, dict) or set(options) != set(_PATTERN):
        got = sorted(map(str, options)) if isinstance(options, dict) else in_brief(entry)
        raise ValueError(
            f"config.{NAME} must have a 'pattern' with {', '.join(_PATTERN)}, as set_attention "
            f"writes it; got {got}"
        )
    try:
        return DilatedPattern(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.{NAME} holds no pattern: {error}") from None


def check_same_pattern(config: Any, pattern: DilatedPattern) -> None:
    """Raise a ValueError unless a config holds a model's pattern: what is saved is right."""
    entry = vars(config).get(NAME)
    if not isinstance(entry, dict) or entry.get("pattern") != _pattern_entry(pattern):
        raise ValueError(
            f"set_attention gave this model the pattern {pattern}, but its config has "
            f"{saved(config) or 'none'}: models that share one config object share its "
            "pattern; make each with copy.deepcopy(config), or call set_attention again"
        )
