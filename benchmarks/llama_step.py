"""A training step of a Llama: transformers' own attention, this package's, and two ranks by FSDP2.

    python benchmarks/llama_step.py --out found.json
    torchrun --nproc-per-node 2 benchmarks/llama_step.py --out found.json
    torchrun --nproc-per-node 2 benchmarks/llama_step.py --device cpu --small

A step is forward, backward and AdamW on one sequence of random tokens, layers compiled. A sample is
several steps in a row, between which the host does not wait for the device. On one process every
kind of attention takes its turn: transformers' `sdpa`, `dense` (the same function by
`set_attention`) and `longnet`. Under torchrun the sequence is sharded and FSDP2 shards the weights.
First gradients are compared with those of transformers' `sdpa` on one device.
"""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import join, leave, spread, write
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ring_dilated_attention import DilatedPattern, SequenceLayout, labels_per_rank
from ring_dilated_attention.bench import take_turns
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch
from ring_dilated_attention.named_patterns import named


def make_model(*, small: bool, device: torch.device) -> LlamaForCausalLM:
    """Four layers of width 2,048, or a tiny model."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    if small:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape,
        num_hidden_layers=4,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        vocab_size=256 if small else 32_000,
        max_position_embeddings=1 << 20,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.float32 if small else torch.bfloat16)


def shard_weights(model: LlamaForCausalLM) -> None:
    """FSDP2 with each layer, the embedding and the head by themselves, so that all overlap.

    Layers stay whole from forward to backward, where they would be gathered a second time.
    """
    fully_shard(model.model.embed_tokens)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)


class Kind:
    """A model with one kind of attention, ready for steps.

    Args:
        name: ``"sdpa"``, ``"dense"`` or ``"longnet"``.
        model: with random weights; becomes this kind's.
        tokens: the whole sequence, (1, n).
        group: all ranks, or None.
        compiles: whether layers are compiled.
    """

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        tokens: torch.Tensor,
        group: dist.ProcessGroup | None,
        *,
        compiles: bool,
    ) -> None:
        self.name, self.model, self.group = name, model, group
        self.batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        if name != "sdpa":
            ranks = 1 if group is None else dist.get_world_size(group)
            layout = SequenceLayout.zigzag(tokens.shape[1], ranks)
            pattern = DilatedPattern.dense() if name == "dense" else named("longnet").pattern
            set_attention(model, pattern, group=group, layout=layout)
            self.batch = shard_batch(self.batch, layout, group)
        for layer in model.model.layers:
            if compiles:
                layer.compile()
        if group is not None:
            shard_weights(model)
            labels = self.batch["shift_labels"]
            self.batch["num_items_in_batch"] = labels_per_rank(labels, model, group)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def backward(self) -> torch.Tensor:
        """Forward and backward; the loss of this rank."""
        loss: torch.Tensor = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def steps(self, count: int) -> None:
        """Steps one after the other, as a training makes them."""
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gradient(self) -> torch.Tensor:
        """All gradients side by side, float32."""
        self.backward()
        whole = [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in self.model.parameters()
        ]
        self.optimizer.zero_grad()
        return torch.cat([x.float().flatten() for x in whole])


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, 1,000 tokens, float32")
    parser.add_argument("--seq-len", type=int, help="default: 32,768; 1,000 with --small")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--in-a-row", type=int, default=5, help="steps of a sample")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    ranks = join(options.device)
    length = options.seq_len or (1000 if options.small else 32_768)
    model = make_model(small=options.small, device=ranks.device)
    torch.manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (1, length), device=ranks.device)
    alone = Kind("sdpa", copy.deepcopy(model), tokens, None, compiles=not options.eager)
    wanted = alone.gradient()
    kinds = {
        name: Kind(name, copy.deepcopy(model), tokens, ranks.world, compiles=not options.eager)
        for name in ("dense", "longnet")
    }
    error = error_of(kinds["dense"].gradient(), wanted)
    found: dict[str, Any] = {"ranks": ranks.size, "tokens": length, "error of dense": error}
    del wanted
    if ranks.size == 1:
        kinds = {"sdpa": alone, **kinds}
    del alone
    times = take_turns(
        {name: partial(kind.steps, options.in_a_row) for name, kind in kinds.items()},
        ranks.device,
        repeats=options.samples,
        seconds=600,
        group=ranks.host,
    )
    for name, samples in times.items():
        found[name] = spread([ms / options.in_a_row for ms in samples])
    if ranks.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if ranks.rank == 0:
        print(json.dumps(found))
        write(options.out, ranks.device, found)
    leave()


if __name__ == "__main__":
    main()
