"""`rda draw`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from . import options
from .command import Example, command
from .option import Argument, Flag, Option, integer, list_of, number_above_0, one_of, positions_from

PICTURE = "Picture"


def _window(given: str, where: str) -> range:
    """Positions as START:STOP."""
    start, colon, stop = given.partition(":")
    if not colon:
        raise ValueError(f"{where} must be START:STOP, as in 0:4K; got {given[:40]!r}")
    read = positions_from(0)
    return range(read(start, where), read(stop, where))


WHAT = Argument(
    name="what",
    panel="Arguments",
    metavar="WHAT",
    help="pattern: which branch shows a head which keys. exchange: which rank sends what to whom. "
    "work: FLOPs per rank, contiguous and zigzag. timeline: the ring step by step, by a cost "
    "model. cache: which rows a KV cache keeps after the sequence, and how it grows.",
    read=one_of(options.PICTURES),
    choices=options.PICTURES,
)
TFLOPS = Option(
    name="tflops",
    panel=PICTURE,
    metavar="X",
    help="For timeline: TFLOP/s (10**12) of one rank; the default is about that of one H200 in "
    "dense causal forward, bf16.",
    read=number_above_0,
    default=600.0,
    toml=(int, float),
)
HEAD = Option(
    name="head",
    panel=PICTURE,
    metavar="LIST",
    help="For pattern, exchange and cache: query heads to draw, as in 0,1; exchange and cache draw "
    "one head.",
    read=list_of(integer(0)),
    default=(0,),
    shown="0",
    is_list=True,
    toml=(int, str),
)
POSITIONS = Option(
    name="positions",
    panel=PICTURE,
    metavar="RANGE",
    help="For pattern, exchange and cache: positions to draw, as in 0:4K; long sequences are drawn "
    "in blocks.",
    read=_window,
    shown="all",
)
STYLE = options.choice(
    "style", ("light", "dark"), panel=PICTURE, help="light or dark.", default="light"
)
TERMINAL = Flag(name="terminal", panel=PICTURE, help="Draw in the terminal too, with --out.")
OUT = options.OUT.but(shown="draw in the terminal").meaning("Picture to write: *.png or *.svg.")

_MODEL = ("exchange", "tflops", "link-gb-s")
_UNUSED = {
    "pattern": ("head-dim", "batch-size", "dtype", "ranks", "layout", *_MODEL),
    "exchange": _MODEL,
    "work": ("dtype", "layout", *_MODEL, "head", "positions"),
    "timeline": ("head", "positions"),
    "cache": ("ranks", "layout", *_MODEL),
}
"""For each picture, the options that change nothing in it."""


def _refuse_unused(on_line: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for an option on the command line that the picture has no use for.

    A file may have such options: it is for several pictures, and for other commands.
    """
    what = found[WHAT.name]
    for name in _UNUSED[what]:
        if name in on_line:
            others = [picture for picture in options.PICTURES if name not in _UNUSED[picture]]
            raise ValueError(
                f"--{name} changes nothing in rda draw {what}: leave it out; it is for "
                f"{', '.join(others)}"
            )
    if STYLE.name in on_line and OUT.name not in found:
        raise ValueError(
            "--style is for a picture that is written: give --out too, or leave out --style"
        )


@command(
    Example(
        "Which keys each branch shows to two heads",
        "rda draw pattern --seq-len 32 --head 0,1 \\\n"
        "    --segment-lengths 8,16,all --dilation-rates 1,2,4",
    ),
    Example(
        "Which rank sends what to whom, as a picture",
        "rda draw exchange --pattern dense --seq-len 48 --causal --out exchange.svg",
    ),
    Example(
        "Which rows a KV cache keeps after 100,000 tokens",
        "rda draw cache --pattern longnet --seq-len 100000",
    ),
    check=_refuse_unused,
)
def draw(
    what: Annotated[str, WHAT],
    pattern: Annotated[str | None, options.PATTERN_NAME],
    segment_lengths: Annotated[Sequence[int | None] | None, options.SEGMENT_LENGTHS],
    dilation_rates: Annotated[Sequence[int] | None, options.DILATION_RATES],
    head_offsets: Annotated[str | None, options.HEAD_OFFSETS_],
    head_branches: Annotated[str | None, options.HEAD_BRANCHES_],
    causal: Annotated[bool, options.CAUSAL],
    documents: Annotated[Sequence[int] | None, options.DOCUMENTS],
    seq_len: Annotated[int, options.SEQ_LENGTH],
    num_heads: Annotated[int | None, options.NUM_HEADS],
    num_kv_heads: Annotated[int | None, options.NUM_KV_HEADS],
    head_dim: Annotated[int | None, options.HEAD_DIM],
    batch_size: Annotated[int, options.BATCH_SIZE],
    dtype: Annotated[str | None, options.DTYPE],
    ranks: Annotated[int, options.RANKS.but(options.MODELLED_RANKS)],
    layout: Annotated[str, options.LAYOUT],
    exchange: Annotated[str, options.EXCHANGE],
    tflops: Annotated[float, TFLOPS],
    link_gb_s: Annotated[float, options.LINK_GB_S],
    head: Annotated[Sequence[int], HEAD],
    positions: Annotated[range | None, POSITIONS],
    style: Annotated[str, STYLE],
    out: Annotated[Path | None, OUT],
    terminal: Annotated[bool, TERMINAL],
) -> None:
    """Draw a pattern, on ranks or in a KV cache: in the terminal, or as a picture.

    Options that change nothing in a picture are refused on the command line: --ranks is for
    exchange, work and timeline, --layout for exchange and timeline, --exchange, --tflops and
    --link-gb-s for timeline.
    """
    from ..bench import given_workload
    from ..checks import MOST_PLANNED_RANKS
    from .run_draw import Drawing, run
    from .sharded import Sharded

    drawing = Drawing(
        what=what,
        heads=tuple(head),
        window=positions,
        exchange=exchange,
        tflops=tflops,
        link_gb_s=link_gb_s,
        style=style,
    )
    workload = given_workload(
        pattern,
        segment_lengths,
        dilation_rates,
        head_offsets=head_offsets,
        head_branches=head_branches,
        seq_len=seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        batch_size=batch_size,
        dtype=dtype,
        is_causal=causal,
    )
    sharded = Sharded(
        workload=workload,
        ranks=ranks,
        most_ranks=MOST_PLANNED_RANKS,
        layout_name=layout,
        documents=documents,
    )
    run(drawing, sharded, out=out, terminal=terminal or out is None)
