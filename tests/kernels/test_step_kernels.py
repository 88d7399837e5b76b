"""The Triton kernels of a step of generation, and models by them; interpreted without a GPU."""

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.generating import VOCABULARY, make_model
from torch import nn
from torch.autograd import forward_ad

pytest.importorskip("triton")

from ring_dilated_attention import kernels
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import (
    LongNet,
    MultiheadDilatedAttention,
    RotaryEmbedding,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
PROMPT = 21


def rows_of(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 24, 768, 5000])
def test_a_sum_and_its_norm(width, dtype):
    torch.manual_seed(0)
    rows, addition = (3 + rows_of(2, 3, width, dtype=dtype) for _ in range(2))
    weight, bias = rows_of(2, width, dtype=dtype).unbind(0)
    kept = rows.clone()
    total, normed = kernels.norm_of_sum(rows, addition.view(6, width), weight, bias, 1e-5)
    assert torch.equal(rows, kept)
    assert torch.equal(total, rows + addition)
    want = F.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5)
    assert normed.shape == (6, width)
    assert normed.dtype == dtype
    assert relative_error(normed, want.view(6, width)) < TOLERANCE[dtype]
    same, alone = kernels.norm_of_sum(total, None, weight, bias, 1e-5)
    assert same is total
    assert torch.equal(alone, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 48, 128])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_are_turned_in_place(head_dim, batch, dtype):
    torch.manual_seed(0)
    count, heads, kv_heads = 3, 4, 2
    positions = torch.randint(1 << 20, (batch, count), device=DEVICE)
    joint = rows_of(2 * count, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    columns = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    before = [x.double().view(2, count, -1, head_dim) for x in joint.clone().split(columns, 1)]
    query, key, value = joint.split(columns, 1)
    rope = RotaryEmbedding(head_dim)
    kernels.turn_heads_(query, key, *rope.wide(positions))
    turn = rope(positions)
    for found, was in zip((query, key), before, strict=False):
        want = turn(was).view(found.shape)
        assert relative_error(found, want) < TOLERANCE[dtype]
    assert torch.equal(value.double().view(before[2].shape), before[2])


def layer_of(columns, width, dtype, *, bias=True):
    weight = rows_of(columns, width, dtype=dtype) / width**0.5
    return weight, rows_of(columns, dtype=dtype) if bias else None


def norm_of(width, dtype):
    return rows_of(width, dtype=dtype), rows_of(width, dtype=dtype), 1e-5


def plain_norm(rows, norm):
    weight, bias, eps = norm
    return F.layer_norm(rows.double(), weight.shape, weight.double(), bias.double(), eps)


def plain_linear(rows, layer):
    weight, bias = layer
    return F.linear(rows.double(), weight.double(), None if bias is None else bias.double())


SIZES = [(1, 1, 1), (24, 40, 3), (300, 17, 16), (1100, 70, 19)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "columns", "count"), SIZES)
def test_a_product_and_what_comes_before_and_after_it(width, columns, count, dtype):
    torch.manual_seed(0)
    rows, addition = 3 + rows_of(1, count, width, dtype=dtype), rows_of(count, columns, dtype=dtype)
    layer, norm = layer_of(columns, width, dtype), norm_of(width, dtype)
    tolerance = TOLERANCE[dtype]
    found = kernels.product(rows, layer, norm=norm, gelu=True)
    assert (found.shape, found.dtype) == ((1, count, columns), dtype)
    want = F.gelu(plain_linear(plain_norm(rows, norm), layer))
    assert relative_error(found, want) < tolerance
    without = layer_of(columns, width, dtype, bias=False)
    found = kernels.product(rows, without, addition=addition[None])
    assert relative_error(found, plain_linear(rows, without) + addition.double()) < tolerance
    assert relative_error(kernels.product(rows, layer), plain_linear(rows, layer)) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 48, 128])
@pytest.mark.parametrize(("batch", "tables", "bias"), [(1, 1, True), (3, 1, False), (2, 2, True)])
def test_products_of_heads_are_turned(head_dim, batch, tables, bias, dtype):
    torch.manual_seed(0)
    heads, kv_heads, width, count = 4, 2, 40, 7
    rows, norm = 3 + rows_of(batch, count, width, dtype=dtype), norm_of(width, dtype)
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    layers = [layer_of(columns, width, dtype, bias=bias) for columns in sizes]
    positions = torch.randint(1 << 20, (tables, count), device=DEVICE)
    rope = RotaryEmbedding(head_dim)
    found = kernels.product_of_heads(rows, norm, layers, *rope.wide(positions))
    plain = [plain_linear(plain_norm(rows, norm), layer) for layer in layers]
    query, key, value = (x.view(batch, count, -1, head_dim) for x in plain)
    turn = rope(positions)
    for got, want in zip(found, (turn(query), turn(key), value), strict=True):
        assert got.shape == want.shape
        assert got.dtype == dtype
        assert relative_error(got, want) < TOLERANCE[dtype]


