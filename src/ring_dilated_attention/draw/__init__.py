"""Pictures of plans: which keys heads see, what ranks send and compute, and what caches keep.

`draw_mask`, `draw_exchange`, `draw_work`, `draw_timeline` and `draw_cache` draw with matplotlib, in
a new figure or in axes that they are given, in the colours of a `Style`; `save` writes a figure.
`draw_tiles` draws scores of the tiles of a slide.
`new_figure`, `dress`, `set_titles` and `add_key` give other figures the same look. matplotlib is
imported when it is used.
"""

from .mask import By, draw_cache, draw_mask, mask_key
from .ranks import TIMELINE_KEY, draw_exchange, draw_timeline, draw_work
from .style import STYLES, Style, add_key, dress, new_figure, save, set_titles
from .tiles import draw_tiles

__all__ = [
    "STYLES",
    "TIMELINE_KEY",
    "By",
    "Style",
    "add_key",
    "draw_cache",
    "draw_exchange",
    "draw_mask",
    "draw_tiles",
    "draw_timeline",
    "draw_work",
    "dress",
    "mask_key",
    "new_figure",
    "save",
    "set_titles",
]
