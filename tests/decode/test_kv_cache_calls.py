"""Calls of a KV cache: what ranks send, what is refused and how, what a failure leaves behind."""

# Arguments of wrong types are what is tested.
# mypy: disable-error-code="arg-type, call-arg, call-overload"

import copy
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import cached_patterns

from ring_dilated_attention import DilatedKVCache, DilatedPattern, SequenceLayout, cached_attention
from ring_dilated_attention.exchange import run_loopback

HEAD_DIM = 8


def owner(layout, position):
    """The rank that has a position of the prompt."""
    (rank,) = (
        rank
        for rank, ranges in enumerate(layout.ranges)
        if any(start <= position < stop for start, stop in ranges)
    )
    return rank


def rows_to_send(cache, layout, document):
    """(from, to) of every row that a rank keeps and another one has."""
    found, plan, ranks = [], cache.plan, range(layout.world_size)
    for branch in plan.branches:
        for _, offset in branch.heads:
            kept = branch.kept(offset, len(document), plan.max_rewind)
            for members, positions in branch.positions(offset, kept):
                for member, position in zip(members, positions, strict=True):
                    source = owner(layout, document[position])
                    keepers = [member % plan.shards] if cache.is_sharded else ranks
                    found += [(source, to) for to in keepers if to != source]
    return found


@st.composite
def prompts(draw):
    world_size, length = draw(st.sampled_from([2, 3, 5])), draw(st.integers(1, 80))
    kind = draw(st.sampled_from(["contiguous", "zigzag"]))
    return {
        "pattern": draw(cached_patterns()),
        "kv_heads": draw(st.integers(1, 4)),
        "layout": SequenceLayout.named(kind, length, world_size, is_causal=True),
        "border": draw(st.integers(0, length - 1)),
        "rewind": draw(st.just(0) | st.integers(0, 30)),
        "sharded": draw(st.booleans()),
        "batch": draw(st.integers(1, 2)),
    }


def sent_in_prefill(case, ends):
    """Bytes and receivers of the messages that a rank sends, and the rows that all are to send."""
    layout, batch, heads = case["layout"], case["batch"], case["kv_heads"]
    length = layout.length
    cache = DilatedKVCache(
        case["pattern"], batch, heads, HEAD_DIM, max_length=length + 100, group=ends,
        max_rewind=case["rewind"], sharded=case["sharded"],
    )  # fmt: skip
    key = torch.randn(batch, layout.local_length(ends.rank), heads, HEAD_DIM)
    before, receivers, start = ends.sent_bytes, [], ends.start

    def count(send, receive):
        receivers.extend([send[0]] if send else [])
        return start(send, receive)

    ends.start = count
    cache.prefill(key, key, layout=layout, documents=sorted({0, case["border"], length}))
    rows = rows_to_send(cache, layout, range(case["border"], length))
    return ends.sent_bytes - before, receivers, rows


@settings(max_examples=100)
@given(prompts())
def test_a_prefill_sends_the_rows_that_another_rank_keeps(case):
    by_rank = run_loopback(case["layout"].world_size, partial(sent_in_prefill, case))
    for rank, (sent, receivers, rows) in enumerate(by_rank):
        own = [to for source, to in rows if source == rank]
        assert sent == 2 * case["batch"] * len(own) * HEAD_DIM * 4
        assert sorted(receivers) == sorted(set(own))


def make(group=None, **changes):
    arguments = {
        "pattern": DilatedPattern([8, None], [2, 3]),
        "batch": 2,
        "num_kv_heads": 2,
        "head_dim": HEAD_DIM,
        "max_length": 40,
        "max_rewind": 2,
        "sharded": True,
        "group": group,
        **changes,
    }
    names = ("pattern", "batch", "num_kv_heads", "head_dim")
    return DilatedKVCache(*[arguments.pop(name) for name in names], **arguments)


def rows(count, heads=2, batch=2, head_dim=HEAD_DIM, **options):
    return torch.randn(batch, count, heads, head_dim, **options)


def prefill(cache, **changes):
    cache.prefill(**{"key": rows(3), "value": rows(3), **changes})


def append(cache, **changes):
    cache.append(**{"key": rows(3), "value": rows(3), **changes})


def attend(cache, **changes):
    arguments = {"query": rows(3, heads=4), "key": rows(3), "value": rows(3), **changes}
    names = ("query", "key", "value")
    return cached_attention(*[arguments.pop(name) for name in names], cache, **arguments)