def test_which_products_are_computed():
    def computes(count, width):
        return kernels.computes_products(torch.empty(count, width, device=DEVICE))

    assert computes(1, 768)
    assert computes(16, 1024)
    assert not computes(17, 768)
    assert not computes(1, 1032)


def by_kernel(**changes: Any) -> LongNet:
    """A model whose attention the decoding kernels compute, in float32."""
    model = make_model(**changes)
    for block in model.blocks:
        assert isinstance(block.attention, MultiheadDilatedAttention)
        block.attention.backend = "triton"
    return model.to(DEVICE, torch.float32)


NORMS = ["norm_of_sum", "turn_heads_", "norm_of_sum"]
PRODUCTS = ["product_of_heads", "product", "product", "product"]


def launches(monkeypatch) -> list[str]:
    """Which kernels were launched, in order, from now on."""
    found: list[str] = []

    def noted(name, function):
        def call(*tensors, **options):
            found.append(name)
            return function(*tensors, **options)

        return call

    for name in {*NORMS, *PRODUCTS}:
        monkeypatch.setattr(kernels, name, noted(name, getattr(kernels, name)))
    return found


def steps(model, tokens, counts=(1, 3, 1, 2), lengths=None):
    """Logits of the tokens behind the prompt, taken in steps of so many."""
    caches = model.make_caches(len(tokens), max_length=60)
    model.prefill(tokens[:, :PROMPT], caches, lengths=lengths)
    found, first = [], PROMPT
    for count in counts:
        found.append(model.step(tokens[:, first : first + count], caches))
        first += count
    return torch.cat(found, 1)


def with_weights_that_are_views(model):
    """Of them cuBLAS computes the products."""
    for block in model.blocks:
        layer = block.attention.k_proj
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())


def with_no_change(model):
    pass


KINDS = pytest.mark.parametrize(
    ("change", "of_a_block"),
    [(with_no_change, PRODUCTS), (with_weights_that_are_views, NORMS)],
    ids=["products", "norms"],
)


@pytest.mark.parametrize("lengths", [None, [PROMPT, 9]], ids=["equal", "of their own"])
@KINDS
def test_steps_of_a_model_are_rows_of_its_forward(change, of_a_block, lengths, monkeypatch):
    model, plain = by_kernel(), make_model().to(DEVICE)
    change(model)
    tokens = torch.randint(VOCABULARY, (2, 40), device=DEVICE)
    launched = launches(monkeypatch)
    found = steps(model, tokens, lengths=lengths)
    assert launched == 4 * 2 * of_a_block
    for row, length in enumerate(lengths or [PROMPT, PROMPT]):
        text = torch.cat([tokens[row : row + 1, :length], tokens[row : row + 1, PROMPT:28]], 1)
        want = plain(text)[:, length:]
        assert relative_error(found[row : row + 1], want) < 1e-5


@KINDS
def test_generation_by_kernels(change, of_a_block, monkeypatch):
    """What cuBLAS computes is joined: products of query, key and value, from copies of weights."""
    model, plain = by_kernel(), make_model().to(DEVICE)
    change(model)
    cat, shapes = torch.cat, []

    def noted(*given, **named):
        found = cat(*given, **named)
        shapes.append(tuple(found.shape))
        return found

    monkeypatch.setattr(torch, "cat", noted)
    tokens = torch.randint(VOCABULARY, (2, PROMPT), device=DEVICE)
    launched = launches(monkeypatch)
    new = model.generate(tokens, 8, capture=False)
    assert launched == 7 * 2 * of_a_block
    joined = sum(len(model.get_parameter(f"blocks.0.attention.{x}_proj.weight")) for x in "qkv")
    assert shapes.count((joined, 32)) == (2 if of_a_block is NORMS else 0)
    assert torch.equal(new, plain.generate(tokens, 8, capture=False))


@pytest.mark.parametrize(("batch", "of_a_block"), [(16, PRODUCTS), (17, NORMS)], ids=["16", "17"])
def test_many_rows_are_multiplied_by_cublas(batch, of_a_block, monkeypatch):
    model, plain = (each.to(DEVICE) for each in (by_kernel(num_layers=1), make_model(num_layers=1)))
    tokens = torch.randint(VOCABULARY, (batch, 1), device=DEVICE)
    launched = launches(monkeypatch)
    found = model.step(tokens, model.make_caches(batch, max_length=9))
    assert launched == of_a_block
    assert relative_error(found, plain(tokens)) < 1e-5


