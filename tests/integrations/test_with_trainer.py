"""transformers' Trainer and accelerate: their own ways to load data, and those of the recipes."""

from tempfile import gettempdir
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
        **{"output_dir": gettempdir(), "save_strategy": "no", "report_to": []},
        **{"logging_strategy": "no", "disable_tqdm": True, "use_cpu": True},
        **{"remove_unused_columns": False, "max_steps": 1},
        **{"per_device_train_batch_size": 2, "max_grad_norm": 0.0},
        **{"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"},
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


def smoothed_labels():
    """The recipe's Trainer, told to work out the loss itself: it would be that of a shard."""
    recipe = example("transformers_trainer")
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0 .* got 0\.1"):
        recipe.SequenceParallelTrainer(
            model_on(world()), arguments(label_smoothing_factor=0.1), mesh=None
        )


def short_last_batch(rank, world_size):
    """The recipe's Trainer evaluates 2 rows and then 1: eval_loss is the mean over rows."""
    as_by_torchrun(rank, world_size)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "sp"))
    model, held_out = model_on(mesh["sp"]), rows(3)
    with torch.no_grad():
        model.lm_head.weight *= 100  # losses of rows differ by more than rounding
    trainer = example("transformers_trainer").SequenceParallelTrainer(
        model, arguments(per_device_eval_batch_size=2), mesh=mesh, data_collator=collated
    )
    found = trainer.evaluate(held_out)["eval_loss"]
    set_attention(model, PATTERN)
    losses = torch.stack([model(**collated([row])).loss.detach() for row in held_out])
    assert losses[:2].mean() / losses[2] - 1 > 0.05
    assert relative_error(torch.tensor(found), losses.mean()) < SUMMED_IN_FLOAT32


@pytest.mark.slow
def test_eval_loss_of_a_short_last_batch():
    run_ranks(short_last_batch, 2)


def as_written(rank, world_size):
    as_by_torchrun(rank, world_size)
    layout = SequenceLayout.zigzag(LENGTH, world_size)
    trainer_as_written(layout)
    accelerate_as_written(layout)
    smoothed_labels()


@pytest.mark.slow
def test_data_split_over_the_ranks_of_a_group_are_refused():
    """By Trainer and by accelerate.prepare, both as one writes them first."""
    run_ranks(as_written, 2)
