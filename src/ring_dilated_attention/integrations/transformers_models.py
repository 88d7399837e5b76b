"""Which models of transformers can have `set_attention`, and the pattern that their config keeps.

``config.json`` gets two entries. ``attn_implementation`` names this package's attention, so that
transformers itself refuses to load the model where nobody has registered that name. The other one
has the pattern with all its options and the kind of the layout.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..layout import SequenceLayout
from ..pattern import DilatedPattern, in_brief

_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")
"""How the classes of models that learn the next token from each one are called; the latter: GPT-2,
BERT as a decoder."""
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
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe"}
"""What the configs of transformers call layers without attention, with older names."""
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
_PEFT = (0, 21)
"""Before this version of peft, adapters called the model's forward past its hooks."""


def kind_of(given: Any) -> str:
    """What something is that should be a model of transformers; of a wrapper, what to do."""
    kind = type(given).__name__
    held = [x for x in given.modules() if x is not given] if isinstance(given, nn.Module) else []
    if not held or not _is_pretrained(held[0]):
        return kind
    return f"{kind} around a {type(held[0]).__name__}: call set_attention before it is wrapped"


def _is_pretrained(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def without_head(model: Any) -> Any:
    """What a model has under its head; the model itself, if it has none.

    transformers' `base_model` is the attribute that `base_model_prefix` names, and the whole model,
    with its head, where that names none of it: then the model that it holds is taken.
    """
    base = model.base_model
    if base is not model or not type(model).__name__.endswith(_HEADS_OF_TOKENS):
        return base
    held = [module for module in model.children() if _is_pretrained(module)]
    return held[0] if len(held) == 1 else base


def without_adapters(model: Any, world_size: int = 1) -> Any:
    """The model of transformers inside of a PeftModel, or what is given if it is none.

    Args:
        model: anything.
        world_size: ranks that share each sequence.

    Raises:
        ValueError: on several ranks, peft would put its virtual tokens before every shard.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    learns_prompts = getattr(model, "_is_prompt_learning", False)
    if world_size > 1 and learns_prompts:
        raise ValueError(
            f"on {world_size} ranks adapters must not add virtual tokens, which would come before "
            f"every shard; got {model.peft_type}: use LoRA or another adapter of weights"
        )
    if isinstance(model, peft.PeftMixedModel):
        return model.base_model.model
    return model.get_base_model()


def check_peft(base: nn.Module, world_size: int) -> None:
    """Raise for adapters that several ranks cannot have.

    Args:
        base: the model without its head.
        world_size: ranks that share each sequence.

    Raises:
        RuntimeError: an old peft would call the model past the hook of its head.
        ValueError: an adapter is active from some token of the sequence on.
    """
    peft = sys.modules.get("peft")
    if peft is None or world_size == 1:
        return
    kind = peft.tuners.tuners_utils.BaseTunerLayer
    layers: list[Any] = [module for module in base.modules() if isinstance(module, kind)]
    for layer in layers:
        for name, variant in getattr(layer, "lora_variant", {}).items():
            if type(variant).__name__.startswith("ALora") and name in layer.active_adapters:
                raise ValueError(
                    f"on {world_size} ranks adapters must treat every token alone; got adapter "
                    f"{name!r} with alora_invocation_tokens, which a shard does not have: use LoRA "
                    "without them"
                )
    version = tuple(int(x) for x in peft.__version__.split(".")[:2])
    if version < _PEFT and layers:
        raise RuntimeError(
            f"on {world_size} ranks adapters need peft {'.'.join(map(str, _PEFT))} or later, which "
            f"calls a model with its hooks; got peft {peft.__version__}"
        )


def _table_of_positions(base: nn.Module) -> nn.Embedding | None:
    """The embeddings of positions, where a model has learnt them; None: it has rotations."""
    for path, module in base.named_modules():
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _POSITIONS:
            return module
    return None


class Positions(NamedTuple):
    """Which position ids a model numbers its tokens with.

    Attributes:
        first: of a row's first token: 0, but padding_idx + 1 in RoBERTa and its like.
        most: how many there are embeddings for; None: any number.
    """

    first: int
    most: int | None

    @classmethod
    def of(cls, base: Any) -> Positions:
        """Those of a model without its head."""
        table = _table_of_positions(base)
        if table is None:
            return ANY_POSITIONS
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        known = getattr(base.config, "max_position_embeddings", None)
        return cls(first, min(table.num_embeddings, known or table.num_embeddings))


ANY_POSITIONS = Positions(0, None)
"""Those of a model with rotations."""


def has_cross_attention(model: Any) -> bool:
    """Whether the config of a model says that it attends to another sequence."""
    flags = ("is_encoder_decoder", "add_cross_attention")
    return any(getattr(model.config, flag, False) for flag in flags)


def rotates_in_dimensions(model: Any) -> bool:
    """Whether a model without its head has position ids of several dimensions (M-RoPE)."""
    rope = getattr(model.config, "rope_parameters", None)
    return isinstance(rope, dict) and "mrope_section" in rope


def learns_next(name: str) -> bool:
    """Whether a model, by the name of its class, learns the next token from each one."""
    return name.endswith(_NEXT_TOKEN)


def check_model(model: nn.Module, base: nn.Module, world_size: int) -> None:
    """Raise a ValueError unless the model is supported.

    Args:
        model: with or without a head.
        base: the same without its head.
        world_size: ranks that share each sequence.
    """
    kind, config = type(model).__name__, model.config
    if has_cross_attention(model):
        raise ValueError(f"models with cross-attention are not supported; got {kind}")
    parameters = inspect.signature(base.forward).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_more or not {"attention_mask", "position_ids"} <= parameters.keys():
        raise ValueError(
            f"{type(base).__name__}.forward must take attention_mask, position_ids and further "
            f"keyword arguments; it takes {', '.join(parameters)}"
        )
    layers = set(getattr(config, "layer_types", None) or ())
    if layers and layers <= _WITHOUT_ATTENTION:
        raise ValueError(
            f"{kind} has no attention to replace: config.layer_types are {sorted(layers)}"
        )
    if world_size == 1:
        return
    where = f"on {world_size} ranks"
    if base is not model and not kind.endswith(_HEADS_OF_TOKENS):
        raise ValueError(
            f"{where} a head must treat every token alone: one of {', '.join(_HEADS_OF_TOKENS)}, "
            f"or model.base_model with a head of your own; got {kind}"
        )
    if base is model and (held := [x for x in model.children() if _is_pretrained(x)]):
        raise ValueError(
            f"{where} base_model_prefix must be the name of the attribute that holds the model "
            f"without its head: of this {kind} it is {model.base_model_prefix!r}; give it that of "
            f"its {type(held[0]).__name__}"
        )
    _check_encoder(base, where)
    others = layers - {"full_attention"}
    if others:
        raise ValueError(
            f"{where} config.layer_types must all be 'full_attention'; got {sorted(others)}"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            raise ValueError(
                f"{where} nothing but attention may mix positions; {path} is a "
                f"{type(module).__name__}"
            )
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            raise ValueError(
                f"{where} queries must not be scaled by positions that are counted in a shard; "
                f"{path} does so (attn_temperature_tuning): use it on one process"
            )
        rope = getattr(module, "rope_type", None)
        for name in rope.values() if isinstance(rope, dict) else [rope]:
            if name in ("dynamic", "longrope"):
                raise ValueError(
                    f"{where} rotary frequencies must not depend on the longest position of a "
                    f"shard; {path} has rope_type {name!r}"
                )


def _check_encoder(base: nn.Module, where: str) -> None:
    """Raise a ValueError for what an encoder would do with a shard alone."""
    if all(getattr(module, "is_causal", True) for module in base.modules()):
        return
    name = type(base).__name__
    if not any(kind.__name__ in _ENCODERS for kind in type(base).__mro__):  # fully_shard's too
        raise ValueError(f"{where} the encoders are {', '.join(_ENCODERS)}; got {name}")
    if getattr(base, "pooler", None) is not None:
        raise ValueError(
            f"{where} {name} must not pool the first token of each shard: make it with "
            "add_pooling_layer=False"
        )


SAVED = "ring_dilated_attention"
"""The entry of a config that holds the pattern."""

IMPLEMENTATION = "attn_implementation"
"""The entry of a config from which transformers takes the name of the attention."""

_LOAD = "import ring_dilated_attention.integrations.transformers before from_pretrained"
_OPTIONS = ("segment_lengths", "dilation_rates", "head_offsets", "head_branches", "zero_keys")


def pattern_entry(pattern: DilatedPattern) -> dict[str, Any]:
    """A pattern as JSON has it: every option by its name, tuples as lists."""
    values = ((name, getattr(pattern, name)) for name in _OPTIONS)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values}


def layout_kind(layout: SequenceLayout | None) -> str:
    """``"contiguous"``, which None means too, ``"zigzag"``, or ``"custom"``: other ranges."""
    if layout is None:
        return "contiguous"
    size = (layout.length, layout.world_size)
    if layout == SequenceLayout.contiguous(*size):
        return "contiguous"
    return "zigzag" if layout == SequenceLayout.zigzag(*size) else "custom"


def write(config: Any, pattern: DilatedPattern, kind: str) -> None:
    """Note a pattern and the kind of a layout in a config of transformers.

    Args:
        config: of the model; changed in place.
        pattern: which keys each head sees.
        kind: of the layout; see `layout_kind`.
    """
    setattr(config, IMPLEMENTATION, SAVED)
    setattr(config, SAVED, {"pattern": pattern_entry(pattern), "layout": kind, "load": _LOAD})


def erase(config: Any) -> None:
    """Take out of a config what `write` has put there."""
    for name in (IMPLEMENTATION, SAVED):
        if name in vars(config):
            delattr(config, name)


def saved_entry(config: Any) -> Any:
    """What a config says about the pattern, as it is; None: nothing."""
    return vars(config).get(SAVED)


def saved_pattern(config: Any) -> DilatedPattern | None:
    """The pattern that `write` has put into a config; None where there is none.

    Raises:
        ValueError: the entry is not one that `write` makes.
    """
    entry = saved_entry(config)
    if entry is None:
        return None
    options = entry.get("pattern") if isinstance(entry, dict) else None
    if not isinstance(options, dict) or set(options) != set(_OPTIONS):
        got = sorted(map(str, options)) if isinstance(options, dict) else in_brief(entry)
        raise ValueError(
            f"config.{SAVED} must have a 'pattern' with {', '.join(_OPTIONS)}, as set_attention "
            f"writes it; got {got}"
        )
    try:
        return DilatedPattern(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.{SAVED} holds no pattern: {error}") from None


def saved_kind(config: Any) -> str:
    """The kind of layout that a config names; contiguous where it names none."""
    entry = saved_entry(config)
    return str(entry["layout"]) if isinstance(entry, dict) and "layout" in entry else "contiguous"


def is_dense(pattern: DilatedPattern) -> bool:
    """Whether a pattern computes what transformers' own attention computes."""
    return pattern.branches == DilatedPattern.dense().branches


def check_same_pattern(config: Any, pattern: DilatedPattern) -> None:
    """Raise a ValueError unless a config holds this pattern, so that what is saved is right.

    Args:
        config: of a model with `set_attention`.
        pattern: of its settings.
    """
    entry = saved_entry(config)
    if not isinstance(entry, dict) or entry.get("pattern") != pattern_entry(pattern):
        raise ValueError(
            f"set_attention gave this model the pattern {pattern}, but its config has "
            f"{saved_pattern(config) or 'none'}: models that share one config object share its "
            "pattern; make each with copy.deepcopy(config), or call set_attention again"
        )


def restore_when_made(set_attention: Callable[[PreTrainedModel], None]) -> None:
    """Let every model of transformers have the pattern of its config as soon as it is made.

    Args:
        set_attention: is called with a new model whose config holds a pattern. Such a model whose
            ``attn_implementation`` is another raises a ValueError.
    """
    post_init = PreTrainedModel.post_init

    @wraps(post_init)
    def made(model: PreTrainedModel) -> None:
        post_init(model)
        pattern, implementation = saved_pattern(model.config), model.config._attn_implementation
        if pattern is None:
            return
        if implementation != SAVED:
            raise ValueError(
                f"the config says that this {type(model).__name__} has the dilated pattern "
                f"{pattern}, but attn_implementation is {implementation!r}, which computes another "
                f"function: pass attn_implementation={SAVED!r}, or, where this model is part of "
                f"another, {{'text_config': {SAVED!r}}} with the name of its config in that of the "
                f"whole; if you want the other attention, a config without the pattern: del "
                f"config.{SAVED}"
            )
        set_attention(model)

    PreTrainedModel.post_init = made
