"""The fixed sweep over real processes and gloo: what `rda verify` runs."""

import gc
import os
from threading import Event
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT
from support.sweep_sample import sweep_sample
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import (
    combine,
    reference_attention,
    relative_error,
    run_cases,
    run_ranks,
    sweep,
)
from ring_dilated_attention.exchange import ProcessGroupExchange, SoloExchange, groups
from ring_dilated_attention.exchange.collectives import Collectives


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7])
def test_sweep(world_size):
    """All of it on up to five ranks; on seven as many cases as have every option."""
    cases = list(sweep(world_size))
    if world_size == 7:
        cases = [cases[number] for number in sweep_sample(world_size)]
    outcomes = combine(run_ranks(run_cases, world_size, cases))
    failed = [
        (case, outcome)
        for case, outcome in zip(cases, outcomes, strict=True)
        if not outcome.passes(case.dtype)
    ]
    assert not failed
    assert (sum(outcome.sent_bytes for outcome in outcomes) > 0) == (world_size > 1)


def _groups(rank, world_size):
    """Errors in groups that overlap, so that a rank's number differs, and in a row of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    members = ([0, 2], [1, 3], [0, 1], [1, 2], [0, 1, 2])
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    errors = []
    for ranks, group in (*groups, ([rank % 2, rank % 2 + 2], mesh["sequence"])):
        if rank not in ranks:
            continue
        torch.manual_seed(ranks[0])  # pairs that run at a time have other sequences
        whole = torch.randn(3, 1, 17, 3, 8, dtype=torch.float64)
        layout, index = SequenceLayout.zigzag(17, len(ranks)), ranks.index(rank)
        query, key, value = (layout.shard(x, index, 1).clone().requires_grad_() for x in whole)
        pattern = DilatedPattern([6, None], [1, 3])
        out = dilated_attention(
            query, key, value, pattern, group=group, layout=layout, is_causal=True
        )
        want, _ = reference_attention(whole[0], whole[1], whole[2], pattern, is_causal=True)
        errors.append(relative_error(out.detach(), layout.shard(want, index, 1)))
        out.sum().backward()
    return errors


def test_subgroups_and_meshes():
    found = run_ranks(_groups, 4)
    assert [len(errors) for errors in found] == [4, 5, 4, 2]
    assert all(error < EXACT for errors in found for error in errors)


def _rows_of_two_devices(rank, _):
    """What a group says that is given rows of another GPU than at first: all that it moved."""
    moved = []

    def transfer(send, receive):
        moved.append(send[1].device.index)

    vars(groups)["make_transport"] = lambda *args, **options: SimpleNamespace(transfer=transfer)
    first, second = (SimpleNamespace(device=torch.device("cuda", i), nbytes=8) for i in (3, 5))
    world: Any = dist.group.WORLD
    ends: Any = ProcessGroupExchange(world)
    for rows in (first, first):
        ends.start((1 - rank, rows), None)
    try:
        ends.start((1 - rank, second), None)
    except ValueError as error:
        return moved, str(error)
    return moved, ""


def test_a_group_has_one_gpu_of_a_rank():
    """Nothing would wait for what another GPU computes."""
    for rank, (moved, message) in enumerate(run_ranks(_rows_of_two_devices, 2)):
        assert moved == [3, 3]
        assert message.startswith(f"this group moves rows of cuda:3 on rank {rank}, where")
        assert "got tensors on cuda:5: make another group for them" in message


def _one_does_not_come(rank, world_size):
    if rank == 1:
        Event().wait()  # until it is stopped
    dist.barrier()


def test_ranks_wait_as_long_as_they_are_told():
    with pytest.raises(RuntimeError, match=r"^rank 0 failed:"):  # not after 240 s
        run_ranks(_one_does_not_come, 2, wait_timeout=1)


def groups_in_turns(rank, world_size):
    """How much is kept of groups that are gone, while a thread holds what a watch would."""
    query, kept, watched = torch.randn(1, 4, 2, 8), [], []
    gone: list[ref[Any]] = []

    def noted(*arguments):
        made = Collectives(*arguments)
        gone.append(ref(made))
        return made

    pytest.MonkeyPatch().setattr(groups, "Collectives", noted)
    for _ in range(3):
        group = dist.new_group()
        dilated_attention(query, query, query, DilatedPattern.dense(), group=group)
        watched.append(ProcessGroupExchange(group).calls)
        gone.append(ref(group))
        dist.destroy_process_group(group)
        del group
        gc.collect()
        kept.append(sum(one() is not None for one in gone))
    assert len(gone) == 6
    return kept


def test_nothing_is_kept_of_groups_that_are_gone():
    assert run_ranks(groups_in_turns, 2) == [[0, 0, 0], [0, 0, 0]]


def test_a_group_that_is_missing(monkeypatch):
    """`dist.group.WORLD` is None before `init_process_group`: ranks must not compute alone."""
    monkeypatch.setattr(groups, "ranks_of_launcher", lambda: "4")
    x = torch.randn(1, 8, 1, 8)
    with pytest.raises(ValueError, match="group is None in one of 4 ranks"):
        dilated_attention(x, x, x, DilatedPattern.dense(), group=dist.group.WORLD)
    alone = SoloExchange()
    out = dilated_attention(x, x, x, DilatedPattern.dense(), group=alone)
    monkeypatch.undo()
    assert torch.equal(out, dilated_attention(x, x, x, DilatedPattern.dense()))


def _threads(rank, world_size):
    return torch.get_num_threads()


def test_ranks_share_the_cores_of_their_host(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    for ranks in (1, 2):
        assert run_ranks(_threads, ranks) == [max(1, cores // ranks)] * ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_ranks(_threads, 1) == [torch.get_num_threads()]  # it has said so
