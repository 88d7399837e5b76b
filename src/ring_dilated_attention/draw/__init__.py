"""Pictures of plans: which keys heads see, who sends and who caches them, who computes how much.

`pattern_figure`, `exchange_figure`, `work_figure`, `timeline_figure` and `cache_figure` each return
a figure of matplotlib for a plan; `save` writes it, and `check_format` finds a bad path before.
`pattern_text`, `exchange_text`, `work_text`, `timeline_text` and `cache_text` draw the same in
lines of characters.

Figures are made of panels (`draw_branches`, `draw_senders`, `draw_matrix`, `draw_work`,
`draw_timeline`, `draw_kept`, `draw_growth`), which draw into axes of a `Sheet` in the colours of a
`Style`. What they draw are `shown_to` (a `Shown` on the cells of a `Grid`), `rows_sent`, the
`timeline` of a `CostModel`, and of a `HeadCache` its `kept_cells` and `growth`.
Importing this subpackage does not import matplotlib; drawing figures does.
"""

from .cache import HeadCache, cache_figure, cache_text, draw_growth, draw_kept, kept_key
from .figures import (
    branch_key,
    exchange_figure,
    pattern_figure,
    timeline_figure,
    timeline_key,
    work_figure,
)
from .kept import (
    Growth,
    KeptCells,
    cache_end,
    growth,
    kept_cells,
    kept_rows,
    lengths_around,
    rows_of,
)
from .mask import NOBODY, Grid, Shown, rows_sent, shown_to
from .panels import draw_branches, draw_matrix, draw_senders, draw_timeline, draw_work
from .schedule import LINK_GB_S, TFLOPS, Activity, CostModel, Timeline, timeline
from .style import (
    DARK,
    LIGHT,
    STYLES,
    Sheet,
    Style,
    add_grid,
    check_format,
    dress,
    headline,
    save,
)
from .text import WIDTH, exchange_text, pattern_text, timeline_text, work_text

__all__ = [
    "DARK",
    "LIGHT",
    "LINK_GB_S",
    "NOBODY",
    "STYLES",
    "TFLOPS",
    "WIDTH",
    "Activity",
    "CostModel",
    "Grid",
    "Growth",
    "HeadCache",
    "KeptCells",
    "Sheet",
    "Shown",
    "Style",
    "Timeline",
    "add_grid",
    "branch_key",
    "cache_end",
    "cache_figure",
    "cache_text",
    "check_format",
    "draw_branches",
    "draw_growth",
    "draw_kept",
    "draw_matrix",
    "draw_senders",
    "draw_timeline",
    "draw_work",
    "dress",
    "exchange_figure",
    "exchange_text",
    "growth",
    "headline",
    "kept_cells",
    "kept_key",
    "kept_rows",
    "lengths_around",
    "pattern_figure",
    "pattern_text",
    "rows_of",
    "rows_sent",
    "save",
    "shown_to",
    "timeline",
    "timeline_figure",
    "timeline_key",
    "timeline_text",
    "work_figure",
    "work_text",
]
