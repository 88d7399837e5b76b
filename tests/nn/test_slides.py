"""Packed slides: each as it would be alone, on any ranks; and packs of any stream."""

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.small_models import cohort, encoder

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn.slides import PackedSlides, Slide, pack

TORCHSCALE = {"head_offsets": "blocked", "zero_keys": True, "branch_gradients": "detached"}
GIGAPATH: dict[str, Any] = {**TORCHSCALE, "grid_positions": True, "pooled_norm_eps": 1e-6}
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "gigapath": GIGAPATH,
    "mean": {**GIGAPATH, "pooling": "mean"},
    "chunks": {"checkpoint": "keep_attention", "chunk_rows": 7, "pooling": "mean"},
}
SIZES = {
    "empty ones": [0, 5, 0, 0, 31, 1, 0],
    "random": random.Random(3).choices(range(1, 40), k=6),
    "one": [23],
    "none": [0],
}


def loss_of(encoded, own=slice(None)):
    """Of these slides, so that each has another weight."""
    weights = torch.arange(1, 100, dtype=torch.float64)[own, None]
    losses = (weights * encoded.cls.square()).sum() + (weights * encoded.layers.sin()).sum()
    return losses + encoded.tiles.sin().sum()


def one_by_one(model, slides):
    """The vectors, tiles and layers of all slides, and the gradients of their losses."""
    found, losses = [], []
    for number, x in enumerate(slides):
        encoded = model(
            x.features[None], x.coordinates[None], tile_size=x.tile_size, all_layers=True
        )
        found.append((encoded.cls[:, 0], encoded.tiles, encoded.layers[:, :, 0]))
        losses.append(loss_of(encoded, slice(number, number + 1)))
    cls, tiles, layers = map(torch.cat, zip(*found, strict=True), (0, 1, 1))
    return (cls, tiles, layers), gradients_of(model, sum(losses))


def gradients_of(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_alike(found, expected):
    """Of results, and of gradients, some of which are 0 but for rounding."""
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        apart = (got - want).abs().max() if want.numel() else 0
        assert apart < 1e-11 or relative_error(got, want) < 1e-11


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_slides_are_encoded_as_each_alone(kind, sizes):
    model, slides = encoder(**KINDS[kind]), cohort(sizes)
    expected, gradients = one_by_one(model, slides)
    whole = PackedSlides.of(slides)
    for documents in (whole.documents, torch.tensor(whole.documents, dtype=torch.int32)):
        encoded = model(
            whole.features,
            whole.coordinates,
            documents=documents,
            tile_size=whole.tile_size,
            all_layers=True,
        )
        assert_alike(encoded, expected)
        assert_alike(gradients_of(model, loss_of(encoded, slice(len(slides)))), gradients)


def shards(layout, documents, rank):
    """The tiles, and the slides of the class tokens, that a rank holds."""
    starts = [border + slide for slide, border in enumerate(documents)]
    held = layout.positions(rank).tolist()
    tiles = [p - sum(start <= p for start in starts[:-1]) for p in held if p not in starts[:-1]]
    return tiles, [slide for slide, start in enumerate(starts[:-1]) if start in held]


def backwards(length, ranks):
    """The last positions on the first rank; the last rank has the first ones behind others."""
    cuts = [length * part // (ranks + 1) for part in range(ranks + 2)]
    *others, second, first = reversed(list(pairwise(cuts)))
    return SequenceLayout([*([each] for each in others), [second, first]])


LAYOUTS: dict[str, Any] = {
    "contiguous": lambda length, ranks: None,
    "zigzag": SequenceLayout.zigzag,
    "backwards": backwards,
    "empty ranks": lambda length, ranks: SequenceLayout([[(0, length)], *[[]] * (ranks - 1)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["exact", "gigapath", "mean"])
def test_ranks_share_packed_slides(kind, ranks, layout):
    model = encoder(**KINDS[kind])
    slides = cohort([7, 0, 1, *random.Random(ranks).choices(range(1, 30), k=3)])
    whole = PackedSlides.of(slides)
    positions = whole.documents[-1] + len(slides)
    given = LAYOUTS[layout](positions, ranks)
    held = given or SequenceLayout.contiguous(positions, ranks)
    (cls, tiles, layers), gradients = one_by_one(model, slides)

    def run(ends):
        own, (rows, here) = copy.deepcopy(model), shards(held, whole.documents, ends.rank)
        encoded = own(
            whole.features[:, rows],
            whole.coordinates[:, rows],
            documents=whole.documents,
            tile_size=whole.tile_size,
            all_layers=True,
            group=ends,
            layout=given,
        )
        assert_alike(encoded, (cls[here], tiles[:, rows], layers[:, here]))
        return gradients_of(own, loss_of(encoded, here))

    found = run_loopback(ranks, run)
    assert_alike([sum(each) for each in zip(*found, strict=True)], gradients)


def test_a_slide_in_a_pack_sees_no_other():
    """Nor does what is broken in one spoil the others."""
    model, slides = encoder(pooling="mean"), cohort([20, 9, 13])
    whole = PackedSlides.of(slides)
    whole.features[:, 20:29] = torch.nan
    cls, tiles, _ = model(whole.features, whole.coordinates, documents=whole.documents)
    assert cls.isnan().any(1).tolist() == [False, True, False]
    assert not tiles[:, :20].isnan().any()


def test_slides_of_a_batch_have_tile_sizes_of_their_own():
    model, slides = encoder(), cohort([17, 17, 17])
    stacked = (torch.stack([getattr(x, n) for x in slides]) for n in ("features", "coordinates"))
    encoded = model(*stacked, tile_size=[x.tile_size for x in slides])
    for number, x in enumerate(slides):
        alone = model(x.features[None], x.coordinates[None], tile_size=x.tile_size)
        assert relative_error(encoded.cls[number], alone.cls[0]) < 1e-11


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"documents": [0, 5, 11]}, ValueError, r"rise from 0 to 12; got \(0, 5, 11\)"),
        ({"documents": [0, 7, 5, 12]}, ValueError, "documents must be the borders"),
        ({"documents": [1, 12]}, ValueError, "documents must be the borders"),
        ({"documents": [12]}, ValueError, "documents must be the borders"),
        ({"documents": [0, 5.0, 12]}, TypeError, "each of documents"),
        (
            {"documents": [0, 5, 12], "layout": SequenceLayout.contiguous(13, 1)},
            ValueError,
            r"rise from 0 to 11, the positions of the layout without 2 class tokens; got",
        ),
        ({"documents": [0, 5, 12], "lengths": [12]}, ValueError, "give documents alone"),
        ({"documents": [0, 5, 12], "tile_size": [1.0]}, ValueError, r"2 slides; got \[1.0\]"),
        (
            {"documents": [0, 5, 12], "tile_size": [1.0, 0]},
            ValueError,
            "tile_size must be a number",
        ),
        ({"tile_size": {256}}, TypeError, "set"),
        ({"tile_size": -3}, ValueError, "above 0, or one for each of 1 slides; got -3"),
        ({"tile_size": torch.nan}, ValueError, "above 0, or one for each of 1 slides; got nan"),
    ],
)
def test_calls_that_are_refused(given, kind, message):
    (x,) = cohort([12])
    with pytest.raises(kind, match=message):
        encoder()(x.features[None], x.coordinates[None], **given)


