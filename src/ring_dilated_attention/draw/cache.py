"""Which keys a KV cache keeps of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..pattern import DilatedPattern
from ..plan import costs, plan_cache
from ..units import count_of, in_bytes
from .mask import mark_positions
from .style import LIGHT, Style, dress, new_figure, set_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SQUARES = 128


def kept_keys(pattern: DilatedPattern, num_kv_heads: int, kv_head: int, length: int) -> list[range]:
    """Find the keys that a position from `length` on can still see, for each branch."""
    kept = []
    for index, (w, rate) in enumerate(pattern.branches):
        offset = dict(pattern.heads(index, num_kv_heads)).get(kv_head)
        start, stop = (0, length + rate) if w is None else (length // w * w, length // w * w + w)
        segment = range(0) if offset is None else range(start + offset, stop, rate)
        goes_on = len(segment) > 0 and (w is None or segment[-1] >= length)
        kept.append(range(segment.start, length, rate) if goes_on else range(0))
    return kept


def draw_cache(
    pattern: DilatedPattern,
    length: int,
    size: costs.TensorSize,
    *,
    num_kv_heads: int,
    kv_head: int = 0,
    style: Style = LIGHT,
    axes: Axes | None = None,
) -> Axes:
    """Draw the keys that a KV cache keeps of a KV head after a text, a lane for each branch.

    Up to 128 positions each key is a square; of longer texts the span with kept keys is drawn.

    Args:
        pattern: the branches; generation is causal.
        length: positions of the text, at least 1.
        size: of the tensors.
        num_kv_heads: key and value heads of the layer.
        kv_head: whose keys are drawn.
        style: colours.
        axes: where to draw; None: in a new figure, with the bytes of the layer's cache.

    Returns:
        The axes; ``axes.figure`` is the figure.

    Raises:
        ValueError: there is no such head.
    """
    if not 0 <= kv_head < num_kv_heads:
        raise ValueError(f"kv_head must lie in [0, {num_kv_heads}); got {kv_head}")
    kept = kept_keys(pattern, num_kv_heads, kv_head, length)
    if axes is None:
        cache = plan_cache(pattern, num_kv_heads, length)
        nbytes = in_bytes(cache.nbytes(size.batch, size.head_dim, size.element_size))
        every = in_bytes(size.key_value_bytes(length * num_kv_heads))
        note = f"{count_of(num_kv_heads, 'KV head')}: {nbytes} per layer; all K and V: {every}."
        axes = new_figure(style, 9.4, 1.7 + 0.34 * len(kept), str(pattern), note).subplots()
    for lane, (keys, color) in enumerate(zip(kept, style.branch_colors(len(kept)), strict=True)):
        axes.broken_barh([(0, length)], (lane + 0.15, 0.7), color=style.faint, linewidth=0)
        spans = [(key + 0.06, 0.88) for key in keys]
        if length > _MOST_SQUARES and keys:
            spans = [(keys.start, length - keys.start)]
        axes.broken_barh(spans, (lane + 0.15, 0.7), color=color, linewidth=0)
        place = length, lane + 0.5
        axes.annotate(f" {len(keys):,}", place, va="center", fontsize=8.5, color=style.ink)
    axes.set_yticks(np.arange(len(kept)) + 0.5, list(map(str, pattern.branches)))
    axes.set(xlim=(0, length), ylim=(len(kept), 0), xlabel="position")
    mark_positions(axes.xaxis, length)
    dress(axes, style, spines=())
    words = f"{count_of(sum(map(len, kept)), 'key')} kept; later positions see no other one"
    title = f"KV head {kv_head} after {count_of(length, 'position')}"
    set_titles(axes, style, title, words)
    return axes
