"""Agreement of the ranks on what a module was given, as torch.compile sees it: an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..exchange import Group, agree, exchange_named, group_name, untraced
from .registration import implement

_Library: Any = torch.library.Library  # its methods have no annotations
_library = _Library("ring_dilated_attention", "FRAGMENT")
_library.define(
    "agreed(Tensor tensor, str name, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)

AGREED = torch.ops.ring_dilated_attention.agreed.default
"""(tensor, name, group) -> a copy of the tensor, once every rank of the group has called the module
`name` with arguments that fit. What follows depends on the copy, so that a graph neither drops the
agreement nor moves it."""


def _agreed(tensor: torch.Tensor, name: str, group: str) -> torch.Tensor:
    agree(name, exchange_named(group), {}, None, tensor.device)
    return tensor.clone()


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient, None, None


implement(_library, AGREED, untraced(_agreed), lambda tensor, name, group: torch.empty_like(tensor))
torch.library.register_autograd(AGREED, _backward, setup_context=_setup_context, lib=_library)


_TRACES_NO_RAISE = torch.__version__ < "2.13"  # as versions compare, not as text
"""torch 2.11's tracer fails where an exception that was caught is raised, and does not show it."""


@untraced
def _refuse(failure: Exception, name: str, group: Group, device: torch.device) -> None:
    agree(name, exchange_named(group_name(group)), None, failure, device)


T = TypeVar("T")


def telling_ranks(group: Group, function: Callable[..., T], rows: object, *more: Any) -> T:
    """What a function on the way to `dilated_attention` returns; the ranks are told if it fails.

    A rank that raised alone would leave the others waiting for it, and its next call would be
    taken for this one. Not for functions in which ranks of the group wait for each other. Where
    torch.compile traces, the function is called as it is.

    Args:
        group: the ranks that share each sequence.
        function: of this rank.
        rows: its first argument.
        more: the others.
    """
    if torch.compiler.is_compiling():
        return function(rows, *more)
    try:
        return function(rows, *more)
    except Exception as failure:
        tell_ranks(failure, group, rows)
        raise


def tell_ranks(failure: Exception, group: Group, rows: object) -> None:
    """Raise a failure on all ranks, whose next call is that of `dilated_attention`.

    While torch.compile traces, nothing is told: what is not compiled then runs again.

    Args:
        failure: of this rank; on the others it is a `ValueError` that names this one.
        group: the ranks that share each sequence.
        rows: what this rank was given, a tensor or anything else.
    """
    if not torch.compiler.is_compiling():
        device = rows.device if isinstance(rows, torch.Tensor) else torch.device("cpu")
        agree("dilated_attention", exchange_named(group_name(group)), None, failure, device)


def agreed(
    tensor: torch.Tensor | None,
    name: str,
    group: Group,
    failure: Exception | None,
    device: torch.device,
) -> torch.Tensor:
    """Raise on every rank unless the arguments of all ranks fit; see `exchange.agree`.

    Args:
        tensor: a small tensor that all that follows depends on; None if this rank refused.
        name: the module that was called, for messages.
        group: the ranks that share each sequence.
        failure: why this rank refused its arguments; None if it did not. While torch.compile
            traces it is raised at once: with ``fullgraph=True`` compilation fails, and else the
            module runs without being compiled, and tells the other ranks.
        device: where the arguments are.

    Returns:
        The tensor, or a copy of it.
    """
    if not torch.compiler.is_compiling():
        ends = exchange_named(group_name(group))
        agree(name, ends, None if failure else {}, failure, device)
    elif failure is not None:
        if _TRACES_NO_RAISE:
            _refuse(failure, name, group, device)
        raise failure
    elif tensor is not None and group is not None:
        tensor = AGREED(tensor, name, group_name(group))
    assert tensor is not None
    return tensor
