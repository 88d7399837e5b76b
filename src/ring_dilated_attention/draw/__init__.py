"""Pictures of plans: which keys heads see, who sends them, who computes how much, and when.

`pattern_figure`, `exchange_figure`, `work_figure` and `timeline_figure` each return a figure of
matplotlib for a plan; `save` writes it, and `check_format` finds a bad path before. `pattern_text`,
`exchange_text`, `work_text` and `timeline_text` draw the same in lines of characters.

Figures are made of panels (`draw_branches`, `draw_senders`, `draw_matrix`, `draw_work`,
`draw_timeline`), which draw into axes of a `Sheet` in the colours of a `Style`. What they draw are
`shown_to` (a `Shown` on the cells of a `Grid`), `rows_sent` and the `timeline` of a `CostModel`.
Importing this room does not import matplotlib; drawing figures does.
"""

from .figures import (
    branch_key,
    exchange_figure,
    pattern_figure,
    timeline_figure,
    timeline_key,
    work_figure,
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
    "Sheet",
    "Shown",
    "Style",
    "Timeline",
    "add_grid",
    "branch_key",
    "check_format",
    "draw_branches",
    "draw_matrix",
    "draw_senders",
    "draw_timeline",
    "draw_work",
    "dress",
    "exchange_figure",
    "exchange_text",
    "headline",
    "pattern_figure",
    "pattern_text",
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
