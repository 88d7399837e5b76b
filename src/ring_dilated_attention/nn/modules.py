"""Modules in general: hooks, initial weights, who gathers them, shapes of inputs; and the norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..engine import autocast_dtype
from ..kernels import takes_rows
from ..parallel import is_dtensor, is_fully_sharded
from ..pattern import in_brief, shape_in_brief
from ..torch_op import gelu_norm

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[str]:
    """Which kinds of hooks a module has, as `nn.Module` calls them."""
    return [kind for kind in _KINDS if getattr(module, kind)]


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is what its class says: no subclass, no hooks, no sharded or view weights.

    Its function may then be computed from its parameters, without calling it.
    """
    # `module.weight` takes five times as long, and a layer asks for it in each call.
    return (
        type(module) is kind
        and type(module._parameters.get("weight")) is nn.Parameter
        and not runs_hooks(module)
    )


def runs_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks: its own, those of all modules, or another forward."""
    return bool(
        hooks_of(module)
        or "forward" in module.__dict__  # as accelerate replaces it
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


@contextmanager
def without_weights(module: nn.Module, device: torch.device | str | None = None) -> Iterator[None]:
    """In the body of the statement a module makes its parts; then their memory is allocated.

    Modules of torch draw weights where they are made, and ours would draw them once more. Made
    without weights, a module draws once, in `reset_parameters`: the same from the same seed,
    whether it was made on its device, or on the meta device and emptied onto it later.

    Args:
        module: has no parameters yet.
        device: where to allocate; None: torch's default device, which may be the meta device.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"):
        yield
    if where.type != "meta":
        module.to_empty(device=where)


IN_CHUNKS = "chunk_rows computes gradients of weights from chunk to chunk"


def refuse_sharded_apart(owner: nn.Module, names: Iterable[str], why: str) -> None:
    """Raise where `fully_shard` gathers the weights of a submodule while nobody uses them.

    It gathers them while that very module is called; `why` says why `owner` uses the weights of
    these submodules without that. The check is of the structure, the same on every rank.
    """
    whole = type(owner).__name__.removeprefix("FSDP")
    for name in names:
        for inner, module in owner.get_submodule(name).named_modules(prefix=name):
            if is_fully_sharded(module):
                raise ValueError(
                    f"{whole}.{inner} must not be under fully_shard by itself: {why}. Leave it "
                    f"to fully_shard of the {whole} around it"
                )


def check_rows(name: str, tensor: Any, width: int, shape: str) -> None:
    """Raise unless an argument is a dense tensor of 3 dimensions, `shape` in words and `width`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not a sparse or nested one")
    if tensor.dim() != 3 or tensor.shape[2] != width:
        raise ValueError(f"{name} must have shape {shape}{width}); got {shape_in_brief(tensor)}")


# --- The norm


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, whose result under autocast has the dtype of a half-precision input.

    autocast makes `nn.LayerNorm` return float32, twice the memory of what comes in and of what the
    projection behind it reads. Means and variances are float32 here too; the weight and the bias
    are rounded to the dtype of the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            input: shape (..., normalized_shape), floating.

        Returns:
            The shape of `input`; its dtype where that is bfloat16 or float16, else that of
            `nn.LayerNorm`.
        """
        return normalize(self, input)


def normalize(norm: nn.LayerNorm, rows: Tensor) -> Tensor:
    """What `LayerNorm.forward` does, by the parameters of any `nn.LayerNorm`."""
    shape, eps = norm.normalized_shape, norm.eps
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return F.layer_norm(rows, shape, norm.weight, norm.bias, eps)
    weight, bias = (None if x is None else x.to(rows.dtype) for x in (norm.weight, norm.bias))
    casts = autocast_dtype(rows.device.type) is not None
    with torch.autocast(rows.device.type, enabled=False) if casts else nullcontext():
        return F.layer_norm(rows, shape, weight, bias, eps)


def normalize_gelu(norm: nn.Module, rows: Tensor) -> Tensor:
    """``norm(F.gelu(rows))``, where `fits_one_kernel` by reading and writing each row once."""
    if fits_one_kernel(norm, rows):
        return gelu_norm(rows, norm.weight, norm.bias, norm.eps)
    found: Tensor = norm(F.gelu(rows))
    return found


def fits_one_kernel(norm: nn.Module, rows: Tensor) -> TypeGuard[LayerNorm]:
    """Whether `normalize_gelu` takes one kernel for this module and these rows.

    It does for what the kernel was measured on, rows of half precision on GPUs, and where calling
    the module would do nothing else.
    """
    return (
        rows.dtype in (torch.bfloat16, torch.float16)
        and is_plain(norm, LayerNorm)
        and type(norm.bias) is nn.Parameter
        and norm.normalized_shape == rows.shape[-1:]
        and takes_kernels(rows, int(norm.normalized_shape[-1]))
    )


def takes_kernels(tensor: Tensor, width: int = 1) -> bool:
    """Whether operators that are one Triton kernel compute with a tensor, its dtype aside.

    `width`: elements of the rows of which a program of the kernel holds a whole one; a constant.
    """
    return (
        tensor.is_cuda
        and not is_dtensor(tensor)
        and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())
        and _takes_rows(tensor.device, width)
    )


def _takes_rows(device: torch.device, width: int) -> bool:
    return takes_rows(device, width)


vars(_takes_rows)["_dynamo_marked_constant"] = True  # as in slide.py
