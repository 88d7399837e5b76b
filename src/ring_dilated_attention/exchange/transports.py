"""How the rows of a group travel: by copies, where all ranks share a host, else by messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .calls import Calls, Roll
from .communicator import Communicator
from .interface import Pending
from .peer_memory import PeerMemory, out_of_reach, place_of


class Transport(Protocol):
    """How rows travel between the ranks of a group."""

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> Pending:
        """See `Exchange.start`."""

    def stop(self) -> None:
        """Begin no transfer any more; return when none is being begun."""

    def close(self) -> None:
        """End all transfers, so that no other rank waits for this one."""

    def abandon(self) -> None:
        """End all transfers, which all ranks know to be in vain; nobody uses this object again."""


class Site(NamedTuple):
    """Where a transport is made.

    Attributes:
        group: the group.
        is_one_host: whether all ranks are on one.
        share: every rank's value, by rank: a collective.
        calls: of the group.
        roll: what the ranks know of each other.
        timeout: seconds to wait for another rank.
        name: tells the transport from others of the group, on all ranks.
    """

    group: dist.ProcessGroup
    is_one_host: bool
    share: Callable[[Any], list[Any]]
    calls: Calls
    roll: Roll
    timeout: float
    name: str

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self.group)


def make_transport(site: Site, device: torch.device, *, peer_memory: bool | None) -> Transport:
    """How rows on `device` travel; all members make theirs at once.

    Args:
        site: where it is made.
        device: this rank's.
        peer_memory: see `ProcessGroupExchange`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of the thread that makes it
    if peer_memory or (peer_memory is None and device.type == "cuda"):
        shared = _share_memory(site, device, is_asked_for=bool(peer_memory))
        if shared is not None:
            return shared
    peers = set(range(dist.get_world_size(site.group))) - {site.rank}
    try:
        return Communicator(
            site.group, device, site.timeout, site.calls, site.roll, site.name, peers
        )
    except RuntimeError:
        site.roll.look(sorted(peers))
        raise  # else they may be what it could not connect to


def _share_memory(site: Site, device: torch.device, *, is_asked_for: bool) -> PeerMemory | None:
    """Memory that all ranks share; None where that is not to be had, and was not asked for."""
    places = dict(enumerate(site.share(place_of(device))))
    refused = out_of_reach(places) if site.is_one_host else "they are on several hosts"
    if refused:
        if is_asked_for:
            raise ValueError(
                "peer_memory=True needs ranks on CUDA devices of one host, which can read each "
                f"other's memory and are visible to every rank; {refused}"
            )
        return None
    made, failure = None, ""
    try:
        made = PeerMemory(
            site.rank, len(places), site.share, device, site.calls, site.roll, site.timeout
        )
    except RuntimeError as error:
        failure = f"rank {site.rank}: {error}"
    # Having heard of all, nobody writes to memory that its rank has yet to clear.
    failures = [one for one in site.share(failure) if one]
    if failures and is_asked_for:
        raise RuntimeError(f"peer_memory=True, but memory cannot be shared: {failures}")
    if failures:
        warnings.warn(
            "the GPUs of this host could read each other's memory, but cannot share it, so "
            "rows travel as messages, which is slower (peer_memory=False asks for that): "
            f"{failures}",
            stacklevel=2,
        )
        return None
    return made
