"""transformers' generate after a long prompt: our caches beside transformers' own, with SDPA.

    python benchmarks/transformers_generate.py --device cuda --out found.json
    python benchmarks/transformers_generate.py --device cpu --small

A Llama with random weights: 4 layers as wide as those of Llama 3 8B. `dense` computes what `sdpa`
does: `tokens_as_sdpa` is how many of its first tokens are the same. The other patterns keep less.
The time of a token is that of generating many, less that of generating one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import small_llama, write

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.bench import take_turns
from ring_dilated_attention.integrations.transformers import DilatedCache, set_attention
from ring_dilated_attention.named_patterns import named


def measure(model: Any, ids: torch.Tensor, count: int, repeats: int) -> dict[str, Any]:
    """The least of several runs, after those that warm up."""
    device, options = ids.device, {"do_sample": False, "return_dict_in_generate": True}

    def generate(new: int) -> Any:
        return model.generate(ids, max_new_tokens=new, **options)

    cache = generate(2).past_key_values
    if not isinstance(cache, DilatedCache):
        cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        cache_bytes = cache.nbytes
    del cache
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    calls = {"one": lambda: generate(1), "many": lambda: generate(1 + count)}
    times = take_turns(calls, device, repeats=repeats)
    one, many = (min(times[name]) for name in calls)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    tokens = generate(1 + count).sequences[0, ids.shape[1] :].tolist()
    return {
        "prompt_s": one / 1e3,
        "token_ms": (many - one) / count,
        "cache_bytes": cache_bytes,
        "peak_bytes": peak,
        "tokens": tokens,
    }


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="a short prompt, a narrow model")] = False,
    prompt: Annotated[int, typer.Option(help="tokens; 0: 262,144, or 3,000 if small")] = 0,
    new_tokens: int = 64,
    repeats: int = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure every case, print a line of each."""
    place, length = torch.device(device), prompt or (3000 if small else 1 << 18)
    options = {"vocab_size": 61 if small else 32_000, "attn_implementation": "sdpa"}
    options["max_position_embeddings"] = length + new_tokens + 2
    model = small_llama(*(64, 128, 4, 1) if small else (4096, 14_336, 32, 8), **options).eval()
    model.generation_config.eos_token_id = None  # no token stops it
    model.generation_config.pad_token_id = 0
    model.to(place, torch.float32 if small else torch.bfloat16)
    ids = torch.randint(1, options["vocab_size"], (1, length), device=place)
    longnet, found = named("longnet").pattern, []
    more = DilatedPattern([*longnet.segment_lengths, None], [*longnet.dilation_rates, 64])
    patterns = {"sdpa": None, "dense": DilatedPattern.dense(), "longnet": longnet}
    for name, pattern in {**patterns, "longnet and (document, 64)": more}.items():
        if pattern is not None:  # None: transformers as it is
            set_attention(model, pattern)
        each = {"case": name, "prompt": length} | measure(model, ids, new_tokens, repeats)
        found.append(each)
        agree = [a == b for a, b in zip(found[0]["tokens"], each["tokens"], strict=True)]
        each["tokens_as_sdpa"] = [*agree, False].index(False)
        print("  ".join(f"{key}={value}" for key, value in each.items() if key != "tokens"))
    write(out, place, found)


if __name__ == "__main__":
    typer.run(main)