def assert_state(cache, before):
    """As it was: its rows too, all but what was never written."""
    assert cache.known_lengths == before.known_lengths
    for name in ("lengths", "keys", "values"):
        assert torch.equal(getattr(cache, name).nan_to_num(7), getattr(before, name).nan_to_num(7))


BAD_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pattern": [(8, 2)]}, TypeError, "pattern must be a DilatedPattern, got type list"),
    ({"batch": 0}, ValueError, "batch must be >= 1, got 0"),
    ({"max_length": None}, ValueError, "max_length must be given"),
    ({"max_rewind": -1}, ValueError, "max_rewind must be >= 0, got -1"),
    ({"dtype": torch.int64}, TypeError, "dtype must be one of torch.float64"),
    ({"sharded": 1}, TypeError, "sharded must be a bool or None, got 1"),
    ({"group": "world"}, TypeError, "group must be a torch.distributed ProcessGroup"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CACHES)
def test_a_bad_cache(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make(**changes)


BAD_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": [1.0]}, TypeError, "key must be a tensor, got type list"),
    ({"key": rows(3, heads=4)}, ValueError, "= (2, 3, 2, 8); got (2, 3, 4, 8)"),
    ({"value": rows(2)}, ValueError, "= (2, 3, 2, 8); got (2, 2, 2, 8)"),
    ({"key": rows(3).double()}, ValueError, "key must be torch.float32 on cpu, as the cache is"),
    ({"value": rows(3).to("meta")}, ValueError, "value must be torch.float32 on cpu"),
    ({"value": rows(3).requires_grad_()}, RuntimeError, "value requires one"),
]
BAD_PROMPTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layout": [[(0, 3)]]}, TypeError, "layout must be a SequenceLayout or None"),
    ({"layout": SequenceLayout.contiguous(6, 4)}, ValueError, "the layout is for 4 ranks"),
    ({"lengths": [1]}, ValueError, "lengths must hold one number for each of 2 rows"),
    ({"rows": [0, 2]}, ValueError, "rows must be numbers of rows in [0, 2); got (0, 2)"),
    ({"rows": [1, 1]}, ValueError, "rows must differ, to take a prompt each; got (1, 1)"),
    ({"rows": [0]}, ValueError, "= (1, 3, 2, 8); got (2, 3, 2, 8)"),
    ({"key": rows(0), "value": rows(0), "layout": None}, ValueError, "length must be >= 1"),
    ({"key": rows(41), "value": rows(41), "layout": None}, ValueError, "call its reserve("),
]
MANY = {"query": rows(38, heads=4), "key": rows(38), "value": rows(38)}
BAD_TOKENS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": None}, TypeError, "query must be a tensor, got None"),
    ({"query": rows(0, heads=4), "key": rows(0), "value": rows(0)}, ValueError,
     "there must be one new position at least; key has no rows"),
    (MANY, ValueError, "and the cache has room for max_length=40; make it with a larger one"),
    ({"query": rows(3, heads=4).requires_grad_()}, RuntimeError, "has no gradient, and an input"),
    ({"backend": "flash"}, ValueError, "backend='flash' cannot compute this attention"),
]  # fmt: skip
BAD_STEPS: list[tuple[str, Any, type[Exception], str]] = [
    ("rewind", 3, ValueError, "at most 2 positions of row 0 can be taken back: it has 3, had 3 at "
     "most, and max_rewind is 2; got 3"),
    ("rewind", [0, 3], ValueError, "at most 2 positions of row 1"),
    ("rewind", -1, ValueError, "and max_rewind is 2; got -1"),
    ("rewind", [1], ValueError, "count must be one number, or one for each of 2 rows; got (1,)"),
    ("select", [], ValueError, "rows must not be empty"),
    ("reset", [2], ValueError, "rows must be numbers of rows in [0, 2)"),
    ("reserve", 0, ValueError, "max_length must be >= 1, got 0"),
    ("advanced", 38, ValueError, "a document would have 41 positions"),
]  # fmt: skip
CALLS = [
    *((function, *row) for function in (prefill, append) for row in BAD_ROWS),
    *((prefill, *row) for row in BAD_PROMPTS),
    *((attend, *row) for row in BAD_TOKENS),
]


@pytest.mark.parametrize(("function", "changes", "error", "message"), CALLS)
def test_a_bad_call_changes_nothing(function, changes, error, message):
    cache = make()
    prefill(cache)
    before = copy.deepcopy(cache)
    with pytest.raises(error, match=re.escape(message)):
        function(cache, **changes)
    assert_state(cache, before)


