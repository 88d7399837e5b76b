"""`shard`, `unshard` and layouts as users of torch's context parallelism know them; its style."""

import copy
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.bounds import EXACT, IN_FLOAT32
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as torch_context_parallel
from torch.distributed.tensor.parallel import parallelize_module

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    dilated_attention,
    shard,
    unshard,
)
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.context_parallel import ContextParallel
from ring_dilated_attention.nn import (
    DilatedAttention,
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    RotaryEmbedding,
)

PATTERN = DilatedPattern([8, 24, None], [1, 2, 4])


def batch_of(length):
    generator = torch.Generator().manual_seed(length)
    return {
        "tokens": torch.arange(2 * length).view(2, length),
        "inputs": {"heads": [torch.randn(2, 4, length, 8, generator=generator)], "none": None},
        "positions": torch.arange(length),
        "mask": torch.arange(2 * length).view(2, length) % 3 == 0,
    }


DIMS = {"tokens": 1, "inputs": {"heads": [2], "none": None}, "positions": -1, "mask": 1}


def there_and_back(length, layout, ends):
    """`shard` gives what the layout says, and `unshard` the whole again."""
    batch = batch_of(length)
    shards = shard(ends, batch, DIMS, layout)
    own = (layout or SequenceLayout.contiguous(length, ends.world_size)).positions(ends.rank)
    assert shards["inputs"]["none"] is None
    assert torch.equal(shards["positions"], own)
    assert torch.equal(shards["tokens"], batch["tokens"][:, own])
    assert torch.equal(shards["inputs"]["heads"][0], batch["inputs"]["heads"][0][:, :, own])
    whole = unshard(ends, shards, DIMS, layout)
    for name in ("tokens", "positions", "mask"):
        assert torch.equal(whole[name], batch[name])
    assert torch.equal(whole["inputs"]["heads"][0], batch["inputs"]["heads"][0])


@pytest.mark.parametrize(
    "layout",
    [
        None,
        SequenceLayout.zigzag(31, 3),
        SequenceLayout([[(0, 31)], [], []]),
        SequenceLayout([[(20, 31), (0, 2)], [(2, 3)], [(3, 20)]]),
    ],
)
def test_there_and_back(layout):
    length = 30 if layout is None else 31
    run_loopback(3, partial(there_and_back, length, layout))
    run_loopback(1, partial(there_and_back, 7, None))


NINE, ZIGZAG = torch.arange(9)[None], SequenceLayout.zigzag(9, 2)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layout": None}, r"9 positions make no equal shards for 2 ranks.*contiguous\(9, 2\)"),
    ({"buffers": {"tokens": NINE, "labels": NINE[:, :8]}}, r"\['labels'\] has 8 along dimension 1"),
    ({"layout": SequenceLayout.zigzag(9, 3)}, "the layout is for 3 ranks; the group has 2"),
    ({"layout": "zigzag"}, "layout must be a SequenceLayout or None, got 'zigzag'"),
    ({"seq_dims": {"tokens": 1}}, "seq_dims must be nested as buffers are"),
    ({"seq_dims": {"tokens": 1, "labels": 2}}, r"\['labels'\] must be one of its 2; got 2"),
    ({"buffers": {"labels": [3]}}, r"buffers\['labels'\].* must be a tensor or None; got 3"),
    ({"buffers": {}}, "buffers must hold a tensor; got none"),
]
ON_ONE_RANK: list[tuple[dict[str, Any], str]] = [
    ({"buffers": {"tokens": NINE + 1, "labels": NINE}}, "tokens.*different|different.*tokens"),
    ({"buffers": {"tokens": 3, "labels": NINE}}, r"\['tokens'\] must be a tensor or None; got 3"),
    ({"layout": SequenceLayout.contiguous(9, 2)}, "layout is"),
    ({"buffers": {"labels": NINE, "tokens": NINE}}, "seq_dims is .*labels.* on rank 0, .*tokens"),
]


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_shard_refuses(everywhere):
    """On every rank, also where one of them is at fault."""
    good = {"buffers": {"tokens": NINE, "labels": NINE}, "seq_dims": 1, "layout": ZIGZAG}

    def run(ends):
        for changes, message in REFUSED if everywhere else ON_ONE_RANK:
            given = {**good, **(changes if everywhere or ends.rank else {})}
            with pytest.raises((TypeError, ValueError), match=message):
                shard(ends, **given)
        message = r"seq_dims is .*square'] 0\W* on rank 0, .*square'] 1\W* on rank 1"
        with pytest.raises(ValueError, match=message):
            shard(ends, {"square": torch.zeros(9, 9)}, ends.rank, ZIGZAG)

    run_loopback(2, run)


