"""The fused attention kernels that ship inside torch, called below `scaled_dot_product_attention`.

The aten operators are used because they return the lse and, in backward, accept a merged out and
lse: they recompute their probabilities from that lse and delta from ``dout * out``, which makes a
tile's gradients those of the whole softmax. They read strided views as they are.
"""

from __future__ import annotations

import torch

from .backend import TileBackend, refuse_all_but
from .eager import EAGER

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )
    return out, lse


def _cpu_backward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
    )
    return dq, dk, dv


def _cudnn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.shape[2] == k.shape[2] == 1:  # cuDNN has no backward for a single score
        return EAGER.backward(dout, q, k, v, out, lse, delta, is_causal=is_causal, scale=scale)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # dropout state, unused
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, is_causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def _flash_backward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout state, unused
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
        0.0, is_causal, seed, seed, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the kernel pads the rows of lse


def _efficient_backward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # The kernel expects lse padded to its alignment, and reads `out` as if its rows were dense.
    lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=torch.inf).contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # dropout state, unused
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False],
        is_causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


FUSED = (
    TileBackend(
        name="cpu_flash",
        forward=_cpu_forward,
        backward=_cpu_backward,
        refusal=refuse_all_but("cpu", (torch.float64, torch.float32, *_HALF)),
    ),
    TileBackend(
        name="cudnn",
        forward=_cudnn_forward,
        backward=_cudnn_backward,
        refusal=refuse_all_but("cuda", _HALF, multiple=8, largest=128),
    ),
    TileBackend(
        name="flash",
        forward=_flash_forward,
        backward=_flash_backward,
        refusal=refuse_all_but("cuda", _HALF, multiple=8, largest=256),
    ),
    TileBackend(
        name="efficient",
        forward=_efficient_forward,
        backward=_efficient_backward,
        refusal=refuse_all_but("cuda", (torch.float32, *_HALF), multiple=8),
    ),
)
"""In the order in which they are preferred."""
