"""Tensor parallelism beside sharded sequences: 2 x 2 processes against one, in float64."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.integrations.tensor_parallel import HeadParallel
from ring_dilated_attention.integrations.torchscale import TorchscaleDilatedAttention
from ring_dilated_attention.nn import (
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    SlideEncoder,
    SlideEncoderConfig,
)
from ring_dilated_attention.nn.heads import Heads, slice_of_projections

LENGTH = 45
UNEVEN = SequenceLayout([[(31, LENGTH), (0, 4)], [(4, 31)]])
PATTERN: dict[str, Any] = {"segment_lengths": [8, 19, None], "dilation_rates": [1, 2, 3]}
LONGNETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "interleaved": ({}, {}),
    "blocked": ({"head_offsets": "blocked"}, {}),
    "split": ({"head_branches": "split"}, {}),
    "grouped queries": ({"num_kv_heads": 4}, {}),
    "grouped queries, blocked": ({"num_kv_heads": 2, "head_offsets": "blocked"}, {}),
    "blocks recomputed": ({}, {"checkpoint": "full"}),
    "in chunks": ({}, {"checkpoint": "keep_attention", "chunk_rows": 7}),
}
"""What the config says, and how memory is saved."""
ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero keys": ({"zero_keys": True, "head_offsets": "blocked"}, {}),
    "detached": ({"branch_gradients": "detached"}, {}),
    "in chunks": ({}, {"checkpoint": "keep_attention", "chunk_rows": 7}),
}


def mesh_of_four() -> tuple[DeviceMesh, DeviceMesh]:
    """That of the ranks that share a sequence, and that of those that share heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    return mesh["sp"], mesh["tp"]


def gradients_of(model, sp):
    """The whole gradient of each parameter: summed over the ranks that share a sequence."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        is_split = isinstance(gradient, DTensor)
        dist.all_reduce(gradient.to_local() if is_split else gradient, group=sp.get_group())
        found[name] = gradient.full_tensor() if is_split else gradient
    return found


def worst(got, model):
    """The largest error of a gradient, relative to the largest element of any."""
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert got.keys() == wanted.keys()
    size = max(x.abs().max() for x in wanted.values())
    return max(((got[name] - wanted[name]).abs().max() / size).item() for name in wanted)


def longnet(options: dict[str, Any], saved: dict[str, Any]) -> LongNet:
    torch.manual_seed(0)
    config = LongNetConfig(
        vocab_size=37, num_layers=2, embed_dim=32, num_heads=8, ffn_dim=48, **PATTERN, **options
    )
    return LongNet(config, **saved).double()


def tokens_and_labels():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(37, (2, 2, LENGTH), generator=generator)


def own(sp, tensor):
    """This rank's part of a sequence."""
    return UNEVEN.shard(tensor, sp.get_local_rank(), 1)


def pair(tp, plan, options, **saved):
    """A LongNet, and the same one split over ranks."""
    model, split = longnet(options, {}), longnet(options, saved)
    return model, parallelize_module(split, tp, plan or {"blocks.*": HeadParallel()})


def projections(prefix=""):
    """A plan of torch's own styles for the projections of an attention."""
    plan: dict[str, ParallelStyle] = {f"{prefix}{x}_proj": ColwiseParallel() for x in "qkv"}
    return {**plan, f"{prefix}out_proj": RowwiseParallel()}


def train_longnet(sp, tp, options, saved):
    """Errors of loss, logits and gradients."""
    tokens, labels = tokens_and_labels()
    model, split = pair(tp, None, options, **saved)
    wanted = model.loss(tokens, labels)
    wanted.backward()
    loss = split.loss(own(sp, tokens), own(sp, labels), group=sp, layout=UNEVEN)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, group=sp.get_group())
    with torch.no_grad():
        logits = split(own(sp, tokens), group=sp, layout=UNEVEN)
        expected = own(sp, model(tokens))
    gradients = worst(gradients_of(split, sp), model)
    return relative_error(loss, wanted), relative_error(logits, expected), gradients


def encode(sp, tp, options, saved):
    """Errors of the tiles' rows and of gradients."""
    config = SlideEncoderConfig(
        in_dim=12, num_layers=2, embed_dim=32, num_heads=4, ffn_dim=48, **PATTERN, **options
    )
    torch.manual_seed(0)
    model = SlideEncoder(config).double()
    split = SlideEncoder(config, **saved).double()
    split.load_state_dict(model.state_dict())
    parallelize_module(split, tp, {"blocks.*": HeadParallel()})
    features = torch.randn(2, LENGTH - 1, 12, dtype=torch.float64)
    coordinates = torch.randint(9999, (2, LENGTH - 1, 2))
    tiles = UNEVEN.positions(sp.get_local_rank())
    tiles = tiles[tiles > 0] - 1
    wanted = model(features, coordinates)
    got = split(features[:, tiles], coordinates[:, tiles], group=sp, layout=UNEVEN)
    for found in (wanted, got):
        (found.cls.square().sum() + found.tiles.pow(3).sum()).backward()
    error = relative_error(got.tiles.detach(), wanted.tiles.detach()[:, tiles])
    return error, worst(gradients_of(split, sp), model)


