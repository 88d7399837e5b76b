"""A KV cache: what it keeps, and that attention to it is a row of the full forward."""

from functools import partial
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import patterns

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
)
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import plan_cache

WORLD_SIZES = (1, 2, 3, 5)


def members_shown_later(pattern, branch, offset, length, horizon):
    """Positions before `length` that a later one can be shown, one by one."""
    segment, rate = pattern.branches[branch]
    segment = segment or horizon
    found = set()
    for key in range(length):
        start = key // segment * segment
        later = range(max(length, start + offset), start + segment)
        is_member = key - start >= offset and (key - start - offset) % rate == 0
        if is_member and any((q - start - offset) % rate == 0 for q in later):
            found.add(key)
    return found


@settings(max_examples=300)
@given(patterns(), st.integers(1, 6), st.integers(0, 150))
def test_the_plan_keeps_what_can_be_shown_later_and_nothing_else(pattern, heads, length):
    horizon = length + 80  # beyond: every offset comes by once more in each segment
    plan = plan_cache(pattern, heads, horizon if None in pattern.segment_lengths else None)
    stored = {(branch.index, head): branch for branch in plan.branches for head in branch.heads}
    rows = [0] * heads
    for index in range(len(pattern.branches)):
        for head in pattern.heads(index, heads):
            want = members_shown_later(pattern, index, head.offset, length, horizon)
            branch = stored.get((index, head))
            if branch is None:
                assert not want
                continue
            kept = branch.kept(head.offset, length)
            runs = list(branch.positions(head.offset, kept))
            assert [n for members, _ in runs for n in members] == list(kept)
            assert {position for _, found in runs for position in found} == want
            assert len(kept) <= branch.slots
            rows[head.head] += len(want)
    assert plan.kept_rows(length) == rows


def test_the_closed_form_of_its_size():
    pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    plan = plan_cache(pattern, 12, None)
    assert plan.rows == 12 * sum(-(-w // r) for w, r in pattern.branches if w)
    assert plan.rows / 12 <= 1.05 * 11_600
    cache = DilatedKVCache(pattern, 3, 12, 64, dtype=torch.bfloat16)
    assert cache.nbytes == plan.nbytes(3, 64, 2) == 2 * 3 * plan.rows * 64 * 2
    assert plan_cache(DilatedPattern([None], [4]), 2, 1001).rows == 2 * 251
    # Shared by ranks: the same on each.
    assert plan_cache(DilatedPattern([None], [4]), 2, 1001, 0, 3).rows == 2 * 84
    # To be taken back: 5 positions are at most 2 members of every 4th.
    assert plan_cache(DilatedPattern([100], [4]), 2, None, 5).rows == 2 * (25 + 2)


@st.composite
def generations(draw):
    kv_heads = draw(st.integers(1, 3))
    prompt = draw(st.integers(0, 90))
    new = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    world_size = draw(st.sampled_from(WORLD_SIZES))
    kind = draw(st.sampled_from(["contiguous", "zigzag"]))
    return {
        "pattern": draw(patterns()),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 3)),
        "batch": draw(st.integers(1, 3)),
        "prompt": prompt,
        "new": new,
        "world_size": world_size,
        "layout": prompt and SequenceLayout.named(kind, prompt, world_size, is_causal=True),
        "sharded": draw(st.booleans()),
        "lengths": draw(st.just(None) | st.lists(st.integers(0, prompt), min_size=3, max_size=3)),
        "room": draw(st.integers(0, 20)),
        "seed": draw(st.integers(0, 1000)),
    }


def inputs(case, dtype):
    """Query, key and value of all positions."""
    torch.manual_seed(case["seed"])
    batch, total = case["batch"], case["prompt"] + sum(case["new"])
    query = torch.randn(batch, total, case["heads"], 8, dtype=dtype)
    return query, *torch.randn(2, batch, total, case["kv_heads"], 8, dtype=dtype)


def run_generation(case, tensors, ends, backend="auto"):
    """Compare each call with rows of the reference; return what came out."""
    q, k, v = tensors
    dtype, batch, kv_heads = q.dtype, case["batch"], case["kv_heads"]
    prompt, total = case["prompt"], q.shape[1]
    lengths = case["lengths"] and case["lengths"][:batch]
    cache = DilatedKVCache(
        case["pattern"], batch, kv_heads, 8, max_length=total + case["room"], dtype=dtype,
        group=ends, sharded=case["sharded"],
    )  # fmt: skip
    cache.keys.fill_(torch.nan)  # what nobody wrote is not to be read
    cache.values.fill_(torch.nan)
    if prompt:
        shards = [case["layout"].shard(x[:, :prompt], ends.rank, 1) for x in (k, v)]
        cache.prefill(*shards, layout=case["layout"], lengths=lengths)
    starts = lengths or [prompt] * batch
    # Row b goes on behind its own prompt, with the rows that come behind the longest one.
    rows = [[*range(n), *range(prompt, total)] for n in starts]
    want = [
        reference_attention(
            q[b : b + 1, row], k[b : b + 1, row], v[b : b + 1, row], case["pattern"],
            is_causal=True,
        )
        for b, row in enumerate(rows)
    ]  # fmt: skip
    borders = [prompt]
    for count in case["new"]:
        borders.append(borders[-1] + count)
    results = []
    for first, stop in pairwise(borders):
        out, lse = cached_attention(
            q[:, first:stop], k[:, first:stop], v[:, first:stop], cache, backend=backend,
            return_lse=True,
        )  # fmt: skip
        for b, n in enumerate(starts):
            at = slice(n + first - prompt, n + stop - prompt)
            hidden = torch.isneginf(want[b][1][0, :, at])
            assert torch.equal(torch.isneginf(lse[b]), hidden)
            assert (out[b].transpose(0, 1)[hidden] == 0).all()
            limit = 1e-10 if dtype == torch.float64 else 1e-5
            assert relative_error(out[b], want[b][0][0, at]) < limit
            both = (x.masked_fill(hidden, 0) for x in (lse[b], want[b][1][0, :, at]))
            assert relative_error(*both) < limit
        results += [out, lse]
    assert cache.lengths.tolist() == [n + sum(case["new"]) for n in starts]
    return results


@settings(max_examples=300, deadline=None)
@given(generations())
def test_any_generation_equals_the_full_forward(case):
    tensors = inputs(case, torch.float64)
    by_rank = run_loopback(case["world_size"], partial(run_generation, case, tensors))
    for results in by_rank[1:]:
        for got, first in zip(results, by_rank[0], strict=True):
            assert torch.equal(got, first)
