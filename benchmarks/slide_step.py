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
from functools import partial
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
    use(torchscale)
    found = []
    for count in map(int, tiles.split(",")):
        for kind in kinds.split(","):
            found.append(measure(kind, count + 1, repeats, layers))
            print(json.dumps(found[-1]), flush=True)
    write(out, torch.device("cuda"), found)


def use(torchscale: Path) -> None:
    """Import from a clone, with stand-ins of what an encoder without dropout needs nothing of."""
    torch.set_float32_matmul_precision("high")
    sys.path.insert(0, str(torchscale))
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


def make(kind: str, layers: int) -> Callable[..., torch.Tensor]:
    """A step of training on features and, for `SlideEncoder`, its other arguments: the loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if kind.startswith("SlideEncoder"):
        model: Any = SlideEncoder(SlideEncoderConfig(num_layers=layers, in_dim=768)).cuda()
        run: Any = torch.compile(model, dynamic=True) if "compiled" in kind else model
    else:
        model = torchscales(kind, layers)
        run = torch.compile(model) if "compiled" in kind else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    scaler = torch.amp.GradScaler()

    def step(features: torch.Tensor, *places: torch.Tensor, **packed: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            if places:
                out = run(features, *places, **packed).cls
            else:
                out = run(src_tokens=None, token_embeddings=features)["encoder_out"]
            loss: torch.Tensor = out.float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def torchscales(kind: str, layers: int) -> torch.nn.Module:
    """An encoder of torchscale, with its attention replaced or not."""
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
    return model


def measure(kind: str, positions: int, repeats: int, layers: int) -> dict[str, Any]:
    """Steps of one kind at one size."""
    is_ours = kind.startswith("SlideEncoder")
    length = positions - is_ours  # it adds a class token
    given = [torch.randn(1, length, 768, device="cuda")]
    if is_ours:
        given.append(torch.zeros(1, length, 2, dtype=torch.long, device="cuda"))
    step = partial(make(kind, layers), *given)
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
