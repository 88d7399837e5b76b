"""What the commands of `rda` share: the app, options, the call they are about, and output."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
import typer.core
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from .. import __version__
from ..named_patterns import NamedPattern
from ..pattern import Length, Window
from ..units import parse_count

if TYPE_CHECKING:
    from ..bench import Workload

MOST_POSITIONS, MOST_HEADS = 1 << 48, 4096
"""Of a command, so that a slip of the hand is an error and not a wait."""

_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it


class RunError(Exception):
    """A run failed, or a check found a difference: exit code 1, the message as one line."""


class _OneLineErrors(typer.core.TyperGroup):
    """Ends with one line for bad input (exit code 2) and failed runs (1).

    Any other exception is a bug of the program and keeps its traceback.
    """

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            code = super().main(*arguments, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except _UsageError as error:
            code = _say(error.format_message().replace("Value error, ", ""), 2)
        except RunError as error:
            code = _say(error, 1)
        except typer.Abort:  # Ctrl-C
            code = 130
        except (BrokenPipeError, SystemExit):  # rich and typer exit where nobody reads, as `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except (ValueError, OSError, OverflowError, MemoryError) as error:
            code = _say(error, 2)
        sys.exit(code)


def _say(error: Exception | str, code: int) -> int:
    print("error:", " ".join((str(error) or type(error).__name__).split()), file=sys.stderr)
    return code


app = typer.Typer(
    cls=_OneLineErrors,
    help="Exact ring dilated attention: look at plans, verify results, measure speed.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _app(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", metavar="")
    ] = False,
) -> None:
    if version:
        print(f"rda {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A function that reads values separated by commas, as in ``1,2,4``."""
    return lambda text: tuple(read(part.strip()) for part in text.split(","))


def integer(least: int, most: int) -> Callable[[str], int]:
    """A function that reads a number such as 4096, 16K, 1M or 1G, from `least` to `most`."""

    def read(text: str) -> int:
        number = parse_count(text)
        if not least <= number <= most:
            raise ValueError(f"{text} is not from {least:,} to {most:,}")
        return number

    return read


def _segment_length(text: str) -> Length:
    if text.startswith("w"):
        sides = text[1:].split("+")
        if len(sides) <= 2:
            return Window(*map(integer(0, MOST_POSITIONS), sides))
    return None if text == "all" else integer(1, MOST_POSITIONS)(text)


