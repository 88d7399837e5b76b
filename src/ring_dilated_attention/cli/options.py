"""The options that commands share, each defined once: name, meaning, default, allowed values.

A command takes them as the annotations of its parameters. `Option.but` changes a default, where a
command needs another; `Option.several` takes several values, where a command compares them.

Values that belong to other rooms are written down again here, so that help and errors need no
torch; tests/test_options.py holds them to what those rooms say.
"""

from __future__ import annotations

from typing import Any

from ..layout import LAYOUTS
from ..named_patterns import DEFAULT_NAME, NAMES
from ..pattern import HEAD_BRANCHES, HEAD_OFFSETS, in_brief
from .option import (
    Flag,
    Option,
    integer,
    list_of,
    number,
    number_above_0,
    one_of,
    path,
    positions,
    positions_from,
    positions_or_all,
)

PATTERN, SIZES, RANKS_, KERNELS = "Pattern", "Sizes", "Ranks", "Device and kernels"
MODEL, OPTIMISATION, DATA, MEMORY = "Model", "Optimisation", "Data and evaluation", "Memory"
MEASURING, SAMPLING, OUTPUT = "Measuring", "Sampling", "Output"
"""Panels of the help."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Names of data types, and torch's for them; both are allowed."""

BACKENDS = (
    *("auto", "sdpa", "fa4", "cpu_flash", "cudnn", "flash", "efficient", "eager", "triton"),
)
EXCHANGES = ("auto", "ring", "gather")
DEVICES = ("auto", "cpu", "cuda")
TIMEOUT = 600.0
SEQ_LEN = 8192
MODELLED_RANKS = 4
"""Default number of ranks of commands that start none: a plan of one rank shows no exchange."""
MOST_SEED = 2**62 - 1
CHECKED_PAIRS = 2_000_000
"""Default limit of the (query, key) pairs and positions that `plan --check` enumerates."""
PICTURES = ("pattern", "exchange", "work", "timeline", "cache")
"""What `rda draw` draws."""

THE_PATTERN_S, THE_PRESET_S = "the pattern's", "the preset's"
"""Defaults in words."""


