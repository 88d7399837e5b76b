"""`rda draw`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import app, documents_of, ints_of, reported_errors

if TYPE_CHECKING:
    from .sharded import Sharded

PATTERN, SIZES, RANKS, PICTURE = "Pattern", "Sizes", "Ranks", "Picture"
"""Panels of the help."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_UNITS = {"K": 1 << 10, "M": 1 << 20}


@app.command()
def draw(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="pattern: which branch shows a head which keys. exchange: which rank sends what "
            "to whom. work: FLOPs per rank, contiguous and zigzag. timeline: the ring step by "
            "step, by a cost model.",
        ),
    ],
    pattern: Annotated[
        str | None,
        typer.Option(
            help="longnet, gigapath, longvit or dense.",
            show_default="longnet, unless --segment-lengths are given",
            rich_help_panel=PATTERN,
        ),
    ] = None,
    segment_lengths: Annotated[
        str | None,
        typer.Option(
            help="Instead of --pattern: one per branch, as in 2048,16K,all (all: the whole "
            "sequence).",
            rich_help_panel=PATTERN,
        ),
    ] = None,
    dilation_rates: Annotated[
        str | None,
        typer.Option(help="One per branch, with --segment-lengths.", rich_help_panel=PATTERN),
    ] = None,
    head_offsets: Annotated[
        str | None,
        typer.Option(
            help="interleaved or blocked.", show_default="the pattern's", rich_help_panel=PATTERN
        ),
    ] = None,
    head_branches: Annotated[
        str | None,
        typer.Option(help="all or split.", show_default="the pattern's", rich_help_panel=PATTERN),
    ] = None,
    causal: Annotated[bool, typer.Option(help="Causal mask.", rich_help_panel=PATTERN)] = False,
    documents: Annotated[
        str | None,
        typer.Option(
            help="Cumulative lengths of packed documents, as in 0,100,250.",
            show_default="one document",
            rich_help_panel=PATTERN,
        ),
    ] = None,
    seq_len: Annotated[
        str,
        typer.Option(
            help="Length of the whole sequence, as in 8192, 256K or 1M (K = 1,024, M = 1,048,576).",
            rich_help_panel=SIZES,
        ),
    ] = "8192",
    num_heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=SIZES)] = 12,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(
            help="KV heads (GQA).", show_default="as many as query heads", rich_help_panel=SIZES
        ),
    ] = None,
    head_dim: Annotated[
        int, typer.Option(help="Elements of a row of one head.", rich_help_panel=SIZES)
    ] = 64,
    batch_size: Annotated[
        int, typer.Option(help="Sequences per batch.", rich_help_panel=SIZES)
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16, fp32 or fp64.", rich_help_panel=SIZES)
    ] = "bf16",
    ranks: Annotated[int, typer.Option(help="World size.", rich_help_panel=RANKS)] = 4,
    layout: Annotated[
        str,
        typer.Option(
            help="auto, contiguous or zigzag; auto: zigzag for causal work on several ranks.",
            rich_help_panel=RANKS,
        ),
    ] = "auto",
    exchange: Annotated[
        str,
        typer.Option(
            help="auto, ring or gather: how the timeline's rows travel.", rich_help_panel=RANKS
        ),
    ] = "auto",
    tflops: Annotated[
        float,
        typer.Option(
            help="Of the timeline: TFLOP/s (10**12) of one rank; the default is about one H200's "
            "in dense causal forward, bf16.",
            rich_help_panel=PICTURE,
        ),
    ] = 600.0,
    link_gb_s: Annotated[
        float,
        typer.Option(
            help="Of the timeline: GB/s (10**9) that a rank sends, and receives; the default is "
            "about one H200's over NVLink.",
            rich_help_panel=PICTURE,
        ),
    ] = 350.0,
    head: Annotated[
        str,
        typer.Option(
            help="Query heads to draw, as in 0,1; exchange draws one.", rich_help_panel=PICTURE
        ),
    ] = "0",
    positions: Annotated[
        str | None,
        typer.Option(
            help="Positions to draw, as in 0:4K; long sequences are drawn in blocks.",
            show_default="all",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    style: Annotated[str, typer.Option(help="light or dark.", rich_help_panel=PICTURE)] = "light",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: *.png or *.svg.",
            show_default="draw in the terminal",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    terminal: Annotated[
        bool,
        typer.Option(
            "--terminal", help="Draw in the terminal too, with --out.", rich_help_panel=PICTURE
        ),
    ] = False,
) -> None:
    """Draw a pattern on ranks: in the terminal, or as a picture.

    rda draw pattern --segment-lengths 8,16,all --dilation-rates 1,2,4 --seq-len 48 --head 0,1

    rda draw exchange --pattern dense --seq-len 48 --causal --ranks 4 --out exchange.svg

    rda draw timeline --pattern dense --seq-len 64K --num-heads 16 --head-dim 128 --causal
    """
    with reported_errors():
        from .run_draw import Drawing, run

        drawing = Drawing(
            what=what,
            heads=ints_of(head),
            window=_window(positions),
            exchange=exchange,
            tflops=tflops,
            link_gb_s=link_gb_s,
            style=style,
        )
        sharded = _sharded(
            name=pattern,
            segment_lengths=_lengths(segment_lengths),
            dilation_rates=None if dilation_rates is None else ints_of(dilation_rates),
            options={"head_offsets": head_offsets, "head_branches": head_branches},
            sizes={
                "length": _positions("--seq-len", seq_len),
                "heads": num_heads,
                "kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "batch": batch_size,
                "dtype": _DTYPES.get(dtype, dtype),
                "is_causal": causal,
            },
            split={"ranks": ranks, "layout_name": layout, "documents": documents_of(documents)},
        )
        run(drawing, sharded, out=out, terminal=terminal or out is None)


def _sharded(
    *,
    name: str | None,
    segment_lengths: Any,
    dilation_rates: Any,
    options: dict[str, str | None],
    sizes: dict[str, Any],
    split: dict[str, Any],
) -> "Sharded":
    from ..bench import Workload, given_pattern
    from ..checks import MOST_PLANNED_RANKS
    from ..pattern import check_choice
    from .sharded import LAYOUTS, Sharded

    check_choice("layout", split["layout_name"], ("auto", *LAYOUTS))
    if split["layout_name"] == "auto":
        even = sizes["is_causal"] and split["ranks"] > 1
        split["layout_name"] = "zigzag" if even else "contiguous"
    pattern = given_pattern(name, segment_lengths, dilation_rates, **options)
    workload = Workload(pattern=pattern, **sizes)
    return Sharded(workload=workload, most_ranks=MOST_PLANNED_RANKS, **split)


def _positions(name: str, text: str) -> int:
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in ("", *_UNITS):
        raise ValueError(
            f"{name} must be a number of positions, as in 8192, 256K or 1M; got {text[:40]!r}"
        )
    return int(number) * _UNITS.get(unit, 1)


def _lengths(text: str | None) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    parts = (part.strip() for part in text.split(","))
    return tuple(None if x == "all" else _positions("--segment-lengths", x) for x in parts)


def _window(text: str | None) -> range | None:
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not colon:
        raise ValueError(f"--positions must be START:STOP, as in 0:4K; got {text[:40]!r}")
    return range(_positions("--positions", start), _positions("--positions", stop))
