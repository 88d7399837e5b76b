"""What a launcher such as torchrun tells a process in its environment."""

from __future__ import annotations

import os
from typing import NamedTuple

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


def check_meeting_point() -> None:
    """Raise a `ValueError` unless ``MASTER_ADDR`` and ``MASTER_PORT`` say where ranks meet."""
    if not os.environ.get("MASTER_ADDR"):
        raise ValueError(
            f"MASTER_ADDR is not set; it must be the host of rank 0, where ranks meet: "
            f"{START_WITHOUT}"
        )
    _whole("MASTER_PORT", 0, 65535)


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