def by_hand(sp, tp):
    """A plan of torch's own styles, whose weights say which heads a rank has."""
    model, split = pair(tp, projections("blocks.*.attention."), {"num_kv_heads": 4})
    tokens, _ = tokens_and_labels()
    logits = split(own(sp, tokens), group=sp, layout=UNEVEN)
    return (relative_error(logits.detach(), own(sp, model(tokens)).detach()),)


def torchscale(sp, tp):
    """Its layer, with blocked offsets and zero keys, by a plan of torch's own styles."""
    args = SimpleNamespace(segment_length="[8, 19]", dilated_ratio="[1, 4]")
    torch.manual_seed(0)
    layer = TorchscaleDilatedAttention(args, 32, 4, self_attention=True).double()
    split = copy.deepcopy(layer)
    parallelize_module(split, tp, projections())
    split.group, split.layout = sp, UNEVEN
    rows = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    wanted, got = layer(rows, rows, rows)[0], split(*[own(sp, rows)] * 3)[0]
    for out in (wanted, got):
        out.square().sum().backward()
    error = relative_error(got.detach(), own(sp, wanted).detach())
    return error, worst(gradients_of(split, sp), layer)


def with_fsdp(sp, tp):
    """FSDP2 over the ranks of a sequence, whose gradients are means of the losses' sums."""
    model, split = pair(tp, None, {"head_offsets": "blocked"})
    for block in split.blocks:
        fully_shard(block, mesh=sp)
    fully_shard(split, mesh=sp)
    tokens, labels = tokens_and_labels()
    summed = partial(nn.functional.cross_entropy, reduction="sum")
    logits = split(own(sp, tokens), group=sp, layout=UNEVEN)
    summed(model(tokens).flatten(0, 1), labels.flatten()).backward()
    (sp.size() * summed(logits.flatten(0, 1), own(sp, labels).flatten())).backward()
    got = {name: cast("DTensor", p.grad).full_tensor() for name, p in split.named_parameters()}
    return (worst(got, model),)


def generate(sp, tp):
    """Errors of the logits of a prompt and of the tokens behind it, and of `generate`."""
    model, split = pair(tp, None, {"num_kv_heads": 4})
    tokens, following = tokens_and_labels()
    shard = own(sp, tokens)
    caches = split.make_caches(2, max_length=60, group=sp, sharded=True)
    alone = model.make_caches(2, max_length=60)
    steps = [(split.prefill(shard, caches, layout=UNEVEN), model.prefill(tokens, alone))]
    for at in range(5):
        new = following[:, at : at + 1]
        steps.append((split.step(new, caches), model.step(new, alone)))
    errors = [relative_error(got, wanted) for got, wanted in steps]
    got = split.generate(shard, 9, group=sp, layout=UNEVEN)
    return *errors, float((got != model.generate(tokens, 9)).sum())


def refusals(tp):
    """What the style and the modules refuse."""
    style: dict[str, ParallelStyle] = {"blocks.*": HeadParallel()}
    queries: dict[str, ParallelStyle] = {"blocks.*.attention.q_proj": ColwiseParallel()}
    model = parallelize_module(longnet({"num_kv_heads": 4}, {}), tp, queries)
    with pytest.raises(ValueError, match="mesh must divide num_kv_heads 1; got 2 ranks"):
        parallelize_module(longnet({"num_kv_heads": 1}, {}), tp, style)
    with pytest.raises(TypeError, match=r"a block of .*; got LayerNorm$"):
        parallelize_module(longnet({}, {}), tp, {"norm": HeadParallel()})
    with pytest.raises(ValueError, match="4 query and 4 KV heads on this rank, of 8 query and 4"):
        model(tokens_and_labels()[0])


def our_modules(rank, world_size):
    sp, tp = mesh_of_four()
    errors = {f"LongNet, {x}": train_longnet(sp, tp, *y) for x, y in LONGNETS.items()}
    errors |= {f"slides, {x}": encode(sp, tp, *y) for x, y in ENCODERS.items()}
    errors |= {"by hand": by_hand(sp, tp), "torchscale": torchscale(sp, tp)}
    errors |= {"FSDP2": with_fsdp(sp, tp), "generate": generate(sp, tp)}
    refusals(tp)
    return errors


