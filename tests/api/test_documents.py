"""Packed documents and padding, against brute force: forward, backward, on any number of ranks."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted_calls import count_calls
from support.on_ranks import outcome
from support.strategies import cases, layouts, patterns
from support.tolerances import FLOAT64
from torch import nn

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    dilated_attention,
    plan_attention,
    reference_attention,
    replicated_query_attention,
)
from ring_dilated_attention.checks import Case, make_layout, relative_error
from ring_dilated_attention.documents import packed_rows
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.kernels import build_cells
from ring_dilated_attention.nn import DilatedAttention, MultiheadDilatedAttention
from ring_dilated_attention.plan import TileGroup, check_plan
from ring_dilated_attention.torch_op import padding

PATTERN = DilatedPattern([5, 12, None], [1, 2, 3])
LONGNET = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


@st.composite
def borders(draw, length):
    """Documents of any lengths, some of a single token; or many of one length and a rest."""
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(1, length), max_size=40))
    else:
        cuts = range(draw(st.integers(1, length)), length, draw(st.integers(1, 9)))
    return tuple(sorted({0, length, *cuts}))


@st.composite
def packed_cases(draw):
    case = draw(cases())
    length = case.layout.length
    lengths = st.tuples(*[st.integers(0, length)] * case.batch)
    return replace(
        case,
        documents=draw(st.none() | borders(length)),
        lengths=draw(st.none() | st.just((length,) * case.batch) | lengths),
    )


@pytest.mark.slow
@settings(max_examples=80)
@given(packed_cases())
def test_any_packed_case_equals_the_reference(case):
    """What is padded is NaN in the tensors, and so is the gradient of its output."""
    assert outcome(case).passes(case.dtype)


@settings(max_examples=100)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 5), st.data())
def test_random_packed_plans_are_proven(pattern, layout, is_causal, heads, data):
    documents = data.draw(borders(layout.length))
    length = data.draw(st.none() | st.integers(0, layout.length))
    check_plan(
        plan_attention(
            pattern,
            layout,
            is_causal=is_causal,
            num_heads=heads,
            documents=documents,
            length=length,
        )
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "uneven"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_layouts_with_documents_and_lengths(world_size, name, is_causal):
    """Borders next to those of shards, documents of one token, a row of padding, a full row."""
    case = Case(
        pattern=PATTERN,
        layout=make_layout(name, 40, world_size),
        num_heads=6,
        num_kv_heads=2,
        batch=4,
        is_causal=is_causal,
        documents=(0, 1, 2, 11, 20, 21, 39, 40),
        lengths=(40, 0, 23, 40),
    )
    assert outcome(case).passes(case.dtype)


# --- What it means


def attend(tensors, **options):
    """Out and gradients of the sum of its squares."""
    query, key, value = leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = dilated_attention(query, key, value, PATTERN, return_lse=True, **options)
    return [out.detach(), lse.transpose(1, 2), *torch.autograd.grad(out.square().sum(), leaves)]


def test_rows_of_a_batch_that_run_together():
    def rows(lengths):
        return [(some, borders[-1]) for some, borders in packed_rows((), lengths, len(lengths), 9)]

    assert rows((9, 9)) == [(slice(None), 9)]
    assert rows((4, 9, 4, 9)) == [(slice(0, 3, 2), 4), (slice(1, 4, 2), 9)]
    assert rows((4, 4, 0, 4)) == [(slice(0, 2, 1), 4), (slice(3, 4, 1), 4), (slice(2, 3, 1), 0)]


@pytest.mark.parametrize("documents", [[0, 5, 5, 9], [0, 0, 5, 9], [0, 5, 9, 9, 9]])
def test_documents_of_length_0_are_left_out_in_every_entry(documents):
    """And so is what pads cu_seqlens at the end."""
    query, key, value = torch.randn(3, 2, 9, 2, 8, dtype=torch.float64).unbind(0)
    given, last = torch.tensor(documents, dtype=torch.int32), range(8, 9)

    def attend(documents, lengths=None):
        return dilated_attention(query, key, value, PATTERN, documents=documents, lengths=lengths)

    def generate(documents):
        cache = DilatedKVCache(PATTERN, 2, 2, 8, max_length=20, dtype=torch.float64)
        cache.prefill(key, value, documents=documents)
        return cached_attention(query[:, last], key[:, last], value[:, last], cache)

    want = attend([0, 5, 9])
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for found in (
        attend(documents),
        attend(given),
        attend(documents, lengths=[9, 9]),
        compiled(given),
        compiled(documents),
        reference_attention(query, key, value, PATTERN, documents=documents)[0],
    ):
        torch.testing.assert_close(found, want)
    found = replicated_query_attention(
        query[:, last], key, value, PATTERN, last, documents=documents
    )
    torch.testing.assert_close(found, want[:, last])
    assert torch.equal(generate(documents), generate([0, 5, 9]))


# --- Padding masks


@pytest.mark.parametrize("documents", [None, [0, 5, 9, 17]])
@pytest.mark.parametrize(
    ("name", "world_size"),
    [("contiguous", 1), ("contiguous", 3), ("zigzag", 3), ("uneven", 3), (None, 3)],
)
def test_a_padding_mask_is_lengths(name, world_size, documents):
    """Documents may end early with both: where the longest row does, or behind it."""
    total, lengths = 21, [14 if documents else 21, 0, 8, 13]
    layout = make_layout(name or "contiguous", total, world_size)
    whole = torch.randn(3, 4, total, 4, 8).unbind(0)
    mask = torch.arange(total) >= torch.tensor(lengths)[:, None]

    def rank(ends):
        group = ends if world_size > 1 else None
        options = {"group": group, "layout": layout if name else None, "documents": documents}
        shards = [layout.shard(x, ends.rank, 1) for x in whole]
        shard = layout.shard(mask, ends.rank, 1)
        if documents:
            with pytest.raises(ValueError, match="rise from 0 to the sequence length 14 or more"):
                attend(shards, key_padding_mask=shard, **{**options, "documents": [0, 5, 9, 13]})
        return (
            attend(shards, key_padding_mask=shard, **options),
            attend(shards, lengths=lengths, **options),
        )

    for got, want in run_loopback(world_size, rank):
        assert all(map(torch.equal, got, want))


def test_multihead_attention_takes_torch_padding_masks():
    torch.manual_seed(0)
    dense: dict[str, Any] = {"segment_lengths": [None], "dilation_rates": [1]}
    module = MultiheadDilatedAttention(24, 3, dtype=torch.float64, **dense)
    theirs = nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        weights = [p.weight for p in (module.q_proj, module.k_proj, module.v_proj)]
        theirs.in_proj_weight.copy_(torch.cat(weights))
        theirs.out_proj.weight.copy_(module.out_proj.weight)
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    lengths = torch.tensor([13, 5])
    mask = torch.arange(13) >= lengths[:, None]
    want, _ = theirs(x, x, x, key_padding_mask=mask, need_weights=False)
    for options in ({"key_padding_mask": mask}, {"lengths": lengths}):
        got, _ = module(x, x, x, **options)
        assert relative_error(got[~mask], want[~mask]) < FLOAT64
        assert (got[mask] == 0).all()  # the bias of the output projection
    attention = DilatedAttention(DilatedPattern.dense())
    heads = torch.randn(2, 13, 3, 8)
    got = attention(heads, heads, heads, key_padding_mask=mask)
    assert torch.equal(got, attention(heads, heads, heads, lengths=lengths))


# --- Masks that are read once


def test_what_a_mask_stands_for_is_asked_once_a_pass(monkeypatch):
    agreed = import_module("ring_dilated_attention.torch_op.agreed")
    asked, read = [], agreed.lengths_of_mask

    def counted(*arguments):
        asked.append(1)
        return read(*arguments)

    monkeypatch.setattr(agreed, "lengths_of_mask", counted)
    query: Any = SimpleNamespace(is_cuda=True, shape=(2, 9, 4, 8), device=torch.device("cpu"))
    first, second, third = object(), object(), object()
    mask = torch.arange(9) >= torch.tensor([[4], [9]])

    def check(layer, length, asks, mask=mask, layout=None):
        asked.clear()
        assert padding(layer, mask, query, layout, None) == {"lengths": [length, 9]}
        assert len(asked) == asks

    check(first, 4, 1)
    check(second, 4, 0)
    check(third, 4, 1, mask.clone())
    mask.data[0, 3:] = True  # is not counted: the next pass sees it
    check(third, 4, 0)
    check(first, 3, 1)
    check(second, 3, 0, layout=None)
    check(second, 3, 1, layout=SequenceLayout.zigzag(9, 1))
    check(third, 3, 0, layout=SequenceLayout.zigzag(9, 1))
    mask[0, 2:] = True  # by a view: its version is that of the mask
    check(object(), 2, 1, layout=SequenceLayout.zigzag(9, 1))
    agreed.KNOWN_LENGTHS.clear()  # as backward does
    check(object(), 2, 1)
    with torch.inference_mode():  # where no write is counted
        mask = torch.arange(9) >= torch.tensor([[4], [9]])
        for layer in (first, second):
            check(layer, 4, 1, mask)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_layers_do_not_wait_for_a_mask_again():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    query = torch.randn(2, 40, 4, 16, device="cuda")
    mask = torch.arange(40, device="cuda") >= torch.tensor([[40], [9]], device="cuda")

    def call(layer):
        given = padding(layer, mask, query, None, None)
        return dilated_attention(query, query, query, PATTERN, **given)

    layers = [object(), object()]
    for filled in (9, 7):
        mask.data[1, filled:] = True
        first = call(layers[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = call(layers[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        want = dilated_attention(query, query, query, PATTERN, lengths=[40, filled])
        assert torch.equal(first, want)
        assert torch.equal(again, want)


def test_a_rank_does_not_refuse_a_mask_by_itself():
    """`dilated_attention` refuses it on every rank; one process has nobody to tell."""
    query: Any = SimpleNamespace(is_cuda=True, shape=(2, 6, 4, 8), device=torch.device("cpu"))
    for mask in ([[False]], torch.zeros(2, 6), torch.zeros(2, 5, dtype=torch.bool)):
        wrong: Any = mask
        attempt_of_rank = partial(padding, None, wrong, query, None)
        given = run_loopback(2, attempt_of_rank)
        assert all(each["key_padding_mask"] is wrong for each in given)
        with pytest.raises((TypeError, ValueError), match="key_padding_mask must"):
            padding(None, wrong, query, None, None)


def test_masks_are_not_captured(monkeypatch):
    """Lengths would be those of the capture in every replay."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    query, mask = torch.randn(1, 9, 2, 8), torch.zeros(1, 9, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="key_padding_mask cannot be captured in a CUDA graph"):
        dilated_attention(query, query, query, PATTERN, key_padding_mask=mask)


