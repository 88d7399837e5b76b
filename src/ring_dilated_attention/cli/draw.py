"""`rda draw`: pictures of a pattern, of what ranks exchange and compute, and of a KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..named_patterns import given_pattern
from . import common
from .common import app, option, workload_of

_PICTURES = (
    "mask: which keys a head's queries see, by branch, or on several ranks by sender. exchange: "
    "bytes that ranks send each other. work: FLOPs per rank. timeline: when ranks compute, receive "
    "and wait, by a model. cache: keys that a KV cache keeps."
)


@app.command()
def draw(
    what: Annotated[
        Literal["mask", "exchange", "work", "timeline", "cache"],
        typer.Argument(help=_PICTURES, metavar="WHAT"),
    ] = "mask",
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
    out: common.Out = None,
) -> None:
    """Draw a picture as *.png or *.svg; without --out as WHAT.svg, here.

    rda draw mask --segment-lengths 8,16,all --dilation-rates 1,2,4 --seq-len 64 --causal
    """
    from .. import draw as pictures

    work = workload_of(
        given_pattern(
            pattern, segment_lengths, dilation_rates, seq_len=seq_len, head_offsets=head_offsets
        ),
        seq_len=seq_len,
        heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        is_causal=causal,
        layout_name=layout,
        documents=documents,
    )
    plan, size = work.plan(ranks), work.size
    if what == "mask":
        axes = pictures.draw_mask(plan, head, by="rank" if ranks > 1 else "branch")
    elif what == "cache":
        kv_heads, kv_head = work.kv_heads, head // (work.num_heads // work.kv_heads)
        axes = pictures.draw_cache(
            work.pattern, seq_len, size, num_kv_heads=kv_heads, kv_head=kv_head
        )
    else:
        axes = getattr(pictures, f"draw_{what}")(plan, size)
    out = out or Path(f"{what}.svg")
    pictures.save(axes, out)
    print(f"wrote {out}")
