"""Calls of a KV cache: what ranks send, what is refused and how, what a failure leaves behind."""

# Arguments of wrong types are what is tested.
# mypy: disable-error-code="arg-type, call-overload"

import copy
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import patterns
from support.tolerances import assert_close_to

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
)
from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.checks.ranks import world_exchange
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


def rows_to_send(pattern, kv_heads, layout, document, rewind, sharded):
    """(from, to) of every row that a rank keeps and another one has: position by position."""
    length, found = len(document), []
    for index, (segment, rate) in enumerate(pattern.branches):
        segment = segment or length + 100
        for _, offset in pattern.heads(index, kv_heads):
            if offset >= segment:
                continue
            seen = [n % segment >= offset and (n % segment - offset) % rate == 0
                    for n in range(length + 2 * segment)]  # fmt: skip
            members = [n for n in range(length) if seen[n]]
            # What is kept lies before the next member, in its segment.
            following = seen.index(True, max(0, length - rewind))
            for number, member in enumerate(members):
                if member < following // segment * segment:
                    continue
                source = owner(layout, document[member])
                keepers = [number % layout.world_size] if sharded else range(layout.world_size)
                found += [(source, to) for to in keepers if to != source]
    return found


@st.composite
def prompts(draw):
    world_size, length = draw(st.sampled_from([2, 3, 5])), draw(st.integers(1, 80))
    kind = draw(st.sampled_from(["contiguous", "zigzag"]))
    return {
        "pattern": draw(patterns()),
        "kv_heads": draw(st.integers(1, 4)),
        "layout": SequenceLayout.named(kind, length, world_size, is_causal=True),
        "border": draw(st.integers(0, length - 1)),
        "rewind": draw(st.just(0) | st.integers(0, 30)),
        "sharded": draw(st.booleans()),
        "batch": draw(st.integers(1, 2)),
    }


def sent_in_prefill(case, ends):
    layout, batch, heads = case["layout"], case["batch"], case["kv_heads"]
    length = layout.length
    cache = DilatedKVCache(
        case["pattern"], batch, heads, HEAD_DIM, max_length=length + 100, group=ends,
        max_rewind=case["rewind"], sharded=case["sharded"],
    )  # fmt: skip
    key = torch.randn(batch, layout.local_length(ends.rank), heads, HEAD_DIM)
    before, messages, start = ends.sent_bytes, [], ends.start

    def count(send, receive):
        messages.append(send[0] if send else None)
        return start(send, receive)

    ends.start = count
    documents = sorted({0, case["border"], length})
    cache.prefill(key, key, layout=layout, documents=documents)
    return ends.sent_bytes - before, messages


@settings(max_examples=100)
@given(prompts())
def test_a_prefill_sends_the_rows_that_another_rank_keeps(case):
    layout = case["layout"]
    document = range(case["border"], layout.length)
    rows = rows_to_send(
        case["pattern"], case["kv_heads"], layout, document, case["rewind"], case["sharded"]
    )
    by_rank = run_loopback(layout.world_size, partial(sent_in_prefill, case))
    for rank, (sent, messages) in enumerate(by_rank):
        own = [to for source, to in rows if source == rank]
        assert sent == 2 * case["batch"] * len(own) * HEAD_DIM * 4
        assert sorted(to for to in messages if to is not None) == sorted(set(own))


def test_a_prefill_of_which_nothing_stays_sends_nothing():
    case = {
        "pattern": DilatedPattern([10, 20], [1, 3]),
        "kv_heads": 3,
        "layout": SequenceLayout.zigzag(40, 4),
        "border": 0,
        "rewind": 0,
        "sharded": True,
        "batch": 1,
    }
    assert run_loopback(4, partial(sent_in_prefill, case)) == [(0, [])] * 4
    case["border"] = 39  # one row stays, for each branch of each head that sees position 0
    sent = [sent for sent, _ in run_loopback(4, partial(sent_in_prefill, case))]
    assert sorted(sent) == [0, 0, 0, 0]  # position 39 and member 0 are both rank 0's
    case["border"] = 36  # rank 0 has all of it; members 1, 2, 3 go to ranks 1, 2, 3
    sent = [sent for sent, _ in run_loopback(4, partial(sent_in_prefill, case))]
    assert sent == [2 * HEAD_DIM * 4 * (3 * 3 + 1), 0, 0, 0]


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


