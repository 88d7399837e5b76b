"""The workloads of a benchmark, from lists of values; and the folder of its results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import check_output
from ..pattern import DilatedPattern, HeadOffsets
from . import report
from .patterns import check_together, named_pattern, named_workload
from .workload import Workload

DEFAULT_PATTERNS = ("longnet",)
DEFAULT_LENGTH = {"cpu": 8192, "cuda": 65536}


def sweep(
    device: str,
    *,
    patterns: Sequence[str] = (),
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
    head_offsets: HeadOffsets | None = None,
    lengths: Sequence[int] = (),
    heads: Sequence[int] = (),
    kv_heads: Sequence[int] = (),
    head_dims: Sequence[int] = (),
    batches: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    causal: Sequence[bool] = (),
    backends: Sequence[str] = (),
) -> list[Workload]:
    """Every combination of the values given; a field without any keeps its default.

    Args:
        device: ``"cpu"`` or ``"cuda"``: length and dtype have defaults that suit it.
        patterns: names of patterns; none, and no segment lengths: `DEFAULT_PATTERNS`.
        segment_lengths: of one more pattern, with `dilation_rates`.
        dilation_rates: see `segment_lengths`.
        head_offsets: of all patterns; None: each pattern's own.
        lengths: of the sequence.
        heads: query heads.
        kv_heads: KV heads.
        head_dims: elements of a row of a head.
        batches: sequences in the batch.
        dtypes: of query, key and value.
        causal: whether queries see no later keys.
        backends: of `dilated_attention`.

    Raises:
        TypeError, ValueError: a value or a combination is not allowed.
    """
    check_together(segment_lengths, dilation_rates)
    found: dict[str, DilatedPattern] = {}
    for name in patterns or (DEFAULT_PATTERNS if segment_lengths is None else ()):
        found[name] = named_pattern(name)
    if segment_lengths is not None and dilation_rates is not None:
        found[""] = DilatedPattern(segment_lengths, dilation_rates)
    if head_offsets is not None:
        for name, pattern in found.items():
            found[name] = DilatedPattern(
                pattern.segment_lengths, pattern.dilation_rates, head_offsets=head_offsets
            )
    values: dict[str, Sequence[Any]] = {
        "length": lengths or (DEFAULT_LENGTH[device],),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dims,
        "batch": batches,
        "dtype": dtypes or (("float32",) if device == "cpu" else ()),
        "is_causal": causal,
        "backend": backends,
    }
    given = {name: tuple(dict.fromkeys(options)) for name, options in values.items() if options}
    workloads = []
    for name, pattern in found.items():
        for combination in itertools.product(*given.values()):
            options = {**dict(zip(given, combination, strict=True)), "pattern": pattern}
            workloads.append(named_workload(name, **options) if name else Workload(**options))
    return workloads


def check_folder(out: Path) -> None:
    """Make the folder of a benchmark, and raise if its JSON file cannot be written.

    Raises:
        OSError: the folder or the file cannot be written.
        ValueError: there is something else that has the file's name.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / report.JSON_NAME
    is_new = not path.exists()
    check_output(path)
    if is_new:
        path.unlink()  # it is there when there is a result