def test_what_unshard_refuses():
    def rank(ends):
        own = torch.zeros(1, 5 - ends.rank)
        pair = dict.fromkeys("ab" if ends.rank else "ba", own)
        for given, dim, layout, message in (
            (own.clone().requires_grad_(), 1, ZIGZAG, "without a gradient"),
            (torch.zeros(1, 3), 1, ZIGZAG, "the layout gives rank"),
            (own.expand(1 + ends.rank, -1), 1, ZIGZAG, "different arguments"),
            (torch.zeros(0), 0, None, "has no positions"),
            (pair, 1, ZIGZAG, r"another order, .*b.*a.* on rank 0; .*a.*b.* on rank 1"),
        ):
            with pytest.raises(ValueError, match=message):
                unshard(ends, given, dim, layout)

    run_loopback(2, rank)


# --- torch's own


def _load_balancers(rank, world_size):
    """Our layout of a load balancer, against the shards that torch makes with it."""
    mesh, length = init_device_mesh("cpu", (world_size,)), 24
    module: Any = torch_context_parallel
    balancers = {
        "head-tail": module._HeadTailLoadBalancer(length, world_size, "cpu"),
        "head-tail of documents": module._PerDocumentHeadTailLoadBalancer(
            [[8, 16]], world_size, "cpu"
        ),
    }
    equal: dict[str, Any] = {}
    x = torch.randn(2, length, 4, 8, generator=torch.Generator().manual_seed(0)).double()
    for name, balancer in balancers.items():
        layout = SequenceLayout.from_load_balancer(balancer)
        (theirs,) = module._context_parallel_shard(mesh, [x], [1], balancer)
        ours = shard(mesh, [x], [1], layout)[0]
        out = dilated_attention(theirs, theirs, theirs, PATTERN, mesh=mesh, layout=layout)
        (whole,) = module.context_parallel_unshard(mesh, [out], [1], balancer)
        want = dilated_attention(x, x, x, PATTERN)
        equal[name] = torch.equal(theirs, ours), relative_error(whole, want) < EXACT
        equal[f"{name}, unshard"] = torch.equal(unshard(mesh, out, 1, layout), whole)
    equal["zigzag"] = SequenceLayout.from_load_balancer(
        balancers["head-tail"]
    ) == SequenceLayout.zigzag(length, world_size)
    return equal


def test_layouts_of_load_balancers():
    """torch's head-tail balancer and `SequenceLayout.zigzag`; what torch unshards is the whole."""
    for equal in run_ranks(_load_balancers, 2):
        assert all(value in (True, (True, True)) for value in equal.values()), equal


def test_load_balancers_and_positions_that_are_refused():
    module: Any = torch_context_parallel
    rows = module._PerDocumentHeadTailLoadBalancer([[8, 16], [16, 8]], 2, "cpu")
    balancers, positions = SequenceLayout.from_load_balancer, SequenceLayout.from_positions
    refused: list[tuple[Any, Any, str]] = [
        (balancers, (rows,), "the same for all rows of a batch"),
        (balancers, ("head-tail",), "balancer must be a load balancer"),
        (positions, ([0, 1], 2), "positions must be a tensor of ints"),
        (positions, (torch.arange(3), 2), "a multiple of 2 ranks"),
        (positions, (torch.tensor([0, 0, 1, 3]), 2), r"held twice|missing"),
    ]
    for call, given, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call(*given)
    for dtype in (torch.uint8, torch.int8, torch.int16):
        found = positions(torch.arange(128).to(dtype), 2)
        assert found == SequenceLayout.contiguous(128, 2)


# --- the style


