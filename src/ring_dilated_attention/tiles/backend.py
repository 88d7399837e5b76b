"""What every tile back end offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class TileInputs(NamedTuple):
    """What the forward of a tile takes.

    q (batch, heads, queries, head_dim); k, v (batch, heads, keys, head_dim): strided views that may
    overlap, the last dimension contiguous. With `is_causal`, queries and keys are equally many and
    row i sees keys 0 to i.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    is_causal: bool
    scale: float


class TileGradients(NamedTuple):
    """What the backward of a tile takes besides `TileInputs`: the MERGED result of its queries.

    dout, out (batch, heads, queries, head_dim), the last dimension contiguous; lse,
    delta = rowsum(dout * out) (batch, heads, queries), float32, or float64 for float64 inputs. All
    may be strided views.
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TileBackend:
    """What computes a tile.

    Attributes:
        name: what users call it.
        forward: ``out = softmax(scale q k^T) v`` and its lse (natural log).
        backward: the tile's share of dq, dk, dv: ``p = exp(scale q k^T - lse)``,
            ``ds = scale p (dout v^T - delta)``, ``dq = ds k``, ``dk = ds^T q``, ``dv = p^T dout``.
            It comes in the dtype of the inputs or wider, as out does.
        refusal: says why it cannot take (device, dtype, head_dim); None if it can.
    """

    name: str
    forward: Callable[[TileInputs], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[TileInputs, TileGradients], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    refusal: Callable[[torch.device, torch.dtype, int], str | None]


def refuse_all_but(
    device: str, dtypes: tuple[torch.dtype, ...], *, multiple: int = 1, largest: int | None = None
) -> Callable[[torch.device, torch.dtype, int], str | None]:
    """The `refusal` of a kernel for one device type, some dtypes, and some head_dims."""

    def refusal(on: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if on.type != device:
            return f"it runs on {device}, the inputs are on {on.type}"
        if dtype not in dtypes:
            return f"it takes {', '.join(map(_short, dtypes))}, the inputs are {_short(dtype)}"
        if head_dim % multiple or (largest is not None and head_dim > largest):
            limit = "" if largest is None else f" up to {largest}"
            return f"it takes a head_dim that is a multiple of {multiple}{limit}, not {head_dim}"
        return None

    return refusal


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
