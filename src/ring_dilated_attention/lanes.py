"""Do several works of one rank side by side: on CUDA each in a lane, a stream of its own.

A kernel leaves multiprocessors idle while its last blocks run; another lane's kernel fills them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

LANES = 2
"""More gain nothing (results/many_gpus_h200x4): what is left idle is what one kernel fills."""


@lru_cache(maxsize=8)
def lane_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """The streams of all lanes of a CUDA device, which has an index."""
    return tuple(torch.cuda.Stream(device) for _ in range(LANES))  # type: ignore[no-untyped-call]


def side_by_side(works: Sequence[Iterator[None]], device: torch.device) -> None:
    """Have works go on in turns, each to its next ``yield``, until all have ended.

    What works are given must be there when this is called, and what they make when it returns, as
    far as the current stream is concerned. Works share nothing that one of them writes.

    Args:
        works: LANES generators at most, which queue what they do on the current stream of `device`.
        device: where; one work has no other stream, and on other devices there are none.
    """
    if device.type != "cuda" or len(works) == 1:
        _in_turns(works, [None] * len(works))
        return
    assert len(works) <= LANES
    main, streams = torch.cuda.current_stream(device), lane_streams(device)[: len(works)]
    for stream in streams:
        stream.wait_stream(main)
    try:
        _in_turns(works, streams)
    finally:  # what they read may be freed, whatever has happened
        for stream in streams:
            main.wait_stream(stream)


def _in_turns(works: Sequence[Iterator[None]], streams: Sequence[torch.cuda.Stream | None]) -> None:
    left = list(zip(works, streams, strict=True))
    while left:
        for one in list(left):
            work, stream = one
            with torch.cuda.stream(stream):  # None: the current one
                if next(work, _ENDED) is _ENDED:
                    left.remove(one)


_ENDED = object()
