"""The fused attention kernels that ship inside torch, called below `scaled_dot_product_attention`.

The aten operators are used because they return the lse and, in backward, accept a merged out and
lse: they recompute their probabilities from that lse and delta from ``dout * out``, which makes a
tile's gradients those of the whole softmax. They read strided views as they are.
"""

from __future__ import annotations

import torch

from .backend import (
    Gradients,
    TileBackend,
    TileGradients,
    TileInputs,
    in_row_blocks,
    reads_aligned_rows,
    reads_any_rows,
    reads_separate_rows,
    refuse_all_but,
)

# Threads of a CPU that call one of these at once, the first of a process, may get 12 bits of it: a
# fault of MKL before 2025 (pytorch issue 188792). So one thread does, here.
for _function in (torch.exp, torch.log, torch.sin, torch.cos, torch.tanh):
    for _dtype in (torch.float32, torch.float64):
        _function(torch.ones(1, dtype=_dtype, device="cpu"))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are summed: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _ungrouped(t: TileInputs) -> TileInputs:
    """The tile with a key head for each query head."""
    group = t.q.shape[1] // t.k.shape[1]
    if group == 1:
        return t
    return t._replace(k=t.k.repeat_interleave(group, 1), v=t.v.repeat_interleave(group, 1))


def _scores(t: TileInputs) -> torch.Tensor:
    dtype = accumulate_dtype(t.q.dtype)
    scores = t.scale * (t.q.to(dtype) @ t.k.to(dtype).transpose(-1, -2))
    if t.softcap is not None:
        scores = t.softcap * torch.tanh(scores / t.softcap)
    if t.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    mask = _mask(t, scores.dtype)
    return scores if mask is None else scores + mask


def _mask(t: TileInputs, dtype: torch.dtype) -> torch.Tensor | None:
    """(queries, keys): 0 where a key is in the band of a query, else -inf; None: there is none."""
    if t.band is None:
        return None
    queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (t.q, t.k))
    away = keys - queries[:, None]
    mask = torch.zeros(away.shape, dtype=dtype, device=t.q.device)
    return mask.masked_fill_((away < t.band[0]) | (away > t.band[1]), -torch.inf)


def _forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    t = _ungrouped(t)
    scores = _scores(t)
    return scores.softmax(-1) @ t.v.to(scores.dtype), torch.logsumexp(scores, -1)


def _backward(t: TileInputs, g: TileGradients) -> Gradients:
    kv_heads, t = t.k.shape[1], _ungrouped(t)
    scores = _scores(t)
    p = torch.exp(scores - g.lse[..., None])
    q, k, v, dout = (x.to(p.dtype) for x in (t.q, t.k, t.v, g.dout))
    delta = (dout * g.out).sum(-1, keepdim=True)
    ds = t.scale * p * (dout @ v.transpose(-1, -2) - delta)
    if t.softcap is not None:  # d tanh = 1 - tanh^2; a masked score of -inf has p = 0
        ds *= 1 - (scores.clamp(min=-t.softcap) / t.softcap).square()
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout
    dk, dv = (x.reshape(len(x), kv_heads, -1, *x.shape[2:]).sum(2) for x in (dk, dv))
    return ds @ k, dk, dv


EAGER = in_row_blocks(
    TileBackend(
        name="eager",
        forward=_forward,
        backward=_backward,
        refusal=lambda on, dtype, head_dim: None,
        reads=reads_any_rows,
        takes_groups=True,
        takes_softcap=True,
    )
)


aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_LONGEST_VECTOR = 16
"""Most scores that a CPU's vector has: of AVX-512, in float32, as scores of half precision are."""
_NO_DROPOUT = -0.0
"""No dropout, and a key of its own in torch's cache of plans of cuDNN's backward: who calls it with
tensors that lie in other ways, by `scaled_dot_product_attention`, gets other plans."""


def _cpu_forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        t.q, t.k, t.v, 0.0, t.is_causal, scale=t.scale, attn_mask=_mask(t, t.q.dtype)
    )
    if t.k.shape[2] < _LONGEST_VECTOR and not lse.all():
        # Of fewer keys than a vector has scores, the kernel's maximum leaves out NaN: rows of NaN
        # scores alone get out 0 and lse 0. Other rows hardly ever have lse 0.
        doubtful = lse == 0
        other_out, other_lse = EAGER.forward(t)
        out = torch.where(doubtful.unsqueeze(-1), other_out.to(out.dtype), out)
        lse = torch.where(doubtful, other_lse, lse)
    return out, lse


def _cpu_backward(t: TileInputs, g: TileGradients) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g.dout, t.q, t.k, t.v, g.out, g.lse, 0.0, t.is_causal, scale=t.scale,
        attn_mask=_mask(t, t.q.dtype),
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        t.q, t.k, t.v, None, True, 0.0, t.is_causal, scale=t.scale
    )
    return out, lse.view(t.q.shape[:3])


