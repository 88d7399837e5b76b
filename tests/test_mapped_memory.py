"""Memory of GPUs that several processes have mapped, and how they pass it to each other."""

import gc
import os
import tempfile

import pytest
import torch
from worlds import world

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.exchange import ProcessGroupExchange
from ring_dilated_attention.exchange.cuda_driver import check, driver
from ring_dilated_attention.exchange.mapped_memory import MappedMemory, passed_files


def pass_texts(rank, world_size, without):
    """What every rank's file says, read by this one; its descriptors before and behind."""
    ends = ProcessGroupExchange(world())
    ends.share(None)  # the ranks have met, and have their board
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as file:
        file.write(b"%d" % rank)
        file.flush()
        own, failure = (None, "no memory") if rank in without else (file.fileno(), "")
        try:
            with passed_files(own, failure, rank, ends.share) as files:
                found = b" ".join(os.pread(each, 9, 0) for each in files).decode()
        except RuntimeError as error:
            found = str(error)
    return found, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_has_all_files(world_size):
    texts = " ".join(map(str, range(world_size)))
    assert run_ranks(pass_texts, world_size, []) == [(texts, 0)] * world_size


def test_a_rank_without_a_file():
    assert run_ranks(pass_texts, 3, [1]) == [("rank 1: no memory", 0)] * 3


def map_and_leave(rank, world_size):
    """What the memory of all ranks holds, then that of rank 0 when rank 0 has let go of it."""
    ends, device = ProcessGroupExchange(world()), torch.device("cuda", 0)
    count = 3 << 20
    memory = MappedMemory(count, device, rank, ends.share)

    def copy(target, source):
        stream = torch.cuda.current_stream(device)
        check(driver().cuMemcpyDtoDAsync_v2(target, source, count, stream.cuda_stream), "a test")
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
