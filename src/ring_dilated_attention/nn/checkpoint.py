"""Activation checkpointing that keeps what attention computed, and recomputes the rest in backward.

Attention is the part of a block that is dear to compute and cheap to keep: its out and lse take as
much memory as one hidden state, while computing them again would run every tile and every transfer
between ranks a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from ..pattern import check_choice, check_positive_int
from ..torch_op import AGREED, FORWARD, LENGTHS
from .recompute import Weights, may_draw

T = TypeVar("T")

Checkpoint: TypeAlias = Literal["none", "full", "keep_attention"]
"""What a module keeps for backward: ``none`` all that backward needs, ``full`` the inputs of each
block, ``keep_attention`` those and the out and lse of its attention."""
CHECKPOINTS: tuple[str, ...] = get_args(Checkpoint)
_KEPT = (FORWARD, LENGTHS, AGREED)
"""The operators of attention."""


def check_checkpoint(checkpoint: Checkpoint, blocks: int) -> None:
    """Raise unless a module can checkpoint like this.

    Args:
        checkpoint: one of `CHECKPOINTS`.
        blocks: the input of every `blocks`-th block is kept.

    Raises:
        TypeError: `blocks` is not an int.
        ValueError: `checkpoint` is unknown, `blocks` below 1, or above 1 without
            ``keep_attention``, as attention would be computed a third time.
    """
    check_choice("checkpoint", checkpoint, CHECKPOINTS)
    if check_positive_int("checkpoint_blocks", blocks) > 1 and checkpoint != "keep_attention":
        raise ValueError(
            f"checkpoint_blocks above 1 needs checkpoint 'keep_attention'; got {blocks} with "
            f"{checkpoint!r}"
        )


def attention_policy(
    ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save the results of attention, recompute those of every other operator.

    For `torch.utils.checkpoint.create_selective_checkpoint_contexts`; call it from a policy of your
    own to keep more.
    """
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputation(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """In backward, gives back what attention computed; every other operator runs.

    torch's own mode refuses an operator that runs more often than in forward. `fully_shard` may
    gather weights in backward that forward found gathered, and marks where it begins and ends.

    Args:
        made: torch's own mode, in whose place this one is used.
    """

    def __init__(self, made: Any) -> None:
        vars(self).update(vars(made))  # torch's arguments differ from version to version

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        kept: Any = super()
        return kept.__torch_dispatch__(func, types, args, kwargs)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint` with `attention_policy`.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> block = torch.nn.Linear(8, 8)
        >>> x = torch.ones(2, 8, requires_grad=True)
        >>> checkpoint(block, x, use_reentrant=False, context_fn=keep_attention).shape
        torch.Size([2, 8])
    """
    forward: Any
    forward, backward = create_selective_checkpoint_contexts(attention_policy)  # type: ignore[no-untyped-call]
    return forward, _Recomputation(backward)


def run_checkpointed(
    checkpoint: Checkpoint,
    modules: Iterable[nn.Module],
    function: Callable[..., T],
    *arguments: Any,
) -> T:
    """Call a function as `checkpoint`, one of `CHECKPOINTS`, says.

    Args:
        checkpoint: what is kept for backward.
        modules: that the function uses: backward calls it with the weights that they have now.
            Random numbers are brought back unless all of them are known to draw none.
        function: deterministic but for these.
        arguments: of the function.
    """
    if checkpoint == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    options: dict[str, Any] = {}  # dynamo takes no conditional expression as a context_fn
    if checkpoint == "keep_attention":
        options["context_fn"] = keep_attention
    draws = False
    if not torch.compiler.is_compiling():  # which brings random numbers back by itself
        modules = tuple(modules)
        draws = may_draw(function, modules)
        function = _with_weights(Weights(modules), function)
    result: T = torch.utils.checkpoint.checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=draws, **options
    )
    return result


def _with_weights(weights: Weights, function: Callable[..., T]) -> Callable[..., T]:
    """A function that computes with the weights of now, when it is called again too."""

    def run(*arguments: Any) -> T:
        weights.refuse_changes()  # as autograd does where nothing is computed again
        with weights.back(as_leaves=False):
            try:
                return function(*arguments)
            finally:
                weights.note_versions()

    return run
