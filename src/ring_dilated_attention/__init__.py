"""Exact ring dilated attention for PyTorch. `dilated_attention` is the function to start from.

Public names are imported when they are first asked for, so that ``rda --help`` needs no torch. A
program that loads an exported model without a call of its own imports
`ring_dilated_attention.torch_op`, which registers the operators.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:
    from .checks import Case, reference_attention, simulate
    from .decode import DilatedKVCache, cached_attention, replicated_query_attention
    from .exchange import ExchangeError, ProcessGroupExchange, SoloExchange
    from .functional import attention_received, detached_dilated_attention, dilated_attention
    from .layout import SequenceLayout
    from .nn import hilbert_order, keep_attention
    from .options import AttentionOptions
    from .parallel import check_same_batch, labels_per_rank, shard, unshard
    from .pattern import DilatedPattern, HeadSlice, Window
    from .plan import AttentionPlan, plan_attention


__all__ = [
    "AttentionOptions",
    "AttentionPlan",
    "Case",
    "DilatedKVCache",
    "DilatedPattern",
    "ExchangeError",
    "HeadSlice",
    "ProcessGroupExchange",
    "SequenceLayout",
    "SoloExchange",
    "Window",
    "attention_received",
    "cached_attention",
    "check_same_batch",
    "detached_dilated_attention",
    "dilated_attention",
    "hilbert_order",
    "keep_attention",
    "labels_per_rank",
    "plan_attention",
    "reference_attention",
    "replicated_query_attention",
    "shard",
    "simulate",
    "unshard",
]

_FROM = {
    name: module
    for module, names in {
        "checks": ("Case", "reference_attention", "simulate"),
        "decode": ("DilatedKVCache", "cached_attention", "replicated_query_attention"),
        "exchange": ("ExchangeError", "ProcessGroupExchange", "SoloExchange"),
        "functional": ("attention_received", "detached_dilated_attention", "dilated_attention"),
        "layout": ("SequenceLayout",),
        "nn": ("hilbert_order", "keep_attention"),
        "options": ("AttentionOptions",),
        "parallel": ("check_same_batch", "labels_per_rank", "shard", "unshard"),
        "pattern": ("DilatedPattern", "HeadSlice", "Window"),
        "plan": ("AttentionPlan", "plan_attention"),
    }.items()
    for name in names
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is first asked for."""
    if name in _FROM:
        found = getattr(import_module(f".{_FROM[name]}", __name__), name)
        globals()[name] = found
        return found
    if not name.startswith("_"):
        try:
            return import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
