"""Sinks and softcap: in the function, its modules, the KV cache; compiled; and what is refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import cases

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    dilated_attention,
    replicated_query_attention,
)
from ring_dilated_attention.checks import combine, reference_attention, run_case
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import DilatedAttention, MultiheadDilatedAttention
from ring_dilated_attention.pattern import Window
from ring_dilated_attention.tiles import TileGradients, TileInputs, backend_named

MIXED = DilatedPattern([7, None], [2, 3], zero_keys=True)
LENGTH, HEADS, KV_HEADS = 37, 4, 2


def tensors(dtype=torch.float64, length=LENGTH):
    """Query, key, value and sink."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, heads, 8) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [(HEADS,)]
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


@st.composite
def packings(draw, length, batch):
    """Documents and lengths, each, both or neither."""
    cuts = draw(st.none() | st.lists(st.integers(0, length), max_size=3))
    row = st.integers(0, length)
    return {
        "documents": None if cuts is None else (0, *sorted(cuts), length),
        "lengths": draw(st.none() | st.tuples(*[row] * batch)),
    }


@settings(max_examples=80)
@given(cases(), st.data())
def test_any_call_equals_the_reference(case, data):
    """Forward and backward, dsink too: all exchanges, GQA, documents, lengths, views, windows."""
    draw, sides = data.draw, st.tuples(st.integers(0, 40), st.integers(0, 9))
    has_sink, softcap = draw(st.sampled_from([(True, None), (False, 0.8), (True, 2.5)]))
    windowed = DilatedPattern([Window(*draw(sides)), None], [1, 5])
    case = replace(
        case,
        pattern=draw(st.sampled_from([case.pattern, windowed])),
        exchange=draw(st.sampled_from([case.exchange, "heads"])),
        backend=case.backend if softcap is None else "auto",
        loss_of=draw(st.sampled_from([("out",), ("lse",), ("out", "lse")])),
        has_sink=has_sink,
        softcap=softcap,
        **draw(packings(case.layout.length, case.batch)),
    )
    wanted, ranks = case.references(), case.layout.world_size
    (outcome,) = combine(run_loopback(ranks, lambda ends: [run_case(case, ends, wanted)]))
    assert outcome.passes(case.dtype), (outcome.errors(), outcome.wrong(case.dtype))


def test_the_reference_is_a_softmax_with_one_more_column():
    query, key, value, sink = tensors()
    pattern, documents = DilatedPattern.dense(), [0, 11, LENGTH]
    options = {"is_causal": True, "documents": documents, "softcap": 1.3, "sink": sink}
    found = reference_attention(query, key, value, pattern, **options)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, 2)) * 8**-0.5
    place = torch.arange(LENGTH)
    hidden = (place > place[:, None]) | ((place >= 11) != (place >= 11)[:, None])
    scores = (1.3 * (scores / 1.3).tanh()).masked_fill(hidden, -torch.inf)
    column = sink.view(1, HEADS, 1, 1).expand(2, -1, LENGTH, 1)
    scores = torch.cat([scores, column], -1)
    out = torch.einsum(
        "bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], value.repeat_interleave(2, 2)
    )
    for a, b in zip(found, (out, scores.logsumexp(-1)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_padding_and_uncovered_positions_have_the_sink_alone():
    query, key, value, sink = tensors()
    pattern, lengths = DilatedPattern([6], [3]), [LENGTH, 5]
    sink.requires_grad_()
    options = {"sink": sink, "lengths": lengths, "return_lse": True}
    out, lse = dilated_attention(query, key, value, pattern, **options)
    alone = (lse == sink[:, None]).transpose(1, 2)
    assert alone[1, 5:].all()
    assert alone[0].sum() > LENGTH  # offsets of other heads
    assert not out[alone].any()
    lse[1, :, 5:].sum().backward()
    assert not sink.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_is_eager(dtype):
    *inputs, sink = tensors(dtype)
    found = []

    def call(query, key, value, sink):
        return dilated_attention(query, key, value, MIXED, is_causal=True, sink=sink, softcap=2.0)

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (*inputs, sink.float())]
        out = function(*leaves)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert found[0][4].dtype == torch.float32


def test_only_the_sink_needs_a_gradient():
    query, key, value, sink = tensors()
    sink.requires_grad_()
    grads = []
    for function in (dilated_attention, reference_attention):
        found = function(query, key, value, MIXED, sink=sink)
        out = found if isinstance(found, torch.Tensor) else found[0]
        grads.append(torch.autograd.grad(out.sum(), sink)[0])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_modules_and_autocast():
    *inputs, sink = tensors(torch.float32)
    query, key, value = inputs
    for softcap in (0.3, 1.5):  # one plan
        want = dilated_attention(query, key, value, MIXED, sink=sink, softcap=softcap)
        exact, _ = reference_attention(query, key, value, MIXED, sink=sink, softcap=softcap)
        torch.testing.assert_close(want, exact)
    assert torch.equal(DilatedAttention(MIXED, softcap=1.5)(*inputs, sink=sink), want)
    layer = MultiheadDilatedAttention(32, HEADS, segment_lengths=[7, None], dilation_rates=[2, 3])
    rows = torch.randn(2, LENGTH, 32)
    got, _ = layer(rows, rows, rows, sink=sink, softcap=1.5)
    heads = layer.project(rows, rows, rows)
    assert torch.equal(got, layer.combine(layer.attend(*heads, sink=sink, softcap=1.5)))
    assert not torch.equal(got, layer(rows, rows, rows, sink=sink)[0])
    with torch.autocast("cpu", torch.bfloat16):  # the sink stays in float32
        rough = dilated_attention(query, key, value, MIXED, sink=sink, softcap=1.5)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), want, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.1}])
