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

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from harness import in_a_row, join, leave, small_llama, write
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import DilatedPattern, SequenceLayout, labels_per_rank
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch
from ring_dilated_attention.named_patterns import named


def shard_weights(model: Any) -> None:
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
        model: Any,
        tokens: torch.Tensor,
        group: dist.ProcessGroup | None,
        *,
        compiles: bool,
    ) -> None:
        self.model = model
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

    def backward(self) -> None:
        """Forward and backward."""
        self.model(**self.batch).loss.backward()

    def step(self) -> None:
        """A step, as a training makes it."""
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


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="a tiny model, float32")] = False,
    seq_len: Annotated[int, typer.Option(help="0: 32,768; 1,000 if small")] = 0,
    samples: int = 7,
    steps: Annotated[int, typer.Option("--in-a-row", help="steps of a sample")] = 5,
    eager: Annotated[bool, typer.Option("--eager", help="layers are not compiled")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Compare, time, print."""
    ranks, length = join(device), seq_len or (1000 if small else 32_768)
    shape = (64, 128, 4, 2) if small else (2048, 5632, 16, 8)
    vocabulary, dtype = (256, torch.float32) if small else (32_000, torch.bfloat16)
    options = {"max_position_embeddings": 1 << 20, "use_cache": False}
    model = small_llama(*shape, vocab_size=vocabulary, **options).to(ranks.device, dtype)
    torch.manual_seed(1)
    tokens = torch.randint(vocabulary, (1, length), device=ranks.device)
    alone = Kind("sdpa", copy.deepcopy(model), tokens, None, compiles=not eager)
    wanted = alone.gradient()
    kinds = {
        name: Kind(name, copy.deepcopy(model), tokens, ranks.world, compiles=not eager)
        for name in ("dense", "longnet")
    }
    error = relative_error(kinds["dense"].gradient(), wanted)
    found: dict[str, Any] = {"ranks": ranks.size, "tokens": length, "error of dense": error}
    del wanted
    if ranks.size == 1:
        kinds = {"sdpa": alone, **kinds}
    del alone
    calls = {name: kind.step for name, kind in kinds.items()}
    found |= in_a_row(calls, steps, ranks, repeats=samples, seconds=600)
    if ranks.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if ranks.rank == 0:
        print(json.dumps(found))
        write(out, ranks.device, found)
    leave()


if __name__ == "__main__":
    typer.run(main)
