"""FSDP2: `fully_shard` of models whose sequences are sharded over ranks, too."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT, IN_FLOAT32
from support.grid_steps import (
    error,
    grid,
    layout_of,
    llama_backward,
    llama_on_one_process,
    longnet_on_one_process,
    longnet_shards,
)
from support.small_models import encoder, make_model, own_tiles, slide
from support.transformers_models import PATTERN, make
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ring_dilated_attention import SequenceLayout, labels_per_rank
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.integrations.transformers import set_attention


def shard_all(model, mesh, apart=(), **options):
    """`fully_shard` of some submodules of each block, of each block, and of the model."""
    for name, module in model.named_modules():
        if name.split(".")[-1] in apart:
            fully_shard(module, mesh=mesh, **options)
    for block in getattr(model, "blocks", ()) or model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# --- a grid of data-parallel and sequence-parallel ranks


def longnet(mesh, over):
    """`model.loss` as written, two micro-batches, gradients reduced with the second."""
    model = shard_all(make_model(), over)
    shards = longnet_shards(mesh)
    divisor = labels_per_rank([labels for _, labels in shards], model, mesh["sp"])
    for last, shard in enumerate(shards):
        model.set_requires_gradient_sync(bool(last))
        (model.loss(*shard, group=mesh["sp"], layout=layout_of(mesh)) / divisor).backward()
    return error(model, longnet_on_one_process())


def summed(mesh, over):
    """With a divisor of gradients other than the number of ranks."""
    model = shard_all(make_model(), over)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(2.0)
    shards = longnet_shards(mesh)
    divisor = labels_per_rank([labels for _, labels in shards], model, mesh["sp"])
    for shard in shards:
        (model.loss(*shard, group=mesh["sp"], layout=layout_of(mesh)) / divisor).backward()
    return error(model, longnet_on_one_process())


def clipped(mesh):
    """The norm of gradients after `clip_grad_norm_`, and the gradients."""
    model = shard_all(make_model(), mesh)
    shards = longnet_shards(mesh)
    divisor = labels_per_rank([labels for _, labels in shards], model, mesh["sp"])
    for shard in shards:
        (model.loss(*shard, group=mesh["sp"], layout=layout_of(mesh)) / divisor).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert isinstance(norm, DTensor)
    alone = longnet_on_one_process()
    own = make_model()
    for parameter, gradient in zip(own.parameters(), alone[1:], strict=True):
        parameter.grad = gradient.clone()
    want = torch.nn.utils.clip_grad_norm_(own.parameters(), 1e-3)
    clipped = [alone[0], *(p.grad for p in own.parameters())]
    return max(relative_error(norm.full_tensor(), want), error(model, clipped))


def llama(mesh, over):
    model = make()
    set_attention(model, PATTERN, group=mesh["sp"], layout=layout_of(mesh))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    llama_backward(shard_all(model, over), mesh)
    return error(model, llama_on_one_process())


def on_a_grid(rank, world_size):
    mesh = grid()
    flat = mesh["dp", "sp"]._flatten("dp_sp")
    return {
        "FSDP": longnet(mesh, flat),
        "HSDP": longnet(mesh, mesh),
        "another divisor": summed(mesh, flat),
        "clipped": clipped(mesh),
        "Llama, FSDP": llama(mesh, flat),
        "Llama, HSDP": llama(mesh, mesh),
    }


@pytest.mark.filterwarnings(  # its new name came with transformers 5.23
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)
@pytest.mark.slow
def test_a_step_on_a_grid_of_ranks_is_that_of_one_process():
    """FSDP2 over the flattened grid and HSDP: unequal batches, uneven shards, accumulation."""
    for errors in run_ranks(on_a_grid, 4):
        assert max(errors.values()) < EXACT, errors


# --- every way to compute a model, on two ranks

LAYOUT = SequenceLayout([[(0, 9), (20, 23)], [(9, 20)]])
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"checkpoint": "full"},
    "keep_attention": {"checkpoint": "keep_attention"},
    "chunks": {"chunk_rows": 5},
    "keep_attention in chunks": {"checkpoint": "keep_attention", "chunk_rows": 5},
    "every second block": {"checkpoint": "keep_attention", "chunk_rows": 5, "blocks": 2},
}
APART: dict[str, dict[str, Any]] = {
    "attention": {"apart": ["attention"]},
    "attention, keep_attention": {"apart": ["attention"], "checkpoint": "keep_attention"},
    "layers of the MLP and norms": {"apart": ["expand", "contract", "mlp_norm", "norm"]},
    "norms, keep_attention": {
        "apart": ["attention_norm", "mlp_norm"],
        "checkpoint": "keep_attention",
    },
    "layers, every second block": {
        "apart": ["q_proj", "mlp_norm", "expand"],
        "checkpoint": "keep_attention",
        "blocks": 2,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "LongNetBlock.attention .*: chunk_rows": {"apart": ["attention"], "chunk_rows": 5},
    "LongNetBlock.attention.q_proj .*: chunk_rows": {"apart": ["q_proj"], "chunk_rows": 5},
    "LongNet.norm .*: chunk_rows .* fully_shard of the LongNet around": {
        "apart": ["norm"],
        "chunk_rows": 5,
    },
    "LongNet.embedding must not be under fully_shard by itself: the logits": {
        "apart": ["embedding"]
    },
}


def text(rank, layout=LAYOUT):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 61, (2, layout.length + 1), generator=generator)
    return [(x, layout.shard(x, rank, 1)) for x in (whole[:, :-1], whole[:, 1:])]


def one_way(rank, mesh, apart=(), blocks=1, **options):
    (tokens, own_tokens), (labels, own_labels) = text(rank)
    model = shard_all(make_model(**options, blocks=blocks, layers=3), mesh, apart)
    loss = model.loss(own_tokens, own_labels, group=mesh, layout=LAYOUT)
    (loss / labels_per_rank(own_labels, model, mesh)).backward()
    alone = make_model(layers=3)
    want = alone.loss(tokens, labels) / labels.numel()
    return error(model, [want, *torch.autograd.grad(want, list(alone.parameters()))])


def kept_gathered(rank, mesh, **options):
    """Two micro-batches; weights stay gathered between them, and are not in the second backward."""
    (tokens, own_tokens), (labels, own_labels) = text(rank)
    model = shard_all(make_model(**options, layers=3), mesh)
    divisor = 2 * labels_per_rank(own_labels, model, mesh)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss = model.loss(own_tokens, own_labels, group=mesh, layout=LAYOUT)
        (loss / divisor).backward()
    alone = make_model(layers=3)
    want = alone.loss(tokens, labels) / labels.numel()
    return error(model, [want, *torch.autograd.grad(want, list(alone.parameters()))])


def wrapped_checkpoints(rank, mesh):
    """Blocks in torch's own wrapper for activation checkpointing."""
    (tokens, own_tokens), (labels, own_labels) = text(rank)
    model = make_model()
    model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    shard_all(model, mesh)
    loss = model.loss(own_tokens, own_labels, group=mesh, layout=LAYOUT)
    (loss / labels_per_rank(own_labels, model, mesh)).backward()
    alone = make_model()
    want = alone.loss(tokens, labels) / labels.numel()
    return error(model, [want, *torch.autograd.grad(want, list(alone.parameters()))])


