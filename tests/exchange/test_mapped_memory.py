"""Memory of GPUs that several processes have mapped, and how they pass it to each other."""

import gc
import inspect
import operator
import os
import re
import sys
import tempfile

import pytest
import torch
from support.driver_standin import DriverStandin
from support.worlds import world

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.exchange import (
    ProcessGroupExchange,
    SoloExchange,
    cuda_driver,
    mapped_memory,
    run_loopback,
)
from ring_dilated_attention.exchange.mapped_memory import MappedMemory, passed_files


def pass_texts(rank, world_size):
    """What every rank's file says, read by this one; its descriptors before and behind."""
    ends = ProcessGroupExchange(world())
    ends.share(None)  # the ranks have met, and have their board
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as file:
        file.write(b"%d" % rank)
        file.flush()
        with passed_files(file.fileno(), "", rank, ends.share) as files:
            found = b" ".join(os.pread(each, 9, 0) for each in files).decode()
    left = len(os.listdir("/proc/self/fd")) - before  # less than 0: gloo has closed one meanwhile
    return found, max(left, 0)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_has_all_files(world_size):
    texts = " ".join(map(str, range(world_size)))
    assert run_ranks(pass_texts, world_size) == [(texts, 0)] * world_size


@pytest.fixture
def standin(monkeypatch):
    made = DriverStandin()
    monkeypatch.setattr(mapped_memory, "driver", lambda: made)
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_mapped_by_all_and_given_back(standin):
    before = descriptors()

    def map_all(ends):
        device = torch.device("cuda", ends.rank)
        memory = MappedMemory(3 << 20, device, ends.rank, ends.share)
        ends.share(None)
        assert len(set(memory.addresses)) == ends.world_size
        return len([what for what, _ in standin.held if what == "handle"])

    run_loopback(3, map_all)
    gc.collect()
    expected = [(reader, f"of device {owner}") for reader in range(3) for owner in range(3)]
    assert sorted(standin.accessible) == expected
    assert not standin.held
    assert descriptors() == before


@pytest.mark.parametrize(
    "failing",
    [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_nothing_is_left_when_the_driver_refuses(standin, failing):
    before = descriptors()
    standin.failing = failing
    with pytest.raises(RuntimeError, match="error 1 in sharing memory between GPUs: out of memory"):
        MappedMemory(1, torch.device("cuda", 0), 0, SoloExchange().share)
    gc.collect()
    assert not standin.held
    assert descriptors() == before


def without_bindings(rank, world_size):
    """What `MappedMemory` says where rank 1 has no cuda-bindings."""
    ends = ProcessGroupExchange(world())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        if rank == 1:
            patch.setitem(sys.modules, "cuda.bindings", None)
        else:
            standin = DriverStandin()
            patch.setattr(mapped_memory, "driver", lambda: standin)
        with pytest.raises(RuntimeError) as refused:
            MappedMemory(1, torch.device("cuda", 0), rank, ends.share)
    return str(refused.value)


def test_a_rank_without_cuda_bindings_says_what_to_install():
    for message in run_ranks(without_bindings, 2):
        assert message.startswith("rank 1: copies between GPUs call CUDA's driver")
        assert "pip install 'cuda-bindings==" in message


def test_the_bindings_have_what_is_used():
    """Every name that the sources take from them, and that the stand-in has of them."""
    driver = pytest.importorskip("cuda.bindings.driver")
    sources = "".join(map(inspect.getsource, (cuda_driver, mapped_memory)))
    names = {*re.findall(r"\b(?:cuda|driver\(\))\.(cu[A-Z]\w+|CU\w+(?:\.CU_\w+)?)", sources)}
    names |= {name for name in dir(DriverStandin) if name.startswith(("cu", "CU"))}
    assert len(names) > 20
    for name in names:
        operator.attrgetter(name)(driver)


def map_and_leave(rank, world_size):
    """What the memory of all ranks holds, then that of rank 0 when rank 0 has let go of it."""
    ends, device = ProcessGroupExchange(world()), torch.device("cuda", 0)
    count = 3 << 20
    memory = MappedMemory(count, device, rank, ends.share)

    def copy(target, source):
        stream = torch.cuda.current_stream(device)
        cuda_driver.copy(stream.cuda_stream, target, source, count)
        torch.cuda.synchronize(device)

    def read(other):
        target = torch.zeros(count, dtype=torch.uint8, device=device)
        copy(target.data_ptr(), memory.addresses[other])
        return target.unique().tolist()

    source = torch.full((count,), 1 + rank, dtype=torch.uint8, device=device)
    copy(memory.addresses[rank], source.data_ptr())
    ends.share(None)
    found = [read(other) for other in range(world_size)]
    ends.share(None)
    if rank == 0:
        del memory
        gc.collect()
    ends.share(None)
    found.append(read(0) if rank else [1])
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_processes_read_each_others_memory():
    assert run_ranks(map_and_leave, 3) == [[[1], [2], [3], [1]]] * 3


def map_and_unmap(rank, world_size, rounds, share_of_device):
    """Map so much memory in each round that the device could not hold what the rounds leave."""
    ends, device = ProcessGroupExchange(world()), torch.device("cuda", 0)
    count = int(torch.cuda.mem_get_info(device)[1] * share_of_device)
    for _ in range(rounds):
        memory = MappedMemory(count, device, rank, ends.share)
        del memory
        gc.collect()
        ends.share(None)
    return "held"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_nobody_has_mapped_is_free():
    # 3 ranks x 20 rounds x 2%: more than there is
    assert run_ranks(map_and_unmap, 3, 20, 0.02) == ["held"] * 3
