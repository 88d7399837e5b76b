"""Files of slides, as TRIDENT, CLAM and prov-gigapath write them: features of tiles, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..nn.slides import PackedSlides, Slide, pack

__all__ = ["SlideFileError", "SlideStream", "read_slide", "slide_files"]

SIZE = "patch_size_level0"
"""The attribute in which TRIDENT writes the side of a tile, in pixels of level 0."""


class SlideFileError(ValueError):
    """A file that cannot be used, in one line: its path, what is wrong, and what to do."""


def _of_h5(path: Path) -> Mapping[str, Any]:
    import h5py  # of the extra `cli`

    with h5py.File(path) as file:
        found = {name: each[()] for name, each in file.items() if isinstance(each, h5py.Dataset)}
        places = [file, *(file[name] for name in found if name in _COORDINATES)]
        return {name: value for place in places for name, value in place.attrs.items()} | found


def _of_npz(path: Path) -> Mapping[str, Any]:
    import numpy as np

    with path.open("rb") as file, np.load(file) as found:  # left open by numpy where it is damaged
        return dict(found)


def _of_pt(path: Path) -> Mapping[str, Any]:
    found = torch.load(path, map_location="cpu", weights_only=True)
    return found if isinstance(found, dict) else {"features": found}  # CLAM's have nothing else


_READERS = {".h5": _of_h5, ".npz": _of_npz, ".pt": _of_pt}
_FEATURES, _COORDINATES = ("features", "tile_embeds"), ("coords", "coordinates")
"""Names by which files have them: the first is TRIDENT's and CLAM's."""


def slide_files(folder: str | Path) -> dict[str, Path]:
    """The files of the slides in a folder: their names without ending, in alphabetical order.

    Raises:
        ValueError: there is no such folder, no file that ends in ``.h5``, ``.npz`` or ``.pt``, or
            two of one name.
    """
    known, found = " or ".join(_READERS), dict[str, Path]()
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder: give one of {known} files")
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in _READERS:
            if path.stem in found:
                raise ValueError(
                    f"{path} and {found[path.stem].name} are files of one slide: remove one"
                )
            found[path.stem] = path
    if not found:
        raise ValueError(f"{folder} has no {known} files: give the folder of the tiles' features")
    return found


def read_slide(
    path: str | Path,
    *,
    tile_size: float | None = None,
    in_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Slide:
    """Read the tiles of one slide.

    A file holds "features", (tiles, in_dim) or (1, tiles, in_dim), and "coords", (tiles, 2) or
    (1, tiles, 2), in pixels of level 0: as datasets of an ``.h5``, arrays of an ``.npz`` or entries
    of a dict in a ``.pt``. The side of a tile is TRIDENT's attribute `patch_size_level0`, or CLAM's
    `patch_size` times `downsample`.

    Args:
        path: the file; its name without ending is that of the slide.
        tile_size: side of a tile in pixels of level 0, where the file does not say it.
        in_dim: the width that features must have; None: any.
        dtype: of the features.

    Raises:
        SlideFileError: the file is damaged, or has no tiles, no coordinates, no tile size or
            features that are not finite.
        ModuleNotFoundError: an ``.h5``, and h5py is not installed.
    """
    path = Path(path)
    try:
        return _slide_of(path.stem, _READERS[path.suffix](path), tile_size, in_dim, dtype)
    except ModuleNotFoundError:
        raise
    except SlideFileError as error:
        raise SlideFileError(f"{path}: {error}") from None
    except Exception as error:  # whatever its reader raises for a file that is damaged
        why = " ".join(str(error).split()) or type(error).__name__
        raise SlideFileError(f"{path}: cannot be read ({why[:120]}): write it anew") from error


def _slide_of(
    name: str,
    found: Mapping[str, Any],
    tile_size: float | None,
    in_dim: int | None,
    dtype: torch.dtype,
) -> Slide:
    features, coordinates = (_rows(found, names) for names in (_FEATURES, _COORDINATES))
    if features.dim() != 2 or coordinates.shape != (len(features), 2):
        shapes = f"{tuple(features.shape)} and {tuple(coordinates.shape)}"
        raise SlideFileError(
            f"features and coords have shapes {shapes}: write (tiles, in_dim) and (tiles, 2)"
        )
    tiles = len(features)
    if not tiles:
        raise SlideFileError("has no tiles: segment its tissue again, or remove it")
    if in_dim not in (None, features.shape[1]):
        raise SlideFileError(
            f"has {features.shape[1]} features a tile, where the encoder takes {in_dim}: take "
            "features of the tile encoder that it was trained on"
        )
    features = features.to(dtype)
    if not all(x.isfinite() for x in features.aminmax()):  # a tenth of the time of all features
        broken = int((~features.isfinite()).any(1).sum())
        raise SlideFileError(
            f"{broken} of {tiles} tiles have features that are NaN or too large for "
            f"{str(dtype).removeprefix('torch.')}: compute them again"
        )
    whole = coordinates.long()
    if not torch.equal(whole.to(coordinates.dtype), coordinates):
        raise SlideFileError("has coords that are no integers: write them in pixels of level 0")
    size = _tile_size(found) or tile_size
    if size is None:
        raise SlideFileError(
            f"does not say the size of a tile: write the attribute {SIZE} of coords, or give the "
            "tile size for such files"
        )
    magnification = found.get("target_magnification")
    seen_at = None if magnification is None else _number(magnification)
    return Slide(name, features, whole, size, seen_at)


def _rows(found: Mapping[str, Any], names: Sequence[str]) -> Tensor:
    """The first of these entries as a tensor (tiles, ...): torch takes no big-endian arrays."""
    rows = next((found[name] for name in names if name in found), None)
    if rows is None:
        others = ", ".join(sorted(map(str, found))[:8])
        raise SlideFileError(
            f"has no {names[0]}, only {others}: CLAM's and TRIDENT's .h5 files have features and "
            "coords"
        )
    if not isinstance(rows, Tensor):
        try:
            rows = torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=False))
        except (AttributeError, TypeError):
            raise SlideFileError(f"has {names[0]} that are no numbers: write it anew") from None
    return rows[0] if rows.dim() == 3 and len(rows) == 1 else rows


def _tile_size(found: Mapping[str, Any]) -> float | None:
    """In pixels of level 0; None where the file does not say it."""
    if SIZE in found:
        return _number(found[SIZE])
    if "patch_size" not in found or "patch_level" not in found:
        return None  # the patch size of a magnification, of which the file does not say the level
    if "downsample" in found:  # CLAM's: one for each axis, and they differ by rounding
        return _number(found["patch_size"]) * _number(found["downsample"])
    return None if found["patch_level"] else _number(found["patch_size"])


def _number(value: Any) -> float:
    """A scalar, or the first of several numbers."""
    import numpy as np

    try:
        number = float(np.asarray(value, dtype=np.float64).flat[0])
    except (TypeError, ValueError, IndexError):
        number = math.nan
    if not 0 < number < math.inf:
        raise SlideFileError(
            f"has an attribute {value!r} where the size of a tile or a magnification is to be: "
            "write a number"
        )
    return number


@dataclass(frozen=True, kw_only=True)
class SlideStream(IterableDataset[PackedSlides | SlideFileError]):
    """A stream of packs of slides, with an error for each file that cannot be used.

    Iterate over it, or have processes read ahead: ``DataLoader(stream, batch_size=None, ...)``.

    Args:
        files: of slides, each read once.
        most_tiles: of a pack; a slide of more tiles is a pack of its own.
        tile_size: as for `read_slide`.
        in_dim: as for `read_slide`.
        dtype: as for `read_slide`.
    """

    files: Sequence[Path]
    most_tiles: int = 16_384
    tile_size: float | None = None
    in_dim: int | None = None
    dtype: torch.dtype = torch.float32

    def __iter__(self) -> Iterator[PackedSlides | SlideFileError]:
        failed, files, worker = list[SlideFileError](), self.files, get_worker_info()
        if worker is not None and worker.dataset is self:  # and not a list of such streams
            files = files[worker.id :: worker.num_workers]
        for slides in pack(self._slides(files, failed), self.most_tiles, buffer=4):
            yield from failed
            failed.clear()
            yield slides
            del slides  # its shared memory, before the next pack takes some
        yield from failed

    def _slides(self, files: Iterable[Path], failed: list[SlideFileError]) -> Iterator[Slide]:
        for path in files:
            try:
                yield read_slide(
                    path, tile_size=self.tile_size, in_dim=self.in_dim, dtype=self.dtype
                )
            except SlideFileError as error:
                failed.append(error)
