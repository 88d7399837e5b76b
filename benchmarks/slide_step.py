"""A step of a GigaPath-shaped encoder: torchscale's, with its attention replaced, and ours.

    git clone https://github.com/microsoft/torchscale /tmp/torchscale
    python benchmarks/slide_step.py --torchscale /tmp/torchscale --tiles 1500,10000,45680

12 layers of 768, 16 heads of 48, FFN 3072, float16 autocast with loss scaling, AdamW, no dropout,
no checkpointing. A slide of so many tiles is a sequence of one position more. torchscale's
attention runs the FlashAttention-2 inside torch; fairscale and timm, of which it needs nothing
here, are stood in for; einops it needs. Times are by the clock, from before a step until the device
is idle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import MagicMock

import torch
import typer
from harness import kernels_of, spread, write

from ring_dilated_attention.bench import take_turns
from ring_dilated_attention.integrations.torchscale import replace_dilated_attention
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig

SEGMENTS, RATES = [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]
KINDS = (
    *("torchscale", "replaced", "replaced exact", "replaced compiled", "replaced exact compiled"),
    *("SlideEncoder", "SlideEncoder compiled"),
)


def main(
    torchscale: Annotated[Path, typer.Option(help="folder of a clone of microsoft/torchscale")],
    tiles: Annotated[str, typer.Option(help="of a slide, by commas")] = "1500,10000,45680",
    kinds: Annotated[str, typer.Option(help=f"by commas, of: {', '.join(KINDS)}")] = ",".join(
        KINDS
    ),
    repeats: int = 12,
    layers: int = 12,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time a step of each kind at each size."""
    stand_in_for_what_torchscale_imports()
    sys.path.insert(0, str(torchscale))
    torch.set_float32_matmul_precision("high")
    found = []
    for count in map(int, tiles.split(",")):
        for kind in kinds.split(","):
            found.append(measure(kind, count + 1, repeats, layers))
            print(json.dumps(found[-1]), flush=True)
    write(out, torch.device("cuda"), found)


def stand_in_for_what_torchscale_imports() -> None:
    """Modules of which an encoder without dropout needs nothing, and flash-attn's function."""
    names = ["fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers"]
    if find_spec("flash_attn") is None:  # else flash-attn-4's, whose kernels we may use
        names.append("flash_attn")
    sys.modules |= {name: MagicMock() for name in names}
    flash = sys.modules["flash_attn.flash_attn_interface"] = ModuleType("flash_attn_interface")
    flash.flash_attn_func = _flash_attention_2


def _flash_attention_2(
    *tensors: torch.Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """What flash-attn's function of that name does, by the same kernel inside torch."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.transpose(1, 2) for x in tensors), dropout_p, causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse, None


def make(kind: str, layers: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A model, and the loss of a batch of features."""
    torch.manual_seed(0)
    if kind.startswith("SlideEncoder"):
        slide = SlideEncoder(SlideEncoderConfig(num_layers=layers, in_dim=768)).cuda()
        encode: Any = torch.compile(slide) if "compiled" in kind else slide

        def loss(features: torch.Tensor) -> torch.Tensor:
            places = torch.zeros(1, features.shape[1], 2, dtype=torch.long, device="cuda")
            found: torch.Tensor = encode(features, places).cls.float().mean()
            return found

        return slide, loss
    from torchscale.architecture.config import EncoderConfig
    from torchscale.model.LongNet import LongNetEncoder

    options = EncoderConfig(
        encoder_embed_dim=768,
        encoder_attention_heads=16,
        encoder_ffn_embed_dim=3072,
        encoder_layers=layers,
        vocab_size=-1,
        no_output_layer=True,
        segment_length=str(SEGMENTS),
        dilated_ratio=str(RATES),
        flash_attention=True,
        dropout=0.0,
        drop_path_rate=0.0,
    )
    options.segment_length, options.dilated_ratio = SEGMENTS, RATES
    model = LongNetEncoder(options).cuda()
    if kind != "torchscale":
        gradients = "exact" if "exact" in kind else "detached"
        replace_dilated_attention(model, branch_gradients=gradients)
    run: Any = torch.compile(model) if "compiled" in kind else model
    return model, lambda x: run(src_tokens=None, token_embeddings=x)["encoder_out"].float().mean()


def measure(kind: str, positions: int, repeats: int, layers: int) -> dict[str, Any]:
    """Steps of one kind at one size."""
    torch._dynamo.reset()
    model, loss_of = make(kind, layers)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-4), torch.amp.GradScaler()
    length = positions - kind.startswith("SlideEncoder")  # it adds a class token
    features = torch.randn(1, length, 768, device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(features)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    device = torch.device("cuda")
    step()  # compiles
    torch.cuda.reset_peak_memory_stats()
    times = take_turns({kind: step}, device, repeats=repeats, seconds=600)[kind]
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {
        "positions": positions,
        "kind": kind,
        **spread(times),
        **kernels_of(step),
        "peak_gb": round(peak, 3),
        "loss": round(step().item(), 6),
    }


if __name__ == "__main__":
    typer.run(main)
