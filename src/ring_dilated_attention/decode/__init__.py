"""Queries that every rank holds whole, as in decoding, against sharded keys and values."""

from .replicated import replicated_query_attention

__all__ = [
    "replicated_query_attention",
]
