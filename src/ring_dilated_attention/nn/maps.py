"""Maps of where a `SlideEncoder` looks, made of the queries, keys and lse of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional import attention_received
from .heads import slice_of_heads
from .slide_rows import Rows

_UNIT = 2.0**10
"""Weights of a rollout, often 1e-5 and less, times this are numbers that float16 has."""


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Where the layers of a `SlideEncoder` look: softmax weights, at the tiles of this rank.

    They are exact, not samples, and in float32 (float64 of a float64 model): see
    `attention_received`. Tiles are in the order of the features, those of packed slides, too, of
    which each has the maps that it would have alone. Padding has 0. Class tokens are left out.

    Attributes:
        received: what a tile receives from all positions of its slide together, shape (layers,
            batch, heads, local_tiles). Where all tiles receive equally much, it is about 1.
        from_cls: what it receives from the class token, between 0 and 1, shape (layers, batch,
            heads, local_tiles).
        rollout: what the class token receives of it through all layers, shape (batch, local_tiles):
            attention rollout (Abnar and Zuidema 2020, arXiv 2005.00928), the class token's row of
            the product of ``(A + I) / 2`` of all layers, where A is the mean of a layer's heads and
            I stands for the residual. What zero keys take is not made up for.
    """

    received: Tensor
    from_cls: Tensor
    rollout: Tensor


class MapRecorder:
    """Attention of the layers of a forward, and the maps of it.

    Until `maps` it keeps query, key and lse of each layer, and where one product makes them, value:
    as much as forward keeps of attention for a backward.

    Args:
        options: what the calls of `dilated_attention` have in common: group, documents and others.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._layers: list[tuple[Any, Tensor, Tensor, Tensor]] = []

    def attend(self, attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as the `MultiheadDilatedAttention` of a layer does.

        Raises:
            ValueError: the rank has some of the heads.
        """
        if query.shape[2] != attention.num_heads:
            raise ValueError(
                "maps=True needs all heads on each rank; got "
                f"{query.shape[2]} of {attention.num_heads}: share slides by group=, not heads"
            )
        out: Tensor
        out, lse = attention.attend(query, key, value, return_lse=True, **self._options)
        self._layers.append((attention, query, key, lse))
        return out

    def maps(self, rows: Rows) -> AttentionMaps:
        """The maps at the tiles among these rows; lets go of the layers.

        The rollout is a row vector, which a layer takes from its outputs to its inputs: the last
        layer comes first, and no product of two layers is formed.
        """
        lse = self._layers[0][-1]
        tiles = lse.new_zeros(len(lse), lse.shape[2] - rows.count, 1)
        cls = rows.joined(tiles, lse.new_ones(len(lse), rows.count, 1))[..., 0]
        found, rollout = [], cls
        while self._layers:
            attention, query, key, lse = self._layers.pop()
            queries = torch.stack((torch.ones_like(cls), cls, _UNIT * rollout))
            *sums, of_rollout = attention_received(
                query,
                key,
                lse,
                attention.pattern,
                queries=queries,
                scale=attention.scale,
                exchange=attention.exchange,
                backend=attention.backend,
                head_slice=slice_of_heads(attention, query, key),
                **self._options,
            )
            found.append(torch.stack(sums))
            rollout = (of_rollout.mean(1) / _UNIT + rollout) / 2
        received, from_cls = torch.stack(found[::-1], 1)
        return AttentionMaps(
            *(rows.of_tiles(x.movedim(-1, 1)).movedim(1, -1) for x in (received, from_cls, rollout))
        )
