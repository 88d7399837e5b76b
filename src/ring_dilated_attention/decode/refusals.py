"""What a cache refuses: tensors that are not its own, rows that it has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from ..documents import Integers, as_ints, in_words
from ..pattern import DilatedPattern, check_int, in_brief
from ..plan import CachePlan
from ..torch_op import refuse_tangents, validate_tensor

NAME = "DilatedKVCache"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class DeepOnly:
    """What `copy.deepcopy` copies, and `copy.copy` does not.

    A shallow copy would share the tensors of a cache, but not the number of rows in them.
    """

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"a shallow copy of a {type(self).__name__} would share its rows, but not their number:"
            " take copy.deepcopy, which gives the copy rows of its own"
        )


def check_options(
    pattern: DilatedPattern, max_rewind: int, dtype: torch.dtype, sharded: bool | None
) -> None:
    """Raise a `TypeError` or `ValueError` unless `DilatedKVCache` allows these options."""
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {in_brief(pattern)}")
    if check_int("max_rewind", max_rewind) < 0:
        raise ValueError(f"max_rewind must be >= 0, got {max_rewind}")
    if dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        given = str(dtype) if isinstance(dtype, torch.dtype) else in_brief(dtype)
        raise TypeError(f"dtype must be one of {allowed}; got {given}")
    if sharded is not None and not isinstance(sharded, bool):
        raise TypeError(f"sharded must be a bool or None, got {in_brief(sharded)}")


def check_kinds(key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise unless these can be keys and values at all.

    Raises:
        TypeError, ValueError: one is no tensor of a dtype and of dimensions that are allowed.
        NotImplementedError: one has a tangent: there is no forward-mode derivative.
    """
    validate_tensor("key", key)
    validate_tensor("value", value)
    refuse_tangents(NAME, key, value)


def check_fit(
    both: tuple[torch.Tensor, torch.Tensor], held: torch.Tensor, plan: CachePlan, batch: int
) -> None:
    """Raise unless keys and values fit into a cache.

    Args:
        both: keys and values, with which `check_kinds` agrees.
        held: the keys that the cache has.
        plan: of the cache.
        batch: rows of the batch that they are for.

    Raises:
        ValueError: the shape, dtype or device of one is not that of the cache.
        RuntimeError: one requires a gradient, and autograd is on.
    """
    heads, head_dim, count = plan.num_kv_heads, held.shape[2], None
    for name, tensor in zip(("key", "value"), both, strict=True):
        wanted = (batch, tensor.shape[1] if count is None else count, heads, head_dim)
        if tensor.shape != wanted:
            positions = "positions" if count is None else count
            raise ValueError(
                f"{name} must have shape (batch, positions, kv_heads, head_dim) = ({batch}, "
                f"{positions}, {heads}, {head_dim}); got {tuple(tensor.shape)}"
            )
        count = tensor.shape[1]
        if tensor.dtype != held.dtype or tensor.device != held.device:
            cast = " (cast by autocast)" * torch.is_autocast_enabled(held.device.type)
            raise ValueError(
                f"{name} must be {held.dtype} on {held.device}, as the cache is; got "
                f"{tensor.dtype}{cast} on {tensor.device}"
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(
                f"{NAME} has no gradient, and {name} requires one: fill it under torch.no_grad() "
                "or torch.inference_mode()"
            )


def rows_in(batch: int, rows: Integers | None) -> list[int]:
    """Rows of a batch as ints.

    Args:
        batch: rows of the batch.
        rows: some of them; None: all.

    Raises:
        TypeError, ValueError: they are not ints, or one is not in the batch.
    """
    if rows is None:
        return list(range(batch))
    found = as_ints("rows", rows)
    if not all(0 <= row < batch for row in found):
        raise ValueError(f"rows must be numbers of rows in [0, {batch}); got {in_words(found)}")
    return found


def for_each_row(name: str, given: int | Integers, batch: int) -> Sequence[int]:
    """One int for each row of a batch.

    Args:
        name: of the argument, for messages.
        given: one for all rows; or a list or 1-D tensor of one for each.
        batch: rows of the batch.

    Raises:
        TypeError, ValueError: it is not an int, or not as many ints as rows.
    """
    if not isinstance(given, torch.Tensor | list | tuple | range):
        return [check_int(name, given)] * batch
    found = as_ints(name, given)
    if len(found) != batch:
        raise ValueError(
            f"{name} must be one number, or one for each of {batch} rows; got {in_words(found)}"
        )
    return found