# --- Many documents


def mixed(length, count, seed=0):
    return [0, *sorted(Random(seed).sample(range(1, length), count - 1)), length]


def tiles_of_documents(count):
    """How many tiles and packed tiles documents take."""
    layout, documents = SequenceLayout.contiguous(262_144, 1), mixed(262_144, count)
    plan = plan_attention(LONGNET, layout, is_causal=True, num_heads=12, documents=documents)
    return sum(len(group.single) + len(group.packed) for group in plan.rank(0).local_groups)


@pytest.mark.slow
def test_planning_thousands_of_documents_is_little_work():
    """Some 35 function calls for each: about 20 ms. Branches longer than all share them."""
    calls, tiles = count_calls(tiles_of_documents, 2048)
    assert calls < 40 * 2048
    assert tiles < 300


@pytest.mark.parametrize("is_causal", [False, True])
def test_cells_of_packed_tiles(is_causal):
    """Those of the same tiles one by one."""
    plan = plan_attention(
        PATTERN,
        SequenceLayout.contiguous(400, 1),
        is_causal=is_causal,
        num_heads=4,
        documents=mixed(400, 50),
    )
    groups = plan.rank(0).local_groups
    assert sum(len(group.packed) for group in groups) > 3
    sizes: dict[str, Any] = {
        "batch": 2,
        "heads_per_kv": 3,
        "block_m": 4,
        "block_n": 8,
        "device": "cpu",
    }
    for group in groups:
        got = build_cells(group.single, group.packed, **sizes)
        want = build_cells(group.tiles, **sizes)
        assert sorted(got.table.tolist()) == sorted(want.table.tolist())
        assert len(got.query_programs) == len(want.query_programs)
        assert (got.is_causal, got.reach) == (is_causal, want.reach)
    with pytest.raises(ValueError, match="all causal or none"):
        build_cells([group.tiles[0]._replace(is_causal=not is_causal)], group.packed, **sizes)


