"""Prov-GigaPath's and LongViT's models on ranks: as on one process, or refused.

With `GIGAPATH` in the environment, the path of a checkout of prov-gigapath, its own model runs in
the place of the stand-in.
"""

import copy
import functools
import threading
import types
from typing import Any

import pytest
import torch
from support.bounds import EXACT
from support.slide_models import (
    LongNetViT,
    LongViTForTCGAClassification,
    gigapath,
    initialized,
    slide,
    small,
)
from support.tolerances import rounding_bound
from support.worlds import world
from torch import nn
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.gigapath import shard_slide_encoder
from ring_dilated_attention.integrations.torchscale import replace_dilated_attention, set_layout


def loss_of(outcomes, used=(-1,)):
    weight = torch.linspace(-1, 1, outcomes[0].shape[-1], dtype=outcomes[0].dtype)
    return sum((outcomes[index] * weight).sum().square() for index in used)


def gradients_of(model) -> dict[str, Any]:
    """Of every parameter; None for those that the loss does not depend on."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def on_one_process(model, *inputs, used=(-1,), **options):
    outcomes = model(*inputs, **options)
    loss_of(outcomes, used).backward()
    return [each.detach() for each in outcomes], gradients_of(model)


def on_ranks(model, ranks, *inputs, used=(-1,), **options):
    """Each rank's outcomes, and the mean of their gradients."""

    def run(ends):
        own = copy.deepcopy(model)
        assert shard_slide_encoder(own, mesh=ends) == len(own.encoder.layers)
        return on_one_process(own, *inputs, used=used, **options)

    ran = run_loopback(ranks, run)
    mean = {}
    for name in ran[0][1]:
        found = [gradients[name] for _, gradients in ran]
        missing = [each is None for each in found]
        assert all(missing) or not any(missing), name
        mean[name] = None if missing[0] else sum(found) / ranks
    return [outcomes for outcomes, _ in ran], mean


def assert_ranks(model, ranks, *inputs, **options):
    """Every rank has the whole embedding and its share of the gradients; returns those."""
    expected, gradients = on_one_process(copy.deepcopy(model), *inputs, **options)
    outcomes, mean = on_ranks(model, ranks, *inputs, **options)
    for found in outcomes:
        for index, want in enumerate(expected):
            assert relative_error(found[index], want) < EXACT
            assert torch.equal(found[index], outcomes[0][index])
    assert_gradients(mean, gradients)
    return expected, gradients


def assert_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert (found[name] is None) == (want is None), name
        if want is not None:
            error = (found[name] - want).norm()
            assert error < EXACT * want.norm() or error < EXACT, (name, error / want.norm())


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize(("ranks", "tiles"), [(1, 40), (2, 40), (3, 41), (4, 2)])
def test_every_rank_has_the_embedding_and_its_share_of_the_gradients(ranks, tiles, global_pool):
    """Two ranks, `model(tiles, coords)`: with a class token on each it was 7 to 8% wrong."""
    assert_ranks(gigapath(global_pool=global_pool), ranks, *slide(tiles))


@pytest.mark.parametrize("global_pool", [False, True])
def test_embeddings_of_all_layers(global_pool):
    """Layers that the loss does not use get no gradients, as on one process."""
    model, inputs = gigapath(global_pool=global_pool), slide(37, batch=2)
    expected, gradients = assert_ranks(model, 3, *inputs, all_layer_embed=True, used=(0, 1))
    assert len(expected) == 3
    assert any(each is None for each in gradients.values())


def test_longvit_with_the_mean_of_all_patches():
    model = initialized(LongViTForTCGAClassification())
    model.encoder = model.model.encoder  # where LongNetViT has it
    assert_ranks(model, 3, torch.randn(1, 3, 20, 28, dtype=torch.float64), used=(0,))


# --- a class token on each rank


def replaced(ends, model, layout=None):
    return replace_dilated_attention(model, group=ends, layout=layout)


