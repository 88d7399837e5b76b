"""Agreements of a process group by torch.distributed: at its first call, and between hosts.

Ranks of one Linux host have a `board` for this from their first call on, others a `relay`, if they
reach each other's ports. Else they agree over gloo, also where their group has NCCL alone: a
collective of NCCL that a rank does not come to keeps the device from ever being idle again, and
cannot be left.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from .calls import Call, Finding, LostPeerError
from .communicator import takes_cpu
from .presence import Presence, make_presence, own_address
from .processes import Notices, Processes, store_of
from .relay import Relay, make_relay
from .waiter import LOOK_S, Waiter, waiting

_POLL_S = 0.002  # between looks into the store
_SPIN_S, _PAUSE_S = 0.001, 0.0001  # is waited without sleeping; is slept then, between looks
_CAUSE_S = 3.0  # so long ranks may take to say that they wait, too, when a wait has failed
_ARRIVES_S = 1.0  # so long what a rank sent before it ended may take to arrive
_MOST_ASKED = 16  # of the ranks that have said nothing, whether they still run


class Collectives:
    """One rank's end of a process group, for small objects and numbers.

    Args:
        group: the group, which is not kept alive.
        close: ends the transfers of this rank, so that those who wait for it do so no longer.
    """

    def __init__(self, group: dist.ProcessGroup, close: Callable[[], None]) -> None:
        self._weak_group, self._close = ref(group), close
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._store = store_of(group)
        self._notices = Notices(self._store)
        self._processes = Processes(self._notices)
        self._own_gloo: Any = None
        self._on_cpu = takes_cpu(group)
        self._rounds = 0
        self._call: Call | None = None
        self._agreed: Call | None = None  # the last call in which all ranks were seen
        self._presence: Presence | None = None

    def meet(self, timeout: float) -> Relay | None:
        """Prepare for calls without a board. All ranks make this call.

        They learn how to tell that the process of another one has ended, and connect to each other
        for agreements: by a relay, or else over gloo where the group cannot do that.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            LostPeerError: a rank did not come, or has ended.
        """
        share = partial(self.share, timeout=timeout)
        self._presence = make_presence(self._rank, self._world_size, self._store, share)
        relay = None
        if self._presence is not None:  # else they do not reach each other
            relay = make_relay(self._rank, self._world_size, self._store, share, self)
        if relay is not None or self._on_cpu:
            return relay
        options = _gloo_options(self._store, timeout)
        store = dist.PrefixStore("gloo", self._store)
        with waiting([], timeout):
            self._own_gloo = Waiter().run(
                lambda: dist.ProcessGroupGloo(store, self._rank, self._world_size, options),
                lambda: self.look([]),
            )
        return None

    @property
    def _gloo(self) -> Any:
        """What has collectives of tensors on the CPU; None: nothing yet."""
        if not self._on_cpu:
            return self._own_gloo
        group = self._weak_group()
        assert group is not None, "whoever calls has it"
        return group

    def share(self, value: Any, timeout: float) -> list[Any]:
        """What every rank passes to its call of this method, by rank: small, and can be pickled.

        Args:
            value: this rank's.
            timeout: seconds to wait for the others.

        Raises:
            LostPeerError: a rank did not come, or has ended.
        """
        data = pickle.dumps(value)
        with waiting([], timeout):
            found = (self._by_store if self._gloo is None else self._by_gloo)(data, timeout)
        self.seen()
        return [pickle.loads(each) for each in found]

    def maximum(self, values: Sequence[int], timeout: float) -> list[int]:
        """The elementwise maximum over all ranks of equally many numbers (int64): see `share`.

        Ranks have to `meet` before.
        """
        options: Any = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = timedelta(seconds=timeout)
        tensor = torch.tensor(values, dtype=torch.int64)
        with waiting([], timeout):
            self._finish(self._gloo.allreduce([tensor], options))
        self.seen()
        return [int(value) for value in tensor.tolist()]

    def seen(self) -> None:
        """All ranks have been heard of, in a round of agreement that this call has begun."""
        self._agreed = self._call

    def _by_gloo(self, data: bytes, timeout: float) -> list[bytes]:
        sizes = self._all_gather(torch.tensor([len(data)]), timeout)
        largest = int(max(sizes))
        padded = torch.frombuffer(bytearray(data.ljust(largest, b"\0")), dtype=torch.uint8)
        found = self._all_gather(padded, timeout)
        return [bytes(x[: int(n)].tolist()) for x, n in zip(found, sizes, strict=True)]

    def _all_gather(self, tensor: torch.Tensor, timeout: float) -> list[torch.Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self._world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        self._finish(self._gloo.allgather([everyone], [tensor], options))
        return everyone

    def _finish(self, work: Any) -> None:
        """Wait for a collective of gloo, unless another rank finds that it will never end.

        A rank sees only those of its connections break that the collective uses.
        """
        begun = time.monotonic()
        around = begun + LOOK_S
        while not work.is_completed():
            now = time.monotonic()
            time.sleep(0 if now < begun + _SPIN_S else _PAUSE_S)
            if now >= around:
                around = now + LOOK_S
                self.look([])
        work.wait()

    def _by_store(self, data: bytes, timeout: float) -> list[bytes]:
        self._rounds += 1
        key, deadline = str(self._rounds), time.monotonic() + timeout
        self._notices.leave(f"{key}/{self._rank}", data.hex())
        found = [
            bytes.fromhex(self._await_notice(f"{key}/{rank}", deadline))
            for rank in range(self._world_size)
        ]
        if self._rank:
            self._notices.leave(f"{key}/{self._rank} has read")
        else:  # it may hold the store, and end because of what it has read
            for rank in range(1, self._world_size):
                self._await_notice(f"{key}/{rank} has read", deadline)
        self._notices.remove(f"{self._rounds - 1}/{self._rank}")  # everybody has read it
        return found

    def _await_notice(self, key: str, deadline: float) -> str:
        while (text := self._notices.read(key)) is None:
            self.look([])
            # A store that does not answer is held by a rank that does not: its time is up then.
            if self._notices.holder_has_ended or time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
        return text

    def begin(self, call: Call) -> None:
        """See `calls.Roll`."""
        self._call = call

    def end(self) -> None:
        """See `calls.Roll`."""

    def waits_for(self, rank: int | None, *, on_stream: bool = False) -> None:
        """See `calls.Roll`; told when a wait fails."""

    def look(self, peers: Sequence[int]) -> None:
        """See `calls.Roll`; a rank that has given up a wait, or has failed, is not named."""
        if self._notices.read("lost") is not None:
            raise LostPeerError(peers)
        # Of those whom everybody waits for, each rank looks after one.
        for rank in peers or [(self._rank + 1) % self._world_size]:
            since = self._gone_since(rank)
            has_gone = since is not None and time.monotonic() - since > _ARRIVES_S
            if has_gone or self._said(rank):
                raise LostPeerError([rank])

    def _gone_of(self, ranks: Sequence[int]) -> list[int]:
        """Which of the first of these ranks are known to have ended, the first found first."""
        since = {rank: self._gone_since(rank) for rank in ranks[:_MOST_ASKED]}
        return [rank for _, rank in sorted((at, rank) for rank, at in since.items() if at)]

    def _gone_since(self, rank: int) -> float | None:
        if self._presence is not None:
            return self._presence.gone_since(rank)
        since, silent = self._processes.gone_since(rank), self._notices.silent_since
        if rank == 0 or since is None or silent is None:
            return since
        # Who goes while the store is silent has given up, as this rank will: rank 0 is at fault.
        return since if since <= silent else None

    def _said(self, rank: int) -> dict[str, str]:
        return {} if self._presence is None else self._presence.said(rank)

    def _tell(self, key: str, text: str) -> None:
        """Tell the others, by ports and by the store: each may be all that is left."""
        if self._presence is not None:
            self._presence.tell(key, text)
        self._notices.leave(f"{key}/{self._rank}", text)
        self._notices.leave("lost")  # whoever waits for this rank in a collective looks there

    def fail(self, finding: Finding) -> None:
        """See `calls.Roll`."""
        self._tell("failed", json.dumps(finding))

    def failed(self) -> Finding | None:
        """See `calls.Roll`: what others say is read when a wait for them fails."""
        return None

    def explain(self, lost: LostPeerError) -> Finding:
        """See `calls.Roll`: whose wait fails tells the others; who does not is at fault."""
        deadline = time.monotonic() + _CAUSE_S
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        silent = others = sorted(others, key=lambda rank: rank not in lost.peers)
        self._gone_of(silent)  # while there is a store that says which processes they are
        # What the wait was, and how long: one that times out breaks others' connections.
        own = "" if lost.waited is None else f"{lost.waited:g}"
        self._tell("waits", own)
        self._close()  # and those who wait for this rank
        waits = [own]
        while True:
            # Whoever has gone may have said why before, so this is asked first.
            gone = self._gone_of(silent)
            if failure := next(filter(None, (self._told_by(r, "failed") for r in others)), None):
                return Finding(*json.loads(failure))
            told = {r: self._told_by(r, "waits") for r in silent}
            waits += [text for text in told.values() if text is not None]
            silent = [r for r in silent if told[r] is None]
            gone = [r for r in gone if r in silent]
            no_more_comes = self._notices.are_lost and self._presence is None
            # By the store alone, whoever holds it ends only when the others know, too.
            is_found = gone and (self._presence is not None or len(gone) == len(silent))
            if is_found or not silent or no_more_comes or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        rank = (*gone, *silent, *others)[0]
        waited = next(filter(None, waits), None)
        after = f"did not answer within {waited} s" if waited else "has gone, or does not answer"
        if gone:
            after = "has gone"
        known = f"the last call it is known to have begun is {self._agreed}"
        if self._agreed is None:
            known = "it has made no call of this group"
        if self._notices.are_lost:
            known += (
                "; the store of torch.distributed, which the process of rank 0 holds as a rule, "
                "does not answer either"
            )
        return Finding(rank, f"rank {rank} {after}; {known}")

    def _told_by(self, rank: int, key: str) -> str | None:
        # Asking connects to a rank: not to all ranks of a large group.
        asks = self._presence is not None and self._presence.is_known(rank)
        text = self._said(rank).get(key) if asks else None
        return self._notices.read(f"{key}/{rank}") if text is None else text


def _gloo_options(store: dist.Store, timeout: float) -> Any:
    """By the interface that the user names, else the network that leads to the store.

    gloo would take the one that this host's name leads to, which can be the loopback interface.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        options._devices = [gloo.create_device(interface=name) for name in named.split(",")]
    else:
        options._devices = [gloo.create_device(hostname=own_address(store))]
    return options
