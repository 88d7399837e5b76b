"""Refuse models of torchscale: nothing to replace, or modules that would see one shard alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..nn.modules import hooks_of
from ..pattern import in_brief

_MOST_SHOWN = 5
_RANKS = "_ring_dilated_attention_ranks"


def refuse_nothing_to_replace(model: nn.Module) -> None:
    """Raise a `ValueError` for a model in which `replace_dilated_attention` finds nothing."""
    raise ValueError(
        f"replace_dilated_attention found no DilatedAttention of torchscale in {_shown(model)}; "
        "pass the model that holds torchscale's LongNet encoder"
    )


def refuse_nothing_replaced(model: nn.Module) -> None:
    """Raise a `ValueError` for a model in which `set_layout` finds nothing."""
    raise ValueError(
        f"set_layout found no TorchscaleDilatedAttention in {_shown(model)}; "
        "call replace_dilated_attention first"
    )


def _shown(model: nn.Module) -> str:
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules())
    seen = [kind for kind in kinds if "attention" in kind.lower()][:_MOST_SHOWN]
    return f"{type(model).__name__}, whose attention modules are: {', '.join(seen) or 'none'}"


def refuse_lost_wrappers(where: str, module: nn.Module) -> None:
    """Raise a `ValueError` for a module with hooks, or a forward of its own, that would be lost.

    Args:
        where: its path, for the message.
        module: what is to be replaced.
    """
    if hooks := hooks_of(module):
        raise ValueError(
            f"{where} has hooks, which would be lost: register them after replacing; "
            f"got {', '.join(hooks)}"
        )
    own = vars(module).get("forward")
    if own is not None:
        raise ValueError(
            f"{where}.forward has been replaced, as checkpoint_wrapper of fairscale replaces it, "
            f"and would be lost: wrap the module after replacing it; got {in_brief(own)}"
        )


def refuse_mixed_rows(model: nn.Module, path: str, ranks: int) -> None:
    """Raise a `ValueError` for a model that mixes rows in other modules than dilated attention.

    Args:
        model: what each rank calls with the rows of its shard.
        path: the model's path in what the user passed, for the message; empty if it is that.
        ranks: how many share each sequence; 1 refuses nothing.
    """
    for name, module in model.named_modules() if ranks > 1 else ():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        where = ".".join(part for part in (path, name) if part)
        if "MultiheadAttention" in kinds and "DilatedAttention" not in kinds:
            crossing = getattr(module, "encoder_decoder_attention", False)
            found = "cross-attention" if crossing else "attention that is not dilated"
            wrong = f"which on each of {ranks} ranks would see the keys of that rank alone"
        elif getattr(module, "is_moe_layer", False):
            found = "a layer of experts (moe_freq)"
            wrong = f"whose capacity on each of {ranks} ranks would count the rows of that rank"
        else:
            continue
        raise ValueError(
            f"{where or 'the model itself'} is {found}, {wrong}: shard only a part of the model "
            "whose other modules treat every row alone (pass that part, an encoder, say, and put "
            f"its rows together before what follows), or use one rank; got {type(module).__name__}"
        )


def refuse_local_positions(model: nn.Module, ranks: int) -> None:
    """Have torchscale's embeddings of positions refuse, from now on, to count those of a shard.

    Args:
        model: the model whose attention is sharded.
        ranks: how many share each sequence.
    """
    for parent in model.modules():
        embedding = parent._modules.get("embed_positions")
        if embedding is None or (ranks == 1 and not hasattr(embedding, _RANKS)):
            continue
        if not hasattr(embedding, _RANKS):
            embedding.register_forward_pre_hook(_before_positions, with_kwargs=True)
        setattr(embedding, _RANKS, ranks)


def _before_positions(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ranks = getattr(module, _RANKS)
    if ranks > 1 and len(args) < 2 and kwargs.get("positions") is None:
        raise ValueError(
            f"on {ranks} ranks embed_positions would count the positions of each shard from 0: "
            "pass positions= to torchscale's Encoder, those of this rank's rows, or set the "
            "model's embed_positions to None and pass token_embeddings that have their positions; "
            "got positions=None"
        )
