"""Class tokens of models whose attention was replaced: on ranks, only one of them may have it."""

from __future__ import annotations

from torch import nn

from ..exchange import Group, resolve_exchange
from ..layout import SequenceLayout

CLASS_TOKENS = ("cls_token", "class_token", "cls_embedding", "class_embedding", "dist_token")
"""What models call a parameter that they put before their sequence."""


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
