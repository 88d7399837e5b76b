"""One rank does something wrong: the others end soon, and say which rank, in which call."""

import pytest
import torch
from support.faults import FAULTS
from support.faulty_ranks import GLOO, Transport, leftovers, problems, run_fault
from support.several_hosts import skip_without_hosts

# One worker has them all: much of their time ranks wait, and the other computes meanwhile.
pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

WITHOUT_A_BOARD = [
    "killed between calls",
    "killed in forward",
    "killed in a message",
    "stopped in backward",
    "error in a tile",
    "skipped call, backward",
    "skipped call, nothing travels",
    "skipped call, then the end",
    "killed in prefill",
    "killed in decoding",
]
"""Ranks of several hosts learn of these by collectives, by ports, and by the store they met in."""
WITH_THE_STORE = ["killed in forward", "stopped in backward", "error in a tile"]
"""Of the first rank, whose process holds that store between hosts."""
WITH_GPUS_ONLY = [
    "killed between calls",
    "stopped before the first call",
    "stopped in backward",
    "skipped call, backward",
    "another version",
]
"""In a group of NCCL alone, whose ranks connect over gloo to agree; rank 0 holds the store."""
BETWEEN_HOSTS = [
    "killed before the first call",
    "killed in forward",
    "stopped in backward",
    "skipped call, backward",
    "skipped call, other arguments",
    "skipped call, nothing travels",
    "other order of backward",
    "a call left out of the loss",
    "checkpoint on one rank",
]
"""Of namespaces. Ranks go on while others have yet to say which call they are in."""
STREAMED = [
    "killed in a message",
    "killed in backward",
    "stopped in backward",
    "error in a tile",
    "skipped call, backward",
    "skipped call, late backward",
    "skipped call, nothing travels",
    "other order of backward",
    "checkpoint on one rank",
    "two threads on all ranks",
    "killed in decoding",
]
"""Of streams, which a thread watches; a thread stands for each."""
BETWEEN_GPUS = [
    "killed between calls",
    "killed in forward",
    "killed in a message",
    "killed in backward",
    "stopped in backward",
    "error in a tile",
    "error in a tile, caught",
    "skipped call, backward",
    "skipped call, late backward",
    "skipped call, nothing travels",
    "skipped call, then the end",
    "other order of backward",
    "two threads on all ranks",
    "killed in prefill",
    "error in prefill",
    "killed in decoding",
    "stopped in decoding",
]


def check(name, world_size, victim, transport=GLOO):
    before = leftovers()
    outcomes = run_fault(name, world_size, victim, transport)
    found = problems(name, world_size, victim, outcomes, transport)
    assert not found, "\n".join(found)
    assert leftovers() <= before


@pytest.mark.parametrize("name", FAULTS)
def test_on_one_host(name):
    check(name, 3, 1)


@pytest.mark.parametrize("name", WITHOUT_A_BOARD)
def test_without_a_board(name):
    check(name, 3, 1, Transport(board=False))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", WITH_THE_STORE)
def test_without_a_board_and_the_store(name, world_size):
    check(name, world_size, 0, Transport(board=False))


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", WITH_GPUS_ONLY)
def test_without_a_board_and_a_group_for_the_cpu(name, victim):
    check(name, 3, victim, Transport(board=False, cpu=False))


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("stopped before the first call", 0),
        ("killed before the first call", 0),
        ("killed before the first call", 2),
    ],
)
def test_a_rank_that_has_given_up_is_not_blamed_for_it(name, victim):
    """It ends before another one asks who has gone, which the store does not say."""
    check(name, 3, victim, Transport(board=False, cpu=False, late=1))


@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_between_hosts(name):
    skip_without_hosts()
    check(name, 3, 1, Transport(hosts=(0, 1, 1)))


@pytest.mark.parametrize("name", STREAMED)
def test_between_streams_that_are_told_to_be_on_two_hosts(name):
    check(name, 2, 1, Transport("streams", hosts=(0, 1)))


@pytest.mark.parametrize("name", ["killed in backward", "error in a tile", "killed in decoding"])
def test_between_streams(name):
    check(name, 2, 1, Transport("streams"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", BETWEEN_GPUS)
def test_between_gpus_that_are_told_to_be_on_two_hosts(name):
    check(name, 2, 1, Transport("nccl", hosts=(0, 1)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "messages"])
@pytest.mark.parametrize("name", BETWEEN_GPUS)
def test_between_gpus(name, copies):
    check(name, 2, 1, Transport("nccl", copies))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", WITH_GPUS_ONLY)
def test_between_gpus_without_a_board(name):
    check(name, 2, 0, Transport("nccl", board=False))
