"""Fine-tune Prov-GigaPath's slide encoder on the slides of a folder, many slides in each step.

    python examples/gigapath_finetune.py SLIDES labels.csv --weights slide_encoder.pth --out tuned
    torchrun --nproc-per-node 4 examples/gigapath_finetune.py SLIDES labels.csv ...  # on 4 GPUs

SLIDES holds a file of TRIDENT's or CLAM's for each slide, with the features of its tiles and their
coordinates. labels.csv has the columns slide_id, the name of the file without its ending, and
label, an int from 0 on; with a column patient_id, all slides of a patient are in one fold.

Each fold is tested once, by a model that was trained on the others but one, whose AUC says when to
stop. Prints AUC and balanced accuracy of every fold. `--out DIR` keeps predictions.csv and the
weights of each fold, which `rda slides --weights` takes. Slides to try it with, and an encoder:
examples/synthetic_tissue.py.
"""

import argparse
import csv
import os
import random
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ring_dilated_attention.integrations.slide_files import (
    SlideFileError,
    SlideStream,
    slide_files,
)
from ring_dilated_attention.nn import SlideEncoder
from ring_dilated_attention.nn.slides import PackedSlides


@dataclass(frozen=True)
class Case:
    """A slide with a label."""

    path: Path
    label: int
    patient: str


def read_cases(folder: Path, labels: Path) -> list[Case]:
    """The slides of a folder that have a label, in the order of the labels."""
    files = slide_files(folder)
    with labels.open(newline="") as file:
        table = csv.DictReader(file)
        if not {"slide_id", "label"} <= {*(table.fieldnames or ())}:
            sys.exit(f"{labels} must have the columns slide_id and label; got {table.fieldnames}")
        rows = list(table)
    wrong = [row["label"] for row in rows if not row["label"].isdecimal()]
    missing = [row["slide_id"] for row in rows if row["slide_id"] not in files]
    if wrong or missing or not rows:
        sys.exit(
            f"{labels}: a label must be an int from 0 on; got {wrong[0]!r}"
            if wrong
            else f"{folder} has no file for {', '.join(missing[:9]) or 'any slide'} of {labels}"
        )
    return [
        Case(files[row["slide_id"]], int(row["label"]), row.get("patient_id") or row["slide_id"])
        for row in rows
    ]


# region folds
def deal(cases: list[Case], folds: int, seed: int) -> list[list[Case]]:
    """Folds with as many patients of each label; all slides of a patient are in one of them."""
    patients: dict[str, list[Case]] = {}
    for case in cases:
        patients.setdefault(case.patient, []).append(case)
    order = list(patients.values())
    random.Random(seed).shuffle(order)
    order.sort(key=lambda slides: slides[0].label)
    return [[case for slides in order[fold::folds] for case in slides] for fold in range(folds)]


# endregion folds


# region model
class Classifier(nn.Module):
    """A linear layer on the vector of a slide."""

    def __init__(self, encoder: SlideEncoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.embed_dim, classes)

    def forward(self, pack: PackedSlides) -> Tensor:
        """Logits (slides, classes) of packed slides."""
        # As tensors: --compile would compile plain numbers in, and compile again for each pack.
        borders = torch.tensor(pack.documents)
        sizes = torch.tensor(pack.tile_size, dtype=torch.float64)
        encoded = self.encoder(pack.features, pack.coordinates, documents=borders, tile_size=sizes)
        return self.head(encoded.cls)


# endregion model


