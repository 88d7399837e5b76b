"""flash-attn-4 (the pip package of that name, extra ``fa4``): Hopper and Blackwell GPUs.

Its CuTe kernels read strided views as they are, and write results into views they are given. They
are called below `flash_attn_func`, because backward takes a merged out and lse there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from ..kernels import profile_of
from .backend import (
    Gradients,
    TileBackend,
    TileGradients,
    TileInputs,
    reads_aligned_rows,
    refuse_all_but,
    wants_same_bits,
)
from .replay import Replay

_CAPABILITIES = (9, 10)  # compute capability 9.x and 10.x
_LOCK = threading.Lock()  # its compiler crashes when two threads are in it
_refused = refuse_all_but("cuda", (torch.float16, torch.bfloat16), multiple=8, largest=256)


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:  # no flash_attn at all
        return False


def _refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    reason = _refused(device, dtype, head_dim)
    if reason is None and not _is_installed():
        return "it is not installed: pip install 'ring-dilated-attention[fa4]'"
    if reason is not None:
        return reason
    major = profile_of(device).capability[0]
    if major not in _CAPABILITIES:
        allowed = " and ".join(f"{each}.x" for each in _CAPABILITIES)
        return f"it runs on compute capability {allowed}, the device has {major}.x"
    if major == 10 and 128 < head_dim < 256:
        return f"on Blackwell it takes a head_dim up to 128, or 256, not {head_dim}"
    return None


@lru_cache(maxsize=1)
def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


FORWARDS = Replay(lambda: [_interface()._flash_attn_fwd], allocates=False)
BACKWARDS = Replay(
    lambda: [
        _interface()._bwd_preprocess,
        _interface()._flash_attn_bwd,
        _interface()._bwd_postprocess_convert,
    ],
    allocates=True,
)
"""The calls of flash-attn-4's kernels that are kept, of forward and of backward."""


def _forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, _ = t.q.shape
    out, lse = t.q.new_empty(t.q.shape), t.q.new_empty((batch, heads, rows), dtype=torch.float32)
    _forward_into(t, out, lse)
    return out.transpose(1, 2), lse


def _forward_into(t: TileInputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v = t[:3]

    def run(noting: AbstractContextManager[Any]) -> None:
        with _LOCK, noting:
            _interface()._flash_attn_fwd(q, k, v, **options, out=out, lse=lse)

    options = _options(t)
    FORWARDS((q, k, v, out, lse), tuple(options.values()), run, t.memo)


def _options(t: TileInputs) -> dict[str, Any]:
    """How the scores of a tile are scaled, capped and masked."""
    left, right = (None, None) if t.band is None else t.sides(1)
    return {
        "softmax_scale": t.scale,
        "causal": t.is_causal,
        "softcap": t.softcap or 0.0,
        "window_size_left": left,
        "window_size_right": right,
    }


def _backward_into(
    t: TileInputs, g: TileGradients, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
) -> None:
    # What it cannot read flash-attn-4 copies itself, and those calls could not be called again.
    lse = g.lse
    if not reads_aligned_rows(lse):
        lse = lse.clone(memory_format=torch.contiguous_format)
    given, repeats = (t.q, t.k, t.v, g.out, g.dout, lse), wants_same_bits()
    options = {**_options(t), "deterministic": repeats}

    def run(noting: AbstractContextManager[Any]) -> None:
        with _LOCK, _even_padding(t.q.shape[3]), noting:
            _interface()._flash_attn_bwd(*given, **options, dq=dq, dk=dk, dv=dv)

    # Programs that take turns do so by a tensor of zeros, which no replay would clear.
    memo = None if repeats else t.memo
    BACKWARDS((*given, dq, dk, dv), tuple(options.values()), run, memo)


@contextmanager
def _even_padding(head_dim: int) -> Iterator[None]:
    """Have the Hopper backward pad head_dim to a multiple of 32, as what reads its dq expects.

    Up to 4.0.0b36 it pads to a multiple of 16, and where that is an odd one (head_dim 48, 80, 112)
    dq comes out wrong: https://github.com/Dao-AILab/flash-attention/pull/2896. The kernels made so
    are kept apart from those that others may have made.
    """
    if head_dim > 128 or _padded(head_dim, 32) == _padded(head_dim, 16):
        yield
        return
    interface = _interface()
    kernel, cache = interface.FlashAttentionBackwardSm90, interface._flash_attn_bwd.compile_cache

    def make_kernel(dtype: Any, head_dim: int, head_dim_v: int, *rest: Any, **options: Any) -> Any:
        return kernel(dtype, _padded(head_dim, 32), _padded(head_dim_v, 32), *rest, **options)

    interface.FlashAttentionBackwardSm90 = make_kernel
    interface._flash_attn_bwd.compile_cache = _EVENLY_PADDED
    try:
        yield
    finally:
        interface.FlashAttentionBackwardSm90 = kernel
        interface._flash_attn_bwd.compile_cache = cache


_EVENLY_PADDED: dict[Any, Any] = {}
"""By head_dim, dtype and the like, as flash-attn-4 keeps its own: no shape is in a key."""


def _padded(head_dim: int, multiple: int) -> int:
    return -(-head_dim // multiple) * multiple


def _backward(t: TileInputs, g: TileGradients) -> Gradients:
    dq, dk, dv = (x.new_empty(x.shape) for x in (t.q, t.k, t.v))
    _backward_into(t, g, dq, dk, dv)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


FA4 = TileBackend(
    name="fa4",
    forward=_forward,
    backward=_backward,
    refusal=_refusal,
    forward_into=_forward_into,
    backward_into=_backward_into,
    # dq in float32, and two statistics of rows.
    backward_workspace=lambda head_dim: 4 * _padded(head_dim, 64 if head_dim > 128 else 32) + 12,
    reads=reads_aligned_rows,  # CuTe compiles a stride of 0 into the kernel that it then keeps
    rows_first=True,
    keeps_calls=True,
    takes_groups=True,
    takes_bands=True,
    takes_softcap=True,
)
