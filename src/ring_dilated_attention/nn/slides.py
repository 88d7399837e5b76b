"""Slides of any number of tiles, packed into one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ..pattern import check_positive_int


@dataclass(frozen=True, eq=False)
class Slide:
    """The tiles of one slide.

    Attributes:
        name: what the slide is called.
        features: shape (tiles, in_dim), floating; there may be no tiles.
        coordinates: where the tiles are, shape (tiles, 2), integers, float32 or float64.
        tile_size: side of a tile in units of the coordinates. Default 256.
        magnification: of the image that the tiles were cut from, 20 for 20x; None: not known.
    """

    name: str
    features: Tensor
    coordinates: Tensor
    tile_size: float = 256.0
    magnification: float | None = None


@dataclass(frozen=True, eq=False)
class PackedSlides:
    """The tiles of several slides one after another, as `SlideEncoder` takes them.

    Attributes:
        features: shape (1, tiles, in_dim).
        coordinates: shape (1, tiles, 2).
        documents: borders of the slides in tiles, (0, ..., tiles).
        names: of the slides.
        tile_size: of each slide, in units of its coordinates.
        magnification: of each slide.
    """

    features: Tensor
    coordinates: Tensor
    documents: tuple[int, ...]
    names: tuple[str, ...]
    tile_size: tuple[float, ...]
    magnification: tuple[float | None, ...]

    @classmethod
    def of(cls, slides: Sequence[Slide]) -> PackedSlides:
        """Pack slides, at least one.

        Raises:
            ValueError: shapes do not fit, or dtypes differ; the message names the slide.
        """
        first = slides[0]
        for x in slides:
            tiles, where = x.features, x.coordinates
            kinds = (tiles.dtype, where.dtype), (first.features.dtype, first.coordinates.dtype)
            shapes = tiles.shape == (len(where), first.features.shape[-1]), where.shape[1:] == (2,)
            if not all(shapes) or kinds[0] != kinds[1]:
                raise ValueError(
                    "slides of a pack must have features (tiles, in_dim) and coordinates "
                    f"(tiles, 2), of the same in_dim and dtypes; got {tuple(tiles.shape)} "
                    f"{tiles.dtype} and {tuple(where.shape)} {where.dtype} of {x.name}, beside "
                    f"{tuple(first.features.shape)} {first.features.dtype} and "
                    f"{first.coordinates.dtype} of {first.name}"
                )
        return cls(
            features=_joined([x.features for x in slides]),
            coordinates=_joined([x.coordinates for x in slides]),
            documents=tuple(accumulate((len(x.features) for x in slides), initial=0)),
            names=tuple(x.name for x in slides),
            tile_size=tuple(x.tile_size for x in slides),
            magnification=tuple(x.magnification for x in slides),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedSlides:
        """The same slides, with tensors on `device`; `non_blocking` as in `torch.Tensor.to`."""
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedSlides:
        """The same slides in pinned memory: torch's `DataLoader` calls it."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> PackedSlides:
        return replace(self, features=move(self.features), coordinates=move(self.coordinates))


def _joined(parts: list[Tensor]) -> Tensor:
    # What a process that reads ahead passes on is copied into shared memory, if not made there.
    out = None
    if get_worker_info() is not None:
        out = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
        out.share_memory_()  # type: ignore[no-untyped-call]
    return torch.cat(parts, out=out)[None]


def pack(slides: Iterable[Slide], most_tiles: int, *, buffer: int = 1) -> Iterator[PackedSlides]:
    """Fill packs from a stream of slides.

    Each pack begins with the largest slide of the buffer, and takes the largest that still fits
    until none does. A slide of more than `most_tiles` tiles is a pack of its own.

    Args:
        slides: read as needed.
        most_tiles: tiles of a pack, class tokens not counted.
        buffer: how many slides to choose from, in memory beside the pack. 1, the default, keeps
            their order; more leave less of the packs empty; the number of slides packs by size.

    Yields:
        Packs of at least one slide each; every slide is in one of them.

    Raises:
        TypeError, ValueError: a number is not an int from 1 on; and see `PackedSlides.of`.
    """
    check_positive_int("most_tiles", most_tiles)
    check_positive_int("buffer", buffer)
    return _packs(iter(slides), most_tiles, buffer)


def _packs(stream: Iterator[Slide], most_tiles: int, buffer: int) -> Iterator[PackedSlides]:
    waiting, chosen, room = list[Slide](), list[Slide](), most_tiles
    while True:
        waiting += islice(stream, buffer - len(waiting))
        fitting = [x for x in waiting if len(x.features) <= room or not chosen]
        if fitting:
            largest = max(fitting, key=lambda x: len(x.features))
            waiting.remove(largest)
            chosen.append(largest)
            room -= len(largest.features)
        elif chosen:
            yield PackedSlides.of(chosen)
            chosen, room = [], most_tiles
        else:
            return