@dataclass(frozen=True)
class Machine:
    """Where it runs: this rank of how many, and its device."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on GPUs that have it in hardware, else float32."""
        fast = self.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        return torch.bfloat16 if fast else torch.float32

    def autocast(self):
        """A context of that dtype."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


class Trainer:
    """A classifier in training on all ranks: each has a share of the slides of every step."""

    def __init__(self, model: Classifier, train: list[Case], args, machine: Machine) -> None:
        self.model, self.args, self.machine = model.to(machine.device), args, machine
        self.train, self.label = train, {case.path.stem: case.label for case in train}
        counts = Counter(self.label.values())
        weights = [len(train) / (len(counts) * counts[c]) if counts[c] else 0.0
                   for c in range(model.head.out_features)]  # fmt: skip
        self.weights = torch.tensor(weights).to(model.head.weight)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)

    # region step
    def gradients(self, packs: list[PackedSlides], slides: list[str]) -> float:
        """Add the gradients of the loss of some slides, of which this rank has packs."""
        total = sum(self.weights[self.label[name]] for name in slides)
        loss = self.weights.new_zeros(())
        for pack in packs:
            labels = torch.tensor([self.label[name] for name in pack.names])
            with self.machine.autocast():
                logits = self.model(pack.to(self.machine.device, non_blocking=True))
            logits, labels = logits.to(self.weights), labels.to(logits.device)
            each = F.cross_entropy(logits, labels, self.weights, reduction="sum")
            (each / total).backward()
            loss += each.detach() / total
        if self.machine.ranks > 1:
            for parameter in self.model.parameters():  # of ranks without slides, too
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        return loss.item()

    # endregion step

    def epoch(self, number: int) -> float:
        """A step for each batch of slides, in a new order; returns the mean loss."""
        self.model.train()
        order = random.Random(f"{self.args.seed} {number}").sample(self.train, len(self.train))
        size = self.args.batch
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        own = [[case.path for case in batch[self.machine.rank :: self.machine.ranks]]
               for batch in batches]  # fmt: skip
        total = 0.0
        for batch, packs in zip(batches, self.read(own), strict=True):
            self.optimizer.zero_grad()
            total += self.gradients(packs, [case.path.stem for case in batch])
            self.optimizer.step()
        return total / len(batches)

    def read(self, batches: list[list[Path]]):
        """The packs of each batch; ends the program where a file cannot be used."""
        options = {
            "most_tiles": self.args.most_tiles,
            "tile_size": self.args.tile_size,
            "in_dim": self.model.encoder.config.in_dim,
            "dtype": self.machine.dtype,
        }
        streams = [SlideStream(files=files, **options) for files in batches]
        # list() reads the packs of a batch, in one of the workers.
        where = {"num_workers": self.args.workers, "pin_memory": self.machine.device.type == "cuda"}
        for packs in DataLoader(streams, batch_size=None, collate_fn=list, **where):
            for each in packs:
                if isinstance(each, SlideFileError):
                    sys.exit(str(each))
            yield packs

    @torch.no_grad()
    def predict(self, cases: list[Case]) -> Tensor:
        """Probabilities (slides, classes), on the CPU."""
        self.model.eval()
        own = [case.path for case in cases[self.machine.rank :: self.machine.ranks]]
        found = {}
        for packs in self.read([own[first : first + 16] for first in range(0, len(own), 16)]):
            for pack in packs:
                with self.machine.autocast():
                    logits = self.model(pack.to(self.machine.device, non_blocking=True))
                found |= dict(zip(pack.names, logits.float().softmax(1).cpu(), strict=True))
        if self.machine.ranks > 1:
            shares = [None] * self.machine.ranks
            dist.all_gather_object(shares, found)
            found = {name: row for share in shares for name, row in share.items()}
        return torch.stack([found[case.path.stem] for case in cases])


# region scores
def auc(probabilities: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve; of several classes the mean of each against the rest."""
    areas = []
    for number, scores in enumerate(probabilities.double().T):
        has, others = scores[labels == number], scores[labels != number]
        if len(has) and len(others):
            above, ties = has[:, None] > others, has[:, None] == others
            areas.append((above.double() + ties.double() / 2).mean().item())
    return sum(areas) / len(areas) if areas else float("nan")


def balanced_accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """The share of slides that are right, averaged over the classes."""
    right = (probabilities.argmax(1) == labels).double()
    return torch.stack([right[labels == c].mean() for c in labels.unique()]).mean().item()


# endregion scores


