"""Lengths of a padding mask: an operator for graphs, a function for other calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..exchange import (
    Exchange,
    Group,
    Scope,
    Shared,
    exchange_named,
    group_name,
    refuse_capture,
    settle,
    untraced,
)
from ..layout import SequenceLayout
from ..resolve import Options, shared_words
from .masks import KNOWN_LENGTHS, check_padding_mask, lengths_of_mask
from .registration import implement

_Library: Any = torch.library.Library  # its methods have no annotations
_library = _Library("ring_dilated_attention", "FRAGMENT")
_library.define(
    "lengths_of_mask(Tensor mask, SymInt[] layout, str group) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

LENGTHS = torch.ops.ring_dilated_attention.lengths_of_mask.default
"""(mask, layout, group) -> lengths: mask boolean (batch, local_sequence), True where a position is
padding; layout and group as in `resolve.Options`; lengths int64 (batch,) on the CPU, the same on
every rank. It waits for the mask. torch.compile makes one call of those of all layers."""


def _lengths(mask: torch.Tensor, layout: Sequence[int], group: str) -> torch.Tensor:
    ends = exchange_named(group)
    refuse_masks_in_graphs()
    refuse_capture("dilated_attention", ends, mask.device)
    given = SequenceLayout.from_flat(tuple(layout)) if layout else None
    words = {"batch": mask.shape[0], "layout": str(given or f"{mask.shape[1]} positions")}
    with ends.calls.enter("dilated_attention", "key_padding_mask") as scope:
        failure = None
        try:
            if given is not None:
                held = f"its key_padding_mask has a local sequence length of {mask.shape[1]}"
                given.check_shard(ends.rank, ends.world_size, mask.shape[1], held)
        except ValueError as error:  # the other ranks are to be told
            failure = error
        shared = Shared.of(words) if ends.world_size > 1 else None
        settle(scope, ends, mask.device, None if failure else shared, failure)
        found = lengths_of_mask(mask, ends, given, scope)
    return torch.tensor(found, dtype=torch.int64)


def _fake_lengths(mask: torch.Tensor, layout: Sequence[int], group: str) -> torch.Tensor:
    return torch.empty(mask.shape[0], dtype=torch.int64, device="cpu")


implement(_library, LENGTHS, untraced(_lengths), _fake_lengths)


def lengths_of_call(
    mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    options: Options,
    layout: SequenceLayout | None,
) -> list[int]:
    """The lengths that a mask stands for, in a call that is not compiled.

    Args:
        mask: boolean (batch, local_sequence), True where a position is padding.
        query: of the call.
        key: of the call.
        options: of the call, without lengths.
        layout: of the call.

    Returns:
        Of each row of the batch, the same on every rank.

    Raises:
        ValueError: the mask is no right padding, or see `resolve`; on every rank.
    """
    ends = exchange_named(options.group)
    refuse_masks_in_graphs()
    refuse_capture("dilated_attention", ends, query.device)
    with ends.calls.enter("dilated_attention", "forward") as scope:
        _agree_but_on_lengths(scope, ends, query, key, options)
        return lengths_of_mask(mask, ends, layout, scope)


def padding(
    caller: object,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    layout: SequenceLayout | None,
    group: Group,
) -> dict[str, Any]:
    """A mask as a layer hands it to `dilated_attention`, or the lengths that it stands for.

    Reading a mask makes the host wait for everything queued on the device, and a model gives all
    its layers the same mask. So the first layer reads it for those that follow. It is read again
    when a layer comes again, or after a backward: not all writes to a tensor can be seen.

    Args:
        caller: the layer.
        mask: None, or what `dilated_attention` takes as `key_padding_mask`.
        query: of the call.
        layout: of the call.
        group: of the call.

    Returns:
        The argument by its name.
    """
    given = {"key_padding_mask": mask}
    # Of several ranks, some might know and the others ask. On the CPU there is nothing to wait for.
    if mask is None or torch.compiler.is_compiling() or not query.is_cuda:
        return given
    # Nor does a rank refuse a mask by itself: `dilated_attention` tells the others.
    ends = exchange_named(group_name(group))
    if ends.world_size > 1 or (layout and layout.local_length(0) != query.shape[1]):
        return given
    check_padding_mask(mask, query.shape[0], query.shape[1], query.device)
    refuse_masks_in_graphs()
    lengths = KNOWN_LENGTHS.get(caller, mask, layout)
    if lengths is None:
        with ends.calls.enter("dilated_attention", "key_padding_mask") as scope:
            lengths = lengths_of_mask(mask, ends, layout, scope)
        KNOWN_LENGTHS.keep(caller, mask, layout, lengths)
    return {"lengths": lengths}


def refuse_masks_in_graphs() -> None:
    """Raise a `RuntimeError` in a CUDA graph: replays would go by the lengths at its capture."""
    _refuse_in_graphs("key_padding_mask", "pass lengths")


def refuse_tensor_in_graphs(name: str) -> None:
    """Raise a `RuntimeError` in a CUDA graph, for lengths or documents in a tensor."""
    _refuse_in_graphs(f"{name} in a tensor", "pass a list of ints")


def _refuse_in_graphs(what: str, instead: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} cannot be captured in a CUDA graph: every replay would use the numbers of the "
            f"capture; {instead}, and capture one graph for each of them"
        )


def _agree_but_on_lengths(
    scope: Scope, ends: Exchange, query: torch.Tensor, key: torch.Tensor, options: Options
) -> None:
    """Agree on a call whose lengths are in masks, which are about to travel."""
    shared, failure = None, None
    try:
        shared = shared_words(options, query, key, ends, words={"lengths": "from key_padding_mask"})
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    settle(scope, ends, query.device, shared, failure)