BAD_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pattern": [(8, 2)]}, TypeError, "pattern must be a DilatedPattern, got type list"),
    ({"batch": 0}, ValueError, "batch must be >= 1, got 0"),
    ({"batch": 2.0}, TypeError, "batch must be an int, got 2.0"),
    ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be >= 1, got -1"),
    ({"head_dim": True}, TypeError, "head_dim must be an int, got True"),
    ({"max_length": 0}, ValueError, "max_length must be >= 1, got 0"),
    ({"max_length": None}, ValueError, "max_length must be given"),
    ({"max_rewind": -1}, ValueError, "max_rewind must be >= 0, got -1"),
    ({"max_rewind": None}, TypeError, "max_rewind must be an int, got None"),
    ({"dtype": torch.int64}, TypeError, "dtype must be one of torch.float64"),
    ({"dtype": "float32"}, TypeError, "got 'float32'"),
    ({"sharded": 1}, TypeError, "sharded must be a bool or None, got 1"),
    ({"group": "world"}, TypeError, "group must be a torch.distributed ProcessGroup"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CACHES)
def test_a_bad_cache(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make(**changes)


BAD_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": [1.0]}, TypeError, "key must be a tensor, got type list"),
    ({"value": None}, TypeError, "value must be a tensor, got None"),
    ({"key": rows(3)[0]}, ValueError, "key must have 4 dimensions"),
    ({"key": rows(3).to(torch.int64)}, TypeError, "the dtype of key must be one of torch.float64"),
    ({"value": rows(3).to_sparse()}, TypeError, "value must be a dense (torch.strided) tensor"),
    (
        {"key": rows(3, heads=4)},
        ValueError,
        "key must have shape (batch, positions, kv_heads, head_dim) = (2, positions, 2, 8); got "
        "(2, 3, 4, 8)",
    ),
    (
        {"value": rows(2)},
        ValueError,
        "value must have shape (batch, positions, kv_heads, head_dim) = (2, 3, 2, 8); got "
        "(2, 2, 2, 8)",
    ),
    ({"key": rows(3, batch=1)}, ValueError, "key must have shape"),
    ({"value": rows(3, head_dim=16)}, ValueError, "value must have shape"),
    ({"key": rows(3).double()}, ValueError, "key must be torch.float32 on cpu, as the cache is"),
    ({"value": rows(3).to("meta")}, ValueError, "value must be torch.float32 on cpu"),
    ({"value": rows(3).requires_grad_()}, RuntimeError, "value requires one"),
]
BAD_PROMPTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *BAD_ROWS,
    ({"layout": [[(0, 3)]]}, TypeError, "layout must be a SequenceLayout or None"),
    ({"layout": SequenceLayout.contiguous(6, 4)}, ValueError, "the layout is for 4 ranks"),
    ({"documents": [1, 2]}, ValueError, "documents must rise from 0 to the sequence length"),
    ({"documents": 3}, TypeError, "documents must be a list of ints or a 1-D tensor"),
    ({"lengths": [1]}, ValueError, "lengths must hold one number for each of 2 rows"),
    ({"lengths": [1, 900]}, ValueError, "lengths must lie in [0, "),
    ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, "lengths must be int32 or int64"),
    ({"rows": [0, 2]}, ValueError, "rows must be numbers of rows in [0, 2); got (0, 2)"),
    ({"rows": [1, 1]}, ValueError, "rows must differ, to take a prompt each; got (1, 1)"),
    ({"rows": [0]}, ValueError, "= (1, positions, 2, 8); got (2, 3, 2, 8)"),
    ({"rows": 1}, TypeError, "rows must be a list of ints or a 1-D tensor"),
    ({"key": rows(0), "value": rows(0), "layout": None}, ValueError, "the prompt is empty"),
    ({"key": rows(41), "value": rows(41), "layout": None}, ValueError, "call its reserve("),
]