def test_a_compiled_step_has_kernels_of_its_own(monkeypatch):
    """The compiler's: ours are not traced."""
    model, plain = by_kernel(num_layers=1), make_model(num_layers=1).to(DEVICE)
    tokens = torch.randint(VOCABULARY, (1, 40), device=DEVICE)
    caches = model.make_caches(1, max_length=60)
    model.prefill(tokens[:, :PROMPT], caches)
    launched = launches(monkeypatch)
    take = torch.compile(lambda new: model.step(new, caches), backend="eager")
    found = [take(tokens[:, at : at + 1]) for at in range(PROMPT, 28)]
    assert relative_error(torch.cat(found, 1), plain(tokens[:, :28])[:, PROMPT:]) < 1e-5
    assert not launched


class Scaled(nn.Linear):
    """A subclass, as adapters are."""

    def forward(self, input):
        return 2 * super().forward(input)


def with_a_hook(model):
    model.blocks[0].expand.register_forward_hook(lambda *_: 2 * _[2])


def with_another_class(model):
    old = model.blocks[0].attention.q_proj
    model.blocks[0].attention.q_proj = new = Scaled(32, 32)
    new.load_state_dict(old.state_dict())


def with_a_norm_without_bias(model):
    model.blocks[0].mlp_norm.bias = None


def with_a_bias_that_is_no_parameter(model):
    layer = model.blocks[0].attention.v_proj
    del layer.bias
    layer.register_buffer("bias", torch.linspace(0, 1, 16))


def with_a_view_as_weight(model):
    norm = model.blocks[0].mlp_norm
    norm.weight = nn.Parameter(torch.stack([norm.weight.detach() + 1, norm.weight + 2], 1)[:, 0])


def with_tables_of_other_dtypes(model):
    class Coarse(RotaryEmbedding):
        def forward(self, positions):
            turn = super().forward(positions)
            return turn._replace(cos=turn.cos.half().float(), sin=turn.sin.half().double())

    model.rope = Coarse(8)


class Marked(torch.Tensor):
    """A subclass that is handed on by what is computed from it."""


def with_rows_of_a_subclass(model):
    embed = model.embed
    model.embed = lambda tokens: embed(tokens).as_subclass(Marked)


OF_NO_BLOCK = [with_tables_of_other_dtypes, with_rows_of_a_subclass]


@pytest.mark.parametrize(
    "change",
    [
        with_a_hook,
        with_another_class,
        with_a_norm_without_bias,
        with_a_bias_that_is_no_parameter,
        with_a_view_as_weight,
        *OF_NO_BLOCK,
    ],
    ids=lambda x: x.__name__,
)
def test_what_kernels_do_not_compute_is_called(change, monkeypatch):
    model, plain = by_kernel(), make_model()
    for each in (model, plain):
        change(each)
    model, plain = model.to(DEVICE, torch.float32), plain.to(DEVICE, torch.float64)
    tokens = torch.randint(VOCABULARY, (1, 40), device=DEVICE)
    launched = launches(monkeypatch)
    found = steps(model, tokens)
    assert launched == ([] if change in OF_NO_BLOCK else 4 * PRODUCTS)  # of one block
    assert relative_error(found, plain(tokens[:, :28])[:, PROMPT:]) < 1e-5


def with_a_bias_that_is_a_view(model):
    layer = model.blocks[0].expand
    layer.bias = nn.Parameter(torch.stack([layer.bias.detach(), layer.bias], 1)[:, 0])


def with_a_query_without_bias(model):
    model.blocks[0].attention.q_proj.bias = None


@pytest.mark.parametrize(
    "change",
    [with_a_bias_that_is_a_view, with_a_query_without_bias],
    ids=lambda x: x.__name__,
)
def test_layers_whose_products_torch_computes(change, monkeypatch):
    model, plain = by_kernel(), make_model().to(DEVICE)
    for each in (model, plain):
        change(each)
    tokens = torch.randint(VOCABULARY, (1, 40), device=DEVICE)
    launched = launches(monkeypatch)
    found = steps(model, tokens)
    assert launched == 4 * [*NORMS, *PRODUCTS]
    assert relative_error(found, plain(tokens[:, :28])[:, PROMPT:]) < 1e-5


def set_up(change):
    """A model that changes after its prompt, the next token, and caches with the prompt."""
    model = by_kernel()
    tokens = torch.randint(VOCABULARY, (1, 40), device=DEVICE)
    caches = model.make_caches(1, max_length=60)
    model.prefill(tokens[:, :PROMPT], caches)
    change(model.blocks[0])
    return model, tokens[:, PROMPT : PROMPT + 1], caches


