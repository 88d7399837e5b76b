"""Limits of the commands, and the environment that a launcher such as torchrun sets.

Sizes have limits so that a slip of the hand is an error and not a wait. The library itself has no
such limits; each is far beyond what has been run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from .pattern import DilatedPattern, check_positive_int

MOST = {
    "seq_len": 1 << 48,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "batch_size": 1 << 20,
    "repeats": 1 << 20,
}
"""Of every command."""

MOST_BRANCHES = 128
"""A plan's time grows with their square: 2 seconds for 100 on 8 ranks."""
MOST_DOCUMENTS = 1 << 20
MOST_PLANNED_RANKS = 16_384
"""A plan of one rank looks at every other: 16,384 take about a minute."""
MOST_SIMULATED_RANKS = 512
"""Each is a thread, and planning time grows with the square of their number."""
MOST_PROCESSES = 128
"""On a CPU; each takes some 0.3 GB. On GPUs there are at most as many ranks as devices."""
MOST_SEED = (1 << 62) - 1
"""Cases count seeds up from there, and torch takes 64 bits."""
RANK_TIMEOUT = 600.0
"""Seconds that a rank waits for another before it raises, if nobody says otherwise."""
MOST_TIMEOUT = timedelta(days=30).total_seconds()


def check_size(name: str, value: Any, most: int | None = None) -> int:
    """Return `value` as an int from 1 to `most`.

    Args:
        name: of the option.
        value: what was given.
        most: the largest value allowed; None: what `MOST` says of `name`.

    Raises:
        TypeError: it is no int.
        ValueError: it is out of bounds.
    """
    number = check_positive_int(name, value)
    most = MOST[name] if most is None else most
    if number > most:
        raise ValueError(f"{name} must be <= {most:,} in this command, got {number}")
    return number


def check_pattern(pattern: DilatedPattern, documents: Sequence[int] | None = None) -> None:
    """Raise a `ValueError` if a pattern, or the number of documents, is beyond the limits."""
    if len(pattern.branches) > MOST_BRANCHES:
        raise ValueError(
            f"a pattern may have {MOST_BRANCHES} branches in this command, "
            f"got {len(pattern.branches):,}"
        )
    for name, numbers in (
        ("segment_lengths", pattern.segment_lengths),
        ("dilation_rates", pattern.dilation_rates),
    ):
        largest = max(number or 1 for number in numbers)
        if largest > MOST["seq_len"]:
            raise ValueError(
                f"{name} must be <= {MOST['seq_len']:,} in this command, got {largest}"
            )
    if documents is not None and len(documents) - 1 > MOST_DOCUMENTS:
        raise ValueError(
            f"there may be {MOST_DOCUMENTS:,} documents in this command, got {len(documents) - 1:,}"
        )


def check_seed(seed: int | None) -> None:
    """Raise a `ValueError` unless `seed` is None or from 0 to `MOST_SEED`."""
    if seed is not None and not 0 <= seed <= MOST_SEED:
        raise ValueError(f"seed must be from 0 to {MOST_SEED}, got {seed}")


def check_seconds(name: str, value: float, most: float = MOST_TIMEOUT) -> float:
    """Return a number of seconds that is above 0 and at most `most`; raise a `ValueError` else."""
    if not 0 < value <= most:  # nor is NaN
        raise ValueError(f"{name} must be > 0 and <= {most:,.0f} seconds, got {value}")
    return value


def check_memory(nbytes: int, available: int | None, what: str) -> None:
    """Raise a `ValueError` if `what` takes more bytes than there are; None: nobody knows."""
    if available is not None and nbytes > available:
        raise ValueError(
            f"{what} takes {nbytes / 2**30:,.1f} GiB at least, and there are "
            f"{available / 2**30:,.1f}: choose a smaller seq_len, batch_size, num_heads or head_dim"
        )


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int | None:
    """Bytes of memory of this machine, or of the container; None where the system does not say."""
    limits = []
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such version of cgroups, or no limit: "max"
            limits.append(int(Path(path).read_text()))
    return min(limits, default=None)


def check_output(path: Path) -> None:
    """Raise if a file cannot be written, so that a bad path is found before the work.

    A file that was not there before is not there afterwards.

    Raises:
        OSError: it cannot be written.
        ValueError: it is there, and neither a file nor a device (opening a FIFO would wait for a
            reader).
    """
    if path.exists() and not (path.is_file() or path.is_char_device()):
        kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISDIR: "a directory"}
        mode = path.stat().st_mode
        kind = next((name for test, name in kinds.items() if test(mode)), "no file")
        raise ValueError(f"the output must be a file; {path} is {kind}")
    is_new = not path.exists()
    with path.open("a"):
        pass
    if is_new:
        path.resolve().unlink(missing_ok=True)  # other ranks may check the same path


START_WITHOUT = "start the command with torchrun, or unset WORLD_SIZE and RANK to run without ranks"


class Launched(NamedTuple):
    """This process's place among the ranks that a launcher has started.

    Attributes:
        rank: its number, ``RANK``.
        size: number of ranks, ``WORLD_SIZE``.
    """

    rank: int
    size: int


def launched() -> Launched | None:
    """This process's place, if a launcher has started it; None without ``WORLD_SIZE``.

    Raises:
        ValueError: ``RANK`` is missing where there are several ranks, or one of the two is no
            number that is possible.
    """
    if "WORLD_SIZE" not in os.environ:
        return None
    size = _whole("WORLD_SIZE", 1)
    if "RANK" in os.environ:
        return Launched(_whole("RANK", 0, size - 1), size)
    if size == 1:
        return None
    raise ValueError(
        f"WORLD_SIZE={size} says that there are {size} ranks, but RANK, from 0 to {size - 1}, is "
        f"not set: {START_WITHOUT}"
    )


def local_rank(default: int = 0) -> int:
    """The number of this rank on its host, ``LOCAL_RANK``.

    Args:
        default: where it is not set.

    Raises:
        ValueError: it is no number that is possible.
    """
    return _whole("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else default


def check_one_process(command: str) -> None:
    """Raise a `ValueError` where this is one of several ranks.

    Args:
        command: that has nothing for ranks to share, such as ``"rda simulate"``.
    """
    place = launched()
    if place is not None and place.size > 1:
        raise ValueError(
            f"{command} runs in one process, and this is rank {place.rank} of {place.size}: start "
            "it without torchrun, or unset WORLD_SIZE and RANK"
        )


def _whole(name: str, low: int, high: int | None = None) -> int:
    text = os.environ.get(name)
    try:
        number = int(text or "")
    except ValueError:
        number = low - 1
    if number < low or (high is not None and number > high):
        allowed = f">= {low}" if high is None else f"from {low} to {high}"
        got = "it is not set" if text is None else f"got {text[:40]!r}"
        raise ValueError(
            f"{name}, which a launcher sets, must be a whole number {allowed}; {got}: "
            f"{START_WITHOUT}"
        )
    return number
