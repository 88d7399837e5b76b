"""Fine-tune Prov-GigaPath's slide encoder on slides of a folder, each on all GPUs.

    python examples/gigapath_finetune.py SLIDES labels.csv                              # one GPU
    torchrun --nproc-per-node 4 examples/gigapath_finetune.py SLIDES labels.csv         # four

SLIDES holds one file per slide, with the features of its tiles (tiles, in_dim) and their pixel
coordinates (tiles, 2): `.h5` with "features" and "coords", as prov-gigapath and TRIDENT write them,
or `.npz` or `.pt` (a dict) with the same names. labels.csv has the columns slide_id, the name of
the file without its ending, and label, an int from 0 on.

`--out FILE` keeps the weights of encoder and head, for `load_state_dict`. `--weights` is what
prov-gigapath's `create_model` takes: "hf_hub:prov-gigapath/prov-gigapath", a file, or "" for random
weights. `--compare` trains a second copy on each process alone, without
dropout, and exits with code 1 if the two differ.
"""

import argparse
import copy
import csv
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ring_dilated_attention.integrations.gigapath import shard_slide_encoder

MOST_DIFFERENCE = {"cpu": 1e-4, "cuda": 5e-2}  # of losses, after steps that round differently
READERS = (".h5", ".npz", ".pt")


# --8<-- [start:read]
def read_slide(path: Path) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Features (1, tiles, in_dim), coordinates (1, tiles, 2), and pixels of a tile, if written."""
    names, written = ("features", "coords"), {}
    if path.suffix == ".h5":
        import h5py

        with h5py.File(path) as file:
            found = {name: file[name][:] for name in names if name in file}
            written = dict(file["coords"].attrs) if "coords" in file else {}
    elif path.suffix == ".npz":
        with np.load(path) as file:
            found = {name: file[name] for name in names if name in file}
    else:
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not {*names} <= found.keys():
        sys.exit(f"{path} must have 'features' and 'coords'; got {[*found]}: rename what it has")
    features, coordinates = (_of_tiles(found[name]) for name in names)
    if features.dim() != 2 or coordinates.shape != (len(features), 2):
        shapes = f"{tuple(features.shape)} and {tuple(coordinates.shape)}"
        sys.exit(f"{path} must have features (tiles, in_dim) and coords (tiles, 2); got {shapes}")
    tile_size = written.get("patch_size_level0")  # TRIDENT's
    if tile_size is None and "patch_size" in written:  # CLAM's, in pixels of its patch_level
        if written.get("patch_level") != 0:
            sys.exit(f"{path} has a patch_size, not of level 0: write patch_size_level0 to coords")
        tile_size = written["patch_size"]
    return features[None].float(), coordinates[None], None if tile_size is None else int(tile_size)


def _of_tiles(rows) -> torch.Tensor:
    """Rows (tiles, ...) as a tensor: torch takes no big-endian arrays."""
    if isinstance(rows, np.ndarray):
        rows = torch.from_numpy(rows.astype(rows.dtype.newbyteorder("=")))
    return rows[0] if rows.dim() == 3 and len(rows) == 1 else rows


# --8<-- [end:read]


def slides_of(folder: Path, labels: Path) -> list[tuple[Path, int]]:
    """The files of the slides that have a label, in the order of the labels."""
    if not folder.is_dir() or not labels.is_file():
        sys.exit(f"SLIDES must be a folder and labels.csv a file; got {folder} and {labels}")
    files = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in READERS}
    with labels.open(newline="") as file:
        table = csv.DictReader(file)
        if not {"slide_id", "label"} <= {*(table.fieldnames or ())}:
            sys.exit(f"{labels} must have the columns slide_id and label; got {table.fieldnames}")
        rows = [(row["slide_id"], _label(row["label"])) for row in table]
    missing = [name for name, _ in rows if name not in files]
    if missing or not rows:
        listed = ", ".join(missing[:10]) or "any slide"
        sys.exit(f"{folder} has no {' or '.join(READERS)} file for {listed} of {labels}")
    return [(files[name], label) for name, label in rows]


def _label(text: str) -> int:
    if not text.isdecimal():
        sys.exit(f"a label must be an int from 0 on; got {text!r}")
    return int(text)


# --8<-- [start:model]
class Classifier(nn.Module):
    """A linear layer on the embedding of a slide."""

    def __init__(self, slide_encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.slide_encoder = slide_encoder
        self.head = nn.Linear(slide_encoder.norm.normalized_shape[0], classes)

    def forward(self, features: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        """Logits (1, classes)."""
        (embedding,) = self.slide_encoder(features, coordinates)
        return self.head(embedding)


def make_classifier(args: argparse.Namespace, in_dim: int, classes: int) -> Classifier:
    """Prov-GigaPath's model, by its own code, and a head."""
    dropout = {} if not args.compare else {"dropout": 0.0, "drop_path_rate": 0.0}
    with np.printoptions(legacy="1.25"):  # its code evaluates a list of numpy's ints as text
        from gigapath.slide_encoder import create_model

        encoder = create_model(
            args.weights, args.arch, in_dim, global_pool=args.global_pool, **dropout
        )
    return Classifier(encoder, classes)


