"""`rda plan` and `rda simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from . import options
from .command import Example, command
from .option import Flag, Option, integer, number_above_0

if TYPE_CHECKING:
    from ..functional import Schedule
    from .run_plan_hosts import Hosts

RANKS = options.RANKS.but(options.MODELLED_RANKS)
GPUS, NETWORK = 8, 45.0
"""Defaults of --gpus-per-host and --network-gb-s, which are None unless given."""


def _ranks_shown(given: str, where: str) -> int | None:
    """A rank, or ``all`` (None)."""
    rank: int | None = None if given.strip() == "all" else integer(0)(given, where)
    return rank


HOSTED_RANKS = RANKS.but(shown=f"{options.MODELLED_RANKS}, or --hosts times --gpus-per-host")
HOSTS = Option(
    name="hosts",
    panel=options.RANKS_,
    metavar="N",
    help="Predict how long a call takes on that many hosts of H200 GPUs, by a cost model.",
    read=integer(1),
    toml=(int,),
)
GPUS_PER_HOST = Option(
    name="gpus-per-host",
    panel=options.RANKS_,
    metavar="N",
    help="With --hosts: ranks of each.",
    read=integer(1),
    shown=str(GPUS),
    toml=(int,),
)
NETWORK_GB_S = Option(
    name="network-gb-s",
    panel=options.RANKS_,
    metavar="X",
    help="With --hosts: bandwidth of a rank to other hosts, in each direction, in GB/s (10**9); "
    "the default is 0.9 of a 400 Gbit/s adapter per GPU.",
    read=number_above_0,
    shown=str(NETWORK),
    toml=(int, float),
)
LINK_GB_S = options.LINK_GB_S.but(shown=str(options.LINK_GB_S.default))
SHOW_RANKS = Option(
    name="show-ranks",
    panel=options.OUTPUT,
    metavar="LIST",
    help="Ranks to show, as in 0,17, or all.",
    read=_ranks_shown,
    shown="a few",
    toml=(int, str),
).several
TILES = Flag(name="tiles", panel=options.OUTPUT, help="List every tile and message.")
CHECK = Flag(
    name="check",
    panel=options.OUTPUT,
    help="Prove the plan by enumerating every (query, key) pair: for short sequences.",
)
CHECK_LIMIT = Option(
    name="check-limit",
    panel=options.OUTPUT,
    metavar="N",
    help="Pairs that --check may enumerate; a million takes about 0.5 GB.",
    read=integer(1),
    default=options.CHECKED_PAIRS,
    shown=f"{options.CHECKED_PAIRS:,}",
    toml=(int,),
)
DECODE = Flag(
    name="decode",
    panel=options.OUTPUT,
    help="Print instead what a KV cache keeps after --seq-len positions, its bytes per layer and "
    "rank, and what a step of generation reads.",
)
BACKWARD = Flag(
    name="backward", panel=options.KERNELS, help="Run backward too.", default=True, has_no=True
)


@command(
    Example("LongNet's pattern on 8 ranks", "rda plan --seq-len 1M --ranks 8 --causal"),
    Example(
        "A billion tokens on 512 hosts: one rank and predicted times, as JSON too",
        "rda plan --seq-len 1024M --hosts 512 --show-ranks 17 --json plan.json",
    ),
    Example(
        "What a KV cache keeps of a million tokens, and its size",
        "rda plan --decode --seq-len 1000000 --num-kv-heads 4",
    ),
)
def plan(
    pattern: Annotated[str | None, options.PATTERN_NAME],
    segment_lengths: Annotated[Sequence[int | None] | None, options.SEGMENT_LENGTHS],
    dilation_rates: Annotated[Sequence[int] | None, options.DILATION_RATES],
    head_offsets: Annotated[str | None, options.HEAD_OFFSETS_],
    head_branches: Annotated[str | None, options.HEAD_BRANCHES_],
    zero_keys: Annotated[bool, options.ZERO_KEYS],
    causal: Annotated[bool, options.CAUSAL],
    documents: Annotated[Sequence[int] | None, options.DOCUMENTS],
    seq_len: Annotated[int, options.SEQ_LENGTH],
    num_heads: Annotated[int | None, options.NUM_HEADS],
    num_kv_heads: Annotated[int | None, options.NUM_KV_HEADS],
    head_dim: Annotated[int | None, options.HEAD_DIM],
    batch_size: Annotated[int, options.BATCH_SIZE],
    dtype: Annotated[str | None, options.DTYPE],
    ranks: Annotated[int | None, HOSTED_RANKS],
    hosts: Annotated[int | None, HOSTS],
    gpus_per_host: Annotated[int | None, GPUS_PER_HOST],
    link_gb_s: Annotated[float | None, LINK_GB_S],
    network_gb_s: Annotated[float | None, NETWORK_GB_S],
    layout: Annotated[str, options.LAYOUT],
    show_ranks: Annotated[Sequence[int | None] | None, SHOW_RANKS],
    tiles: Annotated[bool, TILES],
    check: Annotated[bool, CHECK],
    check_limit: Annotated[int, CHECK_LIMIT],
    decode: Annotated[bool, DECODE],
    json: Annotated[Path | None, options.JSON],
) -> None:
    """Print what each rank would hold, compute and exchange; nothing is run."""
    from ..bench import given_workload
    from ..checks import MOST_PLANNED_RANKS
    from .json_output import json_output
    from .run_plan import show
    from .run_plan_decode import show_cache
    from .sharded import Sharded

    if decode:
        given = {"--show-ranks": show_ranks, "--tiles": tiles, "--check": check, "--hosts": hosts}
        _refuse_with_decode({flag: bool(value) for flag, value in given.items()})
    where = _hosts(hosts, gpus_per_host, link_gb_s, network_gb_s)
    ranks = _all_ranks(ranks, where)
    workload = given_workload(
        pattern,
        segment_lengths,
        dilation_rates,
        head_offsets=head_offsets,
        head_branches=head_branches,
        zero_keys=zero_keys,
        seq_len=seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        batch_size=batch_size,
        dtype=dtype,
        is_causal=causal or decode,  # each token is computed before the next one is known
    )
    sharded = Sharded(
        workload=workload,
        ranks=ranks,
        most_ranks=MOST_PLANNED_RANKS,
        layout_name=layout,
        documents=documents,
    )
    shown = _shown(show_ranks, ranks)
    with json_output(json) as write:
        if decode:
            write(show_cache(sharded))
        else:
            write(
                show(
                    sharded,
                    shown=shown,
                    tiles=tiles,
                    check=check,
                    check_limit=check_limit,
                    hosts=where,
                )
            )


def _hosts(
    number: int | None, gpus: int | None, link_gb_s: float | None, network_gb_s: float | None
) -> Hosts | None:
    """The hosts; None where no times are to be predicted."""
    from .run_plan_hosts import Hosts

    given = {"--gpus-per-host": gpus, "--link-gb-s": link_gb_s, "--network-gb-s": network_gb_s}
    if number is None:
        for flag, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{flag} {value} has a meaning with --hosts only, which predicts times: give "
                    f"--hosts too, or leave out {flag}"
                )
        return None
    return Hosts(
        number,
        GPUS if gpus is None else gpus,
        options.LINK_GB_S.default if link_gb_s is None else link_gb_s,
        NETWORK if network_gb_s is None else network_gb_s,
    )


def _all_ranks(ranks: int | None, hosts: Hosts | None) -> int:
    """The ranks of all hosts."""
    if hosts is None:
        return options.MODELLED_RANKS if ranks is None else ranks
    count = hosts.number * hosts.gpus
    if ranks not in (None, count):
        raise ValueError(
            f"--hosts {hosts.number} with --gpus-per-host {hosts.gpus} is {count} ranks, but "
            f"--ranks is {ranks}: leave out --ranks, or give numbers that agree"
        )
    return count


def _refuse_with_decode(given: Mapping[str, bool]) -> None:
    for flag, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{flag} is about what ranks compute and exchange in a call of dilated_attention; "
                f"--decode is about a KV cache: leave out one of them"
            )


def _shown(asked: Sequence[int | None] | None, ranks: int) -> Sequence[int] | None:
    """Ranks to show; None: a few."""
    if asked is None:
        return None
    for rank in asked:
        if rank is not None and rank >= ranks:
            raise ValueError(
                f"--show-ranks must name ranks from 0 to {ranks - 1}, of {ranks}; got {rank}"
            )
    return range(ranks) if None in asked else [rank for rank in asked if rank is not None]


@command(
    Example("LongNet's pattern on 4 ranks, on this machine alone", "rda simulate --causal"),
    Example(
        "A slide of 45,681 tiles on 16 ranks, on a GPU",
        "rda simulate --device cuda --pattern gigapath --seq-len 45681 --ranks 16",
    ),
    Example(
        "Packed documents, every rank's numbers as JSON",
        "rda simulate --documents 0,3000,8192 --ranks 3 --json found.json",
    ),
)
def simulate(
    pattern: Annotated[str | None, options.PATTERN_NAME],
    segment_lengths: Annotated[Sequence[int | None] | None, options.SEGMENT_LENGTHS],
    dilation_rates: Annotated[Sequence[int] | None, options.DILATION_RATES],
    head_offsets: Annotated[str | None, options.HEAD_OFFSETS_],
    head_branches: Annotated[str | None, options.HEAD_BRANCHES_],
    zero_keys: Annotated[bool, options.ZERO_KEYS],
    causal: Annotated[bool, options.CAUSAL],
    documents: Annotated[Sequence[int] | None, options.DOCUMENTS],
    seq_len: Annotated[int, options.SEQ_LENGTH],
    num_heads: Annotated[int | None, options.NUM_HEADS],
    num_kv_heads: Annotated[int | None, options.NUM_KV_HEADS],
    head_dim: Annotated[int | None, options.HEAD_DIM],
    batch_size: Annotated[int, options.BATCH_SIZE],
    dtype: Annotated[str | None, options.DTYPE],
    ranks: Annotated[int, RANKS],
    layout: Annotated[str, options.LAYOUT],
    exchange: Annotated[str, options.EXCHANGE],
    device: Annotated[str, options.DEVICE],
    backend: Annotated[str, options.BACKEND],
    backward: Annotated[bool, BACKWARD],
    seed: Annotated[int, options.SEED],
    show_ranks: Annotated[Sequence[int | None] | None, SHOW_RANKS],
    json: Annotated[Path | None, options.JSON],
) -> None:
    """Run every rank on one device, one at a time, and compare with a single rank.

    Prints what each rank held, computed and sent, beside the plan. Exit code 1 if results are not
    those of one device, or memory or bytes not those of the plan.
    """
    from ..bench import default_dtype, given_workload, resolve_device
    from ..checks import MOST_SIMULATED_RANKS, check_one_process
    from .json_output import json_output
    from .run_simulate import run
    from .sharded import Sharded

    check_one_process("rda simulate")
    workload = given_workload(
        pattern,
        segment_lengths,
        dilation_rates,
        head_offsets=head_offsets,
        head_branches=head_branches,
        zero_keys=zero_keys,
        seq_len=seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        batch_size=batch_size,
        dtype=dtype or default_dtype(resolve_device(device).type),
        is_causal=causal,
        backend=backend,
    )
    sharded = Sharded(
        workload=workload,
        ranks=ranks,
        most_ranks=MOST_SIMULATED_RANKS,
        layout_name=layout,
        documents=documents,
    )
    shown = _shown(show_ranks, ranks)
    with json_output(json) as write:
        found = run(
            sharded,
            exchange=cast("Schedule", exchange),
            device=device,
            seed=seed,
            backward=backward,
            shown=shown,
        )
        write(found)
    if not found["ok"]:
        raise typer.Exit(1)