def test_a_class_token_without_a_layout_is_refused_on_ranks():
    message = r"class token \(cls_token\), which each of the 2 ranks would put before its shard"

    def run(ends):
        model = initialized(LongNetViT())
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=message):
            replaced(ends, model)
        assert kinds == [type(module) for module in model.modules()]
        assert replaced(ends, model, SequenceLayout.contiguous(41, 2)) == 2
        with pytest.raises(ValueError, match=message):
            set_layout(model, None)
        assert replaced(ends, initialized(LongViTForTCGAClassification())) == 2  # it has none

    run_loopback(2, run)
    run_loopback(1, lambda ends: replaced(ends, initialized(LongNetViT())))


# --- what goes wrong on some ranks is an error on all


def assert_refused(ranks, call, *messages):
    """On every rank, by the message at its place, or by the last of them."""

    def run(ends):
        with pytest.raises(ValueError, match=messages[min(ends.rank, len(messages) - 1)]):
            call(ends)

    run_loopback(ranks, run)


def sharded(ends, global_pool=False, **options):
    model = gigapath(global_pool=global_pool)
    shard_slide_encoder(model, group=ends, **options)
    return model


def encoded(ends):
    """The encoder called by itself, on the second rank with a mask."""
    tokens = torch.zeros(1, 5, 32, dtype=torch.float64)
    given = torch.zeros(1, 5, dtype=torch.bool) if ends.rank else None
    sharded(ends).encoder(None, token_embeddings=tokens, encoder_padding_mask=given)


OTHER_CALLS: dict[str, tuple[Any, ...]] = {
    "lengths": (
        lambda ends: sharded(ends)(*slide(40 + ends.rank)),
        r"shape is \(1, 41, \d+\) on rank 0, \(1, 42, \d+\) on rank 1",
    ),
    "pools": (
        lambda ends: sharded(ends, global_pool=ends.rank == 1)(*slide(40)),
        "global_pool is False on rank 0, True on rank 1",
    ),
    "no tiles": (
        lambda ends: sharded(ends, global_pool=True)(*slide(0)),
        "of a slide with at least one tile; got",
    ),
    "mask": (
        encoded,
        "was refused on other ranks: rank 1",
        "takes token_embeddings .* got encoder_padding_mask",
    ),
}


def test_different_slides_are_refused():
    """A sampler that shares slides out among the ranks of a group, or that shuffles tiles."""
    features, coordinates = slide(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))

    def another_order(ends):
        shuffled = order if ends.rank == 2 else slice(None)
        sharded(ends)(features[:, shuffled], coordinates[:, shuffled])

    message = "embed the tiles of this slide differently than rank 0"
    assert_refused(3, lambda ends: sharded(ends)(*slide(40, seed=1 + (ends.rank == 2))), message)
    assert_refused(3, another_order, message)


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_are_refused_on_every_rank(name):
    assert_refused(2, *OTHER_CALLS[name])


# --- randomness


def dropped_rows(rank, ranks):
    """Which of its rows dropout sets to 0, on a rank that was seeded as the others were."""
    model = initialized(LongNetViT(dropout=0.5))
    rows = []
    model.encoder.layers[0].drop.register_forward_hook(lambda _, __, out: rows.append(out == 0))
    shard_slide_encoder(model, group=world())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = model(*slide(39))[0], model(*slide(39))[0]
    moved = not torch.equal(state, torch.get_rng_state())
    rows = [row.tolist() for row in rows]
    return rows, moved, not torch.equal(first, second), torch.rand(()).item()


def test_dropout_draws_other_numbers_on_each_rank():
    (ours, *state), (others, *other_state) = run_ranks(dropped_rows, 2)
    assert ours[0] != others[0]
    assert ours[0] != ours[2]  # nor twice the same
    assert state == other_state
    assert state[:2] == [True, True]


# --- with what else is done to models


