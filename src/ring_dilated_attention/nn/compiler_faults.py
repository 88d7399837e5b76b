"""What goes around faults of torch's compiler."""

from __future__ import annotations

import torch

MISCOUNTS_ROWS = "2.10" <= torch.__version__ < "2.12"  # as versions compare, not as text
"""Whether Inductor fails in gradients of norms where the rows are a changing number and one more.
Its code for GPUs that sums several orders of a tensor at once has ``2 * 1 + n // 16`` there where
``2 * (1 + n // 16)`` is meant, and backward raises RuntimeError. torch 2.12 writes parentheses."""


def norm_one_row_more() -> None:
    """Call it where a model makes its sequence longer by one row, before the norms.

    With a version of torch that fails there, and only where the model is being compiled, it turns
    off `torch._inductor.config.triton.mix_order_reduction`, as its users would have to.
    """
    if MISCOUNTS_ROWS and torch.compiler.is_compiling():
        _sum_one_order_at_a_time()


def _sum_one_order_at_a_time() -> None:
    # Called by the tracer, before anything is compiled.
    from torch._inductor import config

    config.triton.mix_order_reduction = False


# What `torch.compiler.assume_constant_result` does, which takes a second to import the compiler.
vars(_sum_one_order_at_a_time)["_dynamo_marked_constant"] = True
