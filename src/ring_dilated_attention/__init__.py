"""Exact ring dilated attention for PyTorch. `dilated_attention` is the function to start from."""

from .decode import replicated_query_attention
from .exchange import ExchangeError
from .functional import dilated_attention
from .layout import SequenceLayout
from .pattern import DilatedPattern
from .plan import AttentionPlan, plan_attention
from .version import VERSION

__version__ = VERSION

__all__ = [
    "AttentionPlan",
    "DilatedPattern",
    "ExchangeError",
    "SequenceLayout",
    "dilated_attention",
    "plan_attention",
    "replicated_query_attention",
]