def random_steps(rank, ranks):
    """Gradients with dropout and stochastic depth, recomputed or not, from the same seeds."""
    found = []
    for use_reentrant in (None, False, True):
        model = initialized(LongNetViT(drop_path_rate=0.3, dropout=0.3))
        shard_slide_encoder(model, group=world())
        if use_reentrant is not None:
            model.encoder.through = lambda *each, way=use_reentrant: checkpoint(
                *each, use_reentrant=way
            )
        torch.manual_seed(7)
        found.append(on_one_process(model, *slide(40)))
    for outcomes, gradients in found[1:]:
        assert torch.equal(outcomes[0], found[0][0][0])
        assert_gradients(gradients, found[0][1])


def test_activation_checkpointing():
    """Layers that are recomputed drop the same, and have the same gradients."""
    run_ranks(random_steps, 2)


def test_a_layer_recomputed_for_another_slide_is_an_error():
    """Two forward passes before backward, checkpointed: the layout of the first one is gone."""

    def run(ends):
        model = initialized(LongNetViT())
        shard_slide_encoder(model, group=ends)
        model.encoder.through = lambda *each: checkpoint(*each, use_reentrant=False)
        first = model(*slide(40))
        model(*slide(60))
        with pytest.raises(ValueError, match=r"the layout gives rank|refused on other ranks"):
            loss_of(first).backward()

    run_loopback(2, run)


def compiled(rank, ranks):
    """Slides of two lengths, the second of one that no graph is for; a layer takes seconds."""
    model = gigapath()
    model.encoder.layers = model.encoder.layers[:1]
    alone = copy.deepcopy(model)
    shard_slide_encoder(model, group=world())
    model.compile(backend="aot_eager")
    found = []
    for tiles in (40, 23):
        for each in (model, alone):
            each.zero_grad()
        (want, expected), (outcomes, gradients) = (
            on_one_process(each, *slide(tiles)) for each in (alone, model)
        )
        assert relative_error(outcomes[0], want[0]) < EXACT
        found.append((gradients, expected))
    return found


def test_a_sharded_model_compiles():
    ran = run_ranks(compiled, 2)
    for ours, others in zip(*ran, strict=True):
        mean = {n: x if x is None else (x + others[0][n]) / 2 for n, x in ours[0].items()}
        assert_gradients(mean, ours[1])


def test_half_precision():
    """As far from float64 as the same model is on one process, at most twice."""
    model, (features, coordinates) = gigapath(global_pool=True), slide(40)
    want = model(features, coordinates)[0]
    model.float()

    def run(ends):
        own = copy.deepcopy(model)
        if ends is not None:
            shard_slide_encoder(own, group=ends)
        with torch.autocast("cpu", torch.bfloat16):
            return relative_error(own(features.float(), coordinates)[0], want)

    assert max(run_loopback(2, run)) < 2 * run(None)


def test_copies_state_dicts_and_one_process_again():
    model = gigapath()
    names = list(model.state_dict())
    want = model(*slide(40))[0]

    def run(ends):
        own = copy.deepcopy(model)
        shard_slide_encoder(own, group=ends)
        assert list(own.state_dict()) == names
        twin = copy.deepcopy(own)
        nn.init.zeros_(own.patch_embed.proj.weight)
        assert twin.encoder is not own.encoder
        out = twin(*slide(40))[0]
        assert shard_slide_encoder(twin) == 2
        assert "forward" not in vars(twin.encoder)
        return out, twin(*slide(40))[0]

    for on_two, alone in run_loopback(2, run):
        assert relative_error(on_two, want) < EXACT
        assert relative_error(alone, want) < EXACT


@pytest.mark.parametrize("wrap", [functools.partial, torch.autocast("cpu", torch.bfloat16)])
def test_a_forward_in_a_wrapper_is_the_published_one(wrap):
    """As accelerate, fairscale's checkpoint_wrapper and torch.compile put it into a model."""
    model = gigapath()
    model.forward = wrap(model.forward)
    want = model(*slide(9))[0]
    assert shard_slide_encoder(model) == 2
    error = EXACT if wrap is functools.partial else rounding_bound(torch.bfloat16, 64)
    assert relative_error(model(*slide(9))[0], want) < error


def test_a_projection_can_be_trained_alone():
    """A frozen encoder, as in linear probing."""
    model = gigapath()
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    assert_ranks(model, 2, *slide(40))


