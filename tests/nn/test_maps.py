"""Attention maps of a slide encoder, against the dense softmax of its layers."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.small_models import cohort, encoder

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn.slides import PackedSlides, Slide

KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "gigapath": {"head_offsets": "blocked", "zero_keys": True, "branch_gradients": "detached"},
    "chunks": {"chunk_rows": 7},
}


def dense(query, key, pattern):
    """All weights of the softmax, (batch, heads, queries, keys): each value has a 1 of its own."""
    length, scale = query.shape[1], query.shape[3] ** -0.5
    query, key = (torch.nn.functional.pad(x, (0, length)) for x in (query, key))
    value = torch.zeros_like(key)
    value[..., :length] = torch.eye(length, dtype=key.dtype)[:, None]
    out, _ = reference_attention(query, key, value, pattern, scale=scale)
    return out[..., :length].transpose(1, 2)


def by_matrices(model, slide):
    """received, from_cls and rollout of one slide, of the matrices of its layers."""
    matrices = []

    def note(attention, inputs, kwargs, output):
        query, key, _ = attention.project(*inputs)
        matrices.append(dense(query, key, attention.pattern))

    hooks = [x.attention.register_forward_hook(note, with_kwargs=True) for x in model.blocks]
    rows, model.chunk_rows = model.chunk_rows, None  # hooks and chunks exclude each other
    model(slide.features[None], slide.coordinates[None])
    model.chunk_rows = rows
    for hook in hooks:
        hook.remove()
    product = torch.eye(len(slide.features) + 1, dtype=torch.float64)
    for matrix in matrices:
        product = (matrix.mean(1) + torch.eye(matrix.shape[-1], dtype=torch.float64)) / 2 @ product
    received = torch.stack([x.sum(2) for x in matrices])
    from_cls = torch.stack([x[:, :, 0] for x in matrices])
    return received[..., 1:], from_cls[..., 1:], product[:, 0, 1:]


def assert_equal_maps(maps, expected):
    for got, want in zip((maps.received, maps.from_cls, maps.rollout), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_maps_are_those_of_the_matrices(kind):
    model = encoder(**KINDS[kind])
    slides = cohort([23, 0, 1, 40])
    expected = [by_matrices(model, x) for x in slides]
    for slide, want in zip(slides, expected, strict=True):
        given = slide.features[None], slide.coordinates[None]
        encoded, maps = model(*given, maps=True)
        assert_equal_maps(maps, want)
        assert torch.equal(encoded.cls, model(*given).cls)
    whole = PackedSlides.of(slides)
    _, maps = model(whole.features, whole.coordinates, documents=whole.documents, maps=True)
    for (start, stop), want in zip(pairwise(whole.documents), expected, strict=True):
        tiles = slice(start, stop)
        parts = (x[..., tiles] for x in (maps.received, maps.from_cls, maps.rollout))
        assert_equal_maps(type(maps)(*parts), want)


@pytest.mark.parametrize("ranks", [2, 3])
@torch.no_grad()
def test_ranks_have_the_maps_of_their_tiles(ranks):
    model = encoder(**KINDS["gigapath"])
    (slide,) = cohort([37])
    layout = SequenceLayout.zigzag(38, ranks)
    expected = by_matrices(model, slide)

    @torch.no_grad()
    def rank(ends):
        mine = layout.positions(ends.rank)
        mine = mine[mine > 0] - 1
        given = slide.features[None, mine], slide.coordinates[None, mine]
        _, maps = model(*given, group=ends, layout=layout, maps=True)
        assert_equal_maps(maps, [x[..., mine] for x in expected])

    run_loopback(ranks, rank)


@torch.no_grad()
def test_padded_slides_have_the_maps_of_each():
    model = encoder()
    slides = cohort([9, 9])
    slides[1].features[4:] = 0
    features = torch.stack([x.features for x in slides])
    coordinates = torch.stack([x.coordinates for x in slides])
    _, maps = model(features, coordinates, lengths=[9, 4], maps=True)
    short = Slide("short", slides[1].features[:4], slides[1].coordinates[:4])
    want = [torch.nn.functional.pad(x, (0, 5)) for x in by_matrices(model, short)]
    found = maps.received[:, 1:], maps.from_cls[:, 1:], maps.rollout[1:]
    assert_equal_maps(type(maps)(*found), want)


def test_maps_need_no_gradients():
    (slide,) = cohort([5])
    with pytest.raises(ValueError, match="maps=True under torch"):
        encoder()(slide.features[None], slide.coordinates[None], maps=True)