def test_our_modules():
    """LongNet with every option, slide encoders, a plan by hand, FSDP2, generation, refusals."""
    for errors in run_ranks(our_modules, 4):
        for kind, found in errors.items():
            assert max(found) < EXACT, (kind, found)


# --- transformers

HEADS = {
    "Llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "GPTNeoX": {"num_attention_heads": 4, "num_key_value_heads": 4},
}
_COLUMNS, _ROWS = ColwiseParallel, RowwiseParallel
PLANS: dict[str, tuple[str, dict[str, type[ParallelStyle]]]] = {
    "Llama": ("model.layers.*.", {
        **{f"self_attn.{name}_proj": _COLUMNS for name in "qkv"}, "self_attn.o_proj": _ROWS,
        "mlp.gate_proj": _COLUMNS, "mlp.up_proj": _COLUMNS, "mlp.down_proj": _ROWS,
    }),
    "GPTNeoX": ("gpt_neox.layers.*.", {
        "attention.query_key_value": _COLUMNS, "attention.dense": _ROWS,
        "mlp.dense_h_to_4h": _COLUMNS, "mlp.dense_4h_to_h": _ROWS,
    }),
}  # fmt: skip
"""Where the layers of a model are, and the plan of each."""


def train_transformers(rank, world_size):
    """Errors of logits and gradients, and of generated tokens; and what is refused."""
    from support.transformers_models import PATTERN, batch_of, make, shard_of

    from ring_dilated_attention.integrations.transformers import set_attention

    (sp, tp), errors = mesh_of_four(), {}
    layout = SequenceLayout([[(30, 41), (0, 3)], [(3, 30)]])
    blocked = DilatedPattern([8, 19, None], [1, 2, 3], head_offsets="blocked")
    split_heads = DilatedPattern([8, 19, None], [1, 2, 3], head_branches="split")
    for family, pattern, kind in (
        ("Llama", PATTERN, "packed padded"),
        ("Llama", blocked, "plain"),
        ("Llama", split_heads, "plain"),
        ("Llama", DilatedPattern.dense(), "plain"),
        ("GPTNeoX", PATTERN, "plain"),
    ):
        where, styles = PLANS[family]
        model = make(family, **HEADS[family])
        split = copy.deepcopy(model)
        parallelize_module(split, tp, {where + name: style() for name, style in styles.items()})
        set_attention(model, pattern)
        set_attention(split, pattern, group=sp, layout=layout)
        batch = batch_of(kind)
        wanted, got = model(**batch), split(**shard_of(batch, layout, sp))
        for found in (wanted, got):
            found.loss.backward()
        shard = layout.shard(wanted.logits, sp.get_local_rank(), 1)
        found = [relative_error(got.logits.detach(), shard), worst(gradients_of(split, sp), model)]
        tokens = []
        for one in (model, split):
            one.eval().generation_config.eos_token_id = None
            ids = batch["input_ids"][:1].clamp(min=1)  # 0 would be padding
            tokens.append(one.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))
        errors[family, str(pattern)] = [*found, float((tokens[0] != tokens[1]).sum())]
    model = make(**HEADS["Llama"])
    parallelize_module(model, tp, {"model.layers.*.self_attn.q_proj": ColwiseParallel()})
    set_attention(model, PATTERN)
    with pytest.raises(ValueError, match="LlamaAttention has 4 query and 4 KV heads on this rank"):
        model(batch_of("plain")["input_ids"])
    return errors


def test_transformers_by_parallelize_module():
    """Patterns, models with and without grouped queries, and a plan that is refused."""
    pytest.importorskip("transformers")
    for errors in run_ranks(train_transformers, 4):
        for kind, found in errors.items():
            assert max(found) < EXACT, (kind, found)


def load_transformers(rank, world_size, folder):
    """Errors of the logits and gradients of a model that transformers itself shards."""
    from support.transformers_models import PATTERN, batch_of, make, shard_of
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from ring_dilated_attention.integrations.transformers import set_attention

    model = make(**HEADS["Llama"])
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    split = LlamaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="ring_dilated_attention",
        distributed_config=DistributedConfig(tp_size=2, fsdp_size=2),
    )
    sp = split._device_mesh["fsdp"]
    layout = SequenceLayout([[(30, 41), (0, 3)], [(3, 30)]])
    set_attention(model, PATTERN)
    set_attention(split, PATTERN, group=sp, layout=layout)
    batch = batch_of("packed padded")
    wanted = model(**batch)
    wanted.loss.backward()
    got = split(**shard_of(batch, layout, sp))
    (2 * got.loss).backward()  # FSDP takes the mean of the losses, which are to be summed
    own = layout.shard(wanted.logits, sp.get_local_rank(), 1)
    gradients = {name: p.grad.full_tensor() for name, p in split.named_parameters()}
    return relative_error(got.logits.detach(), own), worst(gradients, model)


