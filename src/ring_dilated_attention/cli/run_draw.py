"""What `rda draw` does: choose a picture, and write it or print it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from .. import draw
from ..layout import SequenceLayout
from ..pattern import check_choice
from ..plan import AttentionPlan
from .options import PICTURES
from .sharded import Sharded

EXCHANGES = {"auto": None, "ring": False, "gather": True}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is drawn, and how.

    Attributes:
        what: one of `options.PICTURES`.
        heads: query heads; pictures of one head take one.
        window: positions to draw; None: all.
        exchange: a key of `EXCHANGES`.
        tflops: of the cost model.
        link_gb_s: of the cost model.
        style: ``"light"`` or ``"dark"``.

    Raises:
        ValueError: a value is not allowed.
    """

    what: str
    heads: tuple[int, ...]
    window: range | None
    exchange: str
    tflops: float
    link_gb_s: float
    style: str

    def __post_init__(self) -> None:
        check_choice("WHAT", self.what, PICTURES)
        check_choice("exchange", self.exchange, tuple(EXCHANGES))
        check_choice("style", self.style, tuple(draw.STYLES))
        if self.what in ("exchange", "cache") and len(self.heads) != 1:
            raise ValueError(
                f"rda draw {self.what} draws one head, as in --head 0; got {len(self.heads)}"
            )

    def of(self, sharded: Sharded) -> tuple[Callable[..., Any], Callable[..., list[str]]]:
        """Functions that return the figure, given a style, and the lines of the terminal."""
        size, name = sharded.workload.size, sharded.layout_name
        if self.what == "pattern":
            # What a head sees does not depend on the layout, and one rank is the quickest to plan.
            plan = self._plan(sharded, SequenceLayout.contiguous)
            one: dict[str, Any] = {"heads": self.heads, "window": self.window}
            return partial(draw.pattern_figure, plan, **one), partial(
                draw.pattern_text, plan, **one
            )
        if self.what == "cache":
            of = self._plan(sharded, SequenceLayout.contiguous), size, self.heads[0]
            return (
                partial(draw.cache_figure, *of, window=self.window),
                partial(draw.cache_text, *of, window=self.window),
            )
        if self.what == "exchange":
            both: dict[str, Any] = {"layout_name": name, "window": self.window}
            given = sharded.plan, size, self.heads[0]
            return (
                partial(draw.exchange_figure, *given, **both),
                partial(draw.exchange_text, *given, **both),
            )
        if self.what == "work":
            makes = {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag}
            plans = {key: self._plan(sharded, make, sharded.ranks) for key, make in makes.items()}
            return partial(draw.work_figure, plans, size), partial(draw.work_text, plans, size)
        model = draw.CostModel(tflops=self.tflops, link_gb_s=self.link_gb_s)
        both = {"layout_name": name, "gathers": EXCHANGES[self.exchange]}
        return (
            partial(draw.timeline_figure, sharded.plan, size, model, **both),
            partial(draw.timeline_text, sharded.plan, size, model, **both),
        )

    @staticmethod
    def _plan(
        sharded: Sharded, make: Callable[[int, int], SequenceLayout], ranks: int = 1
    ) -> AttentionPlan:
        layout = make(sharded.workload.seq_len, ranks)
        return sharded.workload.plan(layout, documents=sharded.documents)


def run(drawing: Drawing, sharded: Sharded, *, out: Path | None, terminal: bool) -> None:
    """Draw.

    Args:
        drawing: what.
        sharded: of which plan.
        out: file to write; None: none.
        terminal: whether to print it.

    Raises:
        ValueError: something cannot be drawn, or the file is neither *.png nor *.svg.
        OSError: the file cannot be written.
    """
    if out is not None:
        draw.check_format(out)
    figure, text = drawing.of(sharded)
    if terminal:
        typer.echo("\n".join(text()))
    if out is not None:
        draw.save(figure(style=draw.STYLES[drawing.style]), out)
        typer.echo(f"wrote {out}")