class Own(nn.Module):
    """A module of the user's, with our attention inside."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.attention = DilatedAttention(PATTERN, is_causal=True)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return self.attention(query, key, value).flatten(2)


class Ours(nn.Module):
    """A layer of ours: it takes three tensors and returns two things."""

    def __init__(self):
        super().__init__()
        self.inner = MultiheadDilatedAttention(
            32, 4, segment_lengths=[8, None], dilation_rates=[1, 2], layer_norm=True
        )
        self.rope = RotaryEmbedding(8)

    def forward(self, x, positions=None):
        rope = None if positions is None else self.rope(positions)
        return self.inner(x, x, value=x, is_causal=True, rope=rope)[0]


def _style(rank, world_size, layout):
    mesh, length = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sp",)), 24
    whole_layout = layout or SequenceLayout.contiguous(length, world_size)
    length = whole_layout.length
    order = torch.cat([whole_layout.positions(each) for each in range(world_size)])
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(0)).double()
    errors = {}
    for name, make, plan in (
        ("own", Own, ""),
        ("ours", Ours, "inner"),
        ("ours, the whole module", Ours, ""),
        ("ours, rotated", Ours, "inner"),
    ):
        turns = name == "ours, rotated"
        local_positions = (whole_layout.positions(rank),) * turns
        torch.manual_seed(1)
        alone = make().double()
        model = copy.deepcopy(alone)
        style = ContextParallel(layout=layout)
        parallelize_module(model, mesh, {plan: style} if plan else style)
        local = whole_layout.shard(x, rank, 1).detach().requires_grad_()  # a view, or a copy
        out = model(local, *local_positions)
        assert isinstance(out, DTensor)
        assert out.placements == (Shard(1),)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).double()
        (out.to_local() * whole_layout.shard(weights, rank, 1)).sum().backward()
        reference = x.clone().requires_grad_()
        want = alone(reference, *(torch.arange(length),) * turns)
        (want * weights).sum().backward()
        pairs: list[Any] = [(out.full_tensor(), want[:, order])]
        assert reference.grad is not None
        pairs.append((local.grad, whole_layout.shard(reference.grad, rank, 1)))
        got = [cast("DTensor", p.grad).full_tensor().flatten() for p in model.parameters()]
        plain = [cast("torch.Tensor", p.grad).flatten() for p in alone.parameters()]
        pairs.append((torch.cat(got), torch.cat(plain)))
        errors[name] = max(relative_error(a.detach(), b.detach()) for a, b in pairs)
    return errors


LAYOUTS = {
    "uneven": SequenceLayout.contiguous(13, 2),
    "zigzag": SequenceLayout.zigzag(24, 2),
    "even": None,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_style_for_parallelize_module(name):
    for errors in run_ranks(_style, 3 if name == "even" else 2, LAYOUTS[name]):
        assert max(errors.values()) < EXACT, errors


def _style_compiled(rank, world_size):
    """In one graph, with a shard that is a view; out and gradients against those of no compiler."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sp",))
    layout = SequenceLayout([[(0, 4), (10, 13)], [(4, 10)]])
    x = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(0))
    style = ContextParallel(layout=layout, use_local_output=True)
    model = parallelize_module(Ours(), mesh, {"inner": style})
    found = []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        out = function(layout.shard(x, rank, 1))
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        whole = [cast("DTensor", gradient).full_tensor() for gradient in gradients]
        found.append(torch.cat([out.detach().flatten(), *(x.flatten() for x in whole)]))
    return relative_error(found[1], found[0])


def test_the_style_compiles():
    for difference in run_ranks(_style_compiled, 2):
        assert difference < IN_FLOAT32


def _style_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    sizes: dict[str, Any] = {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "ffn_dim": 32}
    longnet = LongNet(LongNetConfig(**sizes, segment_lengths=[8], dilation_rates=[1]))
    style, blocks = ContextParallel(), {"blocks.*": ContextParallel()}
    of_15, of_3 = SequenceLayout.zigzag(15, 2), SequenceLayout.zigzag(9, 3)
    refused: list[tuple[Any, Any, str]] = [
        (nn.Linear(3, 3), style, "modules with one of them inside; got Linear"),
        (
            Own(),
            ContextParallel(layout=of_15),
            r"gives its ranks \[8, 7\] in a .* the layout gives them \[7, 8\]: use",
        ),
        (Own(), ContextParallel(layout=of_3), "the layout is for 3 ranks; the group has 2"),
        (longnet, blocks, "give group= and layout= to their calls"),
    ]
    for module, plan, message in refused:
        with pytest.raises(ValueError, match=message):
            parallelize_module(module, mesh, plan)
    model = parallelize_module(longnet, mesh, {"blocks.*.attention": ContextParallel()})
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model(torch.zeros(1, 6, dtype=torch.int64))
    layout = SequenceLayout.contiguous(12, 2)
    model = parallelize_module(Own(), mesh, ContextParallel(layout=layout))
    with pytest.raises(ValueError, match="rank 1" if rank == 0 else "7"):  # on every rank
        model(torch.randn(1, 6 + rank, 32))
    model = parallelize_module(Own(), mesh, ContextParallel(use_local_output=True))
    x = torch.randn(1, 6, 32)
    assert type(model(x)) is torch.Tensor
    with pytest.raises(ValueError, match="takes DTensors with Shard"):
        model(distribute_tensor(x, mesh, [Replicate()]))


def test_what_the_style_refuses():
    run_ranks(_style_refused, 2)
    with pytest.raises(TypeError, match="layout must be a SequenceLayout or None"):
        ContextParallel(layout="zigzag")  # type: ignore[arg-type]
