"""`rda slides`: embeddings and heat maps of the slides of a folder."""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from ..units import count_of
from . import common
from .common import RunError, app, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..integrations.slide_files import SlideFileError
    from ..nn import SlideEncoder
    from ..nn.slides import PackedSlides

_MOST_WORKERS = 8

# fmt: off
_Weights = Annotated[Path, option(
    "--weights", "Prov-GigaPath's slide_encoder.pth, or fine-tuned weights of its layout.",
    Path, "FILE")]
_OutFolder = Annotated[Path, option(
    "--out", "Folder for NAME.h5 of each slide, with its features and coords, as TRIDENT's "
    "slide_features_gigapath. Slides that are there are skipped.", Path, "DIR")]
_Heatmap = Annotated[Path | None, option(
    "--heatmap", "Folder for NAME.png and NAME.csv of each slide: attention to its tiles, of the "
    "class token through all layers (rollout), or with --pool mean of all tiles.", Path, "DIR")]
_Thumbnails = Annotated[Path | None, option(
    "--thumbnails", "Folder of NAME.jpg or NAME.png to show through the tiles.", Path, "DIR")]
_Pool = Annotated[Literal["cls", "mean"], option(
    "--pool", "The class token, or the mean of the tiles (global_pool).", kind="NAME")]
_Layer = Annotated[int | None, option(
    "--layer", "Layer whose output is kept. Default: the last, behind its norm; TRIDENT's "
    "embeddings are --pool mean --layer 11.", common.integer(0, 1000))]
_TileSize = Annotated[float | None, option(
    "--tile-size", "Pixels of level 0 along a tile, of files that do not say it.", float)]
_MostTiles = Annotated[int | None, option(
    "--most-tiles", "Tiles of the slides that are encoded at once. Default: 128K, on a CPU 16K.",
    common.integer(1, common.MOST_POSITIONS))]
_Workers = Annotated[int | None, option(
    "--workers", f"Processes that read, and that write. Default: cores, at most {_MOST_WORKERS}.",
    common.integer(0, 256))]
# fmt: on


