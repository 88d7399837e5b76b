"""Exact ring dilated attention for PyTorch. `dilated_attention` is the function to start from."""

from .checks import Case, reference_attention, simulate, spot_check
from .decode import replicated_query_attention
from .exchange import ExchangeError, ProcessGroupExchange, SoloExchange
from .functional import detached_dilated_attention, dilated_attention
from .layout import SequenceLayout
from .nn import hilbert_order, keep_attention
from .pattern import DilatedPattern
from .plan import AttentionPlan, plan_attention
from .version import VERSION

__version__ = VERSION

__all__ = [
    "AttentionPlan",
    "Case",
    "DilatedPattern",
    "ExchangeError",
    "ProcessGroupExchange",
    "SequenceLayout",
    "SoloExchange",
    "detached_dilated_attention",
    "dilated_attention",
    "hilbert_order",
    "keep_attention",
    "plan_attention",
    "reference_attention",
    "replicated_query_attention",
    "simulate",
    "spot_check",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
