"""Train a Llama of Hugging Face transformers with its sequences sharded over all ranks; generate.

    python examples/transformers_llama.py                           # one process
    torchrun --nproc-per-node 2 examples/transformers_llama.py      # the same losses, sharded

The model is small and its weights are random; a pretrained one is loaded by
`from_pretrained(..., attn_implementation="ring_dilated_attention")`. `--compare`, the default,
trains a second copy on this process alone, and exits with code 1 if the two differ; so it does if
one forward of the generated text on this process would have chosen other tokens.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ring_dilated_attention import DilatedPattern, labels_per_rank
from ring_dilated_attention.integrations.transformers import (
    batch_layout,
    set_attention,
    set_layout,
    shard_batch,
)

TOLERANCE = 1e-4
"""Relative error allowed between sharded and not, after a few float32 steps."""


def packed_batch(length: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Two documents packed into one sequence: position ids restart where a document begins."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, length), generator=generator)
    border = length // 3
    positions = torch.cat([torch.arange(border), torch.arange(length - border)])[None]
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


# region step
def train_step(model, optimizer, batch, pattern, group=None) -> float:
    """One step on one batch of whole sequences; returns the loss."""
    ranks = 1 if group is None else dist.get_world_size(group)
    set_attention(model, pattern, group=group)
    layout = batch_layout(model, batch)  # by document, so that all ranks have as much work
    set_layout(model, layout)
    # Cuts out this rank's shard, and shifts the labels before it does.
    shard = shard_batch(batch, layout, group)
    if group is not None:  # over which losses and gradients are averaged
        shard["num_items_in_batch"] = labels_per_rank(shard["shift_labels"], group, group)
    loss = model(**shard).loss
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if group is not None:  # what DistributedDataParallel and fully_shard do by themselves
        for tensor in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
            tensor /= ranks
    optimizer.step()
    return loss.item()


# endregion step


# region generate
def continue_text(model, prompt, new_tokens):
    """Greedy tokens behind a prompt, which every rank gives whole; all ranks get the same."""
    model.eval()
    mask = torch.ones_like(prompt)  # prompts of different lengths are padded on the left
    return model.generate(
        prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
    )


# endregion generate


@torch.no_grad()
def largest_gap(model, text, new_tokens, pattern) -> float:
    """How far the logits of generated tokens are below the largest ones, by one full forward."""
    model = copy.deepcopy(model)
    set_attention(model, pattern)  # this process alone
    logits = model(text).logits[:, -new_tokens - 1 : -1]
    chosen = logits.gather(-1, text[:, -new_tokens:, None])[..., 0]
    return (logits.amax(-1) - chosen).max().item()


def main() -> list[float]:
    """Train; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets it
    if sharded:
        dist.init_process_group("gloo")
    group = dist.group.WORLD if sharded else None
    first = not sharded or dist.get_rank() == 0

    # region model
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="ring_dilated_attention",  # or as an argument of from_pretrained
    )
    model = LlamaForCausalLM(config)
    pattern = DilatedPattern([256, None], [1, 4])  # DilatedPattern.dense(): what Llama computes
    set_attention(model, pattern)
    # endregion model
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin))

    batch = packed_batch(args.seq_len, config.vocab_size)
    losses, errors = [], [0.0]
    for step in range(args.steps):
        losses.append(train_step(model, optimizer, batch, pattern, group))
        if args.compare and sharded:
            alone = train_step(twin, twin_optimizer, batch, pattern)
            errors.append(abs(losses[-1] - alone) / alone)
        if first:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if first and args.compare and sharded:
        print(f"largest relative difference of a loss from one process: {max(errors):.1e}")
    text = continue_text(model, batch["input_ids"], args.new_tokens)
    gap = largest_gap(model, text, args.new_tokens, pattern) if args.compare else 0.0
    if first:
        print("generated:", *text[0, -args.new_tokens :].tolist())
    if sharded:
        dist.destroy_process_group()
    if not gap <= TOLERANCE:
        sys.exit("a generated token is not the one that a full forward chooses")
    if not all(error <= TOLERANCE for error in errors):  # NaN, too
        sys.exit("sharded training differs from one process")
    return losses


if __name__ == "__main__":
    main()
