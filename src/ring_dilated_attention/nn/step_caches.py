"""The caches of a model: whether they are those of its blocks, and what a failed step added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..decode import DilatedKVCache, Lengths
from ..pattern import in_brief
from .attention import MultiheadDilatedAttention
from .longnet_inputs import check_vocabulary
from .token_ends import TokenEnds

if TYPE_CHECKING:
    from .longnet_block import LongNetBlock
    from .token_generator import TokenGenerator


@contextmanager
def memory_for(max_length: int | None) -> Iterator[None]:
    """Say what was too large where a CPU has no memory for caches.

    Args:
        max_length: of the caches.

    Raises:
        MemoryError: in place of the RuntimeError of torch, which says how many bytes it asked for.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of a GPU, by its own name
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "overflow" not in str(error):
            raise
        raise MemoryError(
            f"there is no memory for KV caches of max_length={max_length} positions, the prompt "
            "and all new tokens, which a pattern with a segment length of None allocates at once: "
            f"ask for fewer. {error}"
        ) from error


def check_caches(model: TokenGenerator, caches: Sequence[DilatedKVCache]) -> None:
    """Raise unless there is a cache for each block, and all hold equally many positions.

    Args:
        model: whose blocks they are for.
        caches: of `make_caches`.

    Raises:
        TypeError, ValueError: they are not; one has another pattern than its block; or a block has
            an attention of its own.
    """
    if not isinstance(caches, Sequence) or not all(isinstance(x, DilatedKVCache) for x in caches):
        raise TypeError(f"caches must be those of make_caches; got {in_brief(caches)}")
    if len(caches) != len(model.blocks):
        raise ValueError(
            f"there must be a cache for each of {len(model.blocks)} blocks; got {len(caches)}"
        )
    lengths = caches[0].known_lengths
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("every block needs a cache of its own; got one cache for several blocks")
    for block, cache in zip(cast("list[LongNetBlock]", model.blocks), caches, strict=True):
        layer, plan = block.attention, cache.plan
        if getattr(layer.attend, "__func__", None) is not MultiheadDilatedAttention.attend:
            raise ValueError(
                f"a {type(layer).__name__} has an attend of its own, which a step with a KV cache "
                "does not call: generate by forward of the whole text, or change project or "
                "combine in its place"
            )
        if layer.head_slice is not None or plan.pattern is not layer.pattern:  # in every step
            pattern = layer.pattern.of_heads(layer.head_slice, plan.num_kv_heads)
            if plan.pattern != pattern:
                raise ValueError(
                    f"a cache must have the pattern of its block, {pattern}; got one of "
                    f"{plan.pattern}: make the caches with make_caches of this model, and anew "
                    "when its patterns have changed"
                )
        if cache.known_lengths != lengths:
            raise ValueError(
                "the caches of all blocks must hold the same positions; the first holds "
                f"{_shown(lengths)}, another one {_shown(cache.known_lengths)}: rewind, select and "
                "reset them all"
            )


def _shown(lengths: Sequence[int]) -> str:
    """The lengths of a few rows, for a message."""
    rest = f" and {len(lengths) - 8} more" if len(lengths) > 8 else ""
    return ", ".join(map(str, lengths[:8])) + rest


def check_batch(tokens: Tensor, caches: Sequence[DilatedKVCache]) -> None:
    """Raise a `ValueError` unless there are tokens for each row of the caches."""
    batch = len(caches[0].known_lengths)
    if len(tokens) != batch:
        raise ValueError(f"the caches are for {batch} rows; got tokens for {len(tokens)}")


def check_prompt(model: TokenGenerator, tokens: Tensor, caches: Sequence[DilatedKVCache]) -> None:
    """Raise a `ValueError` unless a prompt fits the caches, and the model has its tokens."""
    check_batch(tokens, caches)
    if getattr(model.embed, "__func__", None) is TokenEnds.embed:
        check_vocabulary(tokens, model.embedding)


def take_back(caches: Sequence[DilatedKVCache], before: Sequence[Lengths], count: int) -> None:
    """Drop the `count` positions that a step has added to some caches before it failed.

    Args:
        caches: of the step.
        before: what was known of each of them before the step.
        count: tokens of the step; where a cache cannot take back as many, it keeps them.
    """
    for cache, known in zip(caches, before, strict=True):
        added = tuple(length + count for length in known.known)
        if cache.known_lengths == added and count <= cache.plan.max_rewind + 1:
            known.overwritten(count)
            with suppress(RuntimeError):  # of a device that has failed: the first error says more
                cache.set_known(known)


def drop_all(caches: Sequence[DilatedKVCache]) -> None:
    """Drop what caches hold, some of which have a prompt that others do not have."""
    for cache in caches:
        with suppress(RuntimeError):  # of a device that has failed: the first error says more
            cache.reset()