def in_one_layout(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves if their strides are the same, else copies of which that is true.

    Args:
        tensors: of one shape. The stride of a dimension of one element does not matter.
    """
    shape, strides = tensors[0].shape, [x.stride() for x in tensors]
    if all(n == 1 or len(set(found)) == 1 for n, *found in zip(shape, *strides, strict=True)):
        return tensors
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)


def _cudnn_backward(t: TileInputs, g: TileGradients) -> Gradients:
    if t.q.shape[2] == t.k.shape[2] == 1:  # cuDNN has no backward for a single score
        return EAGER.backward(t, g)
    # torch finds a plan by the strides of q, k and v alone, but those of out and dout are part of
    # it: with others the plan is wrong without a word.
    q, out, dout = in_one_layout(t.q, g.out, g.dout)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # dropout state, unused
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, t.k, t.v, out, g.lse.contiguous().unsqueeze(-1), seed, seed, None,
        None, None, q.shape[2], t.k.shape[2], _NO_DROPOUT, t.is_causal, scale=t.scale,
    )  # fmt: skip
    return dq, dk, dv


def flash_takes(t: TileInputs) -> bool:
    """Whether torch's flash kernel computes a band as it is.

    A side that is negative has no end there. One of as many keys or more is cut to their number,
    which hides keys from the first queries where these are more than the keys.
    """
    (left, right), queries, keys = t.sides(2), t.q.shape[2], t.k.shape[2]
    return min(left, right) >= 0 and (right < keys or queries <= keys)


def _flash_forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    if t.band is not None:
        if not flash_takes(t):
            out, lse = EAGER.forward(t)
            return out.to(t.q.dtype), lse
        q, k, v = (x.transpose(1, 2) for x in t[:3])
        left, right = t.sides(2)
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False,
            scale=t.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out.transpose(1, 2), lse
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        t.q, t.k, t.v, 0.0, t.is_causal, scale=t.scale
    )
    return out, lse


def _flash_backward(t: TileInputs, g: TileGradients) -> Gradients:
    seed = torch.empty(2, dtype=torch.uint64, device=t.q.device)  # dropout state, unused
    if t.band is not None:
        if not flash_takes(t):
            return EAGER.backward(t, g)
        given = [x.transpose(1, 2) for x in (g.dout, t.q, t.k, t.v, g.out)]
        left, right = t.sides(2)
        found = aten._flash_attention_backward(
            *given, g.lse.contiguous(), None, None, t.q.shape[2], t.k.shape[2], 0.0, False,
            seed, seed, scale=t.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in found)
        return dq, dk, dv
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        g.dout, t.q, t.k, t.v, g.out, g.lse.contiguous(), None, None, t.q.shape[2], t.k.shape[2],
        0.0, t.is_causal, seed, seed, scale=t.scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        t.q, t.k, t.v, None, True, 0.0, t.is_causal, scale=t.scale
    )
    return out, lse[..., : t.q.shape[2]]  # the kernel pads the rows of lse


def _efficient_backward(t: TileInputs, g: TileGradients) -> Gradients:
    # The kernel expects lse padded to its alignment, and reads `out` as if its rows were dense.
    lse = torch.nn.functional.pad(g.lse, (0, -t.q.shape[2] % 32), value=torch.inf).contiguous()
    out = g.out.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.empty((), dtype=torch.int64, device=t.q.device)  # dropout state, unused
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        g.dout, t.q, t.k, t.v, None, out, lse, seed, seed, 0.0, [True, True, True, False],
        t.is_causal, scale=t.scale,
    )  # fmt: skip
    return dq, dk, dv


def _float32_dq(head_dim: int) -> int:
    """Half precision kernels sum dq in float32, head_dim rounded up, beside statistics of rows."""
    return 4 * (-(-head_dim // 32) * 32) + 12


CPU_FLASH, CUDNN, FLASH, EFFICIENT = (
    in_row_blocks(
        TileBackend(
            name="cpu_flash",
            forward=_cpu_forward,
            backward=_cpu_backward,
            refusal=refuse_all_but("cpu", (torch.float64, torch.float32, *_HALF)),
            reads=reads_separate_rows,
        )
    ),
    TileBackend(
        name="cudnn",
        forward=_cudnn_forward,
        backward=_cudnn_backward,
        refusal=refuse_all_but("cuda", _HALF, multiple=8, largest=128, from_ampere_on=_HALF),
        backward_workspace=_float32_dq,
        reads=reads_aligned_rows,
        wants_one_layout=True,
        repeats=False,  # torch has no way to ask cuDNN for it
    ),
    TileBackend(
        name="flash",
        forward=_flash_forward,
        backward=_flash_backward,
        refusal=refuse_all_but("cuda", _HALF, multiple=8, largest=256, from_ampere_on=_HALF),
        backward_workspace=_float32_dq,
        reads=reads_aligned_rows,
        takes_bands=True,
    ),
    TileBackend(
        name="efficient",
        forward=_efficient_forward,
        backward=_efficient_backward,
        refusal=refuse_all_but(
            "cuda",
            (torch.float32, *_HALF),
            multiple=8,
            largest=256,
            from_ampere_on=(torch.bfloat16,),
        ),
        backward_workspace=_float32_dq,
        reads=reads_aligned_rows,
    ),
)
