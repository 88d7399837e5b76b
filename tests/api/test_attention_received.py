"""What keys receive, against the sums of the dense softmax of the reference."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import cases, layouts

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    attention_received,
    dilated_attention,
)
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.exchange import run_loopback

MIXED = DilatedPattern([7, None], [2, 3], zero_keys=True)
LENGTH, HEADS, KV_HEADS = 37, 4, 2
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def dense(query, key, pattern, **options):
    """All weights of the softmax, (batch, heads, queries, keys), and the lse.

    Each value has a 1 of its own, in columns behind those of the head.
    """
    _, length, _, head_dim = query.shape
    query, key = (torch.nn.functional.pad(x, (0, length)) for x in (query, key))
    value = torch.zeros_like(key)
    value[..., :length] = torch.eye(length, dtype=key.dtype)[:, None]
    options.setdefault("scale", head_dim**-0.5)
    out, lse = reference_attention(query, key, value, pattern, **options)
    return out[..., :length].transpose(1, 2), lse


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, heads, 8) for heads in (HEADS, KV_HEADS)]
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def weights(query, sets):
    """Of each query, some of them 0."""
    generator = torch.Generator().manual_seed(1)
    shape = sets, *query.shape[:2]
    drawn = torch.randn(shape, generator=generator, dtype=query.dtype)
    return drawn.masked_fill(drawn < -0.5, 0)


@settings(max_examples=60)
@given(cases(), st.data())
def test_any_call_equals_the_dense_softmax(case, data):
    """Also on ranks: windows, zero keys, GQA, causal, documents, lengths, sinks, views."""
    draw = data.draw
    layout = draw(layouts().filter(lambda x: x.world_size <= 3))
    total, row = layout.length, st.integers(0, layout.length)
    cuts = draw(st.none() | st.lists(row, max_size=3))
    case = replace(case, layout=layout, dtype=torch.float64, has_sink=draw(st.booleans()))
    options: dict[str, Any] = {
        "is_causal": case.is_causal,
        "documents": None if cuts is None else [0, *sorted(cuts), total],
        "lengths": draw(st.none() | st.tuples(*[row] * case.batch)),
        "softcap": None if case.backend == "cpu_flash" else draw(st.sampled_from([None, 0.8])),
    }
    exchange = draw(st.sampled_from([case.exchange, "heads"]))
    query, key, value, _ = case.inputs()
    sink = case.sink()
    sets = weights(query, draw(st.integers(1, 3)))
    matrix, _ = dense(query, key, case.pattern, sink=sink, **options)

    def rank(ends):
        given: dict[str, Any] = {"group": ends, "layout": layout, "exchange": exchange, **options}
        given["backend"] = case.backend
        shards = [layout.shard(x, ends.rank, 1) for x in (query, key, value)]
        if case.views:
            shards = [kind.view(x) for kind, x in zip(case.views, shards, strict=False)]
        q, k, v = shards
        _, lse = dilated_attention(q, k, v, case.pattern, return_lse=True, sink=sink, **given)
        receive = partial(attention_received, q, k, lse, case.pattern, **given)
        return receive(), receive(queries=layout.shard(sets, ends.rank, 2))

    alone, several = zip(*run_loopback(layout.world_size, rank), strict=True)
    close(layout.unshard(alone, 2), matrix.sum(2))
    close(layout.unshard(several, 3), torch.einsum("sbi,bhij->sbhj", sets, matrix))


def test_all_that_is_given_is_received():
    """Keys, zero keys and the sink receive as much as queries that see anything have to give."""
    query, key = tensors()
    sink = torch.randn(HEADS, dtype=torch.float64)
    out, lse = dilated_attention(
        query, key, torch.ones_like(key), MIXED, return_lse=True, sink=sink
    )
    received = attention_received(query, key, lse, MIXED)
    close(received.sum(2), out[..., 0].sum(1))  # of values of 1, what goes to keys
    assert (received.sum(2) < LENGTH - 1).all()
    plain = replace(MIXED, zero_keys=False)
    _, lse = dilated_attention(query, key, key, plain, return_lse=True)
    close(attention_received(query, key, lse, plain).sum(2), (lse > -torch.inf).double().sum(2))


def test_a_padding_mask_is_lengths():
    query, key = tensors()
    options: dict[str, Any] = {"lengths": [LENGTH, 11]}
    _, lse = dilated_attention(query, key, key, MIXED, return_lse=True, **options)
    want = attention_received(query, key, lse, MIXED, **options)
    assert not want[1, :, 11:].any()
    assert want[1, :, :11].any()
    mask = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [11]])
    assert torch.equal(attention_received(query, key, lse, MIXED, key_padding_mask=mask), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_off_by_two_roundings(dtype):
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = 1, 900, 2, 16
    query, key = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    pattern = DilatedPattern([128, None], [1, 3])
    _, lse = dilated_attention(query, key, key, pattern, return_lse=True)
    found = attention_received(query, key, lse, pattern)
    matrix, _ = dense(query.double(), key.double(), pattern)
    assert found.dtype == torch.float32
    assert dtype == torch.float32 or not torch.equal(found.to(dtype).float(), found)
    error = ((found - matrix.sum(2)) / matrix.sum(2)).abs().max()
    assert error < torch.finfo(dtype).eps + 1e-5


def test_compiled_without_gradients_and_under_autocast():
    query, key = (x.requires_grad_() for x in tensors(torch.float32))

    def attend(query, key):
        _, lse = dilated_attention(query, key, key, MIXED, return_lse=True)
        return attention_received(query, key, lse, MIXED)

    want = attend(query, key)
    assert not want.requires_grad
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key), want)
    with torch.autocast("cpu", torch.bfloat16):
        rough = attend(query, key)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, want, rtol=0.03, atol=0.03)


REFUSED: dict[str, Any] = {
    "lse": ({"lse": torch.zeros(2, LENGTH, HEADS)}, r"lse must be .* shape \(2, 4, 37\)"),
    "lse of another dtype": ({"lse": torch.zeros(2, HEADS, LENGTH)}, "got .* torch.float32"),
    "lse is none": ({"lse": None}, "lse must be .*got None"),
    "queries": ({"queries": torch.ones(LENGTH)}, "queries must be .*got shape"),
    "integers": ({"queries": torch.ones(2, LENGTH).long()}, "queries must be .*torch.int64"),
    "a mask, too": (
        {"lengths": [1, 2], "key_padding_mask": torch.zeros(2, LENGTH, dtype=torch.bool)},
        "pass lengths or key_padding_mask, not both",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, message = REFUSED[name]
    query, key = tensors()
    _, lse = dilated_attention(query, key, key, MIXED, return_lse=True)
    given = {"lse": lse, **options}
    with pytest.raises(ValueError, match=message):
        attention_received(query, key, given.pop("lse"), MIXED, **given)


def test_ranks_are_told_and_agree_on_sets():
    query, key = tensors()
    _, lse = dilated_attention(query, key, key, MIXED, return_lse=True)
    layout = SequenceLayout.contiguous(LENGTH, 2)

    def rank(ends):
        rows, keys, own = (
            layout.shard(x, ends.rank, i) for x, i in ((query, 1), (key, 1), (lse, 2))
        )
        given: dict[str, Any] = {"pattern": MIXED, "group": ends, "layout": layout}
        receive = partial(attention_received, rows, keys, own, **given)
        with pytest.raises(ValueError, match="sets of queries is 1 on rank 0, 2 on rank 1"):
            receive(queries=weights(rows, 1 + ends.rank))
        bad = own[:, :1] if ends.rank else own
        with pytest.raises(ValueError, match="lse must be"):
            attention_received(rows, keys, bad, **given)
        return receive()

    close(layout.unshard(run_loopback(2, rank), 2), attention_received(query, key, lse, MIXED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_of_gpus(dtype):
    """Triton's, interpreted without a GPU."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 70, n, 48, generator=generator).to(dtype) for n in (4, 2))
    pattern = DilatedPattern([16, None], [1, 4])
    matrix, _ = dense(query.double(), key.double(), pattern)
    sets = weights(query, 2)
    _, lse = dilated_attention(query, key, key, pattern, return_lse=True, backend="triton")
    found = attention_received(query, key, lse, pattern, queries=sets, backend="triton")
    want = torch.einsum("sbi,bhij->sbhj", sets.double(), matrix)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=16 * torch.finfo(dtype).eps)
