"""The loss of the language model: chunked or not, checkpointed or not, on any ranks, the same."""

import copy
from typing import get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.small_models import LENGTH, Count, make_model, make_text

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn.checkpoint import Checkpoint
from ring_dilated_attention.torch_op import FORWARD

CHUNKS = (None, 1, 5, 100)  # 5 divides no shard
LAYOUTS = {
    "uneven": SequenceLayout([[(0, 9), (20, 23)], [(9, 13)], [(13, 20)]]),
    "empty": SequenceLayout([[(5, 9), (0, 2)], [], [(9, 23), (2, 5)]]),
    "zigzag": SequenceLayout.zigzag(LENGTH, 3),
}


def loss_and_gradients(model, tokens, labels, **options):
    loss = model.loss(tokens, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def plain():
    """By logits of all rows at once."""
    model = make_model()
    tokens, labels = make_text()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("checkpoint", get_args(Checkpoint))
def test_loss_is_that_of_all_logits(checkpoint, chunk_rows):
    have = loss_and_gradients(make_model(checkpoint, chunk_rows), *make_text())
    for a, b in zip(have, plain(), strict=True):
        assert relative_error(a, b) < 1e-12


def on_gloo(rank, world_size):
    """Of every way to compute it: this rank's loss and gradients."""
    results, group = {}, dist.group.WORLD
    for name, layout in LAYOUTS.items():
        shards = [layout.shard(x, rank, 1) for x in make_text()]
        for checkpoint in get_args(Checkpoint):
            for chunk_rows in (None, 5):
                model = make_model(checkpoint, chunk_rows)
                results[name, checkpoint, chunk_rows] = loss_and_gradients(
                    model, *shards, group=group, layout=layout
                )
    return results


def test_ranks_chunks_and_checkpoints_change_nothing():
    want = plain()
    ranks = run_ranks(on_gloo, 3)
    for key in ranks[0]:
        for index, expected in enumerate(want):
            total = sum(rank[key][index] for rank in ranks)
            # 1e-6 rather than 1e-12: angles are rounded to float32.
            assert relative_error(total, expected) < 1e-6, key


def test_the_residual_stream_has_the_dtype_of_autocast():
    tokens, _ = make_text()
    model = make_model(dtype=torch.float32)
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    model(tokens)
    model.double()(tokens)
    assert seen == [*[torch.bfloat16] * 2, *[torch.float32] * 2, *[torch.float64] * 2]


@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_a_block_is_its_layers_in_turn(chunk_rows):
    model = make_model()
    block, hidden = model.blocks[0], torch.randn(2, LENGTH, 32, dtype=torch.float64)
    rotation = model.rope(torch.arange(LENGTH)[None] + 1000)
    normed = block.attention_norm(hidden)
    want = hidden + block.attention(normed, normed, normed, is_causal=True, rope=rotation)[0]
    want = want + block.contract(F.gelu(block.expand(block.mlp_norm(want))))
    assert relative_error(block(hidden, *rotation, chunk_rows=chunk_rows), want) < 1e-12


@pytest.mark.parametrize(("checkpoint", "times"), [("none", 2), ("keep_attention", 2), ("full", 3)])
def test_chunks_are_computed_twice(checkpoint, times):
    """Keeping attention does not compute what follows it a third time."""
    model = make_model(checkpoint, LENGTH)
    with Count() as count:
        loss_and_gradients(model, *make_text())
    assert count.runs[torch.ops.aten.gelu.default] == times * len(model.blocks)


@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize("blocks", [2, 3, 9])
def test_inputs_of_few_blocks_are_enough(blocks, chunk_rows):
    """Attention runs once a block all the same."""
    want = loss_and_gradients(make_model(layers=5), *make_text())
    model = make_model("keep_attention", chunk_rows, blocks=blocks, layers=5)
    with Count() as count:
        have = loss_and_gradients(model, *make_text())
    backward = torch.ops.ring_dilated_attention.backward.default
    assert count.runs[FORWARD] == count.runs[backward] == 5
    for a, b in zip(have, want, strict=True):
        assert relative_error(a, b) < 1e-12


def test_parameters_keep_their_names():
    """Those of checkpoints of earlier versions."""
    names = {name for name, _ in make_model().named_parameters()}
    block = {
        "attention_norm", "attention.q_proj", "attention.k_proj", "attention.v_proj",
        "attention.out_proj", "mlp_norm", "expand", "contract",
    }  # fmt: skip
    assert names == {"embedding.weight", "norm.weight", "norm.bias"} | {
        f"blocks.{i}.{module}.{kind}" for i in range(2) for module in block
        for kind in ("weight", "bias")
    }  # fmt: skip


def test_bad_labels_of_one_rank_are_refused_on_all():
    layout, model = LAYOUTS["uneven"], make_model()

    def rank(ends):
        tokens, labels = (layout.shard(x, ends.rank, 1) for x in make_text())
        with pytest.raises(ValueError, match="labels must have the shape") as caught:
            copy.deepcopy(model).loss(tokens, labels[:, : 4 - ends.rank], group=ends, layout=layout)
        return str(caught.value)

    said = run_loopback(3, rank)
    assert "other ranks" not in said[0]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be >= 1, got 0"),
        ({"chunk_rows": 1.5}, TypeError, "chunk_rows must be .* got 1.5"),
        ({"checkpoint": "some"}, ValueError, "checkpoint must be one of 'none', 'full', 'keep_att"),
        ({"blocks": 2}, ValueError, "needs checkpoint 'keep_att.*got 2 with 'none'"),
    ],
)
def test_bad_options_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        make_model(**options)


def test_bfloat16_chunks_are_as_accurate_as_none():
    tokens, labels = make_text()
    exact = loss_and_gradients(make_model(dtype=torch.float32), tokens, labels)

    def errors(checkpoint, chunk_rows):
        model = make_model(checkpoint, chunk_rows, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens, labels)
        assert loss.dtype == torch.float32
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(g.dtype == torch.float32 for g in gradients)
        return [relative_error(a, b) for a, b in zip((loss, *gradients), exact, strict=True)]

    plainly, in_chunks = errors("none", None), errors("keep_attention", 5)
    assert max(plainly) < 0.1
    for a, b in zip(in_chunks, plainly, strict=True):
        assert a < 1.5 * b + 1e-3
