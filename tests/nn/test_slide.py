"""The slide encoder: the same on any ranks, in any chunks, with any checkpointing."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.small_models import encoder, own_tiles, slide, small
from support.tolerances import assert_close_to
from support.torchscale_definition import torchscale_by_definition
from torch import nn
from torch._dynamo.utils import counters

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig, sincos_positions
from ring_dilated_attention.nn.modules import LayerNorm
from ring_dilated_attention.nn.slide import EncoderBlock

TORCHSCALE = {"head_offsets": "blocked", "zero_keys": True, "branch_gradients": "detached"}


def assert_alike(found, expected, error=1e-9):
    """Gradients of parameters; some are 0 but for rounding."""
    for got, want in zip(found, expected, strict=True):
        assert relative_error(got, want) < error or (got - want).abs().max() < error


def step(model, features, coordinates, **options):
    """Loss and gradients of this rank; both have to be added up over ranks."""
    encoded = model(features, coordinates, **options)
    loss = encoded.cls.square().sum() + encoded.tiles.sin().sum()
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("options", [{}, TORCHSCALE], ids=["exact", "torchscale"])
def test_it_is_what_it_says_it_is(options):
    """Written down once more, in plain torch, from the definitions."""
    segments, rates = (6, 17, 29, 41), (1, 2, 4, 3)
    model = encoder(num_layers=1, segment_lengths=segments, **options)
    features, coordinates = slide()
    (block,) = model.blocks
    positions = sincos_positions(coordinates / 256, 32)
    x = model.embedding(features) + positions
    x = torch.cat([model.cls_token, x], 1)

    def norm(module, y):
        return F.layer_norm(y, module.normalized_shape, module.weight, module.bias, 1e-5)

    y = norm(block.attention_norm, x)
    a = block.attention
    q, k, v = (p(y).unflatten(-1, (4, 8)) for p in (a.q_proj, a.k_proj, a.v_proj))
    if options:
        out, _ = torchscale_by_definition(q, k, v, segments, rates)
    else:
        out, _ = reference_attention(q, k, v, DilatedPattern(segments, rates))
    x = x + a.out_proj(norm(a.norm, out.flatten(2)))
    inner = F.gelu(block.expand(norm(block.mlp_norm, x)))
    x = norm(model.norm, x + block.contract(norm(block.inner_norm, inner)))
    encoded = model(features, coordinates)
    assert relative_error(encoded.cls, x[:, :1]) < 1e-12
    assert relative_error(encoded.tiles, x[:, 1:]) < 1e-12
    parameters = list(model.parameters())
    expected = torch.autograd.grad(x[:, :1].square().sum() + x[:, 1:].sin().sum(), parameters)
    _, gradients = step(model, features, coordinates)
    assert_alike(gradients, expected, 1e-10)


@pytest.mark.parametrize(("most", "error"), [(2**20, 2e-7), (2**30, 5e-7)])
def test_sincos_of_large_coordinates(most, error):
    coordinates = torch.randint(-most, most, (500, 2), generator=torch.Generator().manual_seed(0))
    got = sincos_positions(coordinates, 768)
    frequencies = 10_000.0 ** (-np.arange(192) / 192)
    angles = coordinates.double().numpy()[..., None] * frequencies
    want = np.concatenate((np.sin(angles), np.cos(angles)), -1).reshape(500, 768)
    assert np.abs(got.double().numpy() - want).max() < error
    with pytest.raises(ValueError, match="embed_dim must be a multiple of 4; got 6"):
        sincos_positions(coordinates, 6)


LAYOUTS = {
    "uneven": SequenceLayout([[(0, 23)], [(23, 24)], [(24, 41)]]),
    "zigzag": SequenceLayout.zigzag(41, 3),
    "an empty rank": SequenceLayout([[(0, 30)], [], [(30, 41)]]),
    "class token behind tiles": SequenceLayout([[(9, 20)], [(30, 41), (0, 9)], [(20, 30)]]),
    "nothing but the class token": SequenceLayout([[(0, 1)], [(1, 20)], [(20, 41)]]),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, TORCHSCALE], ids=["exact", "torchscale"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_ranks_encode_alike(name, options):
    layout, model = LAYOUTS[name], encoder(**options)
    features, coordinates = slide(batch=2)
    encoded = model(features, coordinates)
    want, expected = step(model, features, coordinates)

    def run(ends):
        own = copy.deepcopy(model)
        shard = own_tiles(layout, ends.rank, features, coordinates)
        result = own(*shard, group=ends, layout=layout)
        return result, step(own, *shard, group=ends, layout=layout)

    ran = run_loopback(3, run)
    holder = layout.pieces[0].rank
    for rank, (result, _) in enumerate(ran):
        assert result.cls.shape == (2, int(rank == holder), 32)
        (tiles,) = own_tiles(layout, rank, encoded.tiles)
        assert tiles.numel() == 0 or relative_error(result.tiles, tiles) < 1e-11
    assert relative_error(ran[holder][0].cls, encoded.cls) < 1e-11
    assert relative_error(sum(loss for _, (loss, _) in ran), want) < 1e-11
    by_rank = [gradients for _, (_, gradients) in ran]
    assert_alike(map(sum, zip(*by_rank, strict=True)), expected, 1e-10)


@pytest.mark.parametrize("chunk_rows", [None, 7])
@pytest.mark.parametrize("checkpoint", ["none", "full", "keep_attention"])
def test_chunks_and_checkpoints_change_nothing(checkpoint, chunk_rows):
    for options in ({}, TORCHSCALE):
        want, expected = step(encoder(**options), *slide())
        model = encoder(checkpoint=checkpoint, chunk_rows=chunk_rows, **options)
        loss, gradients = step(model, *slide())
        assert relative_error(loss, want) < 1e-12
        assert_alike(gradients, expected)


def test_slides_of_a_batch_may_differ_in_length():
    model = encoder(zero_keys=True)
    features, coordinates = slide(batch=3)
    encoded = model(features, coordinates, lengths=[40, 13, 25])
    for row, count in enumerate((40, 13, 25)):
        alone = model(features[row : row + 1, :count], coordinates[row : row + 1, :count])
        assert relative_error(encoded.cls[row], alone.cls[0]) < 1e-11
        assert relative_error(encoded.tiles[row, :count], alone.tiles[0]) < 1e-11


def test_chunks_hold_a_few_tensors_a_block():
    """In chunks: the block's input, query, key, value and out, and an lse.

    Without: what every step reads, but inside of the MLP (1.5 wide) its first projection's result
    alone, of three.
    """

    def held(**options):
        sizes = {}

        def pack(tensor):
            if tensor.grad_fn is not None or not tensor.requires_grad:  # no parameters
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = encoder(num_layers=4, **options).float()
        features, coordinates = slide(tiles=999)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            encoded = model(features.float(), coordinates)
        assert encoded.cls.requires_grad
        return sum(sizes.values()) / (1000 * 32 * 4) / 4

    plain, chunked = held(), held(chunk_rows=64)
    assert chunked < 6.5 < 11 < plain < 12


@pytest.mark.parametrize("chunk_rows", [None, 8])
def test_gradients_hold_no_more_than_themselves(chunk_rows):
    """A view of a gradient of all rows keeps all of it, and DDP copies what has odd strides."""
    model = encoder(chunk_rows=chunk_rows)
    encoded = model(*slide())
    (encoded.cls.square().sum() + encoded.tiles.sin().sum()).backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        assert gradient.stride() == parameter.stride()


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_layer_norm_keeps_half_precision(options):
    norm, theirs = LayerNorm(48, **options), nn.LayerNorm(48, **options)
    for parameter in (*norm.parameters(), *theirs.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 48)
    assert torch.equal(norm(x), theirs(x))
    with torch.autocast("cpu", torch.bfloat16):
        half, wide = norm(x.bfloat16()), theirs(x.bfloat16())
        assert norm(x).dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert_close_to(half, wide)
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert_close_to(half, theirs(x))


def test_autocast():
    model = encoder().float()
    features, coordinates = slide()
    want, expected = step(model, features.float(), coordinates)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = model(features.float(), coordinates)
        assert encoded.tiles.dtype == torch.bfloat16
        loss, gradients = step(model, features.float(), coordinates)
    assert relative_error(loss, want) < 0.05
    assert all(g.dtype == torch.float32 for g in gradients)
    whole, other = (torch.cat([g.flatten() for g in gs]) for gs in (expected, gradients))
    assert relative_error(other, whole) < 0.1


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"embed_dim": 30, "num_heads": 3}, ValueError, "embed_dim must be a multiple of 4"),
        ({"tile_size": 0}, ValueError, "tile_size must be finite and above 0; got 0"),
        ({"branch_gradients": "x"}, ValueError, "branch_gradients must be one of"),
    ],
)
def test_config_refuses(changes, kind, message):
    with pytest.raises(kind, match=message):
        small(**changes)


def test_blocks_have_patterns_of_their_own():
    patterns = [DilatedPattern.window(5, 5), DilatedPattern([7, None], [2, 3], zero_keys=True)]
    defaults = {x: getattr(SlideEncoderConfig, x) for x in ("segment_lengths", "dilation_rates")}
    model, one_by_one = encoder(patterns=patterns, **defaults), encoder()
    for block, pattern in zip(one_by_one.blocks, patterns, strict=True):
        block.attention.pattern = pattern
    assert all(map(torch.equal, model(*slide()), one_by_one(*slide())))


def test_config_is_a_value_and_gigapaths_by_default():
    assert small() == small(segment_lengths=(6, 17, 29, None))
    assert hash(small()) == hash(small())
    model = SlideEncoder(SlideEncoderConfig())
    assert sum(p.numel() for p in model.blocks.parameters()) == 12 * 7_095_552


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"features": torch.zeros(1, 40, 11)}, ValueError, r"features must have shape .* 12\)"),
        ({"coordinates": torch.zeros(1, 40, 3)}, ValueError, "coordinates must have shape"),
        ({"coordinates": torch.zeros(1, 39, 2)}, ValueError, "same batch and tiles"),
        ({"coordinates": torch.zeros(1, 40, 2) * 1j}, TypeError, "got torch.complex64"),
        ({"layout": "zigzag"}, TypeError, "layout must be a SequenceLayout or None"),
        (
            {"layout": SequenceLayout.contiguous(40, 1)},
            ValueError,
            "39 tiles beside the class token; got 40. It must",
        ),
        ({"layout": SequenceLayout.contiguous(41, 2)}, ValueError, "the layout is for 2 ranks"),
        ({"lengths": [41]}, ValueError, r"lengths must lie in \[0, 40\]; got 41"),
        ({"lengths": torch.tensor([-1])}, ValueError, r"lengths must lie in \[0, 40\]; got -1"),
        ({"lengths": [40, 3]}, ValueError, r"for each of 1 rows; got \(40, 3\)"),
    ],
)
def test_forward_refuses(arguments, kind, message):
    features, coordinates = slide()
    with pytest.raises(kind, match=message):
        encoder()(**{"features": features, "coordinates": coordinates, **arguments})


def fail(rank):
    if rank:
        raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize("chunk_rows", [None, 8])
@pytest.mark.parametrize("where", ["embedding", "blocks.0.attention_norm", "blocks.1.attention"])
def test_what_fails_on_one_rank_on_the_way_to_attention_does_on_all(where, chunk_rows):
    """For want of memory, say. The next slide is encoded with that of the other rank."""
    layout, model = SequenceLayout.contiguous(41, 2), encoder(chunk_rows=chunk_rows)
    where += ".q_proj" if where.endswith("attention") else ""
    features, coordinates = slide()
    want = model(features, coordinates).tiles

    def run(ends):
        shard, own = own_tiles(layout, ends.rank, features, coordinates), copy.deepcopy(model)
        failing = own.get_submodule(where)
        handle = failing.register_forward_pre_hook(lambda *_: fail(ends.rank))
        wanted = "division by zero" if ends.rank else "dilated_attention was refused on other ranks"
        with pytest.raises((ValueError, ZeroDivisionError), match=wanted):
            own(*shard, group=ends, layout=layout)
        handle.remove()
        return own(*shard, group=ends, layout=layout).tiles

    assert relative_error(torch.cat(run_loopback(2, run), 1), want) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch 2.11
def test_an_exported_encoder_is_saved_and_loaded(tmp_path):
    model, given = encoder(), slide()
    torch.export.save(torch.export.export(model, given), tmp_path / "encoder.pt2")
    loaded = torch.export.load(tmp_path / "encoder.pt2").module()(*given)
    assert type(loaded).__name__ == "Encoded"
    for got, want in zip(loaded, model(*given), strict=True):
        assert torch.equal(got, want)


def test_a_bad_call_is_an_error_on_every_rank():
    layout = SequenceLayout.contiguous(41, 2)
    features, coordinates = slide()

    def run(ends):
        shard = own_tiles(layout, ends.rank, features, coordinates)
        if ends.rank:
            shard[0] = shard[0][:, :-1]
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            encoder()(*shard, group=ends, layout=layout)
        return str(caught.value)

    first, second = run_loopback(2, run)
    assert "SlideEncoder was refused on other ranks: rank 1" in first
    assert "same batch and tiles" in second


def assert_half(loss, gradients, want, expected):
    """A step in half precision on a GPU is one in float64, but for rounding."""
    assert relative_error(loss.cpu(), want) < 0.02
    whole, other = (torch.cat([g.flatten().cpu() for g in gs]) for gs in (expected, gradients))
    assert relative_error(other, whole) < 0.05


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # kernels that have no deterministic form say so
@pytest.mark.parametrize("options", [{}, TORCHSCALE], ids=["exact", "torchscale"])
def test_half_precision_on_a_gpu(options):
    model = encoder(
        embed_dim=64, ffn_dim=96, checkpoint="keep_attention", chunk_rows=512, **options
    )
    features, coordinates = slide(tiles=3000)
    want, expected = step(model, features, coordinates)
    model = model.float().cuda()
    features, coordinates = features.float().cuda(), coordinates.cuda()
    with torch.autocast("cuda", torch.float16):
        assert model.norm(features.new_zeros(3, 64, dtype=torch.float16)).dtype == torch.float16
        assert model(features, coordinates).tiles.dtype == torch.float16
        loss, gradients = step(model, features, coordinates)
    assert_half(loss, gradients, want, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's
def test_compiled_slides_of_changing_lengths_on_a_gpu():
    model = encoder(embed_dim=64, ffn_dim=96)
    slides = [slide(tiles=tiles) for tiles in (300, 511, 700, 1537)]
    wanted = [step(model, *each) for each in slides]
    model = model.float().cuda()
    compiled = torch.compile(model, fullgraph=True)
    for (features, coordinates), (want, expected) in zip(slides, wanted, strict=True):
        with torch.autocast("cuda", torch.float16):
            loss, gradients = step(compiled, features.float().cuda(), coordinates.cuda())
        assert_half(loss, gradients, want, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("default")])],
)
def test_one_graph_computes_packs_of_any_slides(device):
    """torch 2.11 reads borders that are a slice from the start of the whole, in code for GPUs."""
    model = encoder(embed_dim=64, ffn_dim=96)
    packs = [[300, 411, 90], [7, 0, 500, 130, 60], [611, 1, 2, 300]]
    packed = [(slide(sum(tiles)), torch.tensor([0, *tiles]).cumsum(0)) for tiles in packs]
    sizes = [torch.tensor([256.0, 448.5, 100.0, 64.0, 300.0])[: len(tiles)] for tiles in packs]
    calls = [
        (*rows, {"documents": documents, "tile_size": size})
        for (rows, documents), size in zip(packed, sizes, strict=True)
    ]
    wanted = [step(model, x, y, **options) for x, y, options in calls]
    model, on_gpu = model.float().to(device), device == "cuda"
    backend = "inductor" if on_gpu else "aot_eager"
    torch._dynamo.reset()
    counters["stats"].clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for (features, coordinates, options), (want, expected) in zip(calls, wanted, strict=True):
        with torch.autocast("cuda", torch.float16, enabled=on_gpu):
            given = features.float().to(device), coordinates.to(device)
            loss, gradients = step(compiled, *given, **options)
        if on_gpu:
            assert_half(loss, gradients, want, expected)
        else:
            assert relative_error(loss, want) < 1e-5
            assert_alike(gradients, expected, 1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_an_adapter_in_a_hook_of_the_mlp_is_trained():
    """Only plain modules are recomputed without calling them as a checkpoint would."""
    model = encoder()
    block = model.blocks[0]
    assert isinstance(block, EncoderBlock)
    adapter = nn.Linear(block.contract.in_features, block.contract.out_features).double()
    block.contract.register_forward_hook(lambda _, inputs, out: out + adapter(inputs[0]))
    model(*slide()).cls.square().sum().backward()
    for parameter in (adapter.weight, block.contract.weight, block.inner_norm.weight):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


class Dropping(nn.Module):
    """A projection with an adapter that drops some of what it reads, as those of peft do."""

    def __init__(self, projection):
        super().__init__()
        self.projection, self.dropout = projection, nn.Dropout(0.5)
        shape = projection.in_features, projection.out_features
        self.adapter = nn.Linear(*shape, dtype=torch.float64)

    def forward(self, rows):
        return self.projection(rows) + self.adapter(self.dropout(rows))


@pytest.mark.parametrize("chunk_rows", [None, 7])
@pytest.mark.parametrize("checkpoint", ["none", "full", "keep_attention"])
def test_gradients_are_those_of_the_masks_that_dropout_drew(checkpoint, chunk_rows):
    model = encoder(checkpoint=checkpoint, chunk_rows=chunk_rows)
    for block in model.blocks:
        block.contract, block.expand = Dropping(block.contract), Dropping(block.expand)
    weight = model.blocks[0].expand.adapter.weight
    towards = torch.randn_like(weight)

    def loss():
        torch.manual_seed(3)
        return model(*slide()).tiles.sin().sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-6 * towards
            ends.append(loss())
            weight -= sign * 1e-6 * towards
    assert relative_error((gradient * towards).sum(), (ends[0] - ends[1]) / 2e-6) < 1e-5


@pytest.mark.parametrize("kind", ["parameters", "tensors"])
@pytest.mark.parametrize("chunk_rows", [None, 7])
@pytest.mark.parametrize("checkpoint", ["none", "full", "keep_attention"])
def test_backward_with_other_weights_than_forward(checkpoint, chunk_rows, kind):
    """Those of functional_call are gone by then: an error where anything is computed again."""
    model, other = encoder(checkpoint=checkpoint, chunk_rows=chunk_rows), encoder(1)
    weights = dict(other.named_parameters())
    if kind == "tensors":
        weights = {name: 1 * x for name, x in weights.items()}
    loss = torch.func.functional_call(model, weights, slide()).tiles.sin().sum()
    if kind == "parameters" or checkpoint != "none" or chunk_rows:
        with pytest.raises(RuntimeError, match=r"was another one .* use torch\.func\.grad"):
            loss.backward()
        return
    parameters = list(other.parameters())
    want = torch.autograd.grad(other(*slide()).tiles.sin().sum(), parameters)
    assert_alike(torch.autograd.grad(loss, parameters), want)


@pytest.mark.parametrize("chunk_rows", [None, 7])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traces_are_for_any_number_of_tiles(chunk_rows):
    model = encoder(chunk_rows=chunk_rows)
    traced = torch.jit.trace(model, slide(), check_trace=False)
    given = slide(23, seed=3)
    assert relative_error(traced(*given)[1], model(*given).tiles) < 1e-6  # positions are float32


def test_derivatives_by_functions():
    model, given = encoder(), slide()

    def loss(weights):
        return torch.func.functional_call(model, weights, given).tiles.sin().sum()

    weights = dict(model.named_parameters())
    want = torch.autograd.grad(loss(weights), list(weights.values()))
    assert_alike(torch.func.grad(loss)(weights).values(), want)
