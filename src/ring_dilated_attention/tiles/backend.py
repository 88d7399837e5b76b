"""What every tile back end offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Forward(Protocol):
    """``softmax(scale q k^T) v`` and its lse (natural log)."""

    def __call__(  # noqa: D102
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Backward(Protocol):
    """A tile's share of dq, dk, dv, given the MERGED out, lse and delta of its queries.

    ``p = exp(scale q k^T - lse)``, ``ds = scale p (dout v^T - delta)``, ``dq = ds k``,
    ``dk = ds^T q``, ``dv = p^T dout``, where delta = rowsum(dout * out).
    """

    def __call__(  # noqa: D102
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class TileBackend:
    """What computes a tile.

    Shapes: q, out, dout (batch, heads, queries, head_dim); k, v (batch, heads, keys, head_dim);
    lse, delta (batch, heads, queries) in float32, or float64 for float64 inputs. They may be
    strided views that overlap; the last dimension of all but lse and delta is contiguous. With
    `is_causal`, queries and keys are equally many and row i sees keys 0 to i. Outputs and gradients
    come in the dtype of the inputs or wider.

    Attributes:
        name: what users call it.
        forward: computes out and lse.
        backward: computes gradients.
        refusal: says why it cannot take (device, dtype, head_dim); None if it can.
    """

    name: str
    forward: Forward
    backward: Backward
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
