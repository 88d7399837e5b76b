"""Make up slides whose label depends on two regions far apart, and a small encoder to train.

    python examples/synthetic_tissue.py demo
    python examples/gigapath_finetune.py demo/slides demo/labels.csv \
        --weights demo/slide_encoder.pth --lr 1e-3 --out demo/tuned
    rda slides demo/slides --weights demo/tuned/fold1.pth --out demo/embeddings --heatmap demo/maps

Every slide is a strip of tissue with a small region of marked tiles at each end, of tumour (1) or
of something like it (0). The label is 1 if both ends have tumour; otherwise one of them has, so by
one region alone nobody gets an AUC above 0.75. Files are as TRIDENT's and Prov-GigaPath's. The
encoder has random weights, 2 layers and width 128.
"""

import argparse
import csv
from pathlib import Path

import h5py
import numpy as np
import torch

from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig

IN_DIM, TILE = 64, 512


def tissue(rng: np.random.Generator, kinds: tuple[int, int], strength: float):
    """Features (tiles, IN_DIM) and coordinates (tiles, 2) of a slide with these two regions."""
    length, width = rng.integers(28, 45), rng.integers(7, 11)
    x, y = (part.ravel() for part in np.meshgrid(range(length), range(width), indexing="ij"))
    bent = width / 2 + 2 * np.sin(x / length * 5 + rng.uniform(0, 6))
    inside = np.abs(y - bent) < rng.uniform(2.5, 3.5)
    x, y = x[inside], y[inside]
    features = rng.normal(size=(len(x), IN_DIM))
    for kind, end in zip(kinds, (3, length - 4), strict=True):
        middle = np.abs(x - end).argmin()
        region = (x - x[middle]) ** 2 + (y - y[middle]) ** 2 <= 3
        features[region, 0] += strength  # marked
        features[region, 1 + kind] += strength  # of this kind
    return features.astype(np.float16), np.stack([x, y], 1) * TILE


def main() -> None:
    """Write the slides, their labels and the encoder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slides", type=int, default=160)
    parser.add_argument("--strength", type=float, default=4.0, help="of the marks; the noise has 1")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    (args.folder / "slides").mkdir(parents=True, exist_ok=True)
    rows = [("slide_id", "label")]
    for number in range(args.slides):
        kinds = ((1, 1), (0, 1), (1, 1), (1, 0))[number % 4]
        features, coordinates = tissue(rng, kinds, args.strength)
        rows.append((f"slide{number:03d}", min(kinds)))
        with h5py.File(args.folder / "slides" / f"{rows[-1][0]}.h5", "w") as file:
            file["features"], file["coords"] = features, coordinates
            file["coords"].attrs.update(
                patch_size=256, patch_size_level0=TILE, level0_magnification=40,
                target_magnification=20,
            )  # fmt: skip
    with (args.folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    torch.manual_seed(0)
    config = SlideEncoderConfig(
        in_dim=IN_DIM, num_layers=2, embed_dim=128, ffn_dim=256, head_offsets="blocked",
        zero_keys=True, branch_gradients="detached", grid_positions=True, pooled_norm_eps=1e-6,
    )  # fmt: skip
    torch.save({"model": SlideEncoder(config).to_gigapath()}, args.folder / "slide_encoder.pth")
    print(f"wrote {args.slides} slides, labels.csv and slide_encoder.pth to {args.folder}")


if __name__ == "__main__":
    main()