def prefill(cache, **changes):
    cache.prefill(**{"key": rows(3), "value": rows(3), **changes})


@pytest.mark.parametrize(("changes", "error", "message"), BAD_PROMPTS)
def test_a_bad_prompt_of_one_process(changes, error, message):
    cache = make()
    prefill(cache)
    before = state(cache)
    with pytest.raises(error, match=re.escape(message)):
        prefill(cache, **changes)
    assert_state(cache, before)


BAD_TOKENS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": None}, TypeError, "query must be a tensor, got None"),
    ({"query": rows(3, heads=3)}, ValueError, "heads must be a multiple of kv_heads"),
    ({"query": rows(2, heads=4)}, ValueError, "the same local sequence length"),
    ({"key": rows(3).double()}, ValueError, "must have one dtype"),
    ({"key": rows(3, heads=4), "value": rows(3, heads=4)}, ValueError, "key must have shape"),
    (
        {"query": rows(0, heads=4), "key": rows(0), "value": rows(0)},
        ValueError,
        "there must be one new position at least; key has no rows",
    ),
    (
        {"query": rows(38, heads=4), "key": rows(38), "value": rows(38)},
        ValueError,
        "a document would have 41 positions, and the cache has room for max_length=40; make it "
        "with a larger one, or call its reserve(41)",
    ),
    (
        {"query": rows(3, heads=4).double(), "key": rows(3).double(), "value": rows(3).double()},
        ValueError,
        "key must be torch.float32 on cpu",
    ),
    ({"query": rows(3, heads=4).requires_grad_()}, RuntimeError, "has no gradient, and an input"),
    ({"scale": float("inf")}, ValueError, "scale must be finite"),
    ({"scale": "1"}, TypeError, "scale must be a float or None"),
    ({"scale": True}, TypeError, "scale must be a float or None"),
    ({"backend": "magic"}, ValueError, "backend must be one of 'auto'"),
    ({"backend": "flash"}, ValueError, "backend='flash' cannot compute this attention"),
    ({"return_lse": None}, TypeError, "return_lse must be a bool, got None"),
    ({"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
]


def attend(cache, **changes):
    arguments = {"query": rows(3, heads=4), "key": rows(3), "value": rows(3), **changes}
    names = ("query", "key", "value")
    return cached_attention(*[arguments.pop(name) for name in names], cache, **arguments)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_TOKENS)
def test_a_bad_token_of_one_process(changes, error, message):
    cache = make()
    prefill(cache)
    held = state(cache)
    with pytest.raises(error, match=re.escape(message)):
        attend(cache, **changes)
    assert_state(cache, held)


def test_room_for_the_last_token_and_no_other():
    cache = make()
    for _ in range(40):
        attend(cache, query=rows(1, heads=4), key=rows(1), value=rows(1))
    held = state(cache)
    with pytest.raises(ValueError, match="a document would have 41 positions"):
        attend(cache, query=rows(1, heads=4), key=rows(1), value=rows(1))
    assert_state(cache, held)


def test_something_else_than_a_cache():
    with pytest.raises(TypeError, match="cache must be a DilatedKVCache, got None"):
        attend(None)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ROWS)
def test_bad_rows_to_append(changes, error, message):
    cache = make()
    cache.append(rows(3), rows(3))
    before = state(cache)
    with pytest.raises(error, match=re.escape(message)):
        cache.append(**{"key": rows(3), "value": rows(3), **changes})
    assert_state(cache, before)


