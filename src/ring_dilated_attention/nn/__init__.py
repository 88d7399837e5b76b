"""Modules built on `dilated_attention`: layers, a language model of bytes, an encoder of slides."""

from .attention import MultiheadDilatedAttention
from .block import Block as Block  # for other subpackages
from .checkpoint import Checkpoint, attention_policy, check_checkpoint, keep_attention
from .checks import check_head_sizes
from .checks import check_rows as check_rows  # for other subpackages
from .chunked import map_rows
from .config import LongNetConfig
from .dilated import DilatedAttention
from .head_slices import Heads, slice_of_heads, slice_of_projections
from .hooks import hooks_of, is_plain
from .longnet import LongNet
from .norm import LayerNorm, normalize
from .projections import project_heads
from .rope import RotaryEmbedding, Rotation, document_positions
from .sampling import Sampler
from .sincos import sincos_positions
from .slide import Encoded, SlideEncoder
from .slide_config import SlideEncoderConfig
from .spatial import hilbert_order, inverse_order

__all__ = [
    "Checkpoint",
    "DilatedAttention",
    "Encoded",
    "Heads",
    "LayerNorm",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "RotaryEmbedding",
    "Rotation",
    "Sampler",
    "SlideEncoder",
    "SlideEncoderConfig",
    "attention_policy",
    "check_checkpoint",
    "check_head_sizes",
    "document_positions",
    "hilbert_order",
    "hooks_of",
    "inverse_order",
    "is_plain",
    "keep_attention",
    "map_rows",
    "normalize",
    "project_heads",
    "sincos_positions",
    "slice_of_heads",
    "slice_of_projections",
]