def half(rank, mesh):
    """Weights and activations in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (tokens, own_tokens), (labels, own_labels) = text(rank)
    model = shard_all(make_model(dtype=torch.float32), mesh, mp_policy=policy)
    loss = model.loss(own_tokens, own_labels, group=mesh, layout=LAYOUT)
    assert loss.dtype == torch.float32
    (loss / labels_per_rank(own_labels, model, mesh)).backward()
    alone = make_model()
    want = alone.loss(tokens, labels) / labels.numel()
    return error(model, [want, *torch.autograd.grad(want, list(alone.parameters()))])


def slides(rank, mesh, **options):
    """An encoder of slides, whose class token is on one rank."""
    features, coordinates = slide()
    layout = SequenceLayout([[(0, 9), (30, 41)], [(9, 30)]])
    model = shard_all(encoder(**options), mesh)
    shard = own_tiles(layout, rank, features, coordinates)
    encoded = model(*shard, group=mesh, layout=layout)
    # The class token's rank has the loss of the slide; every rank's depends on what it computed.
    loss = encoded.cls.square().sum() + 0.0 * encoded.tiles.sum()
    (loss / labels_per_rank(encoded.cls.shape[1], model, mesh)).backward()
    alone = encoder()
    want = alone(features, coordinates).cls.square().sum()
    return error(model, [want, *torch.autograd.grad(want, list(alone.parameters()))])


def rounded_coordinates(rank, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    features, coordinates = slide()
    layout = SequenceLayout([[(0, 9), (30, 41)], [(9, 30)]])
    model = shard_all(encoder().float(), mesh, mp_policy=policy)
    shard = own_tiles(layout, rank, features.float(), coordinates)
    model(shard[0], shard[1].long(), group=mesh, layout=layout).tiles.sum().backward()
    with pytest.raises(TypeError, match=r"torch.bfloat16 rounds them.*cast_forward_inputs=False"):
        model(shard[0], shard[1].float(), group=mesh, layout=layout)


def refused(rank, mesh, message, apart, **options):
    model = shard_all(make_model(**options), mesh, apart)
    (_, tokens), (_, labels) = text(rank)
    with pytest.raises(ValueError, match=message):
        model.loss(tokens, labels, group=mesh, layout=LAYOUT)


def no_generation(rank, mesh):
    model = shard_all(make_model(), mesh)
    with pytest.raises(ValueError, match="LongNet under fully_shard does not generate"):
        model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=1)


def in_every_way(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    errors = {name: one_way(rank, mesh, **way) for name, way in {**WAYS, **APART}.items()}
    for checkpoint in ("none", "keep_attention"):
        for rows in (None, 5):
            name = f"slides, {checkpoint}, {rows}"
            errors[name] = slides(rank, mesh, checkpoint=checkpoint, chunk_rows=rows)
    errors["checkpoint_wrapper"] = wrapped_checkpoints(rank, mesh)
    errors["kept gathered"] = kept_gathered(rank, mesh)
    errors["kept gathered, every second block"] = kept_gathered(
        rank, mesh, checkpoint="keep_attention", blocks=2
    )
    rounded_coordinates(rank, mesh)
    for message, way in REFUSED.items():
        refused(rank, mesh, message, **way)
    no_generation(rank, mesh)
    return errors, half(rank, mesh)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.slow
def test_every_way_to_compute_a_model_works_or_says_what_to_do():
    """`loss` and blocks under `fully_shard`, of blocks and of submodules; a bfloat16 policy."""
    for errors, in_half in run_ranks(in_every_way, 2):
        assert max(errors.values()) < EXACT, errors
        assert in_half < 0.03


# --- the recipe of the docs

RECIPES = Path(__file__).parents[2] / "docs" / "how-to" / "data-parallel.md"


def recipe():
    """The lines of the page that train a Llama under FSDP2."""
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```$", RECIPES.read_text(), re.M | re.S)
    (code,) = (code for _, code in blocks if "in model.model.layers" in code)
    return textwrap.dedent(code)


def by_the_recipe(rank, world_size):
    """The errors of its loss, which transformers computes in float32, and of its gradients."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (2, 31), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 3 == 0, -100)}
    names: dict[str, Any] = {"model": make(), "pattern": PATTERN, "batch": batch}
    exec(compile(recipe(), str(RECIPES), "exec"), names)
    loss = names["loss"].detach()
    dist.all_reduce(loss)
    alone = make()
    set_attention(alone, PATTERN)
    want = alone(**batch).loss
    gradients = torch.autograd.grad(want, list(alone.parameters()))
    return [relative_error(loss / world_size, want), error(names["model"], [want, *gradients])]


@pytest.mark.slow
def test_the_recipe_for_a_llama_gives_the_step_of_one_process():
    """Loss and gradients of the code in docs/how-to/data-parallel.md, on two ranks over gloo."""
    for loss_error, gradient_error in run_ranks(by_the_recipe, 2):
        assert loss_error < IN_FLOAT32
        assert gradient_error < EXACT
