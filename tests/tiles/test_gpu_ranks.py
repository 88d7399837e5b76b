"""Ranks on CUDA devices of their own: rows travel over NCCL, many calls in a row."""

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from support.cut_rings import rings_cut
from support.worlds import world
from test_gpu import ROUNDED, case_of, failures, kernel_cases

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import (
    combine,
    make_layout,
    relative_error,
    run_case,
    run_ranks,
    sweep,
)
from ring_dilated_attention.exchange import ExchangeError, ProcessGroupExchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # see test_gpu
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def run_over(rank, world_size, cases):
    """Like `run_cases`, in the group of all ranks."""
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


def drawn_case(random, world_size):
    """A length, pattern, layout, exchange and shape of heads."""
    length = random.choice([257, 1031, 4099, 8192, 12_345])
    pattern = random.choice(
        [
            DilatedPattern.dense(),
            DilatedPattern([256, 1024, None], [1, 3, 8]),
            DilatedPattern([2048, 4096], [1, 2]),
            DilatedPattern([100, None], [2, 5], head_offsets="blocked"),
        ]
    )
    layout = make_layout(random.choice(["contiguous", "zigzag", "uneven"]), length, world_size)
    is_causal, exchange = random.random() < 0.5, random.choice(["auto", "ring", "gather"])
    heads, head_dim = random.choice([(8, 64), (4, 128)])  # few: kernels compile
    return length, pattern, layout, is_causal, exchange, heads, head_dim


def soak(rank, world_size, cases, repeats):
    """Calls of many shapes, patterns and layouts with fresh data; each against one GPU's result."""
    group = ProcessGroupExchange(world())
    device = torch.device("cuda", rank)
    random, worst, held = Random(0), 0.0, []
    drawn = [drawn_case(random, world_size) for _ in range(cases)]
    for repeat in range(repeats):
        length, pattern, layout, is_causal, exchange, heads, head_dim = drawn[repeat % cases]
        generator = torch.Generator(device).manual_seed(repeat)
        whole = [
            torch.randn(
                1, length, heads, head_dim, generator=generator, device=device, dtype=torch.bfloat16
            )
            for _ in range(4)
        ]

        def attend(tensors, pattern=pattern, is_causal=is_causal, **options):
            query, key, value = leaves = [x.contiguous().requires_grad_() for x in tensors[:3]]
            out = dilated_attention(query, key, value, pattern, is_causal=is_causal, **options)
            return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

        mine = [layout.shard(x, rank, dim=1) for x in whole]
        got = attend(mine, group=group, layout=layout, exchange=exchange)
        for a, b in zip(got, attend([x.detach() for x in whole]), strict=True):
            part = layout.shard(b, rank, dim=1)
            if part.numel():
                worst = max(worst, relative_error(a, part))
        del whole, mine, got, a, b, part
        held.append(held_bytes(device))
        if rank == 0 and repeat % 10 == 0:
            print(f"repeat {repeat}, largest error {worst:.1e}", flush=True)
    return worst, held


@pytest.mark.timeout(900)  # kernels compile for minutes
def test_many_calls():
    """No hang, no drift, flat memory: results equal one GPU's within what bf16 rounds."""
    world_size, cases = torch.cuda.device_count(), 12
    found = run_ranks(soak, world_size, cases, 100, backend="nccl", timeout=850)
    for worst, held in found:
        print(f"largest error {worst:.1e}, bytes held {held[::20]}, at most {max(held)}")
        assert worst < 4 * ROUNDED  # of two results, each a sum of two rounded parts
        assert max(held[10:]) <= held[10] + 2**24  # tables of shapes that are new
        assert max(held[cases:]) <= max(held[:cases]) + 2**20  # what is kept is kept once
