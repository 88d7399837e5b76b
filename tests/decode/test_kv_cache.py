"""A KV cache: what it keeps, and that attention to it is a row of the full forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import cached_patterns

from ring_dilated_attention import DilatedKVCache, DilatedPattern, cached_attention
from ring_dilated_attention.checks import ViewKind, relative_error
from ring_dilated_attention.pattern import Window
from ring_dilated_attention.plan import plan_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the decoding kernels
WORLD_SIZES = (1, 2, 3, 5)


def members_shown_later(pattern, branch, offset, length, horizon):
    """Positions before `length` that a later one can be shown, one by one."""
    segment, rate = pattern.branches[branch]
    if isinstance(segment, Window):
        return set(range(max(0, length - segment.left), length))
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
@given(cached_patterns(), st.integers(1, 6), st.integers(0, 150))
def test_the_plan_keeps_what_can_be_shown_later_and_nothing_else(pattern, heads, length):
    horizon = length + 80  # beyond: every offset comes by once more in each segment
    plan = plan_cache(pattern, heads, horizon if None in pattern.segment_lengths else None)
    stored = {(branch.index, head): branch for branch in plan.branches for head in branch.heads}
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
            assert len(kept) == len(want)


@settings(max_examples=300)
@given(
    st.integers(1, 40) | st.integers(0, 40).map(Window),
    st.integers(1, 9),
    st.none() | st.integers(1, 120),
    st.integers(0, 40),
    st.sampled_from(WORLD_SIZES),
    st.integers(0, 120),
)
def test_room_for_what_is_taken_back_shared_evenly(w, rate, max_length, rewind, shards, length):
    rate = 1 if isinstance(w, Window) else rate
    plan = plan_cache(DilatedPattern([w], [rate]), rate, max_length, rewind, shards)
    length = length if max_length is None else min(length, max_length - 1)
    for branch in plan.branches:
        for _, offset in branch.heads:
            kept = branch.kept(offset, length, rewind)
            for taken in range(min(rewind, length) + 1):
                earlier = branch.kept(offset, length - taken)
                assert set(earlier) <= set(kept)
            # Beside them, a new row may be written: in no slot that one of them is in.
            most = range(kept.start, max(kept.stop, branch.members_before(offset, length + 1)))
            shares = [plan.own_members(most, shard) for shard in range(shards)]
            assert sum(map(len, shares)) == len(most)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert max(map(len, shares)) <= branch.slots
            numbers = [own * shards + shard for shard in range(shards) for own in shares[shard]]
            assert sorted(numbers) == list(most)


@given(st.integers(0, 12), st.integers(0, 30), st.integers(1, 30), st.sampled_from(WORLD_SIZES))
def test_new_positions_are_shown_each_row_of_their_windows_once(left, length, count, shards):
    plan = plan_cache(DilatedPattern.window(left), 1, None, 0, shards)
    (tile,) = plan.new_tiles(length, count)
    found = []
    for shard in range(shards):
        own = plan.own_members(tile.kept, shard)
        for queries, keys, band in plan.shown(tile, own, shard) if own else ():
            rows, seen = range(count)[queries], own[keys]
            low, high = band or (-len(rows), len(seen))
            pairs = [(i, j) for i in range(len(rows)) for j in range(len(seen))]
            pairs = [(i, j) for i, j in pairs if low <= j - i <= high]
            assert [len(set(x)) for x in zip(*pairs, strict=True)] == [len(rows), len(seen)]
            found += [(rows[i], seen[j] * shards + shard) for i, j in pairs]
    near = range(max(0, length - left), length)
    assert sorted(found) == [(i, k) for i in range(count) for k in near if length + i - k <= left]


def test_the_closed_form_of_its_size():
    pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    plan = plan_cache(pattern, 12, None)
    assert plan.rows == 12 * sum(-(-w // r) for w, r in pattern.branches if isinstance(w, int))
    cache = DilatedKVCache(pattern, 3, 12, 64, dtype=torch.bfloat16)
    assert cache.nbytes == plan.nbytes(3, 64, 2) == 2 * 3 * plan.rows * 64 * 2
    assert plan_cache(DilatedPattern([None], [4]), 2, 1001).rows == 2 * 251
    assert plan_cache(DilatedPattern([None], [4]), 2, 1001, 0, 3).rows == 2 * 84  # of 3 ranks
    plans = [plan_cache(DilatedPattern.window(9), 2, most, 3) for most in (None, 11, 10)]
    assert [(x.rows, x.has_windows) for x in plans] == [(26, True), (22, True), (20, False)]
    with pytest.raises(ValueError, match=r"windows of dilation rate 1; got \(window 9, 2\): give"):
        plan_cache(DilatedPattern.window(9, dilation_rate=2), 1, None)
    # However many positions may be taken back: a document has no more members than these.
    short = DilatedPattern([10], [4])
    assert [plan_cache(short, 1, 35, rewind).rows for rewind in (0, 5, 35, 900)] == [3, 5, 11, 11]


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("kind", ViewKind.named().values(), ids=ViewKind.named())
def test_how_tensors_lie_in_memory_does_not_matter(kind, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    plain = [kind.view(x).contiguous() for x in torch.randn(3, 2, 23, 2, 8).to(DEVICE)]
    results = []
    for q, k, v in ([kind.view(x) for x in plain], plain):
        cache = DilatedKVCache(
            DilatedPattern([5, None], [2, 4]), 2, 2, 8, max_length=40, device=DEVICE
        )
        cache.prefill(k[:, :20], v[:, :20])
        results.append(
            [cached_attention(q[:, at], k[:, at], v[:, at], cache, backend=backend)
             for at in (slice(20, 21), slice(21, None))]
        )  # fmt: skip
    for got, want in zip(*results, strict=True):
        assert got.is_contiguous()
        assert relative_error(got, want) < 1e-5
