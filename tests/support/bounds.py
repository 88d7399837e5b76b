"""How far results of small models may be from each other, by the number of their roundings."""

import torch

from support.tolerances import rounding_bound

EXACT = rounding_bound(torch.float64, 1 << 20)
"""In float64: no number of theirs has a million roundings, layers x width x positions, in it."""

IN_FLOAT32 = rounding_bound(torch.float32, 64)
"""Where norms, rotations or losses are in float32, as transformers' are whatever the model's dtype
is: 64 of them in an output, 2 layers of width 32."""

SUMMED_IN_FLOAT32 = rounding_bound(torch.float32, 64 * 64)
"""The same for gradients, which are sums over up to 64 positions, and for models in float32."""
