"""Modules built on `dilated_attention`: attention layers and a byte-level language model."""

from .attention import DilatedAttention, MultiheadDilatedAttention
from .longnet import LongNet, LongNetConfig
from .rope import RotaryEmbedding, Rotation

__all__ = [
    "DilatedAttention",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "RotaryEmbedding",
    "Rotation",
]
