"""Compare what is computed with brute force, on a small twin of a workload."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..checks import relative_error
from .contender import Contender
from .contenders import OURS
from .result import Errors
from .team import Team
from .workload import Workload

TWIN_LENGTH = {"cpu": 1001, "cuda": 3001}
TWIN_SCORES = {"cpu": 2**22, "cuda": 2**28}
"""Most positions, and most float64 scores of all heads, that are compared with brute force."""


def twin_of(name: str, workload: Workload, team: Team) -> Workload:
    """The twin of a workload for a contender.

    For ours its length divides nothing; baselines on several ranks need a multiple of twice the
    ranks.
    """
    kind = team.device.type
    most = min(TWIN_LENGTH[kind], math.isqrt(TWIN_SCORES[kind] // workload.num_heads) - 1 | 1)
    return workload.twin(most if name == OURS or team.size == 1 else most - most % (2 * team.size))


def twin_errors(
    twin: Workload, team: Team, seed: int, build: Callable[[Workload], Contender]
) -> Errors | None:
    """Errors of out and of the gradients against float64, all ranks' shards put together.

    None for a contender with which there is nothing to compare.

    Args:
        twin: what to compute.
        team: the ranks; every one makes this call.
        seed: of the inputs: all ranks draw the whole of them, and take their shard.
        build: makes the contender for the twin.

    Raises:
        Failure: it failed, on whichever rank.
        RankError: a rank failed where others went on.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = (twin.query_shape, twin.key_shape, twin.key_shape, twin.query_shape)
    whole = [torch.randn(shape, generator=generator).to(twin.torch_dtype) for shape in shapes]

    def compute() -> tuple[list[torch.Tensor], Contender]:
        contender = build(twin)
        if contender.expected is None:
            return [], contender

        def turned(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.transpose(1, 2).contiguous() if contender.heads_first else tensor

        *inputs, dout = (
            turned(contender.layout.shard(x, team.rank, 1).to(team.device)) for x in whole
        )
        leaves = [x.clone().requires_grad_() for x in inputs]
        with contender.inside():
            out = contender.attend(*leaves)
            found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        return [turned(x).cpu() for x in found], contender

    shards, contender = team.attempt(compute)
    by_rank = team.share(shards)

    def judge() -> Errors | None:
        if team.rank or contender.expected is None:
            return None
        query, key, value, dout = (x.to(team.device).double() for x in whole)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = contender.expected(*leaves)
        wanted = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        got = (contender.layout.unshard(parts, 1) for parts in zip(*by_rank, strict=True))
        errors = [relative_error(a.to(b.device), b) for a, b in zip(got, wanted, strict=True)]
        return Errors(twin=twin, out=errors[0], gradients=max(errors[1:]))

    return team.share(team.attempt(judge))[0]
