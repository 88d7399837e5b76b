"""Make a bad call an error on every rank: no rank may be left waiting for one that raised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from .exchange import Exchange


def agree(
    name: str,
    ends: Exchange,
    shared: Mapping[str, Any] | None,
    failure: Exception | None,
    device: torch.device,
) -> None:
    """Raise on every rank if any rank refused its arguments, or if ranks differ in them.

    One small collective a call, whatever the arguments: a rank that skipped it because it had seen
    its own arguments before could not tell that another rank's are new, and would go on without it.

    Args:
        name: what was called, for the message.
        ends: this rank's end of the group.
        shared: the arguments that must be equal on all ranks, by name; None if this rank refused.
        failure: why this rank refused its arguments; None if it did not.
        device: where the tensors of the call are.

    Raises:
        ValueError: other ranks refused their arguments, or ranks differ; the message names them.
        Exception: `failure`, on the ranks that have one.
        RuntimeError: see `refuse_capture`.
    """
    refuse_capture(name, ends, device)
    if ends.world_size > 1:
        digest = hashlib.blake2b(repr(shared).encode(), digest_size=7).digest()
        number = int.from_bytes(digest)
        values = [number, -number, int(failure is not None)]
        largest, minus_smallest, failed = ends.maximum(values, device)
        if failed or largest != -minus_smallest:
            everyone = ends.share((shared, failure and f"{type(failure).__name__}: {failure}"))
            if failure is None:
                raise ValueError(f"{name} {_disagreement(everyone)}")
    if failure is not None:
        raise failure


def refuse_capture(name: str, ends: Exchange, device: torch.device) -> None:
    """Raise a `RuntimeError` where one of several ranks is capturing a CUDA graph.

    The others are not told: they would have to be by a collective, which cannot be captured either.
    """
    several = ends.world_size > 1 and device.type == "cuda"
    if several and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} on {ends.world_size} ranks cannot be captured in a CUDA graph: ranks agree on "
            "every call, and replays would not"
        )


def _disagreement(everyone: list[tuple[Mapping[str, Any] | None, str | None]]) -> str:
    """Say which ranks refused their arguments, or which arguments differ between ranks."""
    refused = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(everyone) if why]
    if refused:
        return f"was refused on other ranks: {'; '.join(refused)}"
    calls = [shared for shared, _ in everyone if shared is not None]
    differences = []
    for name in calls[0]:
        ranks: dict[Any, list[int]] = {}
        for rank, shared in enumerate(calls):
            ranks.setdefault(shared[name], []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(
                f"{value} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
                for value, who in ranks.items()
            )
            differences.append(f"{name} is {values}")
    return f"was called with different arguments on different ranks: {'; '.join(differences)}"
