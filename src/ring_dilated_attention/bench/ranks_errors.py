"""Compare what several ranks compute with brute force, on a small twin of a case."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..checks import reference_attention, relative_error
from .case import Case
from .peers import OURS
from .ranks_team import Team
from .result import Errors
from .ring_peers import RingContender
from .run import TWIN_LENGTH, TWIN_SCORES


def twin_of(name: str, case: Case, team: Team) -> Case:
    """The twin of a case for a contender.

    For ours its length divides nothing; peers need one that is a multiple of twice the ranks.
    """
    kind = team.device.type
    most = min(TWIN_LENGTH[kind], math.isqrt(TWIN_SCORES[kind] // case.heads) - 1 | 1)
    return case.twin(most if name == OURS else most - most % (2 * team.size))


def twin_errors(
    twin: Case, team: Team, seed: int, build: Callable[[Case], RingContender]
) -> Errors:
    """Errors of out and of the gradients against float64, all ranks' shards put together.

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

    def compute() -> tuple[list[torch.Tensor], RingContender]:
        contender = build(twin)

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
        if team.rank:
            return None
        query, key, value, dout = (x.to(team.device).double() for x in whole)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out, _ = reference_attention(query, key, value, twin.pattern, is_causal=twin.is_causal)
        wanted = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        got = (contender.layout.unshard(parts, 1) for parts in zip(*by_rank, strict=True))
        errors = [relative_error(a.to(b.device), b) for a, b in zip(got, wanted, strict=True)]
        return Errors(twin=twin, out=errors[0], gradients=max(errors[1:]))

    found: Errors = team.share(team.attempt(judge))[0]
    return found