@pytest.mark.parametrize("longest", [0, 3, 10**9])
def test_splitting_packed_tiles(longest):
    plan = plan_attention(
        PATTERN, SequenceLayout.contiguous(400, 1), is_causal=False, documents=mixed(400, 50)
    )
    (many,) = plan.rank(0).local_groups[0].packed
    short, long = many.split(longest)
    assert all(tile.queries.length <= longest for tile in short.tiles())
    assert all(tile.queries.length > longest for tile in long.tiles())
    assert sorted([*short.tiles(), *long.tiles()]) == sorted(TileGroup((), (many,)).tiles)


@pytest.mark.parametrize("name", ["documents", "lengths", "key_padding_mask"])
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_would_keep_the_numbers(name, is_layer):
    numbers = {
        "documents": torch.tensor([0, 5, 12]),
        "lengths": torch.tensor([12, 7]),
        "key_padding_mask": torch.arange(12) >= torch.tensor([[12], [7]]),
    }[name]
    layer = MultiheadDilatedAttention(16, 2, segment_lengths=[4], dilation_rates=[1])

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, rows, given):
            if is_layer:
                return self.layer(rows, rows, rows, **{name: given})[0]
            rows = rows.unflatten(-1, (2, 8))
            return dilated_attention(rows, rows, rows, PATTERN, **{name: given})

    with pytest.raises(TypeError, match=f"torch.jit.trace would keep the numbers of {name}"):
        torch.jit.trace(Module(), (torch.randn(2, 12, 16), numbers))
