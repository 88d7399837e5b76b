"""Class tokens and positions of models whose attention was replaced: a shard alone has neither."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..exchange import Group, resolve_exchange
from ..layout import SequenceLayout

CLASS_TOKENS = ("cls_token", "class_token", "cls_embedding", "class_embedding", "dist_token")
"""What models call a parameter that they put before their sequence."""

_RANKS = "_ring_dilated_attention_ranks"


def refuse_class_token(model: nn.Module, group: Group, layout: SequenceLayout | None) -> None:
    """Raise a `ValueError` if every rank would put a class token before its shard.

    With a layout, a shard of one row too many is an error of the call; without one, a class token
    on each rank is a longer sequence, which is computed.

    Args:
        model: the model whose attention is sharded.
        group: the ranks that share each sequence.
        layout: which positions each rank holds; None means contiguous equal shards.
    """
    if layout is not None or group is None:
        return
    ranks = resolve_exchange(group).world_size
    found = [
        name for name, _ in model.named_parameters() if name.rpartition(".")[2] in CLASS_TOKENS
    ]
    if ranks > 1 and found:
        raise ValueError(
            f"the model has a class token ({found[0]}), which each of the {ranks} ranks would put "
            "before its shard: use integrations.gigapath.shard_slide_encoder, which shards behind "
            "it, or pass a layout in which one rank holds its position; got layout=None"
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