def in_units(count: int) -> str:
    """A number of positions as the options take it: 8K for 8,192."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _dtype(given: str, where: str) -> str:
    names = {**DTYPES, **{name: name for name in DTYPES.values()}}
    if given not in names:
        raise ValueError(
            f"{where} must be one of {', '.join(DTYPES)} (or torch's names for them: "
            f"{', '.join(DTYPES.values())}); got {in_brief(given)}"
        )
    return names[given]


def _seed(given: str, where: str) -> int:
    seed: int = integer(0)(given, where)
    if seed > MOST_SEED:
        raise ValueError(f"{where} must be from 0 to {MOST_SEED}, got {in_brief(seed)}")
    return seed


def choice(name: str, choices: tuple[str, ...], **about: Any) -> Option:
    """An option whose value is one of a few names, which the help lists."""
    return Option(name=name, metavar="NAME", read=one_of(choices), choices=choices, **about)


PATTERN_NAME = choice(
    "pattern",
    NAMES,
    panel=PATTERN,
    help="longnet, gigapath, longvit or dense.",
    shown=f"{DEFAULT_NAME}, unless --segment-lengths are given",
)
SEGMENT_LENGTHS = Option(
    name="segment-lengths",
    panel=PATTERN,
    metavar="LIST",
    help="Instead of --pattern: one segment length per branch, as in 2048,16K,all (all: the whole "
    "sequence).",
    read=list_of(positions_or_all),
    shown=THE_PATTERN_S,
    is_list=True,
    toml=(int, str),
)
DILATION_RATES = Option(
    name="dilation-rates",
    panel=PATTERN,
    metavar="LIST",
    help="One dilation rate per branch, with --segment-lengths, as in 1,4,16.",
    read=list_of(integer(1)),
    shown=THE_PATTERN_S,
    is_list=True,
    toml=(int, str),
)
HEAD_OFFSETS_ = choice(
    "head-offsets",
    HEAD_OFFSETS,
    panel=PATTERN,
    help="interleaved or blocked: which positions each head starts at.",
    shown=THE_PATTERN_S,
)
HEAD_BRANCHES_ = choice(
    "head-branches",
    HEAD_BRANCHES,
    panel=PATTERN,
    help="all (every head runs every branch) or split (one branch per group of heads).",
    shown=THE_PATTERN_S,
)
ZERO_KEYS = Flag(
    name="zero-keys",
    panel=PATTERN,
    help="Fill up segments with too few keys for a head with keys of score 0 and value 0, as "
    "torchscale does, and the weights of Prov-GigaPath and LongViT expect.",
    has_no=True,
)
CAUSAL = Flag(name="causal", panel=PATTERN, help="Causal mask.", has_no=True)
DOCUMENTS = Option(
    name="documents",
    panel=PATTERN,
    metavar="LIST",
    help="Cumulative lengths of packed documents, as in 0,100,250.",
    read=list_of(positions_from(0)),
    shown="one document",
    is_list=True,
    toml=(int, str),
)

SEQ_LENGTH = Option(
    name="seq-len",
    panel=SIZES,
    metavar="N",
    help="Global length of a sequence; K is 1,024, M is 1,048,576, as in 8192, 256K or 1M.",
    read=positions,
    default=SEQ_LEN,
    shown=in_units(SEQ_LEN),
    toml=(int, str),
)


def _count(name: str, panel: str, help_text: str, **about: Any) -> Option:
    return Option(
        name=name, panel=panel, metavar="N", help=help_text, read=integer(1), toml=(int,), **about
    )


NUM_HEADS = _count(
    "num-heads", SIZES, "Query heads.", shown=f"{THE_PATTERN_S} (12 with --segment-lengths)"
)
NUM_KV_HEADS = _count("num-kv-heads", SIZES, "Key and value heads (GQA).", shown="--num-heads")
HEAD_DIM = _count(
    "head-dim", SIZES, "Head dimension.", shown=f"{THE_PATTERN_S} (64 with --segment-lengths)"
)
BATCH_SIZE = _count("batch-size", SIZES, "Sequences in a batch, over all ranks.", default=1)
DTYPE = Option(
    name="dtype",
    panel=SIZES,
    metavar="NAME",
    help="bf16, fp16, fp32 or fp64 (or torch's names).",
    read=_dtype,
    shown=f"{THE_PATTERN_S}; fp32 where a CPU computes",
    choices=tuple(DTYPES),
)

RANKS = _count(
    "ranks",
    RANKS_,
    "Number of ranks.",
    default=1,
)
SEVERAL_RANKS = RANKS.several.meaning("Numbers of ranks, each measured, as in 1,2,4.")
LINK_GB_S = Option(
    name="link-gb-s",
    panel=RANKS_,
    metavar="X",
    help="For the cost model: bandwidth of a rank inside a host, in each direction, in GB/s "
    "(10**9); the default is about that of one H200 over NVLink.",
    read=number_above_0,
    default=350.0,
    toml=(int, float),
)
LAYOUT = choice(
    "layout",
    LAYOUTS,
    panel=RANKS_,
    help="How a sequence is sharded: auto (zigzag for causal work on several ranks), contiguous "
    "or zigzag.",
    default="auto",
)
EXCHANGE = choice(
    "exchange",
    EXCHANGES,
    panel=RANKS_,
    help="How remote rows travel: auto, ring or gather.",
    default="auto",
)
TIMEOUT_ = Option(
    name="timeout",
    panel=RANKS_,
    metavar="SECONDS",
    help="How long a rank waits for another before it raises.",
    read=number,
    default=TIMEOUT,
    shown=f"{TIMEOUT:g}",
    toml=(int, float),
)

DEVICE = choice(
    "device",
    DEVICES,
    panel=KERNELS,
    help="auto (cuda where there is a GPU), cpu or cuda.",
    default="auto",
)
BACKEND = choice(
    "backend",
    BACKENDS,
    panel=KERNELS,
    help=f"Attention kernels: {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}.",
    default="auto",
)
SEED = Option(
    name="seed",
    panel=KERNELS,
    metavar="N",
    help="Random seed.",
    read=_seed,
    default=0,
    toml=(int,),
)

OUT = Option(
    name="out",
    panel=OUTPUT,
    metavar="PATH",
    help="Folder to write results to.",
    read=path,
    shown="a new folder in runs",
)
JSON = Option(
    name="json",
    panel=OUTPUT,
    metavar="FILE",
    help="Also write all numbers as JSON; -: to standard output, all else to standard error.",
    read=path,
)
CONFIG = Option(
    name="config",
    panel="Options",
    metavar="FILE",
    help="TOML file of options, by name; the command line overrides it.",
    read=path,
)
