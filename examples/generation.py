"""Read a long prompt, then generate token by token with a KV cache that does not grow.

    python examples/generation.py
    torchrun --nproc-per-node 2 examples/generation.py                        # CPU processes, gloo
    python examples/generation.py --seq-len 1048576 --base --no-check         # one GPU
    torchrun --nproc-per-node 2 examples/generation.py --seq-len 1048576 --base --no-check
    python examples/generation.py --checkpoint RUN --prompt "def "    # of examples/train_longnet.py

Without a checkpoint the model has random weights: what counts is what it costs, and that every
generated token is the one that a forward pass over the whole text finds. Exits with code 1 if one
is not.
"""

import argparse
import codecs
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import LongNet, LongNetConfig

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Another token may be the best one by this much: sums are formed in another order."""


# region model
def make_model(*, is_base: bool) -> LongNet:
    """LongNet's pattern: a small model, or one of 85 million parameters."""
    layers, width, heads = (12, 768, 12) if is_base else (2, 96, 6)
    config = LongNetConfig(
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        ffn_dim=4 * width,
        segment_lengths=[2048, 4096, 8192, 16384, 32768],
        dilation_rates=[1, 2, 4, 6, 12],
    )
    return LongNet(config, chunk_rows=65_536)


# endregion model


def start(device: torch.device) -> dist.ProcessGroup | None:
    """The group of all ranks under torchrun."""
    if "RANK" not in os.environ:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.group.WORLD


# region sample
def sample(args: argparse.Namespace, device: torch.device) -> None:
    """Continue a prompt, one byte at a time, with the newest checkpoint of a run."""
    from train_longnet import join, newest_checkpoint

    join()
    group, rank = dist.group.WORLD, dist.get_rank()
    try:
        path, run = newest_checkpoint(args.checkpoint)
    except ValueError as error:
        sys.exit(str(error))
    model = LongNet(LongNetConfig(**run["model"]))
    reader = dcp.HuggingFaceStorageReader(str(path))  # safetensors: nothing in them can run code
    dcp.load({"model": model.state_dict()}, storage_reader=reader)  # in place
    prompt = torch.tensor([list(args.prompt.encode())], device=device)
    layout = SequenceLayout.zigzag(prompt.shape[1], dist.get_world_size())
    stream = model.to(device).stream(
        layout.shard(prompt, rank, dim=1),
        args.new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        group=group,
        layout=layout,
    )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may have four bytes
    text = args.prompt
    for token in stream:
        if rank == 0:
            print(text, end="", flush=True)
        text = decoder.decode(bytes(token.tolist()))
    if rank == 0:
        print(text)
    dist.destroy_process_group()


# endregion sample


def main() -> float:
    """Generate, print what it took, and compare with one forward pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=20_001, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--base", action="store_true", help="12 layers of width 768, not 2 of 96")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpoint", type=Path, help="a run of examples/train_longnet.py")
    parser.add_argument("--prompt", default="def ", help="that a checkpoint continues")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_args()
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    if args.checkpoint is not None:
        sample(args, device)
        return 0.0
    group = start(device)
    rank, ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = make_model(is_base=args.base).to(device, dtype)
    prompt = torch.randint(256, (1, args.seq_len), device=device)

    # region prefill
    layout = SequenceLayout.zigzag(args.seq_len, ranks)  # the prompt is sharded
    caches = model.make_caches(1, max_length=args.seq_len + args.new_tokens, group=group)
    own = layout.shard(prompt, rank, dim=1)
    if device.type == "cuda":  # once without the clock: kernels compile when they are first used
        model.step(model.prefill(own, caches, layout=layout).argmax(-1, keepdim=True), caches)
        torch.cuda.synchronize()
    begun = time.perf_counter()
    logits = model.prefill(own, caches, layout=layout)
    # endregion prefill
    token = logits.argmax(-1, keepdim=True)
    read_in = time.perf_counter() - begun + 0.0 * token.item()  # which waits for the device

    # region steps
    tokens = [token]
    begun = time.perf_counter()
    for _ in range(args.new_tokens - 1):
        logits = model.step(tokens[-1], caches)  # (1, 1, 256): the same on every rank
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    new = torch.cat(tokens, 1)
    # endregion steps
    new.cpu()
    each = (time.perf_counter() - begun) / max(1, args.new_tokens - 1)

    error = largest_loss(model, prompt, new) if args.check else 0.0
    if rank == 0:
        held = sum(cache.nbytes for cache in caches)
        every = sum(
            2 * args.seq_len * cache.plan.num_kv_heads * cache.keys.shape[2] * dtype.itemsize
            for cache in caches
        )
        on = f"{ranks} rank{'s' * (ranks > 1)}"
        print(f"prompt: {args.seq_len:,} tokens in {read_in:.2f} s on {on}")
        print(f"then {args.new_tokens} tokens, {1e3 * each:.2f} ms each")
        print(f"caches: {held / 1e6:,.1f} MB; all keys and values: {every / 1e6:,.1f} MB")
        if args.check:
            print(f"beside a forward pass over the whole text: at most {error:.1e} from the best")
    if group is not None:
        dist.destroy_process_group()
    if not error <= TOLERANCE[dtype]:  # NaN, too
        sys.exit(f"rank {rank}: a generated token is {error} below the best one")
    return error


# region check
@torch.no_grad()
def largest_loss(model: LongNet, prompt: torch.Tensor, new: torch.Tensor) -> float:
    """By how much the logit of a generated token is below the best one of the whole text's."""
    logits = model(torch.cat([prompt, new], 1))[:, prompt.shape[1] - 1 : -1].float()
    chosen = logits.gather(2, new.unsqueeze(2)).squeeze(2)
    return (logits.amax(2) - chosen).max().item()


# endregion check


if __name__ == "__main__":
    main()
