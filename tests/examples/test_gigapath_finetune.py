"""The example that fine-tunes prov-gigapath's encoder, with a stand-in for its package."""

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launched import run_program
from support.slide_models import create_model, slide

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "examples" / "gigapath_finetune.py"
HAS_H5 = importlib.util.find_spec("h5py") is not None


def write(path, features, coordinates):
    """As prov-gigapath and TRIDENT write it, or with numpy or torch."""
    if path.suffix == ".npz":
        np.savez(path, features=features.numpy(), coords=coordinates.numpy())
    elif path.suffix == ".pt":
        torch.save({"features": features, "coords": coordinates}, path)
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file["features"] = features.half().numpy()
            file["coords"] = coordinates.numpy()
            file["coords"].attrs["patch_size_level0"] = 512


@pytest.fixture
def folder(tmp_path):
    """Slides of 3 to 45 tiles with labels, and a package of prov-gigapath's name."""
    package = tmp_path / "gigapath"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "slide_encoder.py").write_text("from support.slide_models import create_model\n")
    slides = tmp_path / "slides"
    slides.mkdir()
    endings = (".npz", ".pt", ".h5" if HAS_H5 else ".npz")
    lines = ["slide_id,label"]
    for index, (tiles, ending) in enumerate(zip((45, 20, 3), endings, strict=True)):
        features, coordinates = slide(tiles, seed=index)
        write(slides / f"slide {index}{ending}", features[0].float(), coordinates[0])
        lines.append(f"slide {index},{index}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def done(folder, script, *arguments, ranks=0):
    given = [folder / "slides", folder / "labels.csv", "--weights=", *arguments]
    return run_program(script, given, ranks, path=[folder, TESTS])


@pytest.mark.parametrize("ranks", [0, 2])
def test_it_learns_and_agrees_with_one_process(ranks, folder):
    kept = folder / "tuned.pt"
    options = ("--compare", "--epochs=3", "--lr=3e-3", f"--out={kept}")
    found = done(folder, SCRIPT, *options, ranks=ranks)
    assert found.returncode == 0, found.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in found.stdout.splitlines() if "epoch" in line]
    assert losses[-1] < losses[0]
    assert "from one process: " in found.stdout
    assert {"head.weight", "slide_encoder.norm.weight"} <= torch.load(kept).keys()


def test_gradients_that_are_not_averaged_are_an_error(folder):
    """Parameters then differ between ranks."""
    text = SCRIPT.read_text()
    broken = folder / "broken.py"
    broken.write_text(text.replace("if group is not None:", "if False:", 1))
    options = ("--compare", "--epochs=2", "--lr=1e-2", "--global-pool")
    found = done(folder, broken, *options, ranks=2)
    assert found.returncode == 1
    assert "have the same parameters" in found.stderr


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("slide,label\nslide 0,1\n", "must have the columns slide_id and label; got ['slide',"),
        ("slide_id,label\nslide 0,tumor\n", "a label must be an int from 0 on; got 'tumor'"),
        ("slide_id,label\nslide 9,1\n", "has no .h5 or .npz or .pt file for slide 9 of"),
    ],
)
def test_gigapath_finetune_refuses_labels(labels, message, folder):
    (folder / "labels.csv").write_text(labels)
    found = done(folder, SCRIPT)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def h5(path, *, features=(7, 12), coords=(7, 2), names=("features", "coords"), kind="<f2", **attrs):
    import h5py

    values = np.random.default_rng(0).random(features), 1024 * np.ones(coords)
    with h5py.File(path, "w") as file:
        for name, value, dtype in zip(names, values, (kind, kind.replace("f2", "i4")), strict=True):
            file[name] = value.astype(dtype)
        if "coords" in file:
            file["coords"].attrs.update(attrs)
    return path


@pytest.mark.skipif(not HAS_H5, reason="needs h5py")
@pytest.mark.parametrize(
    ("written", "tile_size"),
    [
        ({}, None),
        ({"patch_size_level0": 512, "patch_size": 256}, 512),  # TRIDENT's
        ({"patch_size": 512, "patch_level": 0}, 512),  # CLAM's
        ({"features": (1, 7, 12), "coords": (1, 7, 2)}, None),
        ({"kind": ">f2"}, None),
    ],
)
def test_slides_as_others_write_them(written, tile_size, tmp_path):
    features, coordinates, found = runpy.run_path(str(SCRIPT))["read_slide"](
        h5(tmp_path / "slide.h5", **written)
    )
    assert features.shape == (1, 7, 12)
    assert features.dtype == torch.float32
    assert features.max() < 1
    assert torch.equal(coordinates, torch.full((1, 7, 2), 1024))
    assert found == tile_size


@pytest.mark.skipif(not HAS_H5, reason="needs h5py")
def test_the_tile_size_of_a_slide_does_not_outlive_it(tmp_path):
    program = runpy.run_path(str(SCRIPT))
    torch.manual_seed(0)
    model = program["Classifier"](create_model("", "", 12), 2)
    trainer = program["Trainer"](model, None, torch.device("cpu"), lr=0.0)
    plain = h5(tmp_path / "plain.h5")
    alone = trainer.step(plain, 1)
    assert trainer.step(h5(tmp_path / "large.h5", patch_size_level0=512), 1) != alone
    assert trainer.step(plain, 1) == alone
