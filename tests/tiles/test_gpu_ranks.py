"""Ranks on CUDA devices of their own: rows travel over NCCL, many calls in a row."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.cut_rings import rings_cut
from support.worlds import world
from test_gpu import case_of, failures, kernel_cases

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import combine, run_case, run_ranks, sweep
from ring_dilated_attention.exchange import ExchangeError, ProcessGroupExchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # see test_gpu
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def take_threads(world_size):
    """For references of long cases, on the CPU: with one thread a soak takes 12 minutes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * world_size)))


def run_over(rank, world_size, cases):
    """Like `run_cases`, in the group of all ranks."""
    take_threads(world_size)
    exchange = ProcessGroupExchange(world())
    return [run_case(case, exchange) for case in cases]


def run_and_differ(rank, world_size, cases):
    """Like `run_over`; what ranks say where their calls differ.

    One rank's arguments are others while rows of earlier calls are under way; then all go on.
    """
    exchange = ProcessGroupExchange(world())
    outcomes = [run_case(case, exchange) for case in cases]
    said = []
    for odd in range(2):
        for pattern in (ALONE, DENSE):
            attend_over(exchange, pattern)
        try:
            for _ in range(3):
                attend_over(exchange, ALONE if rank == odd else DENSE)
                torch.cuda.synchronize()
        except (ExchangeError, ValueError) as error:
            said.append(str(error))
        dist.barrier()
        outcomes += [run_case(case, exchange) for case in cases[:3]]
    return outcomes, said


ALONE, DENSE = DilatedPattern([64], [1]), DilatedPattern.dense()


def attend_over(exchange, pattern):
    query = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    return dilated_attention(query, query, query, pattern, group=exchange)


def test_calls_that_differ():
    world_size = torch.cuda.device_count()
    cases = [replace(case, device="cuda") for case in sweep(world_size)]
    cases += kernel_cases(world_size, "auto", torch.bfloat16)
    found = run_ranks(run_and_differ, world_size, cases, backend="cpu:gloo,cuda:nccl")
    outcomes = combine([outcomes for outcomes, _ in found])
    assert not failures([*cases, *cases[:3], *cases[:3]], outcomes)
    for _, said in found:
        assert [f"on rank {odd}" in text for odd, text in enumerate(said)] == [True, True]


def cut_cases(world_size):
    """Dense rings of some length, with additions enough to go behind the compute."""
    for seed, (heads, head_dim, is_causal, layout) in enumerate(
        [
            ((5, 5), 64, True, "zigzag"),  # an odd number of parts
            ((6, 3), 128, True, "zigzag"),
            ((4, 4), 128, False, "uneven"),
            ((1, 1), 64, True, "contiguous"),  # one part
        ]
    ):
        for length in (1031, 4099):
            yield case_of(
                length,
                layout,
                world_size,
                pattern=DilatedPattern.dense(),
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_dim=head_dim,
                is_causal=is_causal,
                exchange="ring",
                seed=seed,
            )


def run_cut(rank, world_size, cases, round_pairs):
    with rings_cut(round_pairs):
        return run_over(rank, world_size, cases)


@pytest.mark.parametrize("round_pairs", [1, 1 << 20])
def test_rings_cut_up(round_pairs):
    world_size = torch.cuda.device_count()
    cases = list(cut_cases(world_size))
    found = run_ranks(run_cut, world_size, cases, round_pairs, backend="nccl")
    assert not failures(cases, combine(found))


def subgroups(world_size):
    """Ranks of groups that overlap, so that a rank has another number in each."""
    return [range(world_size - 1), range(1, world_size), range(world_size)]


def cases_of(ranks, device="cuda"):
    return [replace(case, device=device) for case in list(sweep(len(ranks)))[::7]]


def run_in_subgroups(rank, world_size, device):
    """By group, the outcomes of the ranks that are in it."""
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in subgroups(world_size)]

    def outcomes(ranks, group):
        exchange = ProcessGroupExchange(group)
        return [run_case(case, exchange) for case in cases_of(ranks, device)]

    return [outcomes(ranks, group) if rank in ranks else [] for ranks, group in groups]


def test_subgroups():
    world_size = torch.cuda.device_count()
    found = run_ranks(run_in_subgroups, world_size, "cuda", backend="nccl")
    for ranks, *by_rank in zip(subgroups(world_size), *found, strict=True):
        outcomes = combine([by_rank[rank] for rank in ranks])
        assert not failures(cases_of(ranks), outcomes)


def held_bytes(device):
    """Bytes that calls left behind.

    grad() returns as soon as its result is there, which torch's backward thread of the device holds
    until it has ended its round: it has when it comes to the next task.
    """
    one = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad(one.exp(), one)
    del one
    return torch.cuda.memory_allocated(device)


def soak(rank, world_size, cases, rounds):
    """Outcomes of calls whose inputs differ from round to round, and bytes held after each."""
    take_threads(world_size)
    exchange, outcomes, held = ProcessGroupExchange(world()), [], []
    for seed in range(rounds):
        outcomes += [run_case(replace(case, seed=seed), exchange) for case in cases]
        held.append(held_bytes(torch.device("cuda", rank)))
    return outcomes, held


@pytest.mark.timeout(900)  # kernels compile for minutes
def test_many_calls():
    """No hang, no drift, flat memory: what is kept of a call is kept once."""
    world_size, rounds = torch.cuda.device_count(), 10
    cases = [*cut_cases(world_size), *kernel_cases(world_size, "auto", torch.bfloat16)]
    found = run_ranks(soak, world_size, cases, rounds, backend="nccl", timeout=850)
    assert not failures(rounds * cases, combine([outcomes for outcomes, _ in found]))
    for _, held in found:
        assert max(held) <= held[0] + 2**20
