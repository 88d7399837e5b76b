"""Fine-tuning on packed slides of synthetic tissue, and the commands before and after it."""

import argparse
import csv

import pytest
import torch
from support.launched import EXAMPLES, example, run_program
from typer.testing import CliRunner

from ring_dilated_attention.cli import app
from ring_dilated_attention.integrations.slide_files import read_slide, slide_files
from ring_dilated_attention.nn import SlideEncoder
from ring_dilated_attention.nn.slides import pack

h5py = pytest.importorskip("h5py")
SCRIPT = EXAMPLES / "gigapath_finetune.py"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """9 slides with labels, and an encoder."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_program(EXAMPLES / "synthetic_tissue.py", [folder, "--slides=9"], 0)
    assert done.returncode == 0, done.stderr
    return folder


def finetune(demo, *options, ranks=0, labels="labels.csv"):
    given = [demo / "slides", demo / labels, f"--weights={demo / 'slide_encoder.pth'}"]
    return run_program(SCRIPT, [*given, "--folds=3", *options], ranks)


def test_gradients_of_packs_are_those_of_one_slide_after_another(demo):
    program = example("gigapath_finetune")
    cases = program.read_cases(demo / "slides", demo / "labels.csv")[:5]
    assert len({case.label for case in cases}) == 2
    encoder = SlideEncoder.from_gigapath(demo / "slide_encoder.pth")
    model = program.Classifier(encoder, 2).double()
    machine = program.Machine(0, 1, torch.device("cpu"))
    trainer = program.Trainer(model, cases, argparse.Namespace(lr=0.0), machine)
    assert trainer.weights[0] != trainer.weights[1]
    slides = [read_slide(case.path, dtype=torch.float64) for case in cases]
    found = []
    for most_tiles in (1, 600, 10_000):
        packs = [*pack(slides, most_tiles)]
        model.zero_grad()
        loss = trainer.gradients(packs, [slide.name for slide in slides])
        found.append((len(packs), loss, [p.grad.clone() for p in model.parameters()]))
    assert [count for count, *_ in found] == [5, 3, 1]
    for _, loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][1], rel=1e-12)
        torch.testing.assert_close(gradients, found[0][2], rtol=1e-10, atol=1e-12)


def test_ranks_and_compiled_encoders_do_the_same_and_what_is_trained_embeds_slides(demo):
    said = []
    for ranks, more in ((0, ["--compile"]), (2, [])):
        out = demo / f"tuned by {ranks}"
        options = ("--epochs=2", "--batch=4", f"--out={out}", "--workers=0")
        done = finetune(demo, *options, *more, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(done.stdout)
    assert said[0] == said[1]
    assert "fold 2: AUC " in said[0]
    assert "balanced accuracy of 3 folds: " in said[0]
    with (out / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["slide_id"] for row in rows) == [*slide_files(demo / "slides")]
    for row in rows:
        assert float(row["class_0"]) + float(row["class_1"]) == pytest.approx(1, abs=1e-3)
    tuned = torch.load(out / "fold0.pth")
    assert tuned["head"]["weight"].shape == (2, 128)
    assert not torch.equal(
        tuned["model"]["cls_token"], torch.load(demo / "slide_encoder.pth")["model"]["cls_token"]
    )
    line = ["slides", demo / "slides", "--weights", out / "fold0.pth", "--out", demo / "embedded"]
    done = CliRunner().invoke(app, [*map(str, line), "--workers=0"])
    assert done.exit_code == 0, done.output
    assert "9 slides in " in done.output


def test_a_file_that_cannot_be_used_ends_it_in_one_line(demo):
    table = (demo / "labels.csv").read_text()
    (demo / "more.csv").write_text(table + "damaged,1\n")
    damaged = demo / "slides" / "damaged.h5"
    damaged.write_bytes(b"")
    done = finetune(demo, "--workers=0", labels="more.csv")
    damaged.unlink()
    assert done.returncode == 1
    assert "damaged.h5: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("slide,label\nslide000,1\n", "must have the columns slide_id and label; got ['slide',"),
        ("slide_id,label\nslide000,tumor\n", "a label must be an int from 0 on; got 'tumor'"),
        ("slide_id,label\nslide9,1\n", "has no file for slide9 of"),
        ("slide_id,label\nslide000,1\n", "--folds must be from 3 to the number of patients"),
    ],
)
def test_labels_that_do_not_fit(labels, message, demo):
    (demo / "wrong.csv").write_text(labels)
    done = finetune(demo, labels="wrong.csv")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_folds_keep_patients_together_and_labels_even():
    program = example("gigapath_finetune")
    cases = [
        program.Case(f"slide{n}", int(n // 2 % 3 == 0), f"patient {n // 2}") for n in range(60)
    ]
    folds = program.deal(cases, 5, 0)
    assert sorted(case.path for fold in folds for case in fold) == sorted(x.path for x in cases)
    for fold in folds:
        assert len(fold) == 12
        assert sum(case.label for case in fold) == 4
        others = {case.patient for other in folds if other is not fold for case in other}
        assert not others & {case.patient for case in fold}
    assert program.deal(cases, 5, 1) != folds


def test_scores():
    program = example("gigapath_finetune")
    labels = torch.tensor([0, 0, 0, 1, 1])
    scores = torch.tensor([0.1, 0.4, 0.5, 0.5, 0.9])
    both = torch.stack([1 - scores, scores], 1)
    assert program.auc(both, labels) == pytest.approx(5.5 / 6)  # of 6 pairs one is a tie
    assert program.balanced_accuracy(both, labels) == pytest.approx((1 + 0.5) / 2)
    three = torch.eye(3)[[0, 1, 2, 2]]
    assert program.auc(three, torch.tensor([0, 1, 2, 2])) == 1
    assert program.balanced_accuracy(three, torch.tensor([0, 1, 2, 1])) == pytest.approx(2.5 / 3)


@pytest.mark.slow
def test_it_learns_a_label_that_depends_on_two_regions(tmp_path):
    """By one of the regions alone the AUC is 0.75."""
    done = run_program(EXAMPLES / "synthetic_tissue.py", [tmp_path, "--slides=128"], 0)
    assert done.returncode == 0, done.stderr
    program = example("gigapath_finetune")
    cases = program.read_cases(tmp_path / "slides", tmp_path / "labels.csv")
    torch.manual_seed(0)
    encoder = SlideEncoder.from_gigapath(tmp_path / "slide_encoder.pth")
    args = argparse.Namespace(
        lr=1e-3, batch=16, seed=0, most_tiles=16_384, tile_size=None, workers=0
    )
    machine = program.Machine(0, 1, torch.device("cpu"))
    trainer = program.Trainer(program.Classifier(encoder, 2), cases[:96], args, machine)
    for epoch in range(6):
        trainer.epoch(epoch)
    labels = torch.tensor([case.label for case in cases[96:]])
    assert program.auc(trainer.predict(cases[96:]), labels) > 0.9