BAD_STEPS = [
    ("rewind", 3, ValueError, "at most 2 positions of row 0 can be taken back: it has 6, and "
     "max_rewind is 2; got 3. A cache made with a larger max_rewind can take back more"),
    ("rewind", [0, 3], ValueError, "at most 2 positions of row 1"),
    ("rewind", -1, ValueError, "count must be >= 0; got -1 for row 0"),
    ("rewind", [1], ValueError, "count must be one number, or one for each of 2 rows; got (1,)"),
    ("rewind", 1.0, TypeError, "count must be an int, got 1.0"),
    ("rewind", True, TypeError, "count must be an int, got True"),
    ("rewind", [1.0, 2.0], TypeError, "count must hold ints; got 1.0"),
    ("rewind", None, TypeError, "count must be an int, got None"),
    ("select", [], ValueError, "rows must not be empty"),
    ("select", [2], ValueError, "rows must be numbers of rows in [0, 2); got (2,)"),
    ("select", [-1], ValueError, "rows must be numbers of rows in [0, 2)"),
    ("select", [0.5], TypeError, "rows must hold ints; got 0.5"),
    ("select", torch.tensor([[0]]), ValueError, "rows must be 1-D"),
    ("reset", [2], ValueError, "rows must be numbers of rows in [0, 2)"),
    ("reset", 0, TypeError, "rows must be a list of ints or a 1-D tensor"),
    ("reserve", None, TypeError, "max_length must be an int, got None"),
    ("reserve", 0, ValueError, "max_length must be >= 1, got 0"),
    ("advanced", 35, ValueError, "a document would have 41 positions"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "error", "message"), BAD_STEPS)
def test_a_bad_step(name, argument, error, message):
    cache = make()
    cache.append(rows(6), rows(6))
    before = state(cache)
    with pytest.raises(error, match=re.escape(message)):
        getattr(cache, name)(argument)
    assert_state(cache, before)


def test_what_was_taken_back_once_cannot_be_taken_back_from_again():
    cache = make()
    cache.append(rows(6), rows(6))
    cache.rewind(torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="of row 0 can be taken back: it has 4, after it had 6"):
        cache.rewind([1, 0])
    for twin in (copy.deepcopy(cache), cache):
        twin.select([1, 0])
        with pytest.raises(ValueError, match="of row 1 can be taken back: it has 4, after it had"):
            twin.rewind([0, 1])
    cache.select([1, 0])
    cache.rewind(torch.tensor([0, 1]))
    cache.append(rows(3), rows(3))  # to 7: one more than there were
    cache.rewind(2)
    assert cache.known_lengths == (5, 5)


def state(cache):
    return copy.deepcopy(cache)


def assert_state(cache, before):
    """As it was: its rows too, all but what was never written."""
    assert cache.known_lengths == before.known_lengths
    assert torch.equal(cache.lengths, before.lengths)
    for x, y in ((cache.keys, before.keys), (cache.values, before.values)):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


DIFFERENCES = [
    ({"layout": SequenceLayout.contiguous(9, 3)}, {}, "layout is SequenceLayout([[(0, 2), (8, 9)]"),
    ({"lengths": [3, 4]}, {}, "the document that goes on is 0 to 9 in rows [0, 1]"),
    ({"documents": [0, 5, 9]}, {}, "5 to 9 in rows [0, 1]"),
    ({"rows": [1, 0]}, {}, "0 to 9 in rows [1]"),
    ({}, {"pattern": DilatedPattern([8, None], [2, 4])}, "(8, 2) (document, 3), 2 KV heads, "),
    ({}, {"max_length": 41}, "max_length=41"),
    ({}, {"max_rewind": 3}, "max_rewind=3"),
    ({}, {"sharded": False}, "on 1 ranks, 2 rows, head_dim 8, torch.float32 on rank 1"),
    ({"key": rows(3).double(), "value": rows(3).double()}, {"dtype": torch.float64},
     "torch.float64"),
]  # fmt: skip
ZIGZAG = SequenceLayout.zigzag(9, 3)


def prefill_differs(ends, changes, other):
    cache = make(ends, **(other if ends.rank == 1 else {}))
    options = {"layout": ZIGZAG, **(changes if ends.rank == 1 else {})}
    try:
        prefill(cache, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("changes", "other", "message"), DIFFERENCES)
