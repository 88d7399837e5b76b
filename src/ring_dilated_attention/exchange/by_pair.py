"""How rows travel between each pair of ranks: copies within a host, messages between hosts.

Every rank starts its transfers in one order, which is the same on all ranks: that of the plan. A
copy waits for copies that come before it in this order, and for the other side of its own; a
message of NCCL waits for those before it, and until its other side has started, which waits for
what comes before it alone. So nothing waits for what comes later, whichever way either travels, and
no two ranks can wait for each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .calls import Calls, Roll
from .communicator import Communicator
from .hosts import ranks_of
from .interface import Pending
from .peer_memory import DevicePlace, PeerMemory, out_of_reach, place_of


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
        hosts: host of each rank.
        share: every rank's value, by rank: a collective.
        calls: of the group.
        roll: what the ranks know of each other.
        timeout: seconds to wait for another rank.
        name: tells the transport from others of the group, on all ranks.
    """

    group: dist.ProcessGroup
    hosts: tuple[int, ...]
    share: Callable[[Any], list[Any]]
    calls: Calls
    roll: Roll
    timeout: float
    name: str

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self.group)


class ByPair:
    """Copies to and from the ranks of this host, messages to and from the others.

    Args:
        near: moves the former.
        far: moves the latter.
        members: the ranks of this host.
    """

    def __init__(self, near: PeerMemory, far: Communicator, members: Sequence[int]) -> None:
        self.near, self.far, self._members = near, far, frozenset(members)

    def transfer(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> _Both:
        """See `Exchange.start`."""
        pending: list[Pending] = []
        for transport, is_near in ((self.near, True), (self.far, False)):
            sent, received = (
                one if one is not None and (one[0] in self._members) == is_near else None
                for one in (send, receive)
            )
            if sent is not None or received is not None:
                pending.append(transport.transfer(sent, received))
        return _Both(pending)

    @property
    def nbytes(self) -> int:
        """See `PeerMemory`."""
        return self.near.nbytes

    def stop(self) -> None:
        """See `Transport`."""
        self.near.stop()
        self.far.stop()

    def close(self) -> None:
        """See `Transport`."""
        self.near.close()
        self.far.close()

    def abandon(self) -> None:
        """See `Transport`."""
        self.near.abandon()
        self.far.abandon()


class _Both:
    """Two transfers, or one."""

    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()
        self._pending.clear()


def make_transport(site: Site, device: torch.device, *, peer_memory: bool | None) -> Transport:
    """How rows on `device` travel; all members make theirs at once.

    Args:
        site: where it is made.
        device: this rank's.
        peer_memory: see `ProcessGroupExchange`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of the thread that makes it
    copies = peer_memory or (peer_memory is None and device.type == "cuda")
    near = _share_memory(site, device, is_asked_for=bool(peer_memory)) if copies else None
    members = () if near is None else ranks_of(site.hosts, site.hosts[site.rank])
    peers = set(range(len(site.hosts))) - {site.rank, *members}
    if near is not None and not peers:
        return near
    try:
        far = Communicator(
            site.group, device, site.timeout, site.calls, site.roll, site.name, peers
        )
    except RuntimeError:
        site.roll.look([rank for rank in range(len(site.hosts)) if rank != site.rank])
        raise  # else they may be what it could not connect to
    return far if near is None else ByPair(near, far, members)


def _share_memory(site: Site, device: torch.device, *, is_asked_for: bool) -> PeerMemory | None:
    """Peer memory of this host's ranks; None where that is not to be had, and was not asked for."""
    places = site.share(place_of(device))
    reasons = {
        host: _why_no_copies({rank: places[rank] for rank in ranks_of(site.hosts, host)})
        for host in set(site.hosts)
    }
    refused = next(filter(None, reasons.values()), None)
    if is_asked_for and (refused or None not in reasons.values()):
        raise ValueError(
            "peer_memory=True needs ranks on CUDA devices of one host, which can read each other's "
            f"memory and are visible to every rank; {refused or 'every rank has its own host'}"
        )
    if None not in reasons.values():
        return None
    made, failure = None, ""
    members = ranks_of(site.hosts, site.hosts[site.rank])

    def share(value: Any) -> list[Any]:
        everyone = site.share(value)
        return [everyone[rank] for rank in members]

    if reasons[site.hosts[site.rank]] is None:
        try:
            made = PeerMemory(
                site.rank, members, share, device, site.calls, site.roll, site.timeout
            )
        except RuntimeError as error:
            failure = f"rank {site.rank}: {error}"
    else:
        share(None)  # which the others do once, in `MappedMemory`
    # Having heard of all, nobody writes to memory that its rank has yet to clear.
    found = site.share(failure)
    if is_asked_for and any(found):
        raise RuntimeError(
            f"peer_memory=True, but memory cannot be shared: {[one for one in found if one]}"
        )
    failures = [found[rank] for rank in members if found[rank]]
    if failures:
        warnings.warn(
            "the GPUs of this host could read each other's memory, but cannot share it, so "
            "rows travel as messages, which is slower (peer_memory=False asks for that): "
            f"{failures}",
            stacklevel=2,
        )
        return None
    return made


def _why_no_copies(places: dict[int, DevicePlace]) -> str | None:
    """Why ranks of a host do not copy from each other; None: they do, and "": it has but one."""
    return out_of_reach(places) if len(places) > 1 else ""
