"""Modules built on `dilated_attention`: layers, a language model of bytes, an encoder of slides.

`slides` packs slides of any size; `heads` and `modules` are what the integrations share.
"""

from . import heads, modules, slides
from .attention import DilatedAttention, MultiheadDilatedAttention
from .block import Block
from .checkpoint import attention_policy, keep_attention, map_rows
from .config import LongNetConfig, SlideEncoderConfig
from .generate import Sampler
from .longnet import LongNet
from .positions import RotaryEmbedding, Rotation, document_positions
from .slide import SlideEncoder
from .spatial import hilbert_order, inverse_order, sincos_positions

__all__ = [
    "Block",
    "DilatedAttention",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "RotaryEmbedding",
    "Rotation",
    "Sampler",
    "SlideEncoder",
    "SlideEncoderConfig",
    "attention_policy",
    "document_positions",
    "heads",
    "hilbert_order",
    "inverse_order",
    "keep_attention",
    "map_rows",
    "modules",
    "sincos_positions",
    "slides",
]
