"""torchscale's DilatedAttention: what its weights and its configurations expect of ours."""

import copy
import inspect
import types
from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import EXACT, SUMMED_IN_FLOAT32
from support.slide_models import DropPath
from support.tolerances import rounding_bound
from support.torchscale_definition import PATTERN, RATES, SEGMENTS, config, theirs
from torch import nn

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import reference_attention, relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.torchscale import (
    TorchscaleDilatedAttention,
    replace_dilated_attention,
    set_layout,
)


def make(width=32, heads=8, *, subln=True, seed=0, args=None, **options):
    torch.manual_seed(seed)
    module = TorchscaleDilatedAttention(
        args or config(), width, heads, self_attention=True, subln=subln, **options
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


def assert_alike(ours, other, x, **options):
    """Equal outputs, and equal gradients of the input and of every parameter."""
    dout = torch.randn_like(x)
    results = []
    for module in (ours, other):
        leaf = x.clone().requires_grad_()
        out, weights = module(leaf, leaf, leaf, **options)
        assert weights is None
        named = dict(module.named_parameters())
        gradients = torch.autograd.grad(out, [leaf, *named.values()], dout)
        results.append(dict(zip(["out", "x", *named], (out, *gradients), strict=True)))
    assert results[0].keys() == results[1].keys()
    for name, want in results[1].items():
        got = results[0][name]
        error = relative_error(got, want)
        assert error < EXACT or (got - want).abs().max() < EXACT, (name, error)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("subln", [False, True])
@pytest.mark.parametrize("length", [1, 15, 61, 90])
def test_a_state_dict_loads_and_computes_the_same(length, subln, is_causal):
    other = theirs(subln=subln).double()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = make(subln=subln, seed=1)
    assert str(ours.load_state_dict(other.state_dict(), strict=True)) == (
        "<All keys matched successfully>"
    )
    x = torch.randn(2, length, 32, dtype=torch.float64)
    assert_alike(ours, other, x, is_causal=is_causal)


@pytest.mark.parametrize(("name", "length"), [("gigapath", 1069), ("longvit", 1500)])
def test_patterns_that_people_run(name, length):
    segments, rates = PATTERN[name]
    args = config(segment_length=str(list(segments)), dilated_ratio=str(list(rates)))
    ours = make(32, 16, args=args)
    other = theirs(32, 16, args=config(segment_length=segments, dilated_ratio=rates)).double()
    other.load_state_dict(ours.state_dict())
    assert_alike(ours, other, torch.randn(1, length, 32, dtype=torch.float64))


def test_the_exact_function_by_option():
    """LongNet's own definition: other offsets, no zero keys, the true gradient."""
    ours = make(head_offsets="interleaved", zero_keys=False, branch_gradients="exact")
    x = torch.randn(1, 61, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = (p(x).unflatten(-1, (8, 4)) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    want, _ = reference_attention(q, k, v, DilatedPattern(SEGMENTS, RATES))
    want = ours.out_proj(ours.inner_attn_ln(want.flatten(2)))
    out, _ = ours(x, x, x)
    assert relative_error(out, want) < EXACT
    grads = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (out, want)]
    assert relative_error(*grads) < EXACT


# --- replace_dilated_attention


class Layer(nn.Module):
    def __init__(self, attention, width=32):
        super().__init__()
        self.self_attn = attention
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.self_attn(query=normed, key=normed, value=normed)[0]


def their_model(**options):
    torch.manual_seed(0)
    shared = theirs(**options)
    return nn.Sequential(
        Layer(theirs(**options)), nn.Sequential(Layer(shared)), Layer(shared)
    ).double()


def test_replacing_keeps_weights_modes_and_results():
    model = their_model()
    model.eval()
    model[0].self_attn.q_proj.weight.requires_grad_(False)
    adapted: Any = nn.Sequential(model[0].self_attn.k_proj)
    model[0].self_attn.k_proj = adapted
    before = dict(model.named_parameters())
    x = torch.randn(2, 61, 32, dtype=torch.float64)
    want = model(x)
    assert replace_dilated_attention(model) == 2
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)  # the very same Parameters
    attention = model[0].self_attn
    assert isinstance(attention, TorchscaleDilatedAttention)
    assert not attention.training
    assert attention.k_proj is adapted  # a projection of any kind goes over
    assert model[1][0].self_attn is model[2].self_attn
    assert relative_error(model(x), want) < EXACT
    # Again: the modules that are ours already get the new layout.
    layout = SequenceLayout.contiguous(61, 1)
    assert replace_dilated_attention(model, layout=layout) == 2
    assert attention.layout is layout
    with pytest.raises(ValueError, match="keep their options; got zero_keys"):
        replace_dilated_attention(model, zero_keys=False)
    assert set_layout(model, None) == 2
    assert [m.layout for m in model.modules() if isinstance(m, type(attention))] == [None, None]
    with pytest.raises(TypeError, match="layout must be a SequenceLayout or None, got 3"):
        set_layout(model, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [replace_dilated_attention, partial(set_layout, layout=None)])
def test_a_model_without_torchscales_attention_is_refused(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
    with pytest.raises(ValueError, match=r"found no .* in this Sequential; "):
        change(model)


def changed(**attributes):
    """A model whose first attention has these."""
    model = their_model()
    for name, value in attributes.items():
        setattr(model[0].self_attn, name, value)
    return model


def hooked():
    model = their_model()
    model[0].self_attn.register_forward_hook(print)
    return model


NOT_REPLACED: dict[str, Any] = {
    "no module": (lambda: 3, {}, r"model must be a torch\.nn\.Module, got 3"),
    "attention": (theirs, {}, "the model itself, a DilatedAttention, has no module around it"),
    "a subclass": (
        lambda: changed(__class__=type("Custom", (type(theirs()),), {})),
        {},
        r"0.self_attn, a Custom, has a class of its own",
    ),
    "hooks": (hooked, {}, r"0\.self_attn, .* has _forward_hooks"),
    "forward": (lambda: changed(forward=print), {}, r"0\.self_attn, .* has another forward"),
    "args": (lambda: changed(args=config(xpos_rel_pos=True)), {}, "args.xpos_rel_pos must"),
    "an option": (their_model, {"zero_key": False}, "unexpected keyword argument 'zero_key'"),
}


@pytest.mark.parametrize(("build", "options", "message"), NOT_REPLACED.values(), ids=NOT_REPLACED)
def test_what_is_not_replaced_is_refused_and_stays(build, options, message):
    model = build()
    kinds = [type(m) for m in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises((TypeError, ValueError), match=message):
        replace_dilated_attention(model, **options)
    assert not kinds or kinds == [type(m) for m in model.modules()]


# --- what is not supported


class MultiheadAttention(nn.Module):
    """torchscale's, which is not dilated."""


def experts():
    layer: Any = nn.Linear(2, 2)
    layer.is_moe_layer = True
    return layer


MIXING: dict[str, Any] = {
    "cross": (
        MultiheadAttention,
        "decoder.0, a MultiheadAttention, is attention that is not dilated, .* of 2 ranks",
    ),
    "experts": (experts, r"decoder.0, a Linear, is a layer of experts \(moe_freq\)"),
    "positions": (
        lambda: nn.ModuleDict({"embed_positions": nn.Embedding(9, 32)}),
        r"0\.embed_positions, a Embedding, is an embedding of positions \(None where",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_else_mixes_rows_is_refused_on_ranks(name):
    """It would see the rows of one rank; the encoder alone may be sharded."""
    make, message = MIXING[name]
    model = nn.ModuleDict({"encoder": their_model(), "decoder": nn.Sequential(make())})

    def run(ends):
        own = copy.deepcopy(model)
        with pytest.raises(ValueError, match=message):
            replace_dilated_attention(own, group=ends)
        assert not any(isinstance(m, TorchscaleDilatedAttention) for m in own.modules())
        return replace_dilated_attention(own["encoder"], group=ends)

    assert run_loopback(2, run) == [2, 2]
    assert replace_dilated_attention(model) == 2


def depth_step(rank, world_size):
    """Which sequences of a batch are dropped, on ranks of different seeds."""
    model = nn.Sequential(their_model(), DropPath(0.5))
    replace_dilated_attention(model)
    assert isinstance(model[1], DropPath)  # on one process it stays
    replace_dilated_attention(model, group=torch.distributed.group.WORLD)
    torch.manual_seed(rank)
    x = torch.randn(16, 6, 32, dtype=torch.float64)
    found = model(x)
    kept = found.flatten(1).any(1)
    scaled = torch.equal(found[kept], 2 * model.eval()(x)[kept])
    replace_dilated_attention(model)
    assert vars(model[1])["group"] is None  # it follows the group
    assert model[1].drop_prob == 0.5
    return kept.tolist(), scaled


def test_stochastic_depth_drops_the_same_sequences_on_every_rank():
    first, second = run_ranks(depth_step, 2)
    assert first == second
    assert 0 < sum(first[0]) < 16
    assert first[1]


PADDED_LEFT = torch.tensor([[True] + [False] * 8])
FORWARD_REFUSALS: dict[str, Any] = {
    "incremental_state": ({}, "incremental_state must be None"),
    "attn_mask": (torch.zeros(9, 9), "attn_mask must be None .*is False: set"),
    "rel_pos": (torch.zeros(8, 9, 9), "rel_pos must be None"),
    "is_first_step": (True, "is_first_step must be .* got True"),
    "key_padding_mask": (PADDED_LEFT, "right padding"),
    "query": (torch.zeros(1, 9, 31), r"query must have shape .* 32\); got \(1, 9, 31\)"),
    "key": (torch.zeros(9, 32), r"key must have shape .* got \(9, 32\)"),
    "value": (torch.zeros(1, 8, 32).double(), r"value \(1, 8, 8, 4\)"),
}


@pytest.mark.parametrize("name", FORWARD_REFUSALS)
def test_forward_honours_is_causal_and_refuses(name):
    given, message = FORWARD_REFUSALS[name]
    x = torch.zeros(1, 9, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        make()(**{"query": x, "key": x, "value": x, name: given})
    arguments = inspect.signature(TorchscaleDilatedAttention.forward).parameters
    assert set(arguments) == {"self", "is_causal"} | set(FORWARD_REFUSALS)  # nothing is ignored


CONSTRUCTOR_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"args": config(segment_length="16, x")}, "malformed"),
    ({"args": types.SimpleNamespace()}, "segment_length"),
    ({"args": config(dilated_ratio=[1])}, "one value each"),
    ({"args": config(xpos_rel_pos=True)}, "xpos_rel_pos must"),
    ({"args": config(multiway=True)}, "args.multiway must"),
    ({"args": config(seq_parallel=True)}, "pass group="),
    ({"args": config(layernorm_eps=0)}, "layernorm_eps .* got 0"),
    ({"dropout": 1.5}, r"dropout must lie in \[0, 1\]; got 1.5"),
    ({"encoder_decoder_attention": True}, "self_attention must be True"),
    ({"head_offsets": "none"}, "head_offsets must be one of"),
]


@pytest.mark.parametrize(("changes", "message"), CONSTRUCTOR_REFUSALS)
def test_construction_refuses(changes, message):
    given = {"args": config(), "embed_dim": 32, "num_heads": 8, "self_attention": True}
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        TorchscaleDilatedAttention(**{**given, "subln": True, **changes})


def test_dropout_is_refused_in_training_alone():
    module = make()
    module.dropout = 0.25
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"refused until it is exact and reproducible .* 0.25"):
        module(x, x, x)
    module.eval()
    assert torch.equal(module(x, x, x)[0], make()(x, x, x)[0])


def test_flash_attention_chooses_the_kernels():
    assert make().backend == "auto"
    assert make(args=config(flash_attention=False)).backend == "eager"
    assert make(backend="cpu_flash", args=config(flash_attention=False)).backend == "cpu_flash"


def test_a_padding_mask_is_honoured():
    """A mask of no padding, which torchscale's encoders always pass, changes nothing."""
    module = make()
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    mask = torch.zeros(2, 30, dtype=torch.bool)
    assert torch.equal(module(x, x, x, key_padding_mask=mask)[0], module(x, x, x)[0])
    mask[0, 21:] = True
    out, _ = module(x, x, x, key_padding_mask=mask)
    alone, _ = module(x[:1, :21], x[:1, :21], x[:1, :21])
    assert relative_error(out[:1, :21], alone) < EXACT


def test_layers_with_a_mask_compile_to_one_graph():
    """Encoders call their layers with a mask of no padding, the same for all."""
    torch._dynamo.reset()
    layers = nn.ModuleList(make(seed=seed).float() for seed in range(2))

    def run(x):
        mask = torch.zeros(x.shape[:2]).bool()
        for layer in layers:
            x = x + layer(x, x, x, key_padding_mask=mask)[0]
        return x

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for length in (30, 41, 17):
        x = torch.randn(2, length, 32)
        results = []
        for call in (run, compiled):
            out = call(x)
            gradients = torch.autograd.grad(out.square().mean(), list(layers.parameters()))
            results.append([out, *gradients])
        for got, want in zip(*results, strict=True):
            assert relative_error(got, want) < SUMMED_IN_FLOAT32
    torch._dynamo.reset()


def test_the_norm_stays_in_half_precision_under_autocast():
    """What reads it casts it to half precision anyway; a norm with hooks is called."""
    module, seen = make().float(), []
    module.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    x = torch.randn(1, 30, 32)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = module(x, x, x)
        assert module.inner_attn_ln is not None
        called = []
        module.inner_attn_ln.register_forward_hook(lambda *_: called.append(True))
        want, _ = module(x, x, x)
    assert seen[0] == torch.bfloat16
    assert called
    assert relative_error(got, want) < rounding_bound(torch.bfloat16)
