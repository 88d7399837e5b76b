"""A call as torch sees it: autograd, torch.compile, fake tensors, FLOP formulas.

`FORWARD`, which `call_forward` calls, is the operator of every call of `dilated_attention`;
importing this room registers them, and `RECEIVED` (what keys receive), `LENGTHS` (of a padding
mask), `AGREED` (ranks agree on what a module was given), and those of `gelu_norm` and `rotate`.
`validate_tensors` and `check_padding_mask` refuse arguments; `tell_ranks` and `telling_ranks` raise
a failure on the way to attention on every rank, and `sum_over_ranks` adds what is small.
`apply_function`, `once_differentiable` and `refuse_tangents` serve any autograd function.
"""

from .agreed import (
    AGREED,
    LENGTHS,
    agreed,
    check_padding_mask,
    lengths_of_mask,
    padding,
    sum_over_ranks,
    tell_ranks,
    telling_ranks,
)
from .derivatives import apply_function, once_differentiable, refuse_tangents
from .operator import (
    FORWARD,
    RECEIVED,
    call_forward,
    validate_sink,
    validate_tensor,
    validate_tensors,
)
from .rows import gelu_norm, rotate

__all__ = [
    "AGREED",
    "FORWARD",
    "LENGTHS",
    "RECEIVED",
    "agreed",
    "apply_function",
    "call_forward",
    "check_padding_mask",
    "gelu_norm",
    "lengths_of_mask",
    "once_differentiable",
    "padding",
    "refuse_tangents",
    "rotate",
    "sum_over_ranks",
    "tell_ranks",
    "telling_ranks",
    "validate_sink",
    "validate_tensor",
    "validate_tensors",
]
