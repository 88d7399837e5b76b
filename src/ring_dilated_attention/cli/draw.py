"""`rda draw`: pictures of a pattern, of what ranks exchange and compute, and of a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from ..named_patterns import given_pattern
from . import common
from .common import Call, app, make_console, option

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..draw import Style

By: TypeAlias = Literal["branch", "rank"]
Picture: TypeAlias = Literal["mask", "exchange", "work", "timeline", "cache"]
_PICTURES = (
    "mask: which keys a head's queries see, by branch, or on several ranks by sender. exchange: "
    "bytes that ranks send each other. work: FLOPs per rank. timeline: when ranks compute, receive "
    "and wait, by a model. cache: keys that a KV cache keeps."
)


@app.command()
def draw(
    what: Annotated[Picture, typer.Argument(help=_PICTURES, metavar="WHAT")] = "mask",
    pattern: common.PatternName = None,
    segment_lengths: common.SegmentLengths = None,
    dilation_rates: common.DilationRates = None,
    head_offsets: common.HeadOffsetsName = None,
    seq_len: common.SeqLen = 8192,
    ranks: common.Ranks = 1,
    layout: common.LayoutName = "auto",
    causal: common.Causal = False,
    documents: common.Documents = None,
    heads: common.Heads = None,
    kv_heads: common.KVHeads = None,
    head_dim: common.HeadDim = None,
    head: Annotated[
        int, option("--head", "Query head of mask and cache.", common.integer(0, 4095))
    ] = 0,
    style: Annotated[
        Literal["light", "dark"], option("--style", "Colours for light or dark pages.", kind="NAME")
    ] = "light",
    out: common.Out = None,
) -> None:
    """Draw a picture as *.png or *.svg; without --out, the mask in the terminal.

    rda draw mask --segment-lengths 8,16,all --dilation-rates 1,2,4 --seq-len 64 --causal
    """
    from ..draw import STYLES, mask_text, save

    named = given_pattern(pattern, segment_lengths, dilation_rates, head_offsets=head_offsets)
    call = Call(
        named,
        seq_len=seq_len,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
        layout=layout,
        documents=documents,
    )
    if head >= call.heads:
        raise ValueError(f"--head must lie in [0, {call.heads}), the query heads; got {head}")
    if out is None:
        if what != "mask":
            raise ValueError(f"rda draw {what} needs --out; a terminal shows the mask alone")
        console = make_console()
        by: By = "rank" if ranks > 1 else "branch"
        in_color, width = console.color_system is not None, console.width
        text = mask_text(
            call.plan, head, by=by, style=STYLES[style], width=width, in_color=in_color
        )
        console.print(text)
        return
    if out.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--out must be named *.png or *.svg; got {out.name!r}")
    save(_picture(what, call, head, STYLES[style]), out)
    print(f"wrote {out}")


def _picture(what: Picture, call: Call, head: int, style: Style) -> Axes:
    from .. import draw as pictures

    plan, size = call.plan, call.size
    if what == "mask":
        by: By = "rank" if call.ranks > 1 else "branch"
        axes = pictures.draw_mask(plan, head, by=by, style=style)
    elif what == "cache":
        kv_head = head // (call.heads // call.kv_heads)
        axes = pictures.draw_cache(
            call.pattern,
            call.seq_len,
            size,
            num_kv_heads=call.kv_heads,
            kv_head=kv_head,
            style=style,
        )
    elif what == "exchange":
        axes = pictures.draw_exchange(plan, size, style=style)
    else:
        drawn = pictures.draw_work if what == "work" else pictures.draw_timeline
        axes = drawn(plan, size, style=style)
    return axes
