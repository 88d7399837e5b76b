"""Train a Llama by transformers' Trainer, its sequences sharded over the ranks of a group.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py                     # dp 1, sp 2
    torchrun --nproc-per-node 4 examples/transformers_trainer.py --sequence-ranks 2  # dp 2, sp 2

The Trainer splits data over all ranks. Here it must split them over data-parallel groups only: the
ranks that share a sequence get the same batches, and each takes its part. Afterwards every rank
trains once more alone on the batches of all ranks, and the program exits with code 1 if weights
differ.
"""

import argparse
import copy
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ring_dilated_attention import DilatedPattern, labels_per_rank
from ring_dilated_attention.integrations.transformers import (
    batch_layout,
    set_attention,
    set_layout,
    shard_batch,
)

TOLERANCE = 1e-4
"""Relative error allowed between sharded and not, after a few float32 steps."""
PATTERN = DilatedPattern([64, None], [1, 4])


# region trainer
class SequenceParallelTrainer(Trainer):
    """A Trainer on a mesh of (dp, sp): ranks along sp share each sequence."""

    def __init__(self, *args, mesh, **kwargs):
        super().__init__(*args, **kwargs)
        self.mesh = mesh
        if self.label_smoother is not None:  # it works the loss out of a shard's logits
            factor = self.args.label_smoothing_factor
            raise ValueError(f"label_smoothing_factor must be 0 where ranks share; got {factor}")

    def get_eval_dataloader(self, eval_dataset=None):
        """See Trainer."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        # Dealt by hand: accelerate would repeat rows until all groups have equally many.
        own = range(self.mesh.get_local_rank("dp"), len(data), self.mesh["dp"].size())
        return self._loader(Subset(data, own), self.args.eval_batch_size)

    def _loader(self, data, batch_size, **options):
        return DataLoader(
            data,
            batch_size=batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            **options,
        )

    def get_train_dataloader(self):
        """Batches that differ between data-parallel groups, and not within one."""
        order = torch.Generator().manual_seed(self.args.seed)  # the same on every rank
        drop_last = self.args.dataloader_drop_last
        options = {"shuffle": True, "generator": order, "drop_last": drop_last}
        return prepare_data_loader(
            self._loader(self.train_dataset, self._train_batch_size, **options),
            self.args.device,
            num_processes=self.mesh["dp"].size(),
            process_index=self.mesh.get_local_rank("dp"),
        )

    def _shard(self, batch):
        """This rank's part, and which it is; the ranks compare their batches."""
        layout = batch_layout(self.model, batch)
        return {**shard_batch(batch, layout, self.mesh["sp"]), "layout": layout}

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The shards of a step, and how many labels all ranks have in it."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [self._shard(batch) for batch in batches]
        return batches, self._get_num_items_in_batch(batches, device)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Micro-batches may have different lengths."""
        set_layout(self.model, inputs.pop("layout"))
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss alone: logits are those of a shard."""
        count, group = len(inputs["input_ids"]), self.mesh["sp"]
        inputs = self._prepare_inputs(self._shard(inputs))
        set_layout(self.model, inputs.pop("layout"))
        labels = labels_per_rank(inputs["shift_labels"], group, group)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs, num_items_in_batch=labels).loss
        dist.all_reduce(loss, group=group.get_group())
        loss /= group.size()
        self.evaluated += torch.tensor([count * loss.item(), count])
        return loss, None, None

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """The mean over rows, as on one process: Trainer's would count each rank of a group."""
        self.evaluated = torch.zeros(2, dtype=torch.float64)  # of this group: losses, rows
        self.gather_function = lambda losses: losses  # groups may have unequal numbers of batches
        found = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total = self.evaluated.to(self.args.device)
        dist.all_reduce(total, group=self.mesh.get_group("dp"))
        found.metrics[f"{metric_key_prefix}_loss"] = (total[0] / total[1]).item()
        return found


# endregion trainer


class Recording(SequenceParallelTrainer):
    """Keeps all batches, for the comparison with one process."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.whole_batches = []

    def _shard(self, batch):
        self.whole_batches.append(batch)
        return super()._shard(batch)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right; nothing is learnt of the padding."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = row["input_ids"]
        mask[index, : len(row["input_ids"])] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def texts(count: int) -> list[dict]:
    """Texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 300, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 256, (n,), generator=generator)} for n in lengths]


def new_model() -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="ring_dilated_attention",
    )
    return LlamaForCausalLM(config)


def train_alone(model, steps: list[list[dict]], arguments: TrainingArguments) -> None:
    """What the Trainer does, in plain torch on one process: `steps` has the batches of each."""
    set_attention(model, PATTERN)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    for batches in steps:
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        for batch in batches:
            model(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence-ranks", type=int, default=2, help="that share a sequence")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))  # torchrun sets it
    if not ranks or ranks % args.sequence_ranks:
        sys.exit(
            "start this with: torchrun --nproc-per-node 4 examples/transformers_trainer.py, on a "
            f"multiple of --sequence-ranks, {args.sequence_ranks}; got {ranks or 'no'} ranks"
        )
    micro_batches = 2
    out = tempfile.TemporaryDirectory()
    arguments = TrainingArguments(
        output_dir=out.name,
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=micro_batches,
        max_steps=args.steps,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    # region main
    shape = (ranks // args.sequence_ranks, args.sequence_ranks)
    mesh = init_device_mesh(arguments.device.type, shape, mesh_dim_names=("dp", "sp"))
    model = new_model()
    set_attention(model, PATTERN, group=mesh["sp"])
    twin = copy.deepcopy(model)
    trainer = Recording(model, arguments, mesh=mesh, train_dataset=texts(40), data_collator=collate)
    trainer.train()
    # endregion main
    seen = [None] * ranks
    dist.all_gather_object(seen, trainer.whole_batches)
    groups = seen[:: args.sequence_ranks]  # the ranks of a group have seen the same
    steps = [
        [batch for group in groups for batch in group[first : first + micro_batches]]
        for first in range(0, args.steps * micro_batches, micro_batches)
    ]
    train_alone(twin, steps, arguments)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    held_out = texts(4 * shape[0] + 1)  # batches of unequal size
    loss, expected = trainer.evaluate(held_out)["eval_loss"], 0.0
    for group in range(shape[0]):
        own = held_out[group :: shape[0]]
        for rows in (own[first : first + 2] for first in range(0, len(own), 2)):
            with torch.no_grad():
                expected += len(rows) * twin(**collate(rows)).loss.item() / len(held_out)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}; on one process {expected:.4f}")
        print(f"largest relative difference of weights from one process: {error:.1e}")
    dist.destroy_process_group()
    if not max(error, abs(loss - expected) / expected) <= TOLERANCE:  # NaN, too
        sys.exit("sharded training differs from one process")


if __name__ == "__main__":
    main()
