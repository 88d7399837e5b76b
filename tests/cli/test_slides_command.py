"""`rda slides`: what it writes, what it says, and how it goes on."""

import csv

import h5py
import numpy as np
import pytest
import torch
from matplotlib.image import imsave
from support.launched import run_program
from typer.testing import CliRunner

from ring_dilated_attention.cli import app
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig

WIDTH = 12
SIZES = {"a": 40, "b": 3, "c": 17, "d": 1, "e": 25}
ATTRIBUTES = {"patch_size_level0": 512, "target_magnification": 20}


def rda(*arguments):
    return CliRunner().invoke(app, ["slides", *map(str, arguments)])


@pytest.fixture
def cohort(tmp_path):
    """Five slides and the weights of an encoder."""
    (tmp_path / "slides").mkdir()
    rng = np.random.default_rng(0)
    for name, tiles in SIZES.items():
        cells = np.stack([np.arange(tiles) % 6, np.arange(tiles) // 6], 1)
        with h5py.File(tmp_path / "slides" / f"{name}.h5", "w") as file:
            file["features"] = rng.normal(size=(tiles, WIDTH)).astype(np.float16)
            file["coords"] = 512 * cells
            file["coords"].attrs.update(ATTRIBUTES)
    torch.manual_seed(0)
    config = SlideEncoderConfig(
        in_dim=WIDTH, num_layers=2, embed_dim=128, ffn_dim=48, segment_lengths=[8, None],
        dilation_rates=[1, 2], grid_positions=True, pooled_norm_eps=1e-6,
    )  # fmt: skip
    torch.save({"model": SlideEncoder(config).to_gigapath()}, tmp_path / "weights.pth")
    return tmp_path


def given(cohort, *more):
    return (
        *(cohort / "slides", "--weights", cohort / "weights.pth", "--out", cohort / "out"),
        *("--workers=0", "--device=cpu", *more),
    )


ON_A_GPU = pytest.param("cls", None, ["--device=cuda", "--workers=2"], marks=pytest.mark.gpu)


@pytest.mark.parametrize(("pool", "layer", "on"), [("cls", None, []), ("mean", 1, []), ON_A_GPU])
def test_embeddings_are_those_of_one_slide_after_another(pool, layer, on, cohort):
    options = [f"--pool={pool}", "--most-tiles=30", *[f"--layer={layer}"] * (layer is not None)]
    bound = 0.02 if on else None  # float16; None: the default of the dtype
    done = rda(*given(cohort, *options, *on))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("5 slides in ")
    encoder = SlideEncoder.from_gigapath(cohort / "weights.pth", global_pool=pool == "mean")
    for name, tiles in SIZES.items():
        with h5py.File(cohort / "slides" / f"{name}.h5") as file:
            features, coords = (torch.tensor(file[x][:]) for x in ("features", "coords"))
        with torch.no_grad():
            found = encoder(features[None].float(), coords[None], tile_size=512, all_layers=True)
        expected = found.cls if layer is None else found.layers[layer]
        with h5py.File(cohort / "out" / f"{name}.h5") as file:  # as TRIDENT reads its own
            assert file["features"].shape == (128,)
            assert file["features"].attrs["name"] == name
            assert file["coords"].shape == (tiles, 2)
            assert dict(file["coords"].attrs) == ATTRIBUTES
            vector = torch.tensor(file["features"][:])
            torch.testing.assert_close(vector, expected[0, 0], rtol=bound, atol=bound)
            assert np.array_equal(file["coords"], coords)


def test_it_goes_on_where_it_was(cohort, monkeypatch):
    from ring_dilated_attention.cli import slides

    write = slides.Results.write

    def killed(self, *pack):
        write(self, *pack)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(slides.Results, "write", killed)
        assert rda(*given(cohort, "--most-tiles=30")).exit_code == 1
    kept = {path.name: path.stat().st_mtime_ns for path in (cohort / "out").iterdir()}
    assert 0 < len(kept) < 5
    done = rda(*given(cohort))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{5 - len(kept)} slide")
    assert f"{len(kept)} were in" in done.stdout
    now = {path.name: path.stat().st_mtime_ns for path in (cohort / "out").iterdir()}
    assert {name: now[name] for name in kept} == kept
    assert sorted(now) == [f"{name}.h5" for name in SIZES]
    done = rda(*given(cohort, "--pool=mean"))
    assert done.exit_code == 2
    assert "a.h5 is from weights.pth (CRC" in done.stderr
    assert "mean, last layer: give another --out" in done.stderr
    trained = torch.load(cohort / "weights.pth")
    trained["model"]["cls_token"] += 1
    torch.save(trained, cohort / "weights.pth")
    assert "last layer: give another --out" in rda(*given(cohort)).stderr


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_heat_maps_show_the_attention_of_each_tile(pool, cohort):
    assert rda(*given(cohort, f"--pool={pool}")).exit_code == 0
    maps = cohort / "maps"
    done = rda(*given(cohort, f"--pool={pool}", f"--heatmap={maps}", "--workers=2"))  # though done
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("5 slides in ")
    assert sorted(path.name for path in maps.iterdir()) == [
        f"{name}.{ending}" for name in SIZES for ending in ("csv", "png")
    ]
    encoder = SlideEncoder.from_gigapath(cohort / "weights.pth", global_pool=pool == "mean")
    for name in SIZES:
        with h5py.File(cohort / "slides" / f"{name}.h5") as file:
            features, coords = (torch.tensor(file[x][:]) for x in ("features", "coords"))
        with torch.no_grad():
            _, seen = encoder(features[None].float(), coords[None], tile_size=512, maps=True)
        expected = seen.rollout[0] if pool == "cls" else seen.received[:, 0].mean((0, 1))
        with (maps / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(int(row["x"]), int(row["y"])) for row in rows] == [*map(tuple, coords.tolist())]
        found = torch.tensor([float(row["attention"]) for row in rows])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_thumbnails_show_through_tiles(cohort):
    (cohort / "thumbs").mkdir()
    for name in "ab":  # b's file does not say how large its slide is
        imsave(cohort / "thumbs" / f"{name}.png", np.zeros((50, 60, 3)))
    with h5py.File(cohort / "slides" / "a.h5", "a") as file:
        file["coords"].attrs.update(level0_width=6000, level0_height=5000)
    plain = rda(*given(cohort, f"--heatmap={cohort / 'plain'}"))
    done = rda(*given(cohort, f"--heatmap={cohort / 'maps'}", f"--thumbnails={cohort / 'thumbs'}"))
    assert plain.exit_code == done.exit_code == 0, done.output
    assert "note" not in plain.stderr
    assert [f"{x}.h5 has no thumbnail" in done.stderr for x in "abc"] == [False, True, True]
    same = [len({(cohort / x / f"{y}.png").read_bytes() for x in ("plain", "maps")}) for y in "ab"]
    assert same == [2, 1]


def test_files_that_cannot_be_used_are_a_line_each(cohort):
    slides = cohort / "slides"
    (slides / "c.h5").write_bytes((slides / "c.h5").read_bytes()[:900])
    with h5py.File(slides / "b.h5", "a") as file:
        del file["coords"].attrs["patch_size_level0"]
        del file["coords"].attrs["target_magnification"]
    with h5py.File(slides / "e.h5", "a") as file:
        file["coords"].attrs["target_magnification"] = 40
    done = rda(*given(cohort))
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert any(f"error: {slides}/c.h5: cannot be read" in line for line in lines)
    assert any(f"error: {slides}/b.h5: does not say the size of a tile" in line for line in lines)
    assert "note: tiles have different magnifications: 2 at 20x, 1 at 40x" in " ".join(lines)
    assert lines[-1] == "error: 2 of 5 files cannot be used: see above"
    assert sorted(path.name for path in (cohort / "out").iterdir()) == ["a.h5", "d.h5", "e.h5"]
    done = rda(*given(cohort, "--tile-size=512"))
    assert done.exit_code == 1
    assert (cohort / "out" / "b.h5").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer=3"], "--layer must be at most 2, the layers of"),
        (["--thumbnails=."], "--thumbnails needs --heatmap DIR, and a folder; got ."),
        (["--heatmap=maps", "--thumbnails=no"], "and a folder; got no"),
        (["--pool=max"], "'max' is not one of 'cls', 'mean'"),
        (["--most-tiles=0"], "0 is not from 1 to"),
        (["--weights=no.pth"], "no.pth cannot be used: [Errno 2] No such file or directory"),
        ([f"--weights={__file__}"], "_command.py cannot be used: Weights only load failed"),
    ],
)
def test_bad_options_are_one_line(options, message, cohort):
    done = rda(*given(cohort, *options))
    assert done.exit_code == 2
    (said,) = done.stderr.splitlines()
    assert message in said


def test_ranks_take_their_share(cohort):
    program = cohort / "rda.py"
    program.write_text("from ring_dilated_attention.cli import main; main()\n")
    damaged = cohort / "slides" / "f.h5"
    damaged.write_bytes(b"")
    done = run_program(program, ["slides", *given(cohort)], 2)
    assert done.returncode == 1  # of both: torchrun ends the others where one fails
    assert done.stderr.count("error: 1 of 6 files cannot be used") == 2
    assert done.stdout.startswith("5 slides in ")
    assert sorted(path.stem for path in (cohort / "out").iterdir()) == [*SIZES]