def train_fold(model: Classifier, folds: list[list[Case]], fold: int, args, machine: Machine):
    """Train until the AUC of the next fold no longer rises; returns the best trainer, its epoch."""
    stop = (fold + 1) % len(folds)
    train = [case for i, cases in enumerate(folds) if i not in (fold, stop) for case in cases]
    trainer = Trainer(model, train, args, machine)
    labels = torch.tensor([case.label for case in folds[stop]])
    best, rose, at, state = (-1.0, 0.0), 0, 0, {}
    for epoch in range(args.epochs):
        loss = trainer.epoch(epoch)
        found = trainer.predict(folds[stop])
        score = auc(found, labels), -F.nll_loss(found.log(), labels).item()
        if machine.rank == 0:
            print(f"fold {fold}, epoch {epoch}: loss {loss:.4f}, AUC to stop by {score[0]:.3f}")
        rose = epoch if score[0] > best[0] else rose
        if score > best:  # of equal AUCs the lower loss
            best, at, state = score, epoch, deepcopy(model.state_dict())
        if epoch - rose >= args.patience:
            break
    model.load_state_dict(state or model.state_dict())
    return trainer, at


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slides", type=Path, help="folder of .h5, .npz or .pt files")
    parser.add_argument("labels", type=Path, help="CSV file of slide_id and label")
    parser.add_argument("--weights", required=True, type=Path, help="slide_encoder.pth")
    parser.add_argument("--pool", choices=("cls", "mean"), default="cls")
    parser.add_argument("--folds", type=int, default=5, help="at least 3")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=5, help="epochs without a higher AUC")
    parser.add_argument("--batch", type=int, default=16, help="slides of a step, of all ranks")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--most-tiles", type=int, default=32_768, help="at once on a GPU")
    parser.add_argument(
        "--compile", action="store_true", help="compile the encoder, which takes minutes once"
    )
    parser.add_argument("--tile-size", type=float, help="of files that do not say it")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers", type=int, default=min(4, cores), help="processes that read files"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for predictions.csv and weights")
    return parser.parse_args()


def main() -> list[float]:
    """Train and test every fold; return the AUCs."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    machine = Machine(dist.get_rank() if ranks > 1 else 0, ranks, device)

    folds = deal(read_cases(args.slides, args.labels), args.folds, args.seed)
    if args.folds < 3 or not all(folds):
        sys.exit(f"--folds must be from 3 to the number of patients; got {args.folds}")
    classes = 1 + max(case.label for cases in folds for case in cases)
    rows, aucs, accuracies = [], [], []
    for fold, cases in enumerate(folds):
        torch.manual_seed(args.seed)  # equal heads on every rank
        encoder = SlideEncoder.from_gigapath(args.weights, global_pool=args.pool == "mean")
        if args.compile:
            encoder.compile(dynamic=True)
        model = Classifier(encoder, classes)
        trainer, epoch = train_fold(model, folds, fold, args, machine)
        found = trainer.predict(cases)
        labels = torch.tensor([case.label for case in cases])
        aucs.append(auc(found, labels))
        accuracies.append(balanced_accuracy(found, labels))
        rows += [
            (case.path.stem, fold, case.label, *(f"{x:.4f}" for x in row.tolist()))
            for case, row in zip(cases, found, strict=True)
        ]
        if machine.rank == 0:
            print(
                f"fold {fold}: AUC {aucs[-1]:.3f}, balanced accuracy {accuracies[-1]:.3f} "
                f"(epoch {epoch})"
            )
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                tuned = {"model": encoder.to_gigapath(), "head": model.head.state_dict()}
                torch.save(tuned, args.out / f"fold{fold}.pth")
    if machine.rank == 0:
        for name, values in (("AUC", aucs), ("balanced accuracy", accuracies)):
            spread = torch.tensor(values).std().item()
            print(f"{name} of {len(folds)} folds: {sum(values) / len(values):.3f} ± {spread:.3f}")
        if args.out is not None:
            with (args.out / "predictions.csv").open("w", newline="") as file:
                heading = ["slide_id", "fold", "label", *(f"class_{c}" for c in range(classes))]
                csv.writer(file).writerows([heading, *rows])
    if ranks > 1:
        dist.destroy_process_group()
    return aucs


if __name__ == "__main__":
    main()