@pytest.mark.parametrize(("name", "argument", "error", "message"), BAD_STEPS)
def test_a_bad_step(name, argument, error, message):
    cache = make()
    prefill(cache)
    before = copy.deepcopy(cache)
    with pytest.raises(error, match=re.escape(message)):
        getattr(cache, name)(argument)
    assert_state(cache, before)
    with pytest.raises(TypeError, match="cache must be a DilatedKVCache, got None"):
        attend(None)


ZIGZAG = SequenceLayout.zigzag(9, 3)
DIFFERENCES: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (prefill, {"layout": SequenceLayout.contiguous(9, 3)}, {}, "layout is SequenceLayout([[(0, 2)"),
    (prefill, {"lengths": [3, 4]}, {}, "the document that goes on is 0 to 9 in rows [0, 1]"),
    (prefill, {"documents": [0, 5, 9]}, {}, "5 to 9 in rows [0, 1]"),
    (prefill, {"rows": [1, 0]}, {}, "0 to 9 in rows [1]"),
    (prefill, {}, {"pattern": DilatedPattern([8, None], [2, 4])}, "(8, 2) (document, 3), 2 KV"),
    (prefill, {}, {"max_length": 41}, "max_length=41"),
    (prefill, {}, {"sharded": False}, "on 1 ranks, 2 rows, head_dim 8, torch.float32 on rank 1"),
    (attend, {"scale": 0.5}, {}, "scale is None on ranks 0, 2, 0.5 on rank 1"),
    (attend, {"backend": "eager"}, {}, "backend is auto on ranks 0, 2, eager on rank 1"),
    (attend, {"query": rows(3, heads=2)}, {}, "query is (2, 3, 4, 8) on ranks 0, 2, (2, 3, 2, 8)"),
    (attend, {"step": ("rewind", 1)}, {}, "lengths is (9, 9) on ranks 0, 2, (8, 8) on rank 1"),
    (attend, {"step": ("reserve", 50)}, {}, "max_length=50"),
    *((prefill, changes, {}, message) for changes, _, message in (BAD_ROWS[0], *BAD_PROMPTS)),
    *((attend, changes, {}, message) for changes, _, message in BAD_TOKENS),
]


def differs(ends, function, changes, other):
    """What this rank hears of a call that rank 1 makes otherwise."""
    mine = dict(changes) if ends.rank == 1 else {}
    cache = make(ends, **(other if ends.rank == 1 else {}))
    layout: dict[str, Any] = {"layout": ZIGZAG}
    if not other:
        prefill(cache, **layout)
        if step := mine.pop("step", None):
            getattr(cache, step[0])(step[1])
    before = copy.deepcopy(cache)
    try:
        function(cache, **(layout if function is prefill else {}) | mine)
    except (ValueError, TypeError, RuntimeError) as error:
        assert_state(cache, before)
        if not other and "step" not in changes:
            prefill(cache, **layout)  # the group goes on
        return str(error)
    return "no error"


@pytest.mark.parametrize(("function", "changes", "other", "message"), DIFFERENCES)
def test_ranks_that_differ_are_an_error_on_all(function, changes, other, message):
    for text in run_loopback(3, lambda ends: differs(ends, function, changes, other)):
        assert message in text, text


def test_copies():
    torch.manual_seed(0)
    cache = make()
    cache.append(rows(11), rows(11))
    twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    q, k, v = rows(1, heads=4), rows(1), rows(1)
    want = cached_attention(q, k, v, cache)
    for _ in range(9):
        cached_attention(rows(1, heads=4), rows(1), rows(1), cache)
    for twin in twins:
        assert twin.known_lengths == (11, 11)
        assert torch.equal(cached_attention(q, k, v, twin), want)
    with pytest.raises(TypeError, match="shallow copy of a DilatedKVCache"):
        copy.copy(cache)


def test_what_was_taken_back_once_cannot_be_taken_back_from_again():
    cache = make()
    cache.append(rows(6), rows(6))
    cache.rewind(torch.tensor([2, 1]))
    for twin in (copy.deepcopy(cache), cache):
        twin.select([1, 0])
        with pytest.raises(ValueError, match="of row 1 can be taken back: it has 4, had 6 at most"):
            twin.rewind([0, 1])
    cache.rewind([1, 0])
    cache.append(rows(3), rows(3))  # to 7: one more than there were
    cache.rewind(2)
    assert cache.known_lengths == (5, 5)


