"""FSDP2: `fully_shard` of models whose sequences are sharded over ranks, too."""

import re
import textwrap
from functools import partial
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
from support.small_models import encoder, make_model, make_text, own_tiles, slide
from support.tolerances import rounding_bound
from support.transformers_models import PATTERN, make
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def longnet(mesh, over, syncs=True, factor=None):
    """`model.loss` as written, two micro-batches: the error of its gradients.

    Without `syncs` gradients are reduced with the second; `factor` is a divisor of gradients other
    than the number of ranks.
    """
    model = shard_all(make_model(), over)
    if factor:
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(factor)
    shards = longnet_shards(mesh)
    divisor = labels_per_rank([labels for _, labels in shards], model, mesh["sp"])
    for last, shard in enumerate(shards):
        model.set_requires_gradient_sync(syncs or bool(last))
        (model.loss(*shard, group=mesh["sp"], layout=layout_of(mesh)) / divisor).backward()
    return error(model, longnet_on_one_process())


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
        "FSDP": longnet(mesh, flat, syncs=False),
        "HSDP": longnet(mesh, mesh, syncs=False),
        "another divisor": longnet(mesh, flat, factor=2.0),
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
CHUNKS: dict[str, Any] = {"checkpoint": "keep_attention", "chunk_rows": 5}
KEEP: dict[str, Any] = {"checkpoint": "keep_attention"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"checkpoint": "full"},
    "keep_attention": KEEP,
    "keep_attention in chunks": CHUNKS,
    "every second block": {**CHUNKS, "blocks": 2},
    "attention, keep_attention": {"apart": ["attention"], **KEEP},
    "layers of the MLP and norms": {"apart": ["expand", "contract", "mlp_norm", "norm"]},
    "norms, keep_attention": {"apart": ["attention_norm", "mlp_norm"], **KEEP},
    "kept gathered, every second block": {"kept": True, **KEEP, "blocks": 2},
    "checkpoint_wrapper": {"wrapped": True},
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "LongNetBlock.attention .*: chunk_rows": ("attention", {"chunk_rows": 5}),
    "LongNetBlock.attention.q_proj .*: chunk_rows": ("q_proj", {"chunk_rows": 5}),
    "LongNet.norm .*: chunk_rows .* fully_shard of the LongNet around": ("norm", {"chunk_rows": 5}),
    "LongNet.embedding must not be under fully_shard by itself: the logits": ("embedding", {}),
}


def want_of(loss, model):
    """The loss of one process and its gradients."""
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def one_way(rank, mesh, apart=(), blocks=1, kept=False, wrapped=False, **options):
    """The error of gradients; `kept`: of two halves, between which weights stay gathered."""
    (tokens, labels), policy = make_text(), options.pop("policy", None)
    own_tokens, own_labels = (LAYOUT.shard(x, rank, 1) for x in (tokens, labels))
    model = make_model(**options, blocks=blocks, layers=3)
    if wrapped:
        model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    shard_all(model, mesh, apart, **({"mp_policy": policy} if policy else {}))
    divisor = labels_per_rank(own_labels, model, mesh)
    for last in (False, True) if kept else (True,):
        if kept:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        loss = model.loss(own_tokens, own_labels, group=mesh, layout=LAYOUT)
        assert loss.dtype == (torch.float32 if policy else torch.float64)
        (loss / ((1 + kept) * divisor)).backward()
    alone = make_model(layers=3)
    return error(model, want_of(alone.loss(tokens, labels) / labels.numel(), alone))


def half(rank, mesh):
    """Weights and activations in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return one_way(rank, mesh, dtype=torch.float32, policy=policy)


LAYOUT_OF_SLIDE = SequenceLayout([[(0, 9), (30, 41)], [(9, 30)]])


def slides(rank, mesh, **options):
    """An encoder of slides, whose class token is on one rank."""
    features, coordinates = slide()
    model = shard_all(encoder(**options), mesh)
    shard = own_tiles(LAYOUT_OF_SLIDE, rank, features, coordinates)
    encoded = model(*shard, group=mesh, layout=LAYOUT_OF_SLIDE)
    # The class token's rank has the loss of the slide; every rank's depends on what it computed.
    loss = encoded.cls.square().sum() + 0.0 * encoded.tiles.sum()
    (loss / labels_per_rank(encoded.cls.shape[1], model, mesh)).backward()
    alone = encoder()
    return error(model, want_of(alone(features, coordinates).cls.square().sum(), alone))


def rounded_coordinates(rank, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    features, coordinates = slide()
    model = shard_all(encoder().float(), mesh, mp_policy=policy)
    x, where = own_tiles(LAYOUT_OF_SLIDE, rank, features.float(), coordinates)
    call = partial(model, x, group=mesh, layout=LAYOUT_OF_SLIDE)
    call(where.long()).tiles.sum().backward()
    with pytest.raises(TypeError, match=r"got torch.bfloat16.*cast_forward_inputs=False"):
        call(where.float())


def refused(rank, mesh, message, apart, options):
    model = shard_all(make_model(**options), mesh, [apart])
    tokens, labels = (LAYOUT.shard(x, rank, 1) for x in make_text())
    with pytest.raises(ValueError, match=message):
        model.loss(tokens, labels, group=mesh, layout=LAYOUT)


def no_generation(rank, mesh):
    model = shard_all(make_model(), mesh)
    with pytest.raises(ValueError, match="LongNet under fully_shard does not generate"):
        model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=1)


def in_every_way(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    errors = {name: one_way(rank, mesh, **way) for name, way in WAYS.items()}
    for checkpoint in ("none", "keep_attention"):
        for rows in (None, 5):
            name = f"slides, {checkpoint}, {rows}"
            errors[name] = slides(rank, mesh, checkpoint=checkpoint, chunk_rows=rows)
    rounded_coordinates(rank, mesh)
    for message, way in REFUSED.items():
        refused(rank, mesh, message, *way)
    no_generation(rank, mesh)
    return errors, half(rank, mesh)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.slow
def test_every_way_to_compute_a_model_works_or_says_what_to_do():
    """`loss` and blocks under `fully_shard`, of blocks and of submodules; a bfloat16 policy."""
    for errors, in_half in run_ranks(in_every_way, 2):
        assert max(errors.values()) < EXACT, errors
        assert in_half < rounding_bound(torch.bfloat16)


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
    gradients = want_of(want, alone)
    return relative_error(loss / world_size, want), error(names["model"], gradients)


@pytest.mark.slow
def test_the_recipe_for_a_llama_gives_the_step_of_one_process():
    """Loss and gradients of the code in docs/how-to/data-parallel.md, on two ranks over gloo."""
    for loss_error, gradient_error in run_ranks(by_the_recipe, 2):
        assert loss_error < IN_FLOAT32
        assert gradient_error < EXACT