def parameter(*shape):
    return nn.Parameter(torch.ones(*shape, device=DEVICE))


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "mlp_norm", type(block.mlp_norm)(16).to(DEVICE)),
        lambda block: setattr(block, "contract", nn.Linear(48, 16, device=DEVICE)),
        lambda block: setattr(block.mlp_norm, "weight", parameter(16)),
        lambda block: setattr(block.mlp_norm, "weight", parameter(64)),
        lambda block: setattr(block.attention_norm, "bias", parameter(1)),
        lambda block: setattr(block.attention.q_proj, "weight", parameter(1024)),
        lambda block: setattr(block.attention.out_proj, "weight", parameter(16, 32)),
        lambda block: setattr(block.attention.out_proj, "weight", parameter(32, 16)),
        lambda block: setattr(block.expand, "weight", parameter(128, 16)),
        lambda block: setattr(block.expand, "weight", parameter(64, 32)),
        lambda block: setattr(block.expand, "bias", parameter(8)),
        lambda block: block.attention_norm.to("meta"),
        lambda block: block.mlp_norm.half(),
    ],
    ids=[
        *("norm", "layer", "short weight", "long weight", "short bias", "flat weight", "out"),
        *("narrow out", "narrow expand", "short expand", "expand's bias"),
        *("another device", "another dtype"),
    ],
)
def test_what_does_not_fit_raises(change):
    model, token, caches = set_up(change)
    with pytest.raises(RuntimeError):
        model.step(token, caches)
    assert caches[0].known_lengths == (PROMPT,)


def test_caches_of_another_device_are_refused():
    model, token, caches = set_up(lambda block: None)
    with pytest.raises((RuntimeError, ValueError), match=r"device|on cpu|cuda"):
        model.to("meta").step(token.to("meta"), caches)


def both_ways(changed_by):
    """What a step gives after a change, by kernels and by the modules."""
    model, token, caches = set_up(changed_by)
    plain = make_model().to(DEVICE, torch.float32)
    changed_by(plain.blocks[0])
    twins = deepcopy(caches)
    return model.step(token, caches), plain.step(token, twins)


@pytest.mark.parametrize("eps", [0, 1, torch.tensor(1e-2)], ids=["0", "1", "a tensor"])
def test_an_epsilon_of_another_type(eps):
    found, want = both_ways(lambda block: setattr(block.mlp_norm, "eps", eps))
    assert relative_error(found, want) < 1e-5


def test_a_bias_that_is_to_be_negated():
    def change(block):
        bias = torch._neg_view(block.mlp_norm.bias.detach() + 3)
        block.mlp_norm.bias = nn.Parameter(bias)

    found, want = both_ways(change)
    assert relative_error(found, want) < 1e-5


class Halved(torch.Tensor):
    """A bias of which a layer norm sees half of what lies in memory, as with quantised weights."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.layer_norm:
                kwargs["bias"] = kwargs["bias"] / 2
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if func is torch.Tensor.detach else out


def test_a_bias_of_a_subclass_is_what_its_class_says():
    def halve(block):
        bias = torch.ones(32, device=DEVICE).as_subclass(Halved)
        block.mlp_norm.bias = nn.Parameter(bias)

    found, want = both_ways(halve)
    assert relative_error(found, want) < 1e-5


def test_autocast_is_not_ignored():
    model, token, caches = set_up(lambda block: None)
    model.embed = lambda tokens: model.embedding(tokens)  # which autocast leaves in float32
    with torch.autocast(DEVICE.type, torch.bfloat16), pytest.raises(ValueError, match="bfloat16"):
        model.step(token, caches)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch itself
def test_tangents_are_not_lost():
    model, token, caches = set_up(lambda block: None)
    norm = model.blocks[-1].mlp_norm
    with forward_ad.dual_level():
        norm._parameters["bias"] = forward_ad.make_dual(
            norm.bias.detach(), torch.ones(32).to(DEVICE)
        )
        logits = model.step(token, caches)
        assert forward_ad.unpack_dual(logits).tangent.abs().sum() > 0

    def dual(module, arguments, out):
        return forward_ad.make_dual(out, torch.ones_like(out))

    model, token, caches = set_up(lambda block: None)
    model.embedding.register_forward_hook(dual)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        model.step(token, caches)


def test_ranks_are_told_of_a_backend_that_one_of_them_refuses(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    models = [make_model().float() for _ in range(2)]
    text = torch.randint(VOCABULARY, (1, 42))

    def work(ends):
        model = models[ends.rank]
        caches = model.make_caches(1, max_length=60, group=ends, sharded=True)
        model.prefill(text[:, 21 * ends.rank :][:, :21], caches)
        if ends.rank == 1:
            model.blocks[0].attention.backend = "triton"
        with pytest.raises(ValueError, match=r"was refused on other ranks|triton"):
            model.step(text[:, :1], caches)

    run_loopback(2, work)
