"""The fused attention kernels that ship inside torch, called below `scaled_dot_product_attention`.

The aten operators are used because they return the lse and, in backward, accept a merged out and
lse: they recompute their probabilities from that lse and delta from ``dout * out``, which makes a
tile's gradients those of the whole softmax. All of them read strided views as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def _refuse(
    device: str, dtypes: tuple[torch.dtype, ...], multiple: int, largest: int
) -> Callable[[torch.device, torch.dtype, int], str | None]:
    """A function that says why a kernel cannot take (device, dtype, head_dim), or None if it can."""

    def refusal(on: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if on.type != device:
            return f"it runs on {device}, the inputs are on {on.type}"
        if dtype not in dtypes:
            return f"it takes {', '.join(str(d)[6:] for d in dtypes)}, the inputs are {str(dtype)[6:]}"
        if head_dim % multiple or head_dim > largest:
            return f"it takes a head_dim that is a multiple of {multiple} up to {largest}, not {head_dim}"
        return None

    return refusal


class CpuFlash:
    """Flash attention on the CPU."""

    name = "cpu_flash"
    refusal = staticmethod(
        _refuse("cpu", (torch.float64, torch.float32, torch.bfloat16, torch.float16), 1, 1 << 30)
    )

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, lse

    @staticmethod
    def backward(
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


class CudaFlash:
    """FlashAttention-2 as torch ships it."""

    name = "flash"
    refusal = staticmethod(_refuse("cuda", _HALF, 8, 256))

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, lse

    @staticmethod
    def backward(
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


class CudaEfficient:
    """The memory-efficient kernel; the one that takes float32 on CUDA."""

    name = "efficient"
    refusal = staticmethod(_refuse("cuda", (torch.float32, *_HALF), 8, 1 << 16))

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse[..., : q.shape[2]]  # the kernel pads the rows of lse

    @staticmethod
    def backward(
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
        padding = -q.shape[2] % 32  # the alignment that the kernel expects of lse
        lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf)
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # dropout state, unused
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False],
            is_causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class CudaCudnn:
    """cuDNN's attention; the fastest of these on Hopper."""

    name = "cudnn"
    refusal = staticmethod(_refuse("cuda", _HALF, 8, 128))

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse.view(q.shape[:3])

    @staticmethod
    def backward(
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
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # dropout state, unused
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, is_causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
