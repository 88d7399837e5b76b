"""DTensors as query, key and value: sharded over the sequence, evenly and not; meshes as groups."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, nn
from ring_dilated_attention.checks import relative_error, run_ranks

PATTERN = DilatedPattern([8, 24, None], [1, 2, 4])


def whole(length, batch=2):
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, length, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    ]


def attention(query, key, value, **options):
    return dilated_attention(query, key, value, PATTERN, is_causal=True, return_lse=True, **options)


def differences(tensors, mesh, placements, options=None, want_options=None, order=None):
    """Out, lse and gradients of DTensors, against those of one process; of lse, too, where it has.

    `order` are the positions in the order in which the DTensors have them.
    """
    order = torch.arange(tensors[0].shape[1]) if order is None else order
    leaves: list[Any] = [distribute_tensor(x[:, order], mesh, placements) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in leaves[:3]] + leaves[3:]
    out, lse = attention(*leaves[:3], **(options or {}))
    assert isinstance(out, DTensor)
    assert (out.device_mesh, out.placements, out.shape) == (mesh, placements, leaves[0].shape)
    assert isinstance(lse, DTensor)
    has = 1 if "branch_gradients" in (options or {}) else 2
    dlse = tensors[3].sum(3).transpose(1, 2)
    grads = leaves[3], distribute_tensor(dlse[:, :, order], mesh, lse.placements)
    got: list[Any] = [out, *torch.autograd.grad((out, lse)[:has], leaves[:3], grads[:has])]
    assert all(x.placements == placements for x in got)
    reference = [x.clone().requires_grad_() for x in tensors[:3]]
    want_out, want_lse = attention(*reference, **(want_options or {}))
    results, grads = (want_out, want_lse), (tensors[3], dlse)
    want = [want_out, *torch.autograd.grad(results[:has], reference, grads[:has])]
    errors = [relative_error(x.full_tensor(), y[:, order]) for x, y in zip(got, want, strict=True)]
    lses = [x.masked_fill(x.isneginf(), 0) for x in (lse.full_tensor(), want_lse[:, :, order])]
    return max(*errors, relative_error(*lses))


def _sequence(rank, world_size):
    errors = {}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sp",))
    check = partial(differences, mesh=mesh, placements=(Shard(1),))
    for length in (12 * world_size, 37, 2 * world_size - 1, world_size + 1):
        errors[f"{length} positions"] = check(whole(length))
    for name, given in {
        "group": {"group": mesh},
        "mesh": {"mesh": mesh["sp"]},
        "process group": {"group": dist.group.WORLD},
        "other group of these ranks": {"group": dist.new_group()},
    }.items():
        errors[name] = check(whole(13), options=given)
    options: dict[str, Any] = {"documents": [0, 5, 37], "lengths": [37, 20]}
    errors["documents and lengths"] = check(whole(37), options=options, want_options=options)
    options = {**options, "documents": [0, 5, 5, 37, 37], "branch_gradients": "detached"}
    errors["detached"] = check(whole(37), options=options, want_options=options)
    mask = torch.arange(37) >= torch.tensor([[37], [20]])
    sharded = {"key_padding_mask": distribute_tensor(mask, mesh, [Shard(1)])}
    errors["mask"] = check(whole(37), options=sharded, want_options={"lengths": [37, 20]})
    # The DTensors' own order is that of a load balancer, which the layout tells.
    layout = SequenceLayout.zigzag(4 * world_size, world_size)
    order = torch.cat([layout.positions(each) for each in range(world_size)])
    errors["zigzag"] = check(whole(4 * world_size), options={"layout": layout}, order=order)
    replicated = partial(differences, mesh=mesh, placements=(Replicate(),))
    errors["replicated"] = replicated(whole(13))
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_sequence(world_size):
    """A DTensor query with Shard(1) or Replicate, forward and backward, evenly cut and not."""
    for errors in run_ranks(_sequence, world_size):
        assert max(errors.values()) < EXACT, errors


def _two_dimensions(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    tensors, lengths = whole(13, batch=3), {"lengths": [13, 4, 9]}
    return {
        "batch": differences(
            tensors, mesh, (Shard(0), Shard(1)), options=lengths, want_options=lengths
        ),
        "replicas": differences(tensors, mesh, (Replicate(), Shard(1))),
        "named": differences(tensors, mesh, (Shard(0), Shard(1)), options={"mesh": mesh["sp"]}),
        "heads": differences(tensors, mesh, (Shard(2), Shard(1))),
        "heads alone": differences(tensors, mesh, (Replicate(), Shard(2))),
        "batch alone": differences(tensors, mesh, (Shard(0), Replicate())),
    }


def test_two_dimensions_of_a_mesh():
    for errors in run_ranks(_two_dimensions, 4):
        assert max(errors.values()) < EXACT, errors


def out_of_attention(query, key, value):
    # With lse, torch's graph would want a gradient of it that is a DTensor, and makes one that is
    # none where there is no gradient.
    return dilated_attention(query, key, value, PATTERN, is_causal=True)


def _compiled(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    compiled = torch.compile(out_of_attention, backend="aot_eager", fullgraph=True)
    errors = []
    for length in (12, 13):
        # A second length makes the first dynamic, and of that `_torch_layout` cannot be traced
        # where ranks have unequal shards: "Unsupported: sort with non-constant keys".
        torch.compiler.reset()
        leaves: list[Any]
        *leaves, dout = (distribute_tensor(x, mesh, [Shard(1)]) for x in whole(length))
        leaves = [x.detach().requires_grad_() for x in leaves]
        outs = [function(*leaves) for function in (compiled, out_of_attention)]
        found = [[out, *torch.autograd.grad(out, leaves, dout)] for out in outs]
        pairs = zip(*found, strict=True)
        errors.append(max(relative_error(a.to_local(), b.to_local()) for a, b in pairs))
    return errors


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_dtensors_compile():
    assert run_ranks(_compiled, 2) == [[0.0, 0.0]] * 2


def placed(mesh, *placements):
    return [distribute_tensor(x, mesh, placements) for x in whole(12)[:3]]


def bad_calls(mesh, rank):
    """By their messages: query, key and value; and options."""
    sharded, replicated = placed(mesh, Shard(1)), placed(mesh, Replicate())
    one_row = distribute_tensor(torch.randn(1, 9, 4, 8), mesh, [Shard(0)])
    one_head = distribute_tensor(torch.randn(2, 9, 1, 8), mesh, [Shard(2)])
    heads = [distribute_tensor(torch.randn(1, 9, n, 8), mesh, [Shard(2)]) for n in (6, 3, 3)]
    partial_sum = DTensor.from_local(sharded[0].to_local(), mesh, [Partial()])
    uneven = DTensor.from_local(torch.randn(2, 5 + rank, 2, 8), mesh, [Shard(1)])
    documents = distribute_tensor(torch.tensor([0, 12]), mesh, [Replicate()])
    alone = [dist.new_group([each]) for each in range(mesh.size())][rank]
    mask = torch.zeros(2, 12 // mesh.size(), dtype=torch.bool)
    apart = [sharded[0], *replicated[1:]]
    return {
        "must be placed by Shard.1. .sequence., .* got S.*3.*: redistribute them first": (
            placed(mesh, Shard(3)),
            {},
        ),
        "query heads are with their KV heads; of 6 and 3, this rank has query heads": (heads, {}),
        "every rank must have a row of the batch; got 1 on .*over fewer ranks": ([one_row] * 3, {}),
        "every rank must have a head; got 1 on .*over fewer ranks": ([one_head] * 3, {}),
        "lengths must be a list of ints or a 1-D tensor of them; got 4": (
            placed(mesh, Shard(0)),
            {"lengths": 4},
        ),
        "documents must be a local tensor, not a DTensor": (
            sharded,
            {"documents": documents},
        ),
        "head_slice is for local tensors": (placed(mesh, Shard(2)), {"head_slice": (0, 1, 2)}),
        "must be placed by Shard.1.*redistribute them first": ([partial_sum] * 3, {}),
        "must all be DTensors or all be local tensors; key is no DTensor": (
            [sharded[0], *(x.to_local() for x in sharded[1:])],
            {},
        ),
        "must have one mesh and the same placements": (apart, {}),
        "shard no sequence: leave group out .* or, .* pass x.to_local": (
            replicated,
            {"group": mesh},
        ),
        "the DTensors' sequence is sharded, .* are ranks .0, 1., and group is ranks .": (
            sharded,
            {"group": alone},
        ),
        "pass the ranks as group or as mesh, not as both": (sharded, {"group": mesh, "mesh": mesh}),
        "key_padding_mask must be a DTensor, as query is": (sharded, {"key_padding_mask": mask}),
        "(gives rank|positions on (each )?rank|different arguments)": ([uneven] * 3, {}),
        "the same placements|refused on other ranks": (apart if rank == 1 else sharded, {}),
    }


def _refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sp",))
    for message, (tensors, options) in bad_calls(mesh, rank).items():
        with pytest.raises((TypeError, ValueError), match=message):
            attention(*tensors, **options)
    group = dist.new_group()
    query = torch.randn(1, 6, 2, 8, requires_grad=True)
    out = attention(query, query, query, group=group)[0]
    dist.barrier()
    dist.destroy_process_group(group)
    for late in (out.sum().backward, lambda: attention(query, query, query, group=group)):
        with pytest.raises(ValueError, match=r"no process group .* call destroy_process_group aft"):
            late()


def test_bad_dtensors_and_a_group_that_was_destroyed_are_refused():
    """On every rank, also where one of them is at fault."""
    run_ranks(_refused, 2)


# --- meshes in place of groups


def _modules_on_a_mesh(rank, world_size):
    """Modules with ``mesh=`` and with ``group=``: the same results."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "sp"))["sp"]
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_layers": 1, "embed_dim": 32, "num_heads": 4, "ffn_dim": 48,
        "segment_lengths": (6, None), "dilation_rates": (1, 3),
    }  # fmt: skip
    model = nn.LongNet(nn.LongNetConfig(**shape))
    encoder = nn.SlideEncoder(nn.SlideEncoderConfig(in_dim=8, **shape))
    layout = SequenceLayout.contiguous(11, world_size)
    layer = nn.DilatedAttention(PATTERN, mesh=mesh, layout=layout)
    tokens = layout.shard(torch.arange(22).view(2, 11), rank, 1)
    tiles = layout.local_length(rank) - (rank == 0)
    features, where = torch.randn(1, tiles, 8), torch.rand(1, tiles, 2)
    heads = torch.randn(1, layout.local_length(rank), 4, 8)
    equal = [layer.options.group is mesh, layer(heads, heads, heads).shape == heads.shape]
    for call in (
        lambda **ranks: model(tokens, layout=layout, **ranks),
        lambda **ranks: model.loss(tokens, tokens, layout=layout, **ranks),
        lambda **ranks: model.generate(tokens, 2, layout=layout, **ranks),
        lambda **ranks: encoder(features, where, layout=layout, **ranks).tiles,
    ):
        equal.append(torch.equal(call(group=dist.group.WORLD), call(mesh=mesh)))
        with pytest.raises(ValueError, match="pass the ranks as group or as mesh, not as both"):
            call(group=mesh, mesh=mesh)
    return equal


def test_modules_on_a_mesh():
    for equal in run_ranks(_modules_on_a_mesh, 2):
        assert all(equal), equal