def test_a_token_of_a_cache_that_every_rank_has_whole_sends_nothing():
    def rank(ends):
        cache = make(ends, sharded=False)
        prefill(cache, layout=ZIGZAG)
        sent, number = ends.sent_bytes, ends.calls.number
        attend(cache)
        return ends.sent_bytes - sent, ends.calls.number - number

    assert run_loopback(3, rank) == [(0, 0)] * 3


def test_large_caches_are_shared_by_default():
    def rank(ends):
        large = DilatedKVCache(DilatedPattern.dense(), 1, 1, 32, max_length=2**19, group=ends)
        return make(ends, sharded=None).is_sharded, large.is_sharded, large.nbytes

    assert run_loopback(2, rank) == [(False, True, 2**26)] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_in_a_tile_leaves_the_cache_as_it_was(monkeypatch, count):
    torch.manual_seed(0)
    cache, twin = make(), make()
    key, value = rows(11), rows(11)
    for one in (cache, twin):
        one.append(key, value)
    q, k, v = rows(count, heads=4), rows(count), rows(count)
    with monkeypatch.context() as patch:
        merge = "ring_dilated_attention.decode.attend.merge_"
        patch.setattr(merge, lambda *a: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError, match="no memory"):
            cached_attention(q, k, v, cache)
    assert cache.known_lengths == (11, 11) == tuple(cache.lengths.tolist())
    cache.rewind(2)  # which that error has taken nothing from
    twin.rewind(2)
    got, want = (cached_attention(q, k, v, one) for one in (cache, twin))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda cache: cache.append(rows(9), rows(9)), (0, 0)),
        (lambda cache: prefill(cache, rows=[1], key=rows(9, batch=1), value=rows(9, batch=1)),
         (11, 0)),
    ],
    ids=["append", "prefill"],
)  # fmt: skip
def test_rows_that_are_written_half_are_dropped(monkeypatch, change, left):
    cache, calls = make(), []
    cache.append(rows(11), rows(11))
    keep = DilatedKVCache.keep

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        keep(*arguments)

    monkeypatch.setattr(DilatedKVCache, "keep", fail)
    with pytest.raises(KeyboardInterrupt):
        change(cache)
    assert cache.known_lengths == left == tuple(cache.lengths.tolist())


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_or_not_at_each_call(first):
    torch.manual_seed(0)
    k, q = rows(20), rows(20, heads=4)
    cache = make(max_length=15)
    with torch.inference_mode(first):
        cache.prefill(k[:, :9], k[:, :9])
        cache.select([1, 0])
        cache.reserve(30)
    with torch.inference_mode(not first):
        cache.append(k[:, 9:10], k[:, 9:10])
        cache.rewind(1)
        cache.select([1, 0, 0])
        cache.select([0, 1])
        twin = copy.deepcopy(cache)
    with torch.inference_mode(first):
        got = cached_attention(q[:, 9:12], k[:, 9:12], k[:, 9:12], cache)
    cached_attention(q[:, 12:], k[:, 12:], k[:, 12:], cache)
    assert torch.equal(cached_attention(q[:, 9:12], k[:, 9:12], k[:, 9:12], twin), got)


def test_autocast_casts_as_for_sdpa():
    torch.manual_seed(0)
    k, q = rows(12), rows(2, heads=4)

    def run(q, k, enabled):
        cache = make(dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            cache.append(k[:, :10], k[:, :10])
            return cached_attention(q, k[:, 10:], k[:, 10:], cache)

    assert torch.equal(run(q, k, True), run(q.bfloat16(), k.bfloat16(), False))
    with torch.autocast("cpu", torch.bfloat16):
        message = r"key must be torch.float32 .* got torch.bfloat16 \(cast by autocast\) on cpu"
        with pytest.raises(ValueError, match=message):
            make().append(k, k)


def test_compiled_functions_call_it_between_graphs():
    torch._dynamo.reset()
    q, k = rows(1, heads=4), rows(1)

    def function(query, key, cache):
        return cached_attention(query * 2, key * 2, key, cache) * 3

    compiled = torch.compile(function, backend="aot_eager")
    first, second = make(max_length=60), make(max_length=60)
    graphs = []
    with torch.no_grad():
        for _ in range(30):
            torch.testing.assert_close(compiled(q, k, first), function(q, k, second))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_no_forward_mode_derivative():
    cache = make()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows(3), rows(3))
        for call in (cache.append, cache.prefill):
            with pytest.raises(NotImplementedError, match="DilatedKVCache has no forward-mode"):
                call(dual, dual)
        with pytest.raises(NotImplementedError, match="cached_attention has no forward-mode"):
            cached_attention(dual, dual, dual, cache)
