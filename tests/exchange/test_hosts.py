"""Ranks that pretend to be on several hosts."""

from typing import Any

import pytest
import torch
from support.worlds import pretend_host, world

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    dilated_attention,
)
from ring_dilated_attention.checks import (
    Case,
    combine,
    reference_attention,
    relative_error,
    run_case,
    run_ranks,
)
from ring_dilated_attention.exchange import ExchangeError, ProcessGroupExchange, collectives


def attend(exchange, pattern, *, length=24, seed=0):
    """Errors of out and of the gradients, some of which are 0 but for rounding."""
    layout = SequenceLayout.zigzag(length, exchange.world_size)
    torch.manual_seed(seed)
    whole = torch.randn(3, 1, length, 2, 8, dtype=torch.float64)
    shards = [layout.shard(x, exchange.rank, 1).clone().requires_grad_() for x in whole]
    leaves = [x.clone().requires_grad_() for x in whole]
    out = dilated_attention(
        shards[0], shards[1], shards[2], pattern, is_causal=True, group=exchange, layout=layout
    )
    want, _ = reference_attention(leaves[0], leaves[1], leaves[2], pattern, is_causal=True)
    got = torch.autograd.grad(out.square().sum(), shards)
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    return [
        torch.dist(a, layout.shard(b, exchange.rank, 1)).item()
        for a, b in zip((out, *got), (want, *wanted), strict=True)
    ]


PATTERNS = [
    DilatedPattern([8, None], [1, 3]),
    DilatedPattern.dense(),
    DilatedPattern([1], [1]),  # nothing travels
]


def on_hosts(rank, hosts):
    """An exchange of the world, whose ranks take themselves to be on these hosts."""
    pretend_host(pytest.MonkeyPatch(), hosts[rank])
    return ProcessGroupExchange(world())


def counted(rank, world_size, hosts, rounds):
    """Errors, and how often ranks waited for each other, in the first calls and in later ones."""
    exchange = on_hosts(rank, hosts)
    errors = [attend(exchange, pattern) for pattern in PATTERNS]
    first = exchange.waits
    with pytest.MonkeyPatch.context() as patch:
        for name in ("maximum", "share"):
            patch.setattr(collectives.Collectives, name, None)
        for seed in range(rounds):
            errors += [attend(exchange, pattern, seed=seed) for pattern in PATTERNS]
    return errors, first, exchange.waits - first


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1], [1, 0, 1, 0]], ids=str)
def test_no_call_waits_for_all_ranks_after_the_first_of_its_kind(hosts):
    for errors, first, later in run_ranks(counted, len(hosts), hosts, 5):
        assert max(max(some) for some in errors) < 1e-12
        assert first == len(PATTERNS) + 1  # and backward
        assert later == 0


def decoded(rank, world_size, hosts):
    """How often ranks wait for all in five tokens, after one; and the error of out."""
    exchange, pattern = on_hosts(rank, hosts), PATTERNS[0]
    torch.manual_seed(0)
    prompt, *tokens = torch.randn(3, 1, 30, 2, 8).split([24, *[1] * 6], dim=2)
    sizes: dict[str, Any] = {"batch": 1, "num_kv_heads": 2, "head_dim": 8, "max_length": 40}
    alone = DilatedKVCache(pattern, **sizes)
    cache = DilatedKVCache(pattern, **sizes, group=exchange, sharded=True)
    layout = SequenceLayout.contiguous(24, world_size)
    alone.prefill(prompt[1], prompt[2])
    key, value = (layout.shard(x, rank, 1) for x in prompt[1:])
    cache.prefill(key, value, layout=layout)
    waits, errors = [], []
    for query, key, value in tokens:
        found, want = (cached_attention(query, key, value, each) for each in (cache, alone))
        waits.append(exchange.waits)
        errors.append(relative_error(found, want))
    return waits[-1] - waits[0], max(errors)


def test_tokens_are_decoded_without_waiting_for_all_ranks():
    for waits, error in run_ranks(decoded, 3, [0, 0, 1]):
        assert waits == 0
        assert error < 1e-5


def differ(rank, world_size, hosts, odd):
    """What one rank's other arguments come to, and whether the ranks then go on together."""
    exchange = on_hosts(rank, hosts)
    first, second, alone = PATTERNS
    for pattern in PATTERNS:
        attend(exchange, pattern)
    found = []
    for others in (first, alone):
        try:
            attend(exchange, second if rank == odd else others)
            attend(exchange, first)
        except (ExchangeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        errors = attend(exchange, first)
        assert max(errors) < 1e-12
    return found


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_differ_raise_and_go_on(odd):
    """All kinds are known, so rows are under way when ranks find that they differ."""
    for found in run_ranks(differ, 3, [0, 0, 1], odd):
        assert len(found) == 2
        for text in found:
            assert "pattern is" in text
            assert f"on rank {odd}" in text


def alone_on_a_host(rank, world_size, hosts):
    """Errors of out and gradients where one rank has a document of its own, and exchanges nothing.

    Its branches are no other than the merged ones there, the others' backward takes them apart.
    """
    case = Case(
        pattern=DilatedPattern([None, None], [1, 2]),
        layout=SequenceLayout.contiguous(16, world_size),
        documents=(0, 4, 16),
        branch_gradients="detached",
    )
    return [run_case(case, on_hosts(rank, hosts))]


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 0, 1]], ids=str)
def test_dilated_attention_detached_where_a_rank_exchanges_nothing(hosts):
    (outcome,) = combine(run_ranks(alone_on_a_host, 4, hosts))
    assert outcome.passes(torch.float64)