# --- refusals


class Reads(LongNetViT):
    def forward(self, x, coords, all_layer_embed=False):
        return super().forward(x, coords, all_layer_embed)


def reads_all(self, x, coords):
    """Pools by a maximum over the tiles, of which a sharded encoder returns one or none."""
    x = self.patch_embed(x)
    return self.encoder(src_tokens=None, token_embeddings=x)["encoder_out"].amax(1)


def with_method(forward):
    model = initialized(LongNetViT())
    model.forward = types.MethodType(forward, model)
    return model


def model_with(**attributes):
    model = initialized(LongNetViT())
    for name, value in attributes.items():
        target, _, last = name.rpartition("__")
        setattr(model.get_submodule(target.replace("__", ".")), last, value)
    return model


REFUSED: dict[str, Any] = {
    "no model": (lambda: 3, r"model must be a torch\.nn\.Module, got 3"),
    "nothing": (lambda: nn.Linear(2, 2), "holds no LongNetViT .*; got Linear"),
    "a subclass": (Reads, r"has .*Reads\.forward, .* only the rows that LongNetViT\.forward reads"),
    "a method": (
        lambda: with_method(reads_all),
        "has reads_all, .* only the rows that LongNetViT.forward reads",
    ),
    "forward": (lambda: model_with(encoder__forward=print), "forward has been replaced"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_models_that_are_refused(build, message):
    model = build()
    kinds = [type(m) for m in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises((TypeError, ValueError), match=message):
        shard_slide_encoder(model)
    assert not kinds or kinds == [type(m) for m in model.modules()]


@pytest.mark.parametrize(("tiles", "sizes"), [(1001, [504, 498]), (700, [351, 350])])
def test_shards_of_long_slides_begin_at_multiples_of_the_rates(tiles, sizes):
    """Those of the model are 1, 2 and 4; shards of 351 rows would differ by more than 1%."""
    model, inputs = gigapath(), slide(tiles)
    expected = model(*inputs)[0]

    def run(ends):
        own = copy.deepcopy(model)
        shard_slide_encoder(own, group=ends)
        found = own(*inputs)[0]
        layout = own.encoder.layers[0].self_attn.layout
        return found, [layout.local_length(rank) for rank in range(2)]

    for found, own_sizes in run_loopback(2, run):
        assert own_sizes == sizes
        assert relative_error(found, expected) < EXACT


def test_stochastic_depth_is_that_of_one_process(monkeypatch):
    """The same draws on both: the same function, also the scale of what is kept."""
    model = initialized(LongNetViT(drop_path_rate=0.4))
    draws = [0.9, 0.1, 0.5, 0.3]  # those below 0.4 drop
    mine = threading.local()  # of this rank

    def draw(*shape, **options):
        mine.left = getattr(mine, "left", None) or list(draws)
        return torch.full(shape, mine.left.pop(0), dtype=torch.float64)

    def run(ends):
        own = copy.deepcopy(model)
        shard_slide_encoder(own, group=ends)
        return own(*slide(40))[0]

    monkeypatch.setattr(torch, "rand", draw)
    want = model(*slide(40))[0]
    assert all(relative_error(out, want) < EXACT for out in run_loopback(2, run))


def test_options_reach_the_attention():
    model = initialized(LongNetViT(args=small()))
    assert shard_slide_encoder(model, branch_gradients="exact", zero_keys=False) == 2
    attention = model.encoder.layers[0].self_attn
    assert attention.branch_gradients == "exact"
    assert not attention.pattern.zero_keys
    with pytest.raises(TypeError, match="quick"):
        shard_slide_encoder(initialized(LongNetViT()), quick=True)


def test_layers_that_mix_rows_are_refused_on_ranks():
    """On one process experts see all rows; the message names the layer by its path."""
    model = model_with(encoder__layers__0__is_moe_layer=True)
    assert shard_slide_encoder(model) == 2
    message = "layers.0, a Layer, is a layer of experts"
    assert_refused(2, lambda ends: shard_slide_encoder(model, group=ends), message)