@app.command()
def slides(
    folder: Annotated[
        Path,
        typer.Argument(help="Files of TRIDENT or CLAM: features and coords.", metavar="FOLDER"),
    ],
    weights: _Weights,
    out: _OutFolder,
    heatmap: _Heatmap = None,
    thumbnails: _Thumbnails = None,
    pool: _Pool = "cls",
    layer: _Layer = None,
    tile_size: _TileSize = None,
    most_tiles: _MostTiles = None,
    workers: _Workers = None,
    device: common.DeviceName = "auto",
) -> None:
    """Embed the slides of a folder by Prov-GigaPath's slide encoder, many at once.

    A file that cannot be used is one line, and the rest goes on; exit code 1 if there was any. A
    run that was ended goes on where it was. Under torchrun each process takes its share of slides.

    rda slides SLIDES --weights slide_encoder.pth --out embeddings --heatmap maps

    torchrun --no-python --nproc-per-node 2 rda slides SLIDES --weights FILE --out embeddings
    """
    import torch
    from torch.utils.data import DataLoader

    from ..integrations.slide_files import SlideFileError, SlideStream, slide_files
    from ..nn import SlideEncoder

    rank, ranks = (int(os.environ.get(x, y)) for x, y in (("RANK", "0"), ("WORLD_SIZE", "1")))
    on = torch.device(common.resolve_device(device))
    if on.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:  # whoever has done its share waits for the others, however long they take
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
    files = slide_files(folder)
    if thumbnails and not (heatmap and thumbnails.is_dir()):
        raise ValueError(f"--thumbnails needs --heatmap DIR, and a folder; got {thumbnails}")
    try:
        encoder = SlideEncoder.from_gigapath(weights, global_pool=pool == "mean").to(on).eval()
    except Exception as error:  # whatever torch.load raises for a file that is something else
        why = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{weights} cannot be used: {why[0]}") from error
    layers = encoder.config.num_layers
    if layer is not None and layer > layers:
        raise ValueError(f"--layer must be at most {layers}, the layers of {weights}; got {layer}")
    kept = "last layer" if layer is None else f"layer {layer}"
    what = f"{weights.name} (CRC {zlib.crc32(weights.read_bytes()):08x}), {pool}, {kept}"
    results = Results(out, heatmap, what, thumbnails)
    # Every rank deals all slides, the largest first, whatever is there already.
    dealt = sorted(files.values(), key=lambda x: (-x.stat().st_size, x))[rank::ranks]
    todo = [path for path in dealt if not results.has(path.stem)]
    stream = SlideStream(
        files=todo,
        most_tiles=most_tiles or (1 << 17 if on.type == "cuda" else 1 << 14),
        tile_size=tile_size,
        in_dim=encoder.config.in_dim,
        dtype=torch.float16 if on.type == "cuda" else torch.float32,  # autocast rounds to it
    )
    if workers is None:
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = min(_MOST_WORKERS, cores, len(todo) // 8)
    # Each reads one pack ahead: packs are large.
    readers: Any = {"num_workers": workers, "prefetch_factor": 1 if workers else None}
    packs = DataLoader(stream, batch_size=None, pin_memory=on.type == "cuda", **readers)
    # To draw a map takes longer than to encode its slide.
    writers = ProcessPoolExecutor(workers) if workers else ThreadPoolExecutor(1)
    writing = deque[Future[None]]()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    failed, start, magnifications = 0, time.perf_counter(), Counter[float | None]()
    columns = *Progress.get_default_columns(), TextColumn("{task.fields[rate]}")
    hidden = rank > 0 or not console.is_terminal
    with writers, Progress(*columns, console=console, disable=hidden) as bars:
        bar = bars.add_task("slides", total=len(todo), rate="")
        for each in _encoded(encoder, packs, on, layer, maps=heatmap is not None):
            if isinstance(each, SlideFileError):
                failed, done = failed + 1, 1
                bars.console.print(f"error: {each}")
            else:
                for name, *of_slide in _slides_of(*each):
                    writing.append(writers.submit(results.write, files[name], *of_slide))
                while len(writing) > 8 * workers:
                    writing.popleft().result()
                magnifications.update(each[0].magnification)
                done = len(each[0].names)
            rate = sum(magnifications.values()) / (time.perf_counter() - start)
            bars.update(bar, advance=done, rate=f"{rate:.1f} slides/s")
        for written in writing:
            written.result()
    seconds = time.perf_counter() - start
    if len(magnifications) > 1:
        found = magnifications.most_common()
        kinds = ", ".join(f"{n} at {f'{x:g}x' if x else 'an unknown one'}" for x, n in found)
        console.print(f"note: tiles have different magnifications: {kinds}")
    failed, encoded = _of_all_ranks(ranks, failed, sum(magnifications.values()))
    if rank == 0:
        print(f"{count_of(encoded, 'slide')} in {seconds:.1f} s, {encoded / (seconds or 1):.1f} "
              f"slides/s; {len(files) - failed - encoded} were in {out}")  # fmt: skip
    if failed:
        raise RunError(f"{failed} of {count_of(len(files), 'file')} cannot be used: see above")


def _of_all_ranks(ranks: int, *counts: int) -> list[int]:
    """Sums over the ranks. torchrun ends all of them when one fails, so that all fail or none."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(counts)
    if ranks > 1:
        dist.all_reduce(total)
        dist.destroy_process_group()
    return [int(count) for count in total]


def _encoded(
    encoder: SlideEncoder,
    packs: Iterable[PackedSlides | SlideFileError],
    device: torch.device,
    layer: int | None,
    maps: bool,
) -> Iterator[tuple[PackedSlides, Tensor, Tensor | None] | SlideFileError]:
    """Packs, the vectors of their slides, and with `maps` a score of each tile; on the CPU.

    One pack behind: while it is written, the GPU has the next one.
    """
    import torch

    from ..integrations.slide_files import SlideFileError

    waiting, cuda = deque[Any](), device.type == "cuda"
    # A pack arrives while the one before is encoded: that takes 6% of its time.
    copies: Any = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
    for each in chain(packs, [None]):  # None: nothing is behind the last pack
        if isinstance(each, SlideFileError):
            yield each
            continue
        if each is not None:
            with torch.cuda.stream(copies):
                pack = each.to(device, non_blocking=True)
            if cuda:
                torch.cuda.current_stream().wait_stream(copies)
            with torch.inference_mode(), torch.autocast(device.type, torch.float16, enabled=cuda):
                found: Any = encoder(
                    pack.features,
                    pack.coordinates,
                    documents=pack.documents,
                    tile_size=pack.tile_size,
                    all_layers=layer is not None,
                    maps=maps,
                )
                encoded = found[0] if maps else found
                ready = [encoded.cls if layer is None else encoded.layers[layer]]
                if maps:  # of the class token, or of all tiles, whose mean the vector is
                    is_cls, of = encoder.config.pooling == "cls", found[1]
                    ready.append(of.rollout[0] if is_cls else of.received[:, 0].mean((0, 1)))
                ready = [x.float().to("cpu", non_blocking=True) for x in ready]
            done = torch.cuda.current_stream().record_event() if cuda else None
            waiting.append((each, pack, ready, done))  # the pack, whose memory is still read
        if len(waiting) > (each is not None):
            first, _, (vectors, *scores), done = waiting.popleft()
            if done is not None:
                done.synchronize()
            yield first, vectors, scores[0] if maps else None


@dataclass(frozen=True)
class Results:
    """A file for each slide, written under another name first: one that is there is whole."""

    folder: Path
    maps: Path | None  # folder of heat maps
    encoder: str  # what computes the features, in words; a folder with those of another is refused
    thumbnails: Path | None

    def __post_init__(self) -> None:
        for folder in filter(None, (self.folder, self.maps)):
            folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether there are all files of a slide; a ValueError if they are another encoder's."""
        import h5py

        path = self.folder / f"{name}.h5"
        if not path.exists():
            return False
        with h5py.File(path) as file:
            encoder = file.attrs.get("encoder")
        if encoder != self.encoder:
            raise ValueError(
                f"{path} is from {encoder or 'another program'}, and this is {self.encoder}: "
                "give another --out"
            )
        return self.maps is None or (self.maps / f"{name}.png").exists()

    def write(self, file: Path, vector: Any, where: Any, size: Any, zoom: Any, scores: Any) -> None:
        """Write the files of a slide, of arrays; `zoom` is its magnification."""
        import h5py

        name = file.stem
        if self.maps is not None:
            beneath = self.thumbnails and _beneath(self.thumbnails, file)
            _draw(self.maps / name, where, scores, size, beneath)
        part = self.folder / f"{name}.part"
        with h5py.File(part, "w") as h5:
            h5.attrs["encoder"] = self.encoder
            h5["features"], h5["coords"] = vector, where
            h5["features"].attrs["name"] = name
            h5["coords"].attrs["patch_size_level0"] = size
            if zoom is not None:
                h5["coords"].attrs["target_magnification"] = zoom
        part.replace(self.folder / f"{name}.h5")


def _slides_of(pack: PackedSlides, vectors: Tensor, scores: Tensor | None) -> Iterable[Any]:
    """What `Results.write` takes of each slide of a pack."""
    tiles = [slice(*borders) for borders in pairwise(pack.documents)]
    places = [pack.coordinates[0, x].numpy() for x in tiles]
    sizes = pack.tile_size, pack.magnification
    of_tiles = [None if scores is None else scores[x].numpy() for x in tiles]
    return zip(pack.names, vectors.numpy(), places, *sizes, of_tiles, strict=True)


def _beneath(thumbnails: Path, file: Path) -> tuple[Any, Any] | None:
    """The thumbnail of a slide, and its size at level 0, which TRIDENT's files say."""
    import h5py
    from matplotlib.image import imread

    found = [x for end in ("jpg", "png") if (x := thumbnails / f"{file.stem}.{end}").exists()]
    if found and file.suffix == ".h5":
        with h5py.File(file) as h5:
            size = [h5.get("coords", h5).attrs.get(f"level0_{x}") for x in ("width", "height")]
        if None not in size:
            return imread(found[0]), size
    typer.echo(f"note: {file} has no thumbnail, or no level0_width and level0_height", err=True)
    return None


def _draw(path: Path, coordinates: Any, scores: Any, tile_size: float, beneath: Any) -> None:
    import numpy as np

    from ..draw import draw_tiles, save

    rows = np.column_stack([coordinates, scores])
    np.savetxt(f"{path}.csv", rows, ["%d", "%d", "%.6g"], ",", header="x,y,attention", comments="")
    shares = scores / scores.mean()
    note = "attention to each tile; 1: their mean"
    axes = draw_tiles(coordinates, shares, tile_size, title=path.name, note=note, thumbnail=beneath)
    save(axes, Path(f"{path}.part.png"))
    Path(f"{path}.part.png").replace(f"{path}.png")
