"""One rank does something wrong: the others end soon, and say which rank, in which call.

`make test` tries a rank that dies, one that stops and two that are in other calls than the rest, on
one host. All others, of all transports, are for ``pytest -m faults``.
"""

import pytest
import torch
from support.faults import FAULTS
from support.faulty_ranks import GLOO, Transport, leftovers, problems, run_fault

# One worker has them all: much of their time ranks wait, and the other computes meanwhile.
pytestmark = pytest.mark.xdist_group("faults")

ALWAYS = [
    "killed in forward",
    "stopped in backward",
    "skipped call, backward",
    "skipped call, other arguments",
]
OTHER_CALLS = [
    "skipped call, backward",
    "skipped call, nothing travels",
    "other order of backward",
]
ON_STREAMS = [
    *OTHER_CALLS,
    "skipped call, late backward",
    "killed in a message",
    "killed in backward",
    "killed in decoding",
    "stopped in backward",
    "error in a tile",
    "two threads on all ranks",
]
WITHOUT_A_BOARD = [
    *("killed between calls", "killed in forward", "killed in a message", "killed in prefill"),
    *("stopped in backward", "error in a tile", "skipped call, then the end", *OTHER_CALLS[:2]),
]
WITH_GPUS_ONLY = [
    "killed between calls",
    "stopped before the first call",
    "stopped in backward",
    "skipped call, backward",
    "another version",
]
BETWEEN_HOSTS = [
    *("killed before the first call", *ALWAYS, *OTHER_CALLS[1:]),
    *("a call left out of the loss", "checkpoint on one rank"),
]
NO_BOARD = Transport(board=False)
GPUS_ONLY = Transport(board=False, cpu=False)  # the group; ranks connect over gloo to agree
LATE = GPUS_ONLY._replace(late=1)  # who has given up ends before another asks who has gone
TWO_HOSTS = Transport(hosts=(0, 1, 1))  # as ranks pretend: they agree over TCP
TOLD_STREAMS = Transport("streams", hosts=(0, 1))  # a thread stands for each stream
ON_CPUS = [
    *((GLOO, 3, 1, name) for name in FAULTS),
    *((NO_BOARD, 3, 1, name) for name in WITHOUT_A_BOARD),
    # Rank 0 holds the store in which they met.
    *((NO_BOARD, ranks, 0, name) for name in ALWAYS[:2] for ranks in (2, 3)),
    *((GPUS_ONLY, 3, victim, name) for name in WITH_GPUS_ONLY for victim in (0, 2)),
    *((LATE, 3, victim, "killed before the first call") for victim in (0, 2)),
    (LATE, 3, 0, "stopped before the first call"),
    *((TWO_HOSTS, 3, 1, name) for name in BETWEEN_HOSTS),
    *((TOLD_STREAMS, 2, 1, name) for name in ON_STREAMS),
    *((Transport("streams"), 2, 1, name) for name in ("killed in backward", "error in a tile")),
]
ON_GPUS = [
    *((Transport("nccl", hosts=(0, 1)), 2, 1, name) for name in ON_STREAMS),
    *((Transport("nccl", copies), 2, 1, name) for copies in (True, False) for name in ON_STREAMS),
    *((Transport("nccl", board=False), 2, 0, name) for name in WITH_GPUS_ONLY),
]


def marked(table):
    found = []
    for row in table:
        is_rare = row[0] != GLOO or row[-1] not in ALWAYS
        found.append(pytest.param(*row, marks=[pytest.mark.faults] if is_rare else []))
    return found


def check(transport, world_size, victim, name):
    before = leftovers()
    outcomes = run_fault(name, world_size, victim, transport)
    found = problems(name, world_size, victim, outcomes, transport)
    assert not found, "\n".join(found)
    assert leftovers() <= before


@pytest.mark.parametrize(("transport", "world_size", "victim", "name"), marked(ON_CPUS))
def test_dilated_attention_on_faulty_ranks(transport, world_size, victim, name):
    check(transport, world_size, victim, name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("transport", "world_size", "victim", "name"), marked(ON_GPUS))
def test_dilated_attention_on_faulty_gpus(transport, world_size, victim, name):
    check(transport, world_size, victim, name)
