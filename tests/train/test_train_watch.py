"""What training's ranks say of each other when one of them is missing."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ring_dilated_attention.checks import forked_context
from ring_dilated_attention.train.errors import Watch

WORLD_SIZE = 5
VICTIM = 1


def rank_main(rank, path, fault, results):
    store = dist.FileStore(path, WORLD_SIZE)
    watch = Watch(store, rank, WORLD_SIZE, 60.0)
    watch.meet()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )
    x = torch.ones(1000)
    dist.all_reduce(x)
    watch.begin("step 2")
    try:
        if rank == VICTIM:
            if fault == "ends":
                os._exit(0)
            raise MemoryError("no room")
        dist.all_reduce(x)
    except (RuntimeError, MemoryError) as error:
        results.put((rank, str(watch.explained(error))))
    time.sleep(0.2)  # for the queue
    os._exit(1)


@pytest.mark.parametrize("fault", ["ends", "fails"])
def test_only_the_missing_rank_is_named(tmp_path, fault):
    """A collective connects a rank to some of the others; the rest learn of its end later."""
    context = forked_context()
    results = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, str(tmp_path / "store"), fault, results))
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    others = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
    said = dict(results.get(timeout=60) for _ in range(len(others) + (fault == "fails")))
    for process in processes:
        process.join()
    for rank in others:
        wanted = f"rank {VICTIM} failed: MemoryError: no room"
        if fault == "ends":
            wanted = (
                f"rank {VICTIM}: gone; rank {rank} waited in step 2; the last that rank {VICTIM} "
                "began: step 2"
            )
        assert said[rank] == wanted
