"""Tell torch what implements an operator of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def implement(
    library: Any,
    operator: Any,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> None:
    """Register functions for an operator that `library` has defined.

    Args:
        library: a `torch.library.Library`.
        operator: an overload, such as ``torch.ops.ring_dilated_attention.forward.default``.
        run: what computes it on any device, below autograd.
        fake: what it returns for tensors without data: empty ones.
        autograd: what is called where gradients may be asked for; None: what torch does.
            `torch.library.register_autograd` does the same and takes 30 us longer, on every call.
    """
    name = operator._schema.name.partition("::")[2]
    library.impl(name, run, "CompositeExplicitAutograd")
    if autograd is not None:
        library.impl(name, autograd, "Autograd")
    torch.library.register_fake(operator, fake, lib=library)