def _writable(text: str) -> Path:
    """A file that can be written, or ``-``; others are refused before the work, not after it."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{text} cannot be written: it is a folder, or is in none that exists")
    return path


def option(
    name: str,
    meaning: str,
    read: Callable[[str], Any] | None = None,
    kind: Literal["N", "LIST", "NAME", "FILE", ""] = "N",
) -> Any:
    """An option of typer.

    Args:
        name: with its dashes.
        meaning: the help, of one or two lines.
        read: reads the value from text; its `ValueError` is the message for a value that is not
            allowed. None: a flag, or one of the names of a `Literal`.
        kind: of value, for the help; flags have none.
    """

    def parse(text: Any) -> Any:
        if read is None or not isinstance(text, str):  # typer gives the default, too
            return text
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    parser = None if read is None else parse
    return typer.Option(name, help=meaning, parser=parser, metavar=kind)


_positions, _heads = integer(1, MOST_POSITIONS), integer(1, MOST_HEADS)
_Names: TypeAlias = Literal["longnet", "gigapath", "longvit", "dense", "geometric"]
_Offsets: TypeAlias = Literal["interleaved", "blocked"]
_Dtypes: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]
_Layouts: TypeAlias = Literal["auto", "contiguous", "zigzag"]
_Exchanges: TypeAlias = Literal["auto", "ring", "gather", "heads"]
_Devices: TypeAlias = Literal["auto", "cpu", "cuda"]

# fmt: off
PatternName = Annotated[_Names | None, option(
    "--pattern", "longnet (default), gigapath or longvit, as published; dense; or geometric: "
    "LongNet's series of segments until one spans --seq-len.", kind="NAME")]
SegmentLengths = Annotated[Sequence[Length] | None, option(
    "--segment-lengths", "Instead of --pattern: one length per branch, as in 2048,16K,all; "
    "w1023 is a window of 1,023 positions before each query, w64+64 also behind it.",
    list_of(_segment_length), "LIST")]
DilationRates = Annotated[Sequence[int] | None, option(
    "--dilation-rates", "With --segment-lengths: one rate per branch, as in 1,4,16.",
    list_of(_positions), "LIST")]
HeadOffsetsName = Annotated[_Offsets | None, option(
    "--head-offsets", "With --segment-lengths: interleaved (LongNet) or blocked (torchscale).",
    kind="NAME")]
ZeroKeys = Annotated[bool, option(
    "--zero-keys", "With --segment-lengths: fill up segments with keys of 0, as torchscale does.",
    kind="")]
SeqLen = Annotated[int, option(
    "--seq-len", "Positions of the whole sequence: 8192, 256K, 1M or 1G.", _positions)]
Ranks = Annotated[int, option("--ranks", "Number of ranks.", integer(1, 1 << 14))]
RankCounts = Annotated[Sequence[int], option(
    "--ranks", "Numbers of ranks, one after the other, as in 1,2,4.",
    list_of(integer(1, 128)), "LIST")]
Heads = Annotated[int | None, option("--heads", "Query heads. Default: the pattern's.", _heads)]
KVHeads = Annotated[int | None, option(
    "--kv-heads", "Key and value heads (GQA). Default: --heads.", _heads)]
HeadDim = Annotated[int | None, option(
    "--head-dim", "Head dimension. Default: the pattern's.", _heads)]
Dtype = Annotated[_Dtypes | None, option(
    "--dtype", "bfloat16, float16, float32 or float64. Default: the pattern's; float32 on a CPU.",
    kind="NAME")]
Causal = Annotated[bool, option("--causal", "Queries see no later keys.", kind="")]
LayoutName = Annotated[_Layouts, option(
    "--layout", "contiguous, zigzag or auto: zigzag if causal.", kind="NAME")]
Documents = Annotated[Sequence[int] | None, option(
    "--documents", "Cumulative lengths of packed documents, as in 0,100,250.",
    list_of(integer(0, MOST_POSITIONS)), "LIST")]
ExchangeName = Annotated[_Exchanges, option(
    "--exchange", "How rows travel: auto, ring, gather or heads (all-to-all).", kind="NAME")]
DeviceName = Annotated[_Devices, option(
    "--device", "cpu, cuda or auto: cuda where there is a GPU.", kind="NAME")]
Seed = Annotated[int, option("--seed", "Of the random inputs.", integer(0, (1 << 62) - 1))]
Timeout = Annotated[int, option(
    "--timeout", "Seconds that a rank waits for another.", integer(1, 30 * 24 * 3600))]
Json = Annotated[Path | None, option(
    "--json", "Write all numbers to a JSON file; -: to standard output.", _writable, "FILE")]
Out = Annotated[Path | None, option("--out", "File to write.", _writable, "FILE")]
# fmt: on


def workload_of(
    named: NamedPattern,
    *,
    heads: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    **rest: Any,
) -> Workload:
    """The call that the options of a command describe; what is None is that of the pattern."""
    from ..bench import Workload

    return Workload(
        pattern=named.pattern,
        num_heads=heads or named.num_heads,
        head_dim=head_dim or named.head_dim,
        dtype=dtype or named.dtype,
        **rest,
    )


def resolve_device(name: str) -> str:
    """``"cpu"`` or ``"cuda"`` for what --device says.

    Raises:
        ValueError: torch finds no CUDA device, and one was asked for.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch finds none: use auto or cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def make_console(json_file: Path | None = None) -> Console:
    """Where a command prints: standard output, or standard error if JSON takes that."""
    console = Console(stderr=str(json_file) == "-", highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal
    return console


def show_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Print a table as wide as its content: the first column to the left, the rest to the right."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else str(x) for x in row))
    wide = console.options.update_width(1000)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table, soft_wrap=False)
    console.print()


def working(text: str) -> Status:
    """Say in a terminal what is being done, inside of ``with``."""
    return Console(stderr=True).status(text)


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a document to a file, or for ``-`` to standard output; None: do not.

    JSON has no NaN and no infinity: both are written as ``null``.
    """
    if path is None:
        return
    text = json.dumps(_finite(document), indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
