"""Whether and how generation captures its steps in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..decode import CapturedStep, DilatedKVCache, steps_by_kernel
from ..parallel import is_dtensor
from ..pattern import in_brief
from .attention import MultiheadDilatedAttention
from .hooks import runs_hooks

TakeStep: TypeAlias = Callable[[Tensor], Tensor]
"""From the next tokens, (batch, 1), to logits, (batch, 1, vocab_size)."""

CAPTURED_TOKENS = 32
"""Tokens from which on a step is captured: warming up and capturing take as long as 10 steps."""


def check_capture(
    capture: bool | None, model: nn.Module, device: torch.device, sharded: bool | None
) -> None:
    """Raise a `TypeError` or `ValueError` unless steps can be captured, where that is asked for.

    Args:
        capture: what the user asks for.
        model: that generates.
        device: of the tokens.
        sharded: what the user asks for of caches.
    """
    if capture is not None and not isinstance(capture, bool):
        raise TypeError(f"capture must be a bool or None, got {in_brief(capture)}")
    if capture and (device.type != "cuda" or sharded):
        raise ValueError(
            "capture=True needs a CUDA device, and caches that every rank holds whole "
            f"(sharded=False); got tokens on {device}, sharded={sharded}"
        )
    if capture and _has_hooks(model):
        raise ValueError(
            "capture=True, but modules of the model have hooks, which a CUDA graph would not call "
            "for each token: remove them, or give capture=False"
        )


def captures(
    capture: bool | None, model: nn.Module, caches: Sequence[DilatedKVCache], max_new_tokens: int
) -> bool:
    """Whether steps are captured in a CUDA graph.

    Args:
        capture: what the user asks for, as `check_capture` allows it; None: where it helps.
        model: with no hooks where it is True.
        caches: of its layers.
        max_new_tokens: how many tokens are wanted.

    Raises:
        ValueError: it is asked for, and the ranks share the caches; alike on every rank.
    """
    if capture and caches[0].is_sharded:
        raise ValueError(
            f"the ranks share the rows of each cache ({caches[0].nbytes:,} bytes on each rank), "
            "and such a step cannot be captured: give sharded=False, or capture=False"
        )
    if capture is not None:
        return capture
    device = caches[0].keys.device
    return (
        device.type == "cuda"
        and max_new_tokens >= CAPTURED_TOKENS
        and not _has_hooks(model)
        and not any(cache.is_sharded for cache in caches)
        and not torch.is_autocast_enabled(device.type)
        and not any(is_dtensor(parameter) for parameter in model.parameters())
        and all(steps_by_kernel(caches[0], backend) for backend in _backends(model))
    )


def _backends(model: nn.Module) -> set[str]:
    """What its attention is to be computed by."""
    modules = (x for x in model.modules() if isinstance(x, MultiheadDilatedAttention))
    return {module.backend for module in modules}


def _has_hooks(model: nn.Module) -> bool:
    return any(runs_hooks(module) for module in model.modules())


def captured_step(
    name: str, take: TakeStep, batch: int, caches: Sequence[DilatedKVCache]
) -> TakeStep:
    """A step in a CUDA graph, captured with whatever tokens.

    Args:
        name: what is called, for messages.
        take: the step.
        batch: rows of the batch.
        caches: that the step adds to.

    Raises:
        RuntimeError: it cannot be captured.
    """
    with torch.inference_mode(False), torch.no_grad():
        example = torch.zeros(batch, 1, dtype=torch.int64, device=caches[0].keys.device)
        try:
            return CapturedStep(take, example, caches)
        except RuntimeError as error:
            raise RuntimeError(
                f"{name} cannot capture a step of this model in a CUDA graph, for example because "
                "a module of yours waits for the device. This process has to start again: give "
                f"capture=False. {error}"
            ) from error
