"""Which tensors can be a query, key or value."""

from __future__ import annotations

import torch

from ..parallel import is_dtensor
from ..pattern import in_brief, shape_in_brief

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def validate_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, same_length: bool = True
) -> None:
    """Raise a `TypeError` or `ValueError` unless these can be a query, key and value.

    Args:
        query: the query of a call.
        key: the key of a call.
        value: the value of a call.
        same_length: whether the query must have as many rows as the keys.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        validate_tensor(name, tensor)
    if not query.dtype == key.dtype == value.dtype:
        got = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        raise ValueError(
            f"query, key and value must have one dtype; got {got}. Cast them, or make the call "
            "under torch.autocast"
        )
    if not query.device == key.device == value.device:
        got = f"query {query.device}, key {key.device}, value {value.device}"
        raise ValueError(f"query, key and value must have one device; got {got}")
    problem = _shape_problem(query.shape, key.shape, value.shape, same_length)
    if problem is not None:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(
            f"{problem}; got {shapes}. Shapes are (batch, local_sequence, heads, head_dim)"
        )


def validate_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise a `TypeError` or `ValueError` unless this can be a query, key or value.

    Args:
        name: of the argument, for messages.
        tensor: what was given.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
    if is_dtensor(tensor):
        raise TypeError(f"{name} is a DTensor; pass its shard, {name}.to_local()")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{name} must be a dense (torch.strided) tensor; got {kind}")
    if tensor.ndim != 4:
        raise ValueError(
            f"{name} must have 4 dimensions (batch, local_sequence, heads, head_dim); "
            f"got shape {shape_in_brief(tensor)}"
        )
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(d) for d in _DTYPES)
        raise TypeError(f"the dtype of {name} must be one of {allowed}; got {tensor.dtype}")


def _shape_problem(
    query: torch.Size, key: torch.Size, value: torch.Size, same_length: bool
) -> str | None:
    for dim, what in ((0, "batch size"), (1, "local sequence length"), (3, "head_dim")):
        if (dim != 1 or same_length) and not query[dim] == key[dim] == value[dim]:
            return f"query, key and value must have the same {what}"
    if key[1] != value[1] or key[2] != value[2]:
        return "key and value must have the same shape"
    if query[0] == 0 or query[2] == 0 or key[2] == 0 or query[3] == 0:
        return "batch, heads, kv_heads and head_dim must be >= 1"
    if query[2] % key[2]:
        return "heads must be a multiple of kv_heads"
    return None