def test_cached_and_replicated_queries_are_rows_of_the_reference(ranks, options):
    query, key, value, sink = tensors()
    pattern = DilatedPattern([8, None], [1, 3])
    options = {**options, "sink": sink}
    want, want_lse = reference_attention(query, key, value, pattern, is_causal=True, **options)
    layout = SequenceLayout.contiguous(LENGTH, ranks)

    def rank(ends):
        sizes: Any = {"max_length": LENGTH, "dtype": torch.float64}
        cache = DilatedKVCache(pattern, 2, KV_HEADS, 8, group=ends, sharded=ranks > 1, **sizes)
        found = []
        for rows in (slice(0, 20), slice(20, 21), slice(21, LENGTH)):
            new = query[:, rows], key[:, rows], value[:, rows]
            found.append(cached_attention(*new, cache=cache, return_lse=True, **options))
        outs, lses = zip(*found, strict=True)
        keys, values = (layout.shard(x, ends.rank, 1) for x in (key, value))
        given: Any = {
            "group": ends,
            "layout": layout,
            "is_causal": True,
            "return_lse": True,
            **options,
        }
        some = query[:, 9:31]
        replicated = replicated_query_attention(some, keys, values, pattern, range(9, 31), **given)
        return (torch.cat(outs, 1), torch.cat(lses, 2)), replicated

    for cached, replicated in run_loopback(ranks, rank):
        close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)
        close(cached, (want, want_lse))
        close(replicated, (want[:, 9:31], want_lse[:, :, 9:31]))


def test_eager_tiles_with_a_softcap_are_bounded_blocks(monkeypatch):
    """However long a tile is, no scores are made of more than a block of its rows."""
    eager, largest, tanh = backend_named("eager"), [], torch.tanh

    def note(x):
        largest.append(x.numel())
        return tanh(x)

    monkeypatch.setattr(torch, "tanh", note)
    q, k, v, dout = torch.randn(4, 1, 1, 2000, 8, dtype=torch.float64)
    for is_causal in (False, True):
        tile = TileInputs(q, k, v, is_causal, 0.3, softcap=1.2)
        leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
        query, key, value = leaves
        options: Any = {"is_causal": is_causal, "scale": 0.3, "softcap": 1.2}
        out, lse = eager.forward(tile)
        found = eager.backward(tile, TileGradients(dout, out, lse))
        assert max(largest) <= 1 << 18
        want, _ = reference_attention(query, key, value, DilatedPattern.dense(), **options)
        largest.clear()
        grads = torch.autograd.grad(want, leaves, dout.transpose(1, 2))
        for a, b in zip((out, *found), (want, *grads), strict=True):
            torch.testing.assert_close(a, b.transpose(1, 2), rtol=1e-10, atol=1e-10)


REFUSED: dict[str, Any] = {
    "no tensor": ({"sink": 1.0}, TypeError, r"sink must be a tensor \(heads,\)"),
    "shape": ({"sink": torch.zeros(2)}, ValueError, r"shape \(4,\), on cpu; got shape \(2,\)"),
    "dtype": ({"sink": torch.zeros(4).half()}, TypeError, "must be torch.float32 or that of query"),
    "detached": (
        {"sink": torch.zeros(4), "branch_gradients": "detached"},
        ValueError,
        "a sink needs branch_gradients='exact'; got 'detached'",
    ),
    "sign": ({"softcap": -1.0}, ValueError, "softcap must be > 0, between 2.*, got -1.0"),
    "zero": ({"softcap": 0.0}, ValueError, "softcap must be > 0"),
    "words": ({"softcap": "50"}, TypeError, "softcap must be a float or None"),
    "kernel": (
        {"softcap": 2.0, "backend": "cpu_flash"},
        ValueError,
        "cpu_flash: it does not compute a softcap: 'fa4', 'eager' and 'auto' do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, error, message = REFUSED[name]
    query, key, value, _ = tensors()
    with pytest.raises(error, match=message):
        dilated_attention(query, key, value, MIXED, **options)
    if "backend" not in options:
        with pytest.raises(error, match=message):
            reference_attention(query, key, value, MIXED, **options)


def test_ranks_differ_in_softcap_and_a_replicated_sink_has_no_gradient():
    query, key, value, _ = tensors()

    def rank(ends):
        with pytest.raises(ValueError, match="softcap"):
            dilated_attention(query, key, value, MIXED, group=ends, softcap=1.0 + ends.rank)

    run_loopback(2, rank)
    sink = torch.zeros(HEADS, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient of a sink"):
        replicated_query_attention(query, key, value, MIXED, range(LENGTH), sink=sink)
    cache = DilatedKVCache(DilatedPattern([8], [2]), 2, KV_HEADS, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="has no gradient"):
        cached_attention(query, key, value, cache, sink=sink)
