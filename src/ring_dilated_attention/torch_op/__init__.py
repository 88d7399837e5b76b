"""A call as torch sees it: autograd, torch.compile, fake tensors, FLOP formulas.

`FORWARD` is the operator of every call of `dilated_attention`, `BACKWARD` that of its gradients;
importing this room registers them.
`validate_tensors` refuses what cannot be a query, key and value, `validate_tensor` one of them.
`AGREED` and `agreed` have the ranks agree on what a module was given, `tell_ranks` tells them of a
failure on the way to attention, and `telling_ranks` calls what may fail.
`LENGTHS`, an operator too, `lengths_of_mask` and `padding` tell the lengths that a padding mask
stands for, and `check_padding_mask` refuses what is none.
`gelu_norm` is the layer norm of a GELU by one kernel, as an operator (`GELU_NORM`).
`apply_function`, `once_differentiable` and `refuse_tangents` are what any autograd function here
needs.
"""

from .agreed import (
    AGREED,
    LENGTHS,
    agreed,
    check_padding_mask,
    lengths_of_mask,
    padding,
    tell_ranks,
    telling_ranks,
)
from .derivatives import apply_function, once_differentiable, refuse_tangents
from .gelu_norm import GELU_NORM, gelu_norm
from .operator import BACKWARD, FORWARD, validate_tensor, validate_tensors

__all__ = [
    "AGREED",
    "BACKWARD",
    "FORWARD",
    "GELU_NORM",
    "LENGTHS",
    "agreed",
    "apply_function",
    "check_padding_mask",
    "gelu_norm",
    "lengths_of_mask",
    "once_differentiable",
    "padding",
    "refuse_tangents",
    "tell_ranks",
    "telling_ranks",
    "validate_tensor",
    "validate_tensors",
]
