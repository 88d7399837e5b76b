"""A call as torch sees it: autograd, torch.compile, fake tensors, FLOP formulas.

`FORWARD` is the operator of every call of `dilated_attention`; importing this room registers it.
`apply_function`, `once_differentiable` and `refuse_tangents` are what any autograd function here
needs.
"""

from .derivatives import apply_function, once_differentiable, refuse_tangents
from .operator import FORWARD

__all__ = [
    "FORWARD",
    "apply_function",
    "once_differentiable",
    "refuse_tangents",
]
