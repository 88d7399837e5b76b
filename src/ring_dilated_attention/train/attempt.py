"""A store without what an earlier attempt has left in it.

torchrun's agent keeps one store through all restarts, and the ranks of a restart would read in it
where those before them listened. How often ranks were restarted tells attempts apart only where
none was restarted because hosts came or went. So the ranks agree on a name of their own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL = 0.02


def store_of_attempt(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """The part of a store that only the ranks of this attempt use.

    Every rank asks with a token that nobody else has had. Rank 0 answers all tokens with the name
    of the attempt until each rank has confirmed it; tokens of earlier attempts are answered too,
    which nobody waits for.

    Args:
        store: of all attempts.
        rank: this rank.
        size: number of ranks.
        timeout: seconds that the ranks may start apart.

    Raises:
        RuntimeError: some rank has not come within the timeout.
    """
    token = uuid.uuid4().hex
    if rank:
        store.set(f"attempt/asks/{rank}", token)
        answer = f"attempt/answers/{token}"
        store.wait([answer], timedelta(seconds=timeout))
        name = store.get(answer).decode()
        store.set(f"{name}/is/{rank}", "")
        return dist.PrefixStore(name, store)
    name = f"attempt/{token}"
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    end = time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            asks = f"attempt/asks/{other}"
            if store.check([asks]) and (asked := store.get(asks)) != answered.get(other):
                store.set(f"attempt/answers/{asked.decode()}", name)
                answered[other] = asked
        missing = {other for other in missing if not store.check([f"{name}/is/{other}"])}
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} have not come within {timeout:g} s")
        time.sleep(_POLL * bool(missing))
    return dist.PrefixStore(name, store)
