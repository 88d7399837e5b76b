"""Train a LongNet on text, with every sequence sharded over several ranks.

    python examples/train_longnet.py                                     # one process
    torchrun --standalone --nproc-per-node 2 examples/train_longnet.py   # the same losses, sharded
    torchrun --standalone --nproc-per-node 4 examples/train_longnet.py \
        @examples/longnet_base.txt --seq-len 8M --data FOLDER            # options from a file

Tokens are bytes; without `--data` they are the source code of Python's standard library. A run
leaves log.jsonl, loss.png and checkpoints in its folder, `--out`. Ctrl-C or SIGTERM saves a
checkpoint and ends; the same command with `--resume --out FOLDER` goes on, on any number of ranks.
examples/generation.py continues a prompt with a checkpoint.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import LongNet, LongNetConfig
from ring_dilated_attention.units import parse_count


def count(text: str) -> int:
    """A positive number: 4096, 4K, 8M or 1G."""
    if (number := parse_count(text)) < 1:
        raise ValueError
    return number


def lengths(text: str) -> list[int | None]:
    """Segment lengths with commas between them: 2K,8K,all."""
    return [None if part == "all" else count(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """The command line. The defaults take about two minutes on two CPU cores."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",  # @FILE: options from a file, one a line
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder of the run; None: runs/ and the time of day")
    add("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    add("--data", nargs="*", default=[], help="files and folders of text")
    add("--num-layers", type=count, default=3)
    add("--embed-dim", type=count, default=128, help="the MLP is four times as wide")
    add("--num-heads", type=count, default=4)
    add("--segment-lengths", type=lengths, default=[256, 1024, 4096], help="such as 2K,8K,all")
    add("--dilation-rates", type=lengths, default=[1, 2, 4], help="one for each segment length")
    add("--seq-len", type=count, default=4096, help="bytes of a sequence, over all its ranks")
    add("--batch-size", type=count, default=1, help="sequences of a step, over all ranks")
    add("--steps", type=count, default=350)
    add("--learning-rate", type=float, default=6e-3, help="the highest; it ends at a tenth of it")
    add("--warmup-steps", type=int, default=20)
    add("--weight-decay", type=float, default=0.1)
    add("--max-grad-norm", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--eval-every", type=count, default=50, help="steps")
    add("--eval-windows", type=count, default=16, help="held-out sequences of an evaluation")
    add("--save-every", type=count, default=100, help="steps")
    add("--keep", type=count, default=3, help="checkpoints")
    add("--sequence-ranks", type=count, help="ranks that share a sequence; None: all")
    add("--fsdp", action="store_true", help="shard parameters over all ranks (FSDP2)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: autocast")
    add("--activation-checkpoint", choices=["none", "full", "keep_attention"], default="none")
    add("--activation-checkpoint-blocks", type=count, default=1, help="see LongNet")
    add("--chunk-rows", type=count, help="rows at a time, to save memory; see LongNet")
    return parser


def join() -> None:
    """Join the ranks that torchrun has started; plain `python` is a group of one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # gloo beside NCCL, for what lies on the CPU: options, metrics, step numbers of AdamW.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        # One process: gloo would listen at the address that the host's name leads to.
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "".join(loopback[:1]))
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def start(argv: list[str] | None) -> argparse.Namespace:
    """Rank 0's options and text, on every rank: one rank says what is wrong, and only once."""
    box = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = read_options(argv)
        except SystemExit as ended:  # of argparse, which has said why
            box[1] = ended.code or 0
        except (ValueError, TypeError, OSError) as error:
            print(f"train_longnet.py: {error}", file=sys.stderr, flush=True)
            box[1] = 1
    dist.broadcast_object_list(box)
    if box[1] is not None:
        sys.exit(box[1])
    return box[0]


def read_options(argv: list[str] | None) -> argparse.Namespace:
    """The options, the text and the checkpoint to go on from; all that can be wrong early."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.resume and args.out is None:
        parser.error("--resume needs --out, the folder of the run")
    args.out = args.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    found = None
    if checkpoints(args.out):
        if not args.resume:
            raise ValueError(f"{args.out} holds a run: add --resume, or choose another --out")
        found = newest_checkpoint(args.out)
        parser.set_defaults(**found[1]["options"])  # what this command does not say itself
        args = parser.parse_args(argv)
    args.found = found
    config, ranks = model_config(args), dist.get_world_size()
    args.sequence_ranks = args.sequence_ranks or ranks
    groups, rest = divmod(ranks, args.sequence_ranks)
    if rest or args.batch_size % groups:
        raise ValueError(
            f"{ranks} ranks must be a multiple of --sequence-ranks, {args.sequence_ranks}, and "
            f"--batch-size, {args.batch_size}, a multiple of their quotient"
        )
    args.text, args.heldout = read_text(args.data)
    args.digest = hashlib.sha256(args.text + args.heldout).hexdigest()
    if min(len(args.text), len(args.heldout) // args.batch_size) <= args.seq_len:
        raise ValueError(
            f"--seq-len {args.seq_len:,} is too long for {len(args.text):,} bytes of text and "
            f"{len(args.heldout):,} held-out bytes"
        )
    if found:
        path, run = found
        if LongNetConfig(**run["model"]) != config:
            raise ValueError(f"{path} is of another model: leave out the model's options")
        if run["digest"] != args.digest:
            raise ValueError(f"{path} was trained on other text than --data holds now")
        if run["step"] >= args.steps:
            raise ValueError(f"{path} has done {run['step']} steps: raise --steps to go on")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def read_text(paths: list[str]) -> tuple[bytes, bytes]:
    """Bytes to train on, and held-out ones: about every twentieth file, or else the text's end."""
    text, heldout = [], []
    for path in paths or [sysconfig.get_path("stdlib")]:
        root = Path(path).resolve()
        # Sorted by name, so that the same files are the same text on every machine.
        below = sorted(file for file in root.rglob("*" if paths else "*.py") if file.is_file())
        for file in below if root.is_dir() else [root]:
            name = file.relative_to(root.parent)
            if any(part.startswith(".") or part.endswith("-packages") for part in name.parts[1:]):
                continue
            data = file.read_bytes()
            if b"\0" not in data:  # no binary file
                # By its name in the folder alone: neither other files nor another version's folder
                # move it to the other side.
                inside = "/".join(name.parts[1:]) or name.name
                (text if zlib.crc32(inside.encode()) % 20 else heldout).append(data)
    whole = b"".join(text), b"".join(heldout)
    if all(whole):
        return whole
    together = b"".join(whole)
    cut = len(together) * 19 // 20
    return together[:cut], together[cut:]


def train_windows(args, step: int) -> list[bytes]:
    """The sequences of a step, each one byte longer for the labels.

    They depend on the step and the seed alone: any number of ranks sees the same ones, and a run
    that is resumed needs no state of a data loader.
    """
    draw = random.Random(f"{args.seed}, {step}")
    starts = [draw.randrange(len(args.text) - args.seq_len) for _ in range(args.batch_size)]
    return [args.text[start : start + args.seq_len + 1] for start in starts]


def heldout_batches(args) -> list[list[bytes]]:
    """Held-out sequences, evenly spaced, in batches like those of training."""
    fit = (len(args.heldout) - 1) // args.seq_len
    number = max(min(args.eval_windows, fit) // args.batch_size, 1) * args.batch_size
    starts = [index * fit // number * args.seq_len for index in range(number)]
    windows = [args.heldout[start : start + args.seq_len + 1] for start in starts]
    return [windows[i : i + args.batch_size] for i in range(0, number, args.batch_size)]


def model_config(args) -> LongNetConfig:
    """The shape of the model."""
    return LongNetConfig(
        num_layers=args.num_layers,
        embed_dim=args.embed_dim,
        num_heads=args.num_heads,
        ffn_dim=4 * args.embed_dim,
        segment_lengths=args.segment_lengths,
        dilation_rates=args.dilation_rates,
    )


def make_model(args, device: torch.device):
    """The model, wrapped so that gradients are averaged over all ranks, and its optimizer."""
    torch.manual_seed(args.seed)  # equal weights on every rank, drawn on the CPU
    model = LongNet(
        model_config(args),
        checkpoint=args.activation_checkpoint,
        checkpoint_blocks=args.activation_checkpoint_blocks,
        chunk_rows=args.chunk_rows,
    ).to(device)
    # All ranks, not the data-parallel ones alone: those of a sequence see other positions of it.
    if args.fsdp:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    # The optimizer comes last: FSDP2 has replaced the parameters.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and norms do not decay
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=args.weight_decay)


def summed_loss(model, windows: list[bytes], args, mesh, device) -> torch.Tensor:
    """Cross-entropy in nats, summed over this rank's positions of its sequences of the batch."""
    # Ranks are a grid: rows train on different sequences, the ranks of a row share each sequence.
    mine = windows[mesh.get_local_rank("data") :: mesh["data"].size()]
    batch = torch.stack([torch.frombuffer(bytearray(w), dtype=torch.uint8) for w in mine])
    # Zigzag gives each rank an early and a late part: late positions have more keys to attend to.
    layout = SequenceLayout.zigzag(args.seq_len, mesh["sequence"].size())
    rank = mesh.get_local_rank("sequence")
    # Labels are shifted before sharding: the next byte of a shard's last one is on another rank.
    tokens = layout.shard(batch[:, :-1], rank, dim=1).to(device, torch.int64)
    labels = layout.shard(batch[:, 1:], rank, dim=1).to(device, torch.int64)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        return model(tokens, labels, group=mesh["sequence"], layout=layout)


@torch.no_grad()
def heldout_bits(model, args, mesh, device) -> float:
    """Bits per byte of held-out text."""
    batches = heldout_batches(args)
    nats = sum(summed_loss(model, windows, args, mesh, device).item() for windows in batches)
    (nats,) = sum_over_ranks(nats)
    return nats / (len(batches) * args.batch_size * args.seq_len) / math.log(2)


def sum_over_ranks(*numbers: float) -> list[float]:
    """Numbers, each summed over all ranks, on the CPU."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def learning_rate(args, step: int) -> float:
    """Linear warmup, then a cosine down to a tenth."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


# Checkpoints: folders of safetensors files and a run.json, in which nothing can run code


# region checkpoints
def save(args, step: int, model, optimizer) -> None:
    """Write a checkpoint, every rank its share. Killed at any moment, it leaves the one before."""
    path, partial = args.out / f"step_{step:07}", args.out / ".partial"
    if dist.get_rank() == 0:
        remove(partial)  # of a run that was killed
        partial.mkdir()
    sum_over_ranks(0)  # all ranks wait for the folder
    weights, state = get_state_dict(model, optimizer)  # the same names under DDP and FSDP2
    dcp.save(
        {"model": weights, "optimizer": state["state"]},
        storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),  # fsyncs
    )
    if dist.get_rank() == 0:
        ours = ("out", "resume", "found", "text", "heldout", "digest", "sequence_ranks")
        run = {
            "step": step,
            "model": dataclasses.asdict(model_config(args)),
            "options": {name: value for name, value in vars(args).items() if name not in ours},
            "digest": args.digest,
            "files": sorted(file.name for file in partial.iterdir()),
        }
        with open(partial / "run.json", "x") as file:
            json.dump(run, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        remove(path)  # a damaged one, which the run did not go on from
        partial.rename(path)  # from here on there is a checkpoint, and it is whole
        sync_folder(args.out)
        for old in [p for p in checkpoints(args.out) if p <= path][: -args.keep]:
            remove(old)


def load(path: Path, model, optimizer) -> None:
    """Read a checkpoint, whatever number of ranks has written it, under DDP or FSDP2."""
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state["state"]}
    # In place: each rank reads those parts of files that its shards need.
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


# endregion checkpoints


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first; of a checkpoint, itself."""
    return [out] if out.name.startswith("step_") else sorted(out.glob("step_*"))


def newest_checkpoint(out: Path) -> tuple[Path, dict]:
    """The newest whole checkpoint of a run, and its run.json."""
    for path in reversed(checkpoints(out)):
        try:
            run = json.loads(regular(path / "run.json").read_text())
            for name in run["files"]:
                with safe_open(regular(path / name), "pt"):
                    pass  # it raises if the file is missing, cut or of another kind
            LongNetConfig(**run["model"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"{path} is damaged and passed over: {said}", file=sys.stderr, flush=True)
        else:
            return path, run
    raise ValueError(f"there is no whole checkpoint in {out}")


def regular(path: Path) -> Path:
    """The path of a file that is there and is no pipe, which would be waited for."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not a file")
    return path


def remove(path: Path) -> None:
    """Remove a folder or file; of a link, not what it leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Wait until the names of a folder's files are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_log(out: Path, last: int) -> list[dict]:
    """What the log says of steps up to `last`."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]  # a full disk cuts one
    return [entry for entry in entries if entry["step"] <= last]


def open_log(out: Path, start: int):
    """The log, with one JSON object a line; steps that will be done again are dropped from it."""
    entries = read_log(out, start)
    fresh = out / ".log.jsonl"  # a new file, so that no link is followed
    fresh.unlink(missing_ok=True)
    log = fresh.open("x", buffering=1)
    log.writelines(json.dumps(entry) + "\n" for entry in entries)
    fresh.replace(out / "log.jsonl")
    return log


def plot(out: Path, last: int) -> None:
    """Draw bits per byte against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, style in (("training", "-"), ("heldout", "o-")):
        points = [(entry["step"], entry[key]) for entry in read_log(out, last) if key in entry]
        steps, bits = [step for step, _ in points], [bits for _, bits in points]
        axes.plot(steps, bits, style, label=key, linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    (out / "loss.png").unlink(missing_ok=True)
    figure.savefig(out / "loss.png", dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Train."""
    join()
    args = start(argv)
    ranks, leader = dist.get_world_size(), dist.get_rank() == 0
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    console = Console(quiet=not leader, markup=False, highlight=False, soft_wrap=True)
    shape = (ranks // args.sequence_ranks, args.sequence_ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    model, optimizer = make_model(args, device)
    step = 0
    if args.found:
        path, run = args.found
        load(path, model, optimizer)
        step = run["step"]
        console.print(f"going on from step {step}")
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{size:,} parameters, {len(args.text) / 1e6:.1f} MB of text, "
        f"{len(args.heldout) / 1e6:.1f} MB held out; a sequence has {args.seq_len:,} bytes on "
        f"{args.sequence_ranks} of {ranks} ranks; {args.out}"
    )
    # A signal asks for the end of the run. Under torchrun each rank gets it, and some get it twice.
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    log = open_log(args.out, step) if leader else None
    bar = Progress(
        *(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")),
        TimeRemainingColumn(),
        console=console,
        disable=not (leader and console.is_terminal),
    )
    task = bar.add_task("", total=args.steps, completed=step)
    tokens, stopping = args.batch_size * args.seq_len, False
    with bar:
        while step < args.steps and not stopping:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step)
            optimizer.zero_grad()
            loss = summed_loss(model, train_windows(args, step), args, mesh, device)
            # The mean over all tokens, times the number of ranks: DDP and FSDP2 average gradients.
            (loss * ranks / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            step += 1
            # Ranks stop after the same step, whichever of them got the signal.
            nats, asked = sum_over_ranks(loss.item(), stop.is_set())
            bits, stopping = nats / tokens / math.log(2), asked > 0
            if not math.isfinite(bits):
                console.print(f"the loss of step {step} is {bits}: try a lower --learning-rate")
                sys.exit(1)
            found = {"step": step, "training": bits, "seconds": time.perf_counter() - began}
            said = f"{bits:.3f} bits per byte, {tokens / found['seconds']:,.0f} bytes/s"
            bar.update(task, completed=step, description=said)
            if bar.disable and step % 10 == 0:
                console.print(f"step {step} of {args.steps}: {said}")
            if step == args.steps or step % args.eval_every == 0:
                found["heldout"] = heldout_bits(model, args, mesh, device)
                console.print(f"step {step}: {found['heldout']:.3f} bits per byte of held-out text")
            if log:
                log.write(json.dumps(found) + "\n")
            if step == args.steps or step % args.save_every == 0 or stopping:
                save(args, step, model, optimizer)
    if leader:
        plot(args.out, step)
    console.print(f"step {step} of {args.steps}: checkpoint and loss.png in {args.out}")
    if step < args.steps:
        console.print(f"stopped: the same command with --resume --out {args.out} goes on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
