"""transformers' Trainer and accelerate: their own ways to load data, and those of the recipes.

That the recipes, `examples/transformers_trainer.py` and `examples/accelerate_loop.py`, agree with
one process is tested with the other examples.
"""

import copy
from typing import Any

import pytest
import torch
from support.bounds import SUMMED_IN_FLOAT32
from support.launched import as_by_torchrun, example
from support.transformers_models import PATTERN, SMALL
from support.worlds import world
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch

pytest.importorskip("accelerate", reason="accelerate is not installed")

MESSAGE = r"shard_batch .* input_ids is .* on rank 0, .* on rank 1.* data-parallel groups only"
LENGTH = 40


def rows(count=8):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (count, LENGTH), generator=generator)
    return [{"input_ids": x, "labels": x.clone()} for x in tokens]


def collated(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def model_on(group, layout=None):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    set_attention(model, PATTERN, group=group, layout=layout)
    return model


def arguments(**changes: Any) -> Any:
    import transformers

    settings = {
        "output_dir": "unused",
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    return transformers.TrainingArguments(**settings | changes)


def trainer_as_written(layout):
    """A collator that shards, and a Trainer that splits the rows over both ranks of a group."""
    import transformers

    trainer = transformers.Trainer(
        model_on(world(), layout),
        arguments(),
        train_dataset=rows(),
        data_collator=lambda batch: shard_batch(collated(batch), layout, world()),
    )
    with pytest.raises(ValueError, match=MESSAGE):
        trainer.train()


def accelerate_as_written(layout):
    import accelerate

    loader = torch.utils.data.DataLoader(rows(), batch_size=2, collate_fn=collated)
    loader = accelerate.Accelerator(cpu=True).prepare(loader)
    with pytest.raises(ValueError, match=MESSAGE):
        shard_batch(next(iter(loader)), layout, world())


def labels_of_a_rank_alone():
    """The recipe's Trainer, told to take the mean over the labels of each rank."""
    recipe = example("transformers_trainer")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    trainer = recipe.SequenceParallelTrainer(
        model_on(mesh["sp"]),
        arguments(average_tokens_across_devices=False),
        mesh=mesh,
        train_dataset=[{"input_ids": row["input_ids"][:34]} for row in rows()],  # 32 and 34 labels
        data_collator=recipe.collate,
    )
    message = r"num_items_in_batch is [\d.]+ on rank 0, [\d.]+ on rank 1.*average_tokens_across"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def smoothed_labels():
    """The recipe's Trainer, told to work out the loss itself: it would be that of a shard."""
    recipe = example("transformers_trainer")
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0 .* got 0\.1"):
        recipe.SequenceParallelTrainer(
            model_on(world()), arguments(label_smoothing_factor=0.1), mesh=None
        )


def flattened():
    """Packed rows by DataCollatorWithFlattening: the update of one step is that of one process."""
    import transformers

    recipe = example("transformers_trainer")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    model = model_on(mesh["sp"])
    twin = copy.deepcopy(model)
    data = [{name: x.tolist() for name, x in row.items()} for row in rows(2)]
    trainer = recipe.Recording(
        model,
        arguments(),
        mesh=mesh,
        train_dataset=data,
        data_collator=transformers.DataCollatorWithFlattening(),
    )
    trainer.train()
    (batch,) = trainer.whole_batches
    assert batch["input_ids"].shape == (1, 2 * LENGTH)
    recipe.train_alone.__globals__["PATTERN"] = PATTERN
    settings = arguments(max_grad_norm=float("inf"))
    recipe.train_alone(twin, [[batch]], settings)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(relative_error(a.detach(), b.detach()) for a, b in pairs)


def as_written(rank, world_size):
    as_by_torchrun(rank, world_size)
    layout = SequenceLayout.zigzag(LENGTH, world_size)
    trainer_as_written(layout)
    accelerate_as_written(layout)
    labels_of_a_rank_alone()
    smoothed_labels()
    return flattened()


@pytest.mark.slow
def test_data_split_over_the_ranks_of_a_group_are_refused():
    """A Trainer with a collator that shards and accelerate.prepare, both as one writes them first.

    And what works or is refused beside it: packed rows; a mean over the labels of each rank.
    """
    for error in run_ranks(as_written, 2):
        assert error < SUMMED_IN_FLOAT32