def test_transformers_by_its_own_plan(tmp_path, monkeypatch):
    """``from_pretrained`` with a DistributedConfig: its tp_plan, and FSDP2 over the sequence."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs it to load a sharded model")
    for found in run_ranks(load_transformers, 4, str(tmp_path)):
        assert max(found) < EXACT


def local_heads(heads):
    """A Llama whose attention has a few heads of those that its config says, and no DTensors."""
    from support.transformers_models import make

    model = make(num_hidden_layers=1)
    attention, width = model.model.layers[0].self_attn, 8 * heads
    for name, rows in (("q_proj", width), ("k_proj", width // 2), ("v_proj", width // 2)):
        setattr(attention, name, nn.Linear(32, rows, bias=False, dtype=torch.float64))
    attention.o_proj = nn.Linear(width, 32, bias=False, dtype=torch.float64)
    return model


def test_local_heads_that_do_not_match_the_config():
    pytest.importorskip("transformers")
    from support.transformers_models import DENSE, PATTERN

    from ring_dilated_attention.integrations.transformers import set_attention

    ids = torch.arange(20)[None]
    model = local_heads(2)
    set_attention(model, PATTERN)
    message = r"has 2 query and 1 KV heads on this rank, of 4 query and 2 KV heads, and its weights"
    with pytest.raises(ValueError, match=message):
        model(ids)
    results = []
    for start in (0, 1):
        set_attention(model, PATTERN, head_slice=(start, start + 1, 2))
        results.append(model(ids).logits)
    assert relative_error(results[1].detach(), results[0].detach()) > 1e-3
    set_attention(model, DENSE)  # the same for every head
    model(ids)


# --- which heads

BOTH = Heads(8, 4)


def cut(rows, of, ranks=2, coordinate=1, dim=0, **more):
    """What counts of a DTensor: its rows are those of a coordinate of a 1-D mesh."""
    mesh = SimpleNamespace(shape=(ranks,), get_coordinate=lambda: (coordinate,))
    placement = SimpleNamespace(is_shard=lambda wanted: wanted == dim, **more)
    return SimpleNamespace(shape=(rows * of, 3), device_mesh=mesh, placements=(placement,))


def test_heads_by_their_weights():
    weights = cut(8, 6), cut(4, 6)
    assert slice_of_projections(BOTH, Heads(4, 2), weights, "x") == (2, 4, 4)
    assert slice_of_projections(BOTH, BOTH, (None, None), "x") is None
    last = cut(8, 6, 4, 3), cut(4, 6, 4, 3)
    assert slice_of_projections(BOTH, Heads(2, 1), last, "x") == (3, 4, 4)


UNKNOWN_HEADS: list[tuple[Heads, tuple[Any, Any]]] = [
    (Heads(4, 4), (cut(8, 6), cut(4, 6))),  # not as many KV heads, by fraction
    (Heads(4, 2), (nn.Parameter(torch.zeros(8, 3)), None)),
    (Heads(4, 2), (cut(8, 6, dim=1), cut(4, 6))),
    (Heads(4, 2), (cut(8, 6, dim=None, split_factor=2),) * 2),
    (Heads(4, 2), (cut(8, 6, 4, 2), cut(4, 6))),  # another number of rows
    (Heads(4, 2), (cut(8, 6, 3), cut(4, 6))),  # a part of a head
    (Heads(4, 2), (cut(8, 6), cut(5, 6))),  # rows of more heads than the layer has
    (Heads(4, 2), (cut(8, 6), cut(4, 6, 2, 0))),  # KV heads of other queries
]


@pytest.mark.parametrize(("own", "weights"), UNKNOWN_HEADS)
def test_heads_that_are_not_known(own, weights):
    with pytest.raises(ValueError, match=r"^x has .* and its weights do not say which"):
        slice_of_projections(BOTH, own, weights, "x")


def test_a_module_whose_heads_are_set():
    """By a tensor parallelism of your own: the second half of the heads, as part of them all."""
    torch.manual_seed(0)
    layer = MultiheadDilatedAttention(32, 4, **PATTERN, num_kv_heads=2).double()
    rows = torch.randn(1, 20, 32, dtype=torch.float64)
    heads = layer.project(rows, rows, rows)
    wanted = layer.attend(*heads)
    own = [x[:, :, x.shape[2] // 2 :] for x in heads]
    with pytest.raises(ValueError, match="MultiheadDilatedAttention has 2 query and 1 KV heads"):
        layer.attend(*own)
    layer.head_slice = (1, 2, 2)  # type: ignore[assignment]
    assert relative_error(layer.attend(*own).detach(), wanted[:, :, 2:].detach()) < EXACT