def test_ranks_that_disagree_about_a_prompt(changes, other, message):
    for text in run_loopback(3, partial(prefill_differs, changes=changes, other=other)):
        assert text.startswith("DilatedKVCache.prefill was called with different arguments"), text
        assert message in text, text
        assert "on ranks 0, 2" in text, text


@pytest.mark.parametrize(("changes", "error", "message"), BAD_PROMPTS)
def test_a_bad_prompt_of_one_rank_is_an_error_on_all(changes, error, message):
    def rank(ends):
        cache = make(ends)
        prefill(cache, layout=ZIGZAG)
        before = state(cache)
        try:
            prefill(cache, **{"layout": ZIGZAG, **(changes if ends.rank == 1 else {})})
        except (ValueError, TypeError, RuntimeError) as failure:
            assert_state(cache, before)
            prefill(cache, layout=ZIGZAG)  # goes on
            return str(failure)
        return "no error"

    for text in run_loopback(3, rank):
        assert message in text, text


TOKENS_THAT_DIFFER = [
    *((changes, message) for changes, _, message in BAD_TOKENS),
    ({"scale": 0.5}, "scale is None on ranks 0, 2, 0.5 on rank 1"),
    ({"backend": "eager"}, "backend is auto on ranks 0, 2, eager on rank 1"),
    ({"query": rows(3, heads=2)}, "query is (2, 3, 4, 8) on ranks 0, 2, (2, 3, 2, 8) on rank 1"),
    ({"step": "rewind"}, "lengths is (9, 9) on ranks 0, 2, (8, 8) on rank 1"),
    ({"step": "reserve"}, "max_length=50"),
]


def token_differs(ends, changes):
    changes = dict(changes)
    cache = make(ends)
    prefill(cache, layout=ZIGZAG)
    step = changes.pop("step", None)
    if ends.rank == 1 and step:
        getattr(cache, step)({"rewind": 1, "reserve": 50}[step])
    before = state(cache)
    try:
        attend(cache, **(changes if ends.rank == 1 else {}))
    except (ValueError, TypeError, RuntimeError) as failure:
        assert_state(cache, before)
        prefill(cache, layout=ZIGZAG) if not step else None
        return str(failure)
    return "no error"


@pytest.mark.parametrize(("changes", "message"), TOKENS_THAT_DIFFER)
def test_a_bad_token_of_one_rank_is_an_error_on_all(changes, message):
    message = message.replace("41", "47")  # positions: 38 more than 9, not than 3
    for text in run_loopback(3, partial(token_differs, changes=changes)):
        assert message in text, text


def test_what_all_ranks_ask_for_in_vain_leaves_their_group_usable():
    def rank(ends):
        cache = make(ends)
        prefill(cache, layout=ZIGZAG)
        with pytest.raises(ValueError, match="backend='flash' cannot compute this attention"):
            attend(cache, backend="flash")
        attend(cache)
        return cache.known_lengths

    assert run_loopback(3, rank) == [(12, 12)] * 3


def _process(rank, world_size):
    ends = world_exchange()
    return [
        prefill_differs(ends, {"lengths": [3, 4]}, {}),
        prefill_differs(ends, {"key": None}, {}),
        token_differs(ends, {"scale": 0.5}),
        token_differs(ends, {"backend": "magic"}),
    ]


def test_processes():
    for texts in run_ranks(_process, 3):
        assert "the document that goes on is 0 to 9 in rows [0, 1]" in texts[0]
        assert "key must be a tensor, got None" in texts[1]
        assert "scale is None on ranks 0, 2, 0.5 on rank 1" in texts[2]
        assert "backend must be one of 'auto'" in texts[3]


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
        small = make(ends, sharded=None)
        pattern = DilatedPattern.dense()
        large = DilatedKVCache(pattern, 1, 1, 32, max_length=2**19, group=ends)
        return small.is_sharded, large.is_sharded, large.nbytes

    assert run_loopback(2, rank) == [(False, True, 2**26)] * 2
    assert not DilatedKVCache(DilatedPattern.dense(), 1, 1, 32, max_length=2**19).is_sharded


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


