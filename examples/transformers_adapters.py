"""Train LoRA adapters of a Llama with a dilated pattern on all ranks; save, load and generate.

    python examples/transformers_adapters.py                         # one process
    torchrun --nproc-per-node 2 examples/transformers_adapters.py    # the same losses, sharded

The model is small and its weights are random. Exits with code 1 if a loss differs from that of a
copy trained on this process alone, or if what was saved generates other tokens when it is loaded.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ring_dilated_attention import DilatedPattern, SequenceLayout, labels_per_rank
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch

TOLERANCE = 1e-4
"""Relative error allowed between sharded and not, after a few float32 steps."""


def save_base(folder: Path) -> None:
    """A model with a pattern, which its config.json keeps."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    # region save
    model = LlamaForCausalLM(config)  # or from_pretrained(...)
    set_attention(model, DilatedPattern([64, None], [1, 4]))
    model.save_pretrained(folder)  # config.json has the pattern now
    # endregion save


def with_adapters(folder: Path, group=None, layout=None):
    """The saved model with new adapters, the same on every rank."""
    torch.manual_seed(0)
    # region adapters
    model = AutoModelForCausalLM.from_pretrained(folder)  # with its pattern
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    set_attention(model, group=group, layout=layout)  # the pattern is the config's
    # endregion adapters
    return model.train()


def train(model, batch, layout, steps, group=None) -> list[float]:
    """A few steps of AdamW on one batch; returns the losses."""
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-2)
    losses = []
    for _ in range(steps):
        shard = shard_batch(batch, layout, group)
        count = labels_per_rank(shard["shift_labels"], group, group)
        loss = model(**shard, num_items_in_batch=count).loss
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if group is not None:
            for tensor in (loss, *(weight.grad for weight in learnt)):
                dist.all_reduce(tensor, group=group)
                tensor /= dist.get_world_size(group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def generated(model, prompt, new_tokens=16):
    """Greedy tokens behind a prompt, which every rank gives whole."""
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
    return model.eval().generate(input_ids=prompt, max_new_tokens=new_tokens, **options)


def main() -> list[float]:
    """Train, save, load and generate; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    group, ranks, rank = None, 1, 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun sets it
        dist.init_process_group("gloo")
        group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    if group is not None:
        dist.broadcast_object_list(folders, src=0)
    base, adapters = Path(folders[0], "base"), Path(folders[0], "adapters")
    if rank == 0:
        torch.manual_seed(0)
        save_base(base)
    if group is not None:
        dist.barrier()

    tokens = torch.randint(256, (1, args.seq_len), generator=torch.manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    layout = SequenceLayout.zigzag(args.seq_len, ranks)
    model = with_adapters(base, group, layout)
    losses = train(model, batch, layout, args.steps, group)
    text = generated(model, tokens[:, :200])
    alone = SequenceLayout.contiguous(args.seq_len, 1)
    wanted = train(with_adapters(base, layout=alone), batch, alone, args.steps)
    error = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))

    same = True
    if rank == 0:
        # region load
        model.save_pretrained(adapters)  # names the folder of the base model
        loaded = AutoPeftModelForCausalLM.from_pretrained(adapters)  # with the pattern
        # endregion load
        same = torch.equal(generated(loaded, tokens[:, :200]), text)
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.4f}")
        print(f"largest relative difference of a loss from one process: {error:.1e}")
        print(f"loaded adapters generate the same tokens: {same}")
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(folders[0])
    if not (error <= TOLERANCE and same):  # NaN, too
        sys.exit("what was trained on ranks, or loaded, differs from one process")
    return losses


if __name__ == "__main__":
    main()
