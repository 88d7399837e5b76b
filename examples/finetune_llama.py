"""Fine-tune a language model of transformers on long sequences, each shared by several ranks.

    torchrun --nproc-per-node 8 examples/finetune_llama.py \
        --model FOLDER_OR_NAME --data FILES --seq-len 128K --out RUN

Every file is a document. Documents are packed into sequences of `--seq-len` tokens, and attention
stays within each. Their layout gives all ranks of a sequence as much work. Weights, gradients and
the optimizer are sharded over all ranks (FSDP2), compute is bfloat16, and activations are computed
again in backward; while it loads, each process has the model in float32 on its host. `--out` gets
checkpoints, from which the same command with `--resume` goes on, on any number of ranks, and at the
end the model as `from_pretrained` takes it.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from ring_dilated_attention import (
    DilatedPattern,
    dilated_attention,
    labels_per_rank,
)
from ring_dilated_attention.integrations.transformers import (
    batch_layout,
    set_attention,
    set_layout,
    shard_batch,
)
from ring_dilated_attention.units import parse_count

PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250}
"""Dense bfloat16, by a part of the GPU's name, for the model FLOPs utilization (MFU)."""


def lengths(text: str) -> list[int | None]:
    """Numbers with commas between them: 2K,16K,all."""
    return [None if part == "all" else parse_count(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder or a name of the Hub, of a causal language model")
    add("--data", nargs="+", required=True, type=Path, help="files of text; each is a document")
    add("--out", required=True, type=Path, help="folder for checkpoints and the trained model")
    add("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    add("--seq-len", type=parse_count, default=131_072, help="tokens of a sequence, such as 128K")
    add("--sequence-ranks", type=int, help="ranks that share a sequence; None: all")
    add("--segment-lengths", type=lengths, default=[None], help="all: dense; or 2K,16K,all")
    add("--dilation-rates", type=lengths, default=[1], help="one for each segment length: 1,4,16")
    add("--exchange", default="auto", help="how rows travel: auto, ring, gather, heads, heads:4")
    add("--steps", type=int, default=100)
    add("--learning-rate", type=float, default=1e-5)
    add("--warmup-steps", type=int, default=10)
    add("--weight-decay", type=float, default=0.0)
    add("--max-grad-norm", type=float, default=1.0)
    add("--save-every", type=int, default=50, help="steps")
    add("--seed", type=int, default=0, help="of the order of documents")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of compute")
    return parser


def packed(args, tokenizer) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences of `--seq-len` tokens, of documents in random order, again and again.

    A document that does not fit goes on in the next sequence as a document of its own.
    """
    documents = []
    for path in args.data:
        ids = tokenizer(path.read_text(errors="replace"), add_special_tokens=False)["input_ids"]
        documents.append(ids + [tokenizer.eos_token_id] * (tokenizer.eos_token_id is not None))
    documents = [document for document in documents if document]
    if not documents:
        raise ValueError(f"there is no text in {', '.join(map(str, args.data))}")
    draw, waiting = random.Random(args.seed), []
    tokens, borders = [], [0]
    while True:
        waiting = waiting or draw.sample(documents, len(documents))
        document, room = waiting.pop(), args.seq_len - len(tokens)
        if rest := document[room:]:
            waiting.append(rest)
        tokens += document[:room]
        borders.append(len(tokens))
        if len(tokens) == args.seq_len:
            yield sequence(tokens, borders)
            tokens, borders = [], [0]


def sequence(tokens: list[int], borders: list[int]) -> dict[str, torch.Tensor]:
    """A whole sequence as transformers' models take it."""
    ids, starts = torch.tensor([tokens]), torch.tensor(borders[:-1])
    labels = ids.clone()
    labels[0, starts] = -100  # the first token of a document does not follow from the one before
    sizes = torch.tensor(borders).diff()
    positions = torch.arange(len(tokens)) - starts.repeat_interleave(sizes)
    borders = torch.tensor(borders, dtype=torch.int32)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
    }


def load_model(args, group):
    """The model with this package's attention, sharded over all ranks, and its optimizer."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    pattern = DilatedPattern(args.segment_lengths, args.dilation_rates)
    set_attention(model, pattern, group=group, exchange=args.exchange)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    dtype = getattr(torch, args.dtype)
    # Inputs stay as they are: a number of labels in bfloat16 would be another one.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Over all ranks: those of a sequence see other positions of it. Each layer goes to the GPU
    # when it is cut, so no GPU ever holds the whole model; each process does on its host.
    for layer in model.base_model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    return model, optimizer, pattern


def train_step(args, model, optimizer, whole, mesh, device) -> torch.Tensor:
    """One step; returns this rank's part of the loss."""
    group = mesh["sequence"]
    layout = batch_layout(model, whole)
    set_layout(model, layout)
    batch = shard_batch(whole, layout, group)
    batch = {name: x.to(device) for name, x in batch.items()}
    # The mean over all labels of all ranks: FSDP2 averages gradients.
    count = labels_per_rank(batch["shift_labels"], dist.group.WORLD, group)
    optimizer.zero_grad()
    loss = model(**batch, num_items_in_batch=count).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return loss.detach()


def step_flops(args, model, pattern, documents: list[int]) -> float:
    """Floating-point operations of a sequence, forward and backward, without recomputation."""
    config = model.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    query, key = (
        torch.empty(1, args.seq_len, count, size, device="meta")
        for count in (heads, config.num_key_value_heads)
    )
    with FlopCounterMode(display=False) as counter:
        dilated_attention(query, key, key, pattern, is_causal=True, documents=documents)
    attention = 3.5 * config.num_hidden_layers * counter.get_total_flops()  # backward 2.5 times
    return attention + 6 * sum(x.numel() for x in model.parameters()) * args.seq_len


# --- checkpoints: folders of safetensors files


def save(args, step: int, model, optimizer) -> None:
    """Write a checkpoint; one that is not whole keeps the name .partial."""
    path, partial = args.out / f"step_{step:07}", args.out / ".partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": of_one_name(model, weights), "optimizer": state["state"]},
        storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(path)
    dist.barrier()


def of_one_name(model, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each weight by one name: embeddings may be the weights of the head, too."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    twice = every - {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in weights.items() if name not in twice}


def resume(args, model, optimizer) -> int:
    """Read the newest checkpoint; returns its step, 0 where there is none."""
    found = sorted(args.out.glob("step_*"))
    if not (args.resume and found):
        return 0
    weights, state = get_state_dict(model, optimizer)
    both = {"model": of_one_name(model, weights), "optimizer": state["state"]}
    dcp.load(both, storage_reader=HuggingFaceStorageReader(str(found[-1])))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(found[-1].name.removeprefix("step_"))


def export(args, model, tokenizer) -> None:
    """Write the model as `from_pretrained` reads it; the config has the pattern."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(args.out / "model", state_dict=weights)
        tokenizer.save_pretrained(args.out / "model")


def main(argv: list[str] | None = None) -> list[float]:
    """Fine-tune; returns the losses."""
    args = make_parser().parse_args(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    ranks, leader = dist.get_world_size(), dist.get_rank() == 0
    shared = args.sequence_ranks or ranks
    if ranks % shared:
        sys.exit(f"{ranks} ranks must be a multiple of --sequence-ranks {shared}")
    if not args.resume and any(args.out.glob("step_*")):
        sys.exit(f"{args.out} has checkpoints: go on with --resume, or take another --out")
    mesh = init_device_mesh(
        "cuda" if on_gpu else "cpu", (ranks // shared, shared), mesh_dim_names=("data", "sequence")
    )
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model, optimizer, pattern = load_model(args, mesh["sequence"])
    step = resume(args, model, optimizer)
    gpu = torch.cuda.get_device_name() if on_gpu else ""
    peak = next((x for name, x in PEAK_TFLOPS.items() if name in gpu), None)
    losses, sequences = [], packed(args, tokenizer)
    groups, own = mesh["data"].size(), mesh["data"].get_local_rank()
    for _ in range(step * groups):  # the order of sequences depends on the seed alone
        next(sequences)
    while step < args.steps:
        whole = [next(sequences) for _ in range(groups)][own]
        for options in optimizer.param_groups:
            options["lr"] = args.learning_rate * min(1.0, (step + 1) / (args.warmup_steps + 1))
        began = time.perf_counter()
        loss = train_step(args, model, optimizer, whole, mesh, device)
        dist.all_reduce(loss, dist.ReduceOp.AVG if on_gpu else dist.ReduceOp.SUM)
        losses.append(loss.item() / (1 if on_gpu else ranks))  # waits for the step
        seconds, step = time.perf_counter() - began, step + 1
        if leader:
            found = {
                "step": step,
                "loss": round(losses[-1], 4),
                "tokens_per_second": round(groups * args.seq_len / seconds),
            }
            if on_gpu:
                found["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
            if peak:
                flops = groups * step_flops(args, model, pattern, whole["cu_seq_lens_q"].tolist())
                found["MFU"] = round(flops / ranks / seconds / peak / 1e12, 3)
            print(json.dumps(found), flush=True)
        if step % args.save_every == 0 or step == args.steps:
            save(args, step, model, optimizer)
    export(args, model, tokenizer)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