def test_rows_that_are_written_half_are_dropped(monkeypatch):
    cache = make()
    cache.append(rows(11), rows(11))
    slots = type(cache.slots)
    keep, calls = slots.keep, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        keep(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(slots, "keep", fail)
        with pytest.raises(KeyboardInterrupt):
            cache.append(rows(9), rows(9))
    assert cache.known_lengths == (0, 0) == tuple(cache.lengths.tolist())
    calls.clear()
    cache.append(rows(11), rows(11))
    with monkeypatch.context() as patch:
        patch.setattr(slots, "keep", fail)
        with pytest.raises(KeyboardInterrupt):
            prefill(cache, rows=[1], key=rows(9, batch=1), value=rows(9, batch=1))
    assert cache.known_lengths == (11, 0) == tuple(cache.lengths.tolist())


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
    late = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    got, *others = (cached_attention(q, k, v, one) for one in late)
    assert all(torch.equal(got, other) for other in others)
    with pytest.raises(TypeError, match="shallow copy of a DilatedKVCache"):
        copy.copy(cache)

    def rank(ends):
        of_ranks = make(ends)
        prefill(of_ranks, layout=ZIGZAG)
        twin = copy.deepcopy(of_ranks)
        assert twin.exchange is ends
        return [cached_attention(q, k, v, one) for one in (of_ranks, twin)]

    for got, same in run_loopback(3, rank):
        assert torch.equal(got, same)


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_or_not_at_each_call(first):
    torch.manual_seed(0)
    k, q = rows(20), rows(20, heads=4)
    results = []
    for mode in (first, not first):
        with torch.inference_mode(mode):
            cache = make(max_length=15)
            cache.prefill(k[:, :9], k[:, :9])
            cache.select([1, 0])
            cache.reserve(30)
        with torch.inference_mode(not mode):
            cache.append(k[:, 9:10], k[:, 9:10])
            cache.rewind(1)
            cache.select([1, 0, 0])
            cache.select([0, 1])
            twin = copy.deepcopy(cache)
        with torch.inference_mode(mode):
            results.append(cached_attention(q[:, 9:12], k[:, 9:12], k[:, 9:12], cache))
        cached_attention(q[:, 12:], k[:, 12:], k[:, 12:], cache)
        assert torch.equal(cached_attention(q[:, 9:12], k[:, 9:12], k[:, 9:12], twin), results[-1])
    assert torch.equal(*results)


def test_autocast_casts_as_for_sdpa():
    torch.manual_seed(0)
    k, q = rows(12), rows(2, heads=4)

    def run(*tensors, enabled):
        q, k = tensors
        cache = make(dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            cache.prefill(k[:, :9], k[:, :9])
            cache.append(k[:, 9:10], k[:, 9:10])
            return cached_attention(q, k[:, 10:], k[:, 10:], cache)

    inside, outside = run(q, k, enabled=True), run(q.bfloat16(), k.bfloat16(), enabled=False)
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, outside)
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


def test_one_row_begins_anew_while_the_others_go_on():
    """As a server does that fills a row as soon as its text is finished."""
    torch.manual_seed(0)
    cache = make()
    prompt, token = rows(9), rows(1)
    prefill(cache, key=prompt, value=prompt)
    cached_attention(rows(1, heads=4), token, token, cache)
    new = rows(5, batch=1)
    cache.prefill(new, new, rows=torch.tensor([1]))
    assert cache.known_lengths == (10, 5)
    q, k = rows(1, heads=4), rows(1)
    got = cached_attention(q, k, k, cache)
    for row, known in enumerate((torch.cat([prompt, token], 1)[:1], new)):
        alone = make(batch=1)
        alone.append(known, known)
        want = cached_attention(q[row : row + 1], *[k[row : row + 1]] * 2, alone)
        assert_close_to(got[row : row + 1], want, terms=HEAD_DIM)
