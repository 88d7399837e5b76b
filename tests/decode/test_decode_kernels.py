"""The decoding kernels: interpreted where there is no GPU."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import patterns
from support.tolerances import assert_close_to

import ring_dilated_attention
from ring_dilated_attention import DilatedKVCache, DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.decode import Step
from ring_dilated_attention.decode.attend import attend_by_kernel
from ring_dilated_attention.decode.replicated import strips_on
from ring_dilated_attention.engine import merge_
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels.decode import strips_of_cache
from ring_dilated_attention.pattern import Window
from ring_dilated_attention.plan import plan_cache
from ring_dilated_attention.plan.cache import NO_END

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
attend: Any = ring_dilated_attention.cached_attention
attend_whole: Any = ring_dilated_attention.replicated_query_attention
LONGNET = DilatedPattern([8, 16, 32], [1, 2, 5])


def rows_of(heads, kv_heads, length, batch=1, head_dim=8, dtype=torch.float32):
    torch.manual_seed(0)
    query = torch.randn(batch, length, heads, head_dim, device=DEVICE, dtype=dtype)
    return query, *torch.randn(
        2, batch, length, kv_heads, head_dim, device=DEVICE, dtype=dtype
    ).unbind(0)


def check(out, lse, want, positions):
    """Compare with rows of the reference, those of `reference`."""
    exact, plain = want
    rows = slice(positions.start, positions.stop)
    hidden = torch.isneginf(exact[1][:, :, rows])
    assert (out.transpose(1, 2)[hidden] == 0).all()
    options: dict[str, Any] = {"factor": 4.0, "terms": out.shape[3]}
    assert_close_to(out, exact[0][:, rows], plain=plain[0][:, rows], **options)
    assert_close_to(lse, exact[1][:, :, rows], plain=plain[1][:, :, rows], **options)


def reference(*tensors, pattern, **options):
    """(out, lse) in float64, and in the dtype of the tensors."""
    attention: Any = reference_attention
    return [
        attention(*(x.to(dtype) for x in tensors), pattern, **options)
        for dtype in (torch.float64, tensors[0].dtype)
    ]


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize(
    ("pattern", "counts"),
    [
        (DilatedPattern([8, 16, None], [1, 3, 2]), [3, 1, 16, 1, 5]),
        (DilatedPattern([Window(4), 6], [1, 2]), [1] * 9),
    ],
    ids=str,
)
def test_each_rank_computes_its_share(pattern, counts, shards):
    """The kernels of one rank after the other: the interpreter takes one thread."""
    query, key, value = rows_of(4, 2, sum(counts))
    want = reference(query, key, value, pattern=pattern, is_causal=True)
    worlds = run_loopback(shards, lambda ends: ends)
    caches = []
    for ends in worlds:
        cache = DilatedKVCache(
            pattern, 1, 2, 8, max_length=sum(counts), group=ends, sharded=True, device=DEVICE
        )
        assert cache.plan == plan_cache(pattern, 2, sum(counts), 0, shards)
        caches.append(cache)
    first = 0
    for count in counts:
        at = slice(first, first + count)
        new = query[:, at], key[:, at], value[:, at]
        parts = [attend_by_kernel(new, cache, 8**-0.5, Step()) for cache in caches]
        out, lse = parts[0]
        for other, other_lse in parts[1:]:
            merge_(out, lse, other, other_lse)
        check(out, lse.transpose(1, 2), want, range(first, first + count))
        first += count


def test_a_position_without_room_is_nan(monkeypatch):
    """A graph that is replayed cannot raise."""
    query, key, value = rows_of(2, 1, 6)
    cache = DilatedKVCache(DilatedPattern.dense(), 1, 1, 8, max_length=4, device=DEVICE)
    cache.prefill(key[:, :3], value[:, :3])
    monkeypatch.setattr(DilatedKVCache, "check_room", lambda *_: None)
    new = [x[:, 3:5] for x in (query, key, value)]
    out = attend(*new, cache, backend="triton")
    assert torch.isfinite(out[:, 0]).all()
    assert torch.isnan(out[:, 1]).all()


MOST = 2**30 - 16
LARGE = st.integers(1, 2**40) | st.integers(1, 9) | st.integers(MOST - 3, 2**30 + 3)


@settings(max_examples=40 if INTERPRETED else 400)
@given(st.integers(0, MOST - 1) | st.integers(0, 30), st.integers(1, 16), st.data())
def test_rows_are_found_in_32_bits_as_in_64(position, count, data):
    """Of segments and rates that may be longer than any text, or than 32 bits hold."""
    count, branches = min(count, MOST - position), []
    for base in (0, 2**35):
        length = data.draw(LARGE | st.just(NO_END))
        rate = data.draw(LARGE)
        offset = data.draw(st.integers(0, min(rate, length) - 1) | st.just(-1))
        window = data.draw(LARGE | st.just(NO_END))
        slots = data.draw(st.integers(1, 2**29))
        branches.append([length, rate, window, slots, offset, base])
    lengths, table = (torch.tensor(x, device=DEVICE) for x in ([position], branches))
    shards = data.draw(st.integers(1, 3))
    shard = data.draw(st.integers(0, shards - 1))
    narrow, wide = (
        strips_of_cache(lengths, table, 1, count, shard=shard, shards=shards, max_length=most)
        for most in (MOST, 2**40)
    )
    for found in (narrow, wide):
        strips = found.table[0, 0, : found.num_strips * (3 + count)].view(-1, 3 + count)
        strips[strips[:, 2] == 0, 0] = 0  # where a strip without rows begins means nothing
    assert torch.equal(narrow.table, wide.table)


@settings(max_examples=15 if INTERPRETED else 200)
@given(patterns(windows=False), st.booleans(), st.integers(1, 60), st.data())
def test_replicated_queries_take_the_kernels(pattern, is_causal, length, data):
    first = data.draw(st.integers(0, length - 1))
    positions = range(first, data.draw(st.integers(first + 1, min(length, first + 20))))
    cut = data.draw(st.integers(0, length))
    layout = SequenceLayout([[(cut, length), (0, cut)]])
    query, key, value = rows_of(4, 2, length, batch=2)
    want = reference(query, key, value, pattern=pattern, is_causal=is_causal)
    out, lse = attend_whole(
        query[:, positions.start : positions.stop],
        *(layout.shard(x, 0, 1) for x in (key, value)),
        pattern,
        positions,
        is_causal=is_causal,
        layout=layout,
        backend="triton",
        return_lse=True,
    )
    check(out, lse, want, positions)


@pytest.mark.parametrize("is_causal", [False, True])
def test_replicated_queries_of_rows_of_several_lengths(is_causal):
    """And of none: a row that is all padding has no keys."""
    query, key, value = rows_of(4, 2, 40, batch=3)
    lengths = [30, 0, 17]
    out, lse = attend_whole(
        query[:, 15:20], key, value, LONGNET, range(15, 20), is_causal=is_causal, lengths=lengths,
        backend="triton", return_lse=True,
    )  # fmt: skip
    whole: Any = ring_dilated_attention.dilated_attention
    tensors = [(x.double(), x) for x in (query, key, value)]
    options: dict[str, Any] = {"is_causal": is_causal, "lengths": lengths, "return_lse": True}
    want = [whole(*some, LONGNET, **options) for some in zip(*tensors, strict=True)]
    check(out, lse, want, range(15, 20))


def test_a_rank_whose_keys_are_all_behind_the_query():
    plan = plan_attention(LONGNET, SequenceLayout.contiguous(40, 2), is_causal=True, num_heads=2)
    strips = strips_on(plan, range(3, 5), 1, torch.empty(0, device=DEVICE).device)
    assert strips.shape == (1, 2, 0, 5)


def test_too_many_new_positions_for_the_kernels():
    query, key, value = rows_of(2, 1, 65)
    cache = DilatedKVCache(LONGNET, 1, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match="decodes at most 64 new positions a call; got 65"):
        attend(query, key, value, cache, backend="triton")