def test_a_batch_of_packs_and_padded_means_are_refused():
    x = PackedSlides.of(cohort([12]))
    twice = x.features.expand(2, -1, -1), x.coordinates.expand(2, -1, -1)
    with pytest.raises(ValueError, match=r"packed slides must be a batch of 1; got .* batch 2"):
        encoder()(*twice, documents=x.documents)
    with pytest.raises(ValueError, match="pack the slides without padding"):
        encoder(pooling="mean")(*twice, lengths=[12, 3])


def test_another_number_of_tiles_is_an_error_on_every_rank():
    whole, layout = PackedSlides.of(cohort([12, 7])), SequenceLayout.contiguous(21, 2)

    def run(ends):
        rows, _ = shards(layout, whole.documents, ends.rank)
        rows = rows[ends.rank :]
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            encoder()(
                whole.features[:, rows],
                whole.coordinates[:, rows],
                documents=whole.documents,
                group=ends,
                layout=layout,
            )
        return str(caught.value)

    first, second = run_loopback(2, run)
    assert "SlideEncoder was refused on other ranks: rank 1" in first
    assert "gives this rank 9 tiles beside the class tokens of 1 slides; got 8" in second


def test_ranks_that_want_other_layers_are_refused():
    (x,) = cohort([12])

    def run(ends):
        rows = slice(0, 6) if ends.rank == 0 else slice(6, 12)
        with pytest.raises(
            ValueError, match=r"shape is \(4, 1, 1, 32\) on rank 0, \(1, 1, 1, 32\)"
        ):
            encoder(pooling="mean")(
                x.features[None, rows],
                x.coordinates[None, rows],
                group=ends,
                layout=SequenceLayout.contiguous(13, 2),
                all_layers=ends.rank == 0,
            )

    run_loopback(2, run)


# --- packs


def names_of(packs):
    return [x.names for x in packs]


def test_packs_keep_the_order_of_the_slides():
    slides = cohort([5, 4, 9, 30, 1, 0])
    packs = list(pack(slides, 10))
    assert [x.documents for x in packs] == [(0, 5, 9), (0, 9), (0, 30), (0, 1, 1)]
    names = [name for x in packs for name in x.names]
    assert names == [x.name for x in slides]
    assert packs[0].tile_size == (256.0, 448.5)
    assert torch.equal(packs[0].features[0, 5:], slides[1].features)
    assert torch.equal(packs[3].coordinates[0], slides[4].coordinates)


def test_packs_by_size_leave_less_empty():
    sizes = random.Random(0).choices(range(1, 60), k=200)
    by_size = list(pack(cohort(sizes), 100, buffer=200))
    ordered = list(pack(cohort(sizes), 100))
    assert sorted(name for x in by_size for name in x.names) == sorted(
        x.name for x in cohort(sizes)
    )
    assert len(by_size) <= sum(sizes) / 100 / 0.97
    assert len(by_size) < len(list(pack(cohort(sizes), 100, buffer=8))) < len(ordered)


def test_a_stream_is_read_as_needed():
    read = []

    def stream():
        for x in cohort([6, 6, 6]):
            read.append(x.name)
            yield x

    packs = pack(stream(), 10)
    assert not read
    next(packs)
    assert len(read) == 2


def test_a_pack_goes_to_another_device():
    (x,) = pack(cohort([3, 2]), 10)
    moved = x.to("meta")
    assert moved.features.is_meta
    assert moved.coordinates.is_meta
    assert moved.documents == (0, 3, 5)


@pytest.mark.parametrize("wrong", ["features", "coordinates"])
def test_slides_that_do_not_fit_are_named(wrong):
    first, other = cohort([3, 2])
    changed = {**vars(other), wrong: getattr(other, wrong)[:, :1]}
    with pytest.raises(ValueError, match=r"slides of a pack .* of slide 1, beside \(3, 12\)"):
        list(pack([first, Slide(**changed)], 10))
    with pytest.raises(ValueError, match="most_tiles must be >= 1, got 0"):
        pack([], 0)
