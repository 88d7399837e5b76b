"""The loss of a head whose labels are those of the tokens themselves, on several ranks.

Heads of masked language models and of token classification take the mean over the labels of a
shard, and most of them ignore ``num_items_in_batch``. On several ranks their labels are taken out
of the call, and the loss is computed from their logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..exchange import resolve_exchange
from .transformers_call import ARGUMENT, Settings
from .transformers_models import learns_next

_IGNORED = -100  # transformers' label of what is not learnt


@dataclass(frozen=True, eq=False)
class Labels:
    """What the loss of a call needs, which goes with the call to the hook behind the head.

    Attributes:
        labels: of this rank's shard, (batch, local_sequence), -100 where nothing is learnt.
        divisor: ``num_items_in_batch``: what the sum is divided by.
    """

    labels: Tensor
    divisor: Tensor | float


def own_loss(module: nn.Module, settings: Settings, given: dict[str, Any]) -> bool:
    """Whether the loss of a call is computed here and not by the head.

    Args:
        module: the model with its head.
        settings: of `set_attention`.
        given: arguments of its forward, by name.
    """
    if settings.group is None or given.get("labels") is None or learns_next(type(module).__name__):
        return False
    return resolve_exchange(settings.group).world_size > 1


def without_labels(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a head, so that it computes logits alone and the hook behind it the loss.

    Args:
        given: its arguments by name, with ``labels`` and ``num_items_in_batch``.
    """
    labels = Labels(given["labels"], given["num_items_in_batch"])
    return {**given, "labels": None, "num_items_in_batch": None, ARGUMENT: labels}


def after_head(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """The hook behind a head: the loss, where `without_labels` has taken the labels out."""
    given = kwargs.get(ARGUMENT)
    if not isinstance(given, Labels):
        return None
    logits = output.logits.flatten(0, 1)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels = given.labels.reshape(-1).to(logits.device)
    total = nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
    divisor = given.divisor
    output.loss = total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)
    return output
