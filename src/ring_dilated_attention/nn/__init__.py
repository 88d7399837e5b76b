"""Modules built on `dilated_attention`: attention layers and a byte-level language model."""

from .attention import DilatedAttention, MultiheadDilatedAttention
from .chunked import map_rows
from .config import LongNetConfig
from .longnet import LongNet
from .rope import RotaryEmbedding, Rotation

__all__ = [
    "DilatedAttention",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "RotaryEmbedding",
    "Rotation",
    "map_rows",
]