# --8<-- [end:model]


def autocast(device: torch.device):
    """Half precision on a GPU: bfloat16, or float16 on those that have no fast bfloat16."""
    if device.type != "cuda":
        return nullcontext()
    fast = torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.autocast("cuda", torch.bfloat16 if fast else torch.float16)


class Trainer:
    """A model in training, on one process or under DDP, which averages gradients over ranks."""

    def __init__(self, model: Classifier, group, device: torch.device, lr: float) -> None:
        self.whole, self.encoder, self.device = model, model.slide_encoder, device
        self.tile_size = self.encoder.tile_size  # of slides whose files do not say theirs
        # --8<-- [start:shard]
        shard_slide_encoder(model, group=group)  # without a group: its attention alone
        self.model = model.to(device)
        if group is not None:
            # Its table of embedded positions is 3 GB: not to be sent at every step.
            self.model = DistributedDataParallel(
                model, process_group=group, broadcast_buffers=False
            )
        # --8<-- [end:shard]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    # --8<-- [start:step]
    def step(self, path: Path, label: int) -> float:
        """One step on one slide, the same on every rank; returns the loss."""
        features, coordinates, tile_size = read_slide(path)
        self.encoder.tile_size = tile_size or self.tile_size
        with autocast(self.device):
            logits = self.model(features.to(self.device), coordinates.to(self.device))
        target = torch.tensor([label], device=self.device)
        loss = F.cross_entropy(logits.float(), target)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    # --8<-- [end:step]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slides", type=Path, help="folder of .h5, .npz or .pt files")
    parser.add_argument("labels", type=Path, help="CSV file of slide_id and label")
    parser.add_argument("--weights", default="hf_hub:prov-gigapath/prov-gigapath")
    parser.add_argument("--arch", default="gigapath_slide_enc12l768d")
    parser.add_argument(
        "--global-pool", action="store_true", help="mean of the tiles, no class token"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--out", type=Path, help="a file for the trained weights")
    parser.add_argument("--compare", action="store_true", help="with one process")
    return parser.parse_args()


def main() -> list[float]:
    """Train; return the mean loss of every epoch."""
    args = arguments()
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if sharded:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = dist.group.WORLD if sharded else None
    first = not sharded or dist.get_rank() == 0

    slides = slides_of(args.slides, args.labels)
    classes = 1 + max(label for _, label in slides)
    torch.manual_seed(0)  # equal weights on every rank
    model = make_classifier(args, read_slide(slides[0][0])[0].shape[2], classes)
    trainers = [Trainer(copy.deepcopy(model), None, device, args.lr)] if args.compare else []
    trainers.append(Trainer(model, group, device, args.lr))

    losses, worst = [], 0.0
    for epoch in range(args.epochs):
        total = 0.0
        for path, label in slides:
            found = [trainer.step(path, label) for trainer in trainers]
            total += found[-1]
            worst = max(worst, abs(found[-1] - found[0]) / max(found[0], 1e-3))
        losses.append(total / len(slides))
        if first:
            print(f"epoch {epoch}: mean loss {losses[-1]:.4f}")
    if first and args.out is not None:
        torch.save(trainers[-1].whole.state_dict(), args.out)
        print(f"wrote {args.out}")
    if first and args.compare:
        print(f"largest relative difference of a loss from one process: {worst:.1e}")
    if sharded:
        dist.destroy_process_group()
    if not worst <= MOST_DIFFERENCE[device.type]:  # NaN, too
        sys.exit("sharded training differs from one process")
    return losses


if __name__ == "__main__":
    main()
