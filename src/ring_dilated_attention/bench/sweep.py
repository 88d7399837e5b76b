"""The workloads of a benchmark, from lists of values; and the folder of its results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import check_output
from ..pattern import HeadBranches, HeadOffsets
from . import report
from .patterns import default_dtype, given_workload
from .plots import RATES_NAME, SCALING_NAME
from .workload import Workload

SEQ_LEN = 8192
"""Positions of a workload that is told no other."""


def sweep(
    device: str,
    *,
    patterns: Sequence[str] = (),
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
    head_offsets: HeadOffsets | None = None,
    head_branches: HeadBranches | None = None,
    zero_keys: bool | None = None,
    seq_lens: Sequence[int] = (),
    num_heads: Sequence[int] = (),
    num_kv_heads: Sequence[int] = (),
    head_dims: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    causal: Sequence[bool] = (),
    backends: Sequence[str] = (),
) -> list[Workload]:
    """Every combination of the values given; a field without any keeps its default.

    Args:
        device: ``"cpu"`` or ``"cuda"``: on a CPU the default dtype is float32.
        patterns: names of patterns; none, and no segment lengths: ``"longnet"``.
        segment_lengths: of a pattern without a name, with `dilation_rates`.
        dilation_rates: see `segment_lengths`.
        head_offsets: of all patterns; None: each pattern's.
        head_branches: of all patterns; None: each pattern's.
        zero_keys: of all patterns; None: each pattern's.
        seq_lens: of the sequence, in positions; none: `SEQ_LEN`.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dims: head dimensions.
        batch_sizes: sequences in the batch.
        dtypes: of query, key and value.
        causal: whether the mask is causal.
        backends: of `dilated_attention`.

    Raises:
        TypeError, ValueError: a value or a combination is not allowed.
    """
    values: dict[str, Sequence[Any]] = {
        "seq_len": seq_lens or (SEQ_LEN,),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dims,
        "batch_size": batch_sizes,
        "dtype": dtypes or (default_dtype(device),),
        "is_causal": causal,
        "backend": backends,
    }
    given = {name: tuple(dict.fromkeys(options)) for name, options in values.items() if options}
    return [
        given_workload(
            name,
            segment_lengths,
            dilation_rates,
            head_offsets=head_offsets,
            head_branches=head_branches,
            zero_keys=zero_keys,
            **dict(zip(given, combination, strict=True)),
        )
        for name in dict.fromkeys(patterns or (None,))
        for combination in itertools.product(*given.values())
    ]


def check_folder(out: Path) -> None:
    """Make the folder of a benchmark, and raise if its JSON file cannot be written.

    Raises:
        OSError: the folder or the file cannot be written.
        ValueError: the folder has results of another run, or there is something else that has the
            file's name.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_output(out / report.JSON_NAME)
    names = (report.JSON_NAME, RATES_NAME, SCALING_NAME)
    found = [name for name in names if (out / name).is_file()]
    if found:
        raise ValueError(
            f"{out} has results of another run ({', '.join(found)}): choose another folder for "
            f"--out, or remove {'it' if len(found) == 1 else 'them'}"
        )
