"""Agreements of a process group by torch.distributed: at its first call, and between hosts.

Ranks of one Linux host have a `board` for this from their first call on.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed.distributed_c10d import _get_process_group_store

from .calls import Call, Finding, LostPeerError
from .presence import Presence, make_presence
from .waiter import LOOK_S, waiting

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
        self._store = dist.PrefixStore("ring_dilated_attention", _get_process_group_store(group))
        self._on_cpu = "cpu" in dist.get_backend_config(group)
        self._rounds = 0
        self._call: Call | None = None
        self._agreed: Call | None = None  # the last call in which all ranks were seen
        self._presence: Presence | None = None

    def meet(self, timeout: float) -> None:
        """Learn how to tell that the process of another rank has ended. All ranks make this call.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            LostPeerError: a rank did not come, or has ended.
        """
        share = partial(self.share, timeout=timeout)
        self._presence = make_presence(self._rank, self._world_size, self._store, share)

    @property
    def _group(self) -> dist.ProcessGroup:
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
        self._rounds += 1
        data = pickle.dumps(value)
        with waiting([], timeout):
            found = (self._by_gloo if self._on_cpu else self._by_store)(data, timeout)
        self._seen()
        return [pickle.loads(each) for each in found]

    def maximum(self, values: Sequence[int], device: torch.device, timeout: float) -> list[int]:
        """The elementwise maximum over all ranks of equally many numbers (int64): see `share`."""
        with waiting([], timeout):
            found = self._all_reduce(list(values), device, timeout)
        self._seen()
        return found

    def _seen(self) -> None:
        self._agreed = self._call

    def _by_gloo(self, data: bytes, timeout: float) -> list[bytes]:
        self._store.set(f"{self._rounds}/{self._rank}", "")  # says who has come
        sizes = self._all_gather(torch.tensor([len(data)]), timeout)
        largest = int(max(sizes))
        padded = torch.frombuffer(bytearray(data.ljust(largest, b"\0")), dtype=torch.uint8)
        found = self._all_gather(padded, timeout)
        self._store.delete_key(f"{self._rounds - 1}/{self._rank}")
        return [bytes(x[: int(n)].tolist()) for x, n in zip(found, sizes, strict=True)]

    def _all_gather(self, tensor: torch.Tensor, timeout: float) -> list[torch.Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self._world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        self._finish(self._group.allgather([everyone], [tensor], options))
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
        keys = [f"{self._rounds}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], data.hex())
        deadline = time.monotonic() + timeout
        while not self._store.check(keys):
            self.look([])
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
        found = [bytes.fromhex(self._store.get(key).decode()) for key in keys]
        self._store.delete_key(f"{self._rounds - 1}/{self._rank}")  # everybody has read it
        return found

    def _all_reduce(self, values: list[int], device: torch.device, timeout: float) -> list[int]:
        options: Any = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = timedelta(seconds=timeout)
        if self._on_cpu:
            tensor = torch.tensor(values, dtype=torch.int64)
            self._finish(self._group.allreduce([tensor], options))
            return [int(value) for value in tensor.tolist()]
        if device.type == "cpu":
            device = torch.device("cuda", torch.cuda.current_device())  # all that NCCL can reach
        # On a stream of its own it does not wait for what the device has still to compute.
        with torch.cuda.stream(_agreement_stream(device)):
            tensor = torch.tensor(values, dtype=torch.int64, device=device)
            self._group.allreduce([tensor], options).wait(timedelta(seconds=timeout))
            return [int(value) for value in tensor.tolist()]

    def begin(self, call: Call) -> None:
        """See `calls.Roll`."""
        self._call = call

    def end(self) -> None:
        """See `calls.Roll`."""

    def waits_for(self, rank: int | None, *, on_stream: bool = False) -> None:
        """See `calls.Roll`; told when a wait fails."""

    def look(self, peers: Sequence[int]) -> None:
        """See `calls.Roll`; a rank that has given up a wait, or has failed, is not named."""
        if self._store.check(["lost"]):
            raise LostPeerError(peers)
        # Of those whom everybody waits for, each rank looks after one.
        for rank in peers or [(self._rank + 1) % self._world_size]:
            since = self._gone_since(rank)
            if since is not None and time.monotonic() - since > _ARRIVES_S:
                raise LostPeerError([rank])

    def _gone_since(self, rank: int) -> float | None:
        return None if self._presence is None else self._presence.gone_since(rank)

    def fail(self, finding: Finding) -> None:
        """See `calls.Roll`."""
        try:
            self._store.set(f"failed/{self._rank}", json.dumps(finding))
            self._store.set("lost", "")  # whoever waits for this rank in a collective looks there
        except RuntimeError:
            return  # whoever holds the store has gone; the others will find that too

    def failed(self) -> Finding | None:
        """See `calls.Roll`: what others say is read when a wait for them fails."""
        return None

    def explain(self, lost: LostPeerError) -> Finding:
        """See `calls.Roll`: whose wait fails says so in the store; who does not is at fault."""
        try:
            return self._explain(lost)
        except RuntimeError:
            rank = lost.peers[0] if lost.peers else 0
            return Finding(
                rank,
                f"rank {rank} does not answer, and neither does the store of torch.distributed: "
                "the process that holds it, as a rule that of rank 0, has gone",
            )

    def _explain(self, lost: LostPeerError) -> Finding:
        # What the wait was, and how long: one that times out breaks others' connections.
        self._store.set(f"waits/{self._rank}", "" if lost.waited is None else f"{lost.waited:g}")
        self._store.set("lost", "")  # those who wait in a collective say so too
        self._close()  # and those who wait for this rank
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        silent = sorted(others, key=lambda rank: rank not in lost.peers)
        deadline = time.monotonic() + _CAUSE_S
        while True:
            # Whoever has gone may have said why before, so this is asked first.
            gone = [r for r in silent[:_MOST_ASKED] if self._gone_since(r) is not None]
            for rank in others:
                if self._store.check([f"failed/{rank}"]):
                    return Finding(*json.loads(self._store.get(f"failed/{rank}")))
            silent = [r for r in silent if not self._store.check([f"waits/{r}"])]
            gone = [r for r in gone if r in silent]
            if gone or not silent or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        rank = (*gone, *silent, *lost.peers, *others)[0]
        waits = [f"waits/{r}" for r in range(self._world_size) if r not in silent]
        waited = next((found for key in waits if (found := self._store.get(key).decode())), "")
        after = f"did not answer within {waited} s" if waited else "has gone, or does not answer"
        if gone:
            after = "has gone"
        known = f"the last call it is known to have begun is {self._agreed}"
        if self._agreed is None:
            known = "it has made no call of this group"
        return Finding(rank, f"rank {rank} {after}; {known}")


@lru_cache(maxsize=8)
def _agreement_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
