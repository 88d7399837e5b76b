"""Files of slides as others write them, and what is said of those that cannot be used."""

import pickle
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ring_dilated_attention.integrations.slide_files import (
    SlideFileError,
    SlideStream,
    read_slide,
    slide_files,
)
from ring_dilated_attention.nn.slides import PackedSlides, pack

h5py = pytest.importorskip("h5py")

TILES, WIDTH = 7, 12
COORDS = np.arange(2 * TILES).reshape(TILES, 2) * 256
FEATURES = np.random.default_rng(0).random((TILES, WIDTH)).astype(np.float32)
TRIDENT = {"patch_size": 256, "level0_magnification": 40, "target_magnification": 20}


def write(path, *, features=FEATURES, coords=COORDS, **attributes):
    """As `path` ends; None: without."""
    arrays = {"features": features, "coords": coords}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    if path.suffix == ".npz":
        np.savez(path, **arrays, **attributes)
    elif path.suffix == ".pt":
        torch.save({k: torch.as_tensor(v) for k, v in (arrays | attributes).items()}, path)
    else:
        with h5py.File(path, "w") as file:
            file.update(arrays)
            file["coords" if "coords" in arrays else "features"].attrs.update(attributes)
    return path


RIGHT: dict[str, Any] = {
    # file: (what is written, size of a tile, magnification)
    "trident at 40x.h5": ({**TRIDENT, "patch_size_level0": 512}, 512, 20),
    "trident at 20x.h5": ({**TRIDENT, "patch_size_level0": 256}, 256, 20),
    "clam at level 1.h5": (
        {"patch_size": 512, "patch_level": 1, "downsample": (4.0, 4.0)}, 2048, None,
    ),
    "clam at level 0.h5": (
        {"patch_size": 256, "patch_level": 0, "downsample": (1.0, 1.0)}, 256, None,
    ),
    "level 0.h5": ({"patch_size": 512, "patch_level": 0}, 512, None),
    "clam, no attributes.h5": ({}, 224, None),
    "one more dimension.h5": ({"features": FEATURES[None], "coords": COORDS[None]}, 224, None),
    "half.h5": ({"features": FEATURES.astype("<f2")}, 224, None),
    "big-endian.h5": (
        {"features": FEATURES.astype(">f4"), "coords": COORDS.astype(">i4"), "patch_size": 512,
         "patch_level": 1, "downsample": np.array([2.0, 2.0], ">f8")},
        1024, None,
    ),
    "as floats.npz": ({"coords": COORDS.astype(np.float64), "patch_size_level0": 128}, 128, None),
    "a dict.pt": ({"patch_size_level0": 128}, 128, None),
    "a tile twice.pt": ({"coords": COORDS // 512 * 512}, 224, None),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_slides_as_others_write_them(name, tmp_path):
    written, tile_size, magnification = RIGHT[name]
    slide = read_slide(write(tmp_path / name, **written), tile_size=224, in_dim=WIDTH)
    assert (slide.name, slide.tile_size) == (name.rpartition(".")[0], tile_size)
    assert slide.magnification == magnification
    assert slide.features.dtype == torch.float32
    assert slide.coordinates.dtype == torch.int64
    torch.testing.assert_close(slide.features, torch.tensor(FEATURES), rtol=1e-3, atol=1e-3)
    coords = np.asarray(written.get("coords", COORDS)).reshape(TILES, 2).astype(np.int64)
    assert torch.equal(slide.coordinates, torch.tensor(coords))


def with_(value):
    features = FEATURES.copy()
    features[[2, 4], 1] = value
    return features


WRONG: dict[str, Any] = {
    "no coords.h5": ({"coords": None}, "has no coords, only features: CLAM's and TRIDENT's .h5"),
    "no features.npz": ({"features": None}, "has no features, only coords: "),
    "no tiles.h5": (
        {"features": FEATURES[:0], "coords": COORDS[:0]},
        "has no tiles: segment its tissue again, or remove it",
    ),
    "nan.h5": ({"features": with_(np.nan)}, "2 of 7 tiles have features that are NaN or too large"),
    "large.npz": ({"features": with_(np.inf)}, "2 of 7 tiles have features that are NaN or"),
    "no size.h5": ({}, "does not say the size of a tile: write the attribute patch_size_level0"),
    "level 1.h5": ({"patch_size": 512, "patch_level": 1}, "does not say the size of a tile"),
    "trident, old.h5": (TRIDENT, "does not say the size of a tile"),
    "size of text.h5": ({"patch_size_level0": "big"}, "has an attribute 'big' where the size of"),
    "other shape.h5": ({"coords": COORDS[:3]}, "have shapes (7, 12) and (3, 2): write (tiles"),
    "vectors.h5": ({"features": FEATURES[0]}, "have shapes (12,) and (7, 2): write (tiles"),
    "narrow.pt": ({"features": FEATURES[:, :5]}, "5 features a tile, where the encoder takes 12"),
    "halves.pt": ({"coords": COORDS + 0.5}, "has coords that are no integers: write them in"),
    "text.h5": ({"coords": [["a", "b"]] * TILES}, "has coords that are no numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_cannot_be_used_are_named_in_one_line(name, tmp_path):
    written, message = WRONG[name]
    path = write(tmp_path / name, **written)
    with pytest.raises(SlideFileError) as caught:
        read_slide(path, in_dim=WIDTH)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said  # from a process that reads ahead


@pytest.mark.parametrize("name", ["slide.h5", "slide.npz", "slide.pt"])
def test_damaged_files_are_named_in_one_line(name, tmp_path):
    path = write(tmp_path / name, patch_size_level0=512)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a file of slides"):
        path.write_bytes(content)
        with pytest.raises(SlideFileError, match="cannot be read") as caught:
            read_slide(path)
        assert "\n" not in str(caught.value)


def test_a_tensor_alone_has_no_coordinates(tmp_path):
    torch.save(torch.tensor(FEATURES), tmp_path / "clam.pt")
    with pytest.raises(SlideFileError, match="has no coords, only features: CLAM's"):
        read_slide(tmp_path / "clam.pt")


def test_nothing_is_kept_from_the_slide_before(tmp_path):
    write(tmp_path / "a.h5", patch_size_level0=512, target_magnification=20)
    write(tmp_path / "b.h5")
    (slides,) = SlideStream(files=[*slide_files(tmp_path).values()], tile_size=256)
    assert not isinstance(slides, SlideFileError)
    assert [*slides.tile_size] == [512, 256]
    assert [*slides.magnification] == [20, None]


def test_slide_files_lists_a_folder(tmp_path):
    for name in ("b.h5", "a.pt", "labels.csv", "c.npz"):
        (tmp_path / name).touch()
    found = slide_files(tmp_path)
    assert [*found] == ["a", "b", "c"]
    (tmp_path / "a.h5").touch()
    with pytest.raises(ValueError, match=r"a\.pt and a\.h5 are files of one slide: remove one"):
        slide_files(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        slide_files(tmp_path / "a.h5")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no \.h5 or \.npz or \.pt files"):
        slide_files(tmp_path / "empty")


def test_a_stream_holds_no_pack_while_it_makes_the_next(tmp_path, monkeypatch):
    """Processes make them in shared memory, of which containers have little."""
    for index in range(4):
        write(tmp_path / f"{index}.h5", features=FEATURES, coords=COORDS)
    make, packs, held = PackedSlides.of, list[Any](), list[int]()

    def of(slides):
        held.append(sum(pack() is not None for pack in packs))
        made = make(slides)
        packs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(PackedSlides, "of", of)
    files = [*slide_files(tmp_path).values()]
    deque(SlideStream(files=files, most_tiles=1, tile_size=256), maxlen=0)
    assert held == [0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_packs_what_can_be_read_and_says_the_rest(workers, tmp_path):
    for index in range(6):
        tiles = 1 + index
        write(tmp_path / f"{index}.h5", features=FEATURES[:tiles], coords=COORDS[:tiles])
    write(tmp_path / "damaged.h5", features=with_(np.nan))
    files = [*slide_files(tmp_path).values()]
    stream = SlideStream(files=files, most_tiles=5, tile_size=256)

    def read(name):
        return read_slide(tmp_path / f"{name}.h5", tile_size=256)

    found = [*DataLoader(stream, batch_size=None, num_workers=workers)]
    errors = [each for each in found if isinstance(each, SlideFileError)]
    packs = [each for each in found if not isinstance(each, SlideFileError)]
    assert len(errors) == 1
    assert "damaged.h5: 2 of 7 tiles" in str(errors[0])
    assert sorted(name for each in packs for name in each.names) == [*"012345"]
    for each in packs:
        assert each.documents[-1] <= 5 or each.names == ("5",)
        for name, start, stop in zip(each.names, each.documents, each.documents[1:], strict=False):
            own = torch.tensor(FEATURES[: int(name) + 1])
            assert torch.equal(each.features[0, start:stop], own)
    # Of a list of streams each is read by one process, whole.
    streams: Any = [stream]
    (alone,) = DataLoader(streams, batch_size=None, collate_fn=list, num_workers=workers)
    assert len(alone) == 1 + len([*pack(map(read, "012345"), 5, buffer=4)])
