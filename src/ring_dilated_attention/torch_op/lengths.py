"""Lengths of a padding mask: an operator for graphs, a function for other calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..exchange import (
    KNOWN_LENGTHS,
    Exchange,
    Scope,
    Shared,
    exchange_named,
    lengths_of_mask,
    refuse_capture,
    settle,
)
from ..layout import SequenceLayout
from ..resolve import Options, shared_words
from .untraced import untraced

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
    refuse_capture("dilated_attention", ends, mask.device)
    given = SequenceLayout.from_flat(tuple(layout)) if layout else None
    words = {"batch": mask.shape[0], "layout": str(given or f"{mask.shape[1]} positions")}
    with ends.calls.enter("dilated_attention", "key_padding_mask") as scope:
        settle(scope, ends, mask.device, Shared.of(words) if ends.world_size > 1 else None)
        found = lengths_of_mask(mask, ends, given, scope)
    return torch.tensor(found, dtype=torch.int64)


def _fake_lengths(mask: torch.Tensor, layout: Sequence[int], group: str) -> torch.Tensor:
    return torch.empty(mask.shape[0], dtype=torch.int64, device="cpu")


_library.impl("lengths_of_mask", untraced(_lengths), "CompositeExplicitAutograd")
torch.library.register_fake(LENGTHS, _fake_lengths, lib=_library)


def lengths_of_call(
    mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    options: Options,
    layout: SequenceLayout | None,
) -> list[int]:
    """The lengths that a mask stands for, in a call that is not compiled.

    The device is asked once where several layers are given the same mask.

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
    # Of several ranks, some might know and the others ask. On the CPU there is nothing to wait for.
    keeps = ends.world_size == 1 and mask.device.type != "cpu"
    known = KNOWN_LENGTHS.get(mask, layout) if keeps else None
    if known is not None:
        return known
    refuse_capture("dilated_attention", ends, query.device)
    with ends.calls.enter("dilated_attention", "forward") as scope:
        _agree_but_on_lengths(scope, ends, query, key, options)
        found = lengths_of_mask(mask, ends, layout, scope)
    if keeps:
        KNOWN_LENGTHS.keep(mask, layout, found)
    return found


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
