"""transformers' generate after a long prompt: our caches beside transformers' own, with SDPA.

    python benchmarks/transformers_generate.py --device cuda --out found.json
    python benchmarks/transformers_generate.py --device cpu --small

A Llama with random weights: 4 layers as wide as those of Llama 3 8B. `dense` computes what `sdpa`
does: `tokens_as_sdpa` is how many of its first tokens are the same. The other patterns keep less.
The time of a token is that of generating many, less that of generating one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.transformers import DilatedCache, set_attention
from ring_dilated_attention.named_patterns import named


def make_model(layers: int, positions: int, *, small: bool) -> LlamaForCausalLM:
    """Random weights in float32; which no token stops."""
    width = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32}
    if small:
        width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000 if not small else 61,
        num_hidden_layers=layers,
        num_key_value_heads=width["num_attention_heads"] // 4,
        max_position_embeddings=positions,
        attn_implementation="sdpa",
        **width,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def patterns() -> dict[str, DilatedPattern | None]:
    """By name; None: transformers as it is."""
    longnet = named("longnet").pattern
    more = DilatedPattern([*longnet.segment_lengths, None], [*longnet.dilation_rates, 64])
    return {
        "sdpa": None,
        "dense": DilatedPattern.dense(),
        "longnet": longnet,
        "longnet and (document, 64)": more,
    }


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Wall time of a call, until the device is idle."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def held_bytes(cache: Any) -> int:
    """Bytes of keys and values in a cache of transformers, or in ours."""
    if isinstance(cache, DilatedCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def measure(model: LlamaForCausalLM, ids: torch.Tensor, count: int, repeats: int) -> dict[str, Any]:
    """The least of several runs, after one to warm up."""
    device, options = ids.device, {"do_sample": False, "return_dict_in_generate": True}

    def generate(new: int) -> Any:
        return model.generate(ids, max_new_tokens=new, **options)

    found = generate(2)
    cache_bytes = held_bytes(found.past_key_values)
    del found
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    one = min(seconds(lambda: generate(1), device) for _ in range(repeats))
    many = min(seconds(lambda: generate(1 + count), device) for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    tokens = generate(1 + count).sequences[0, ids.shape[1] :].tolist()
    return {
        "prompt_s": one,
        "token_ms": (many - one) * 1e3 / count,
        "cache_bytes": cache_bytes,
        "peak_bytes": peak,
        "tokens": tokens,
    }


def main() -> None:
    """Measure every case, print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a short prompt, a narrow model")
    parser.add_argument("--prompt", type=int, help="tokens; default 262,144, or 3,000 if small")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    device = torch.device(options.device)
    length = options.prompt or (3000 if options.small else 1 << 18)
    dtype = torch.float32 if options.small else torch.bfloat16
    positions = length + options.new_tokens + 2
    model = make_model(options.layers, positions, small=options.small).to(device, dtype)
    ids = torch.randint(1, model.config.vocab_size, (1, length), device=device)
    found = []
    for name, pattern in patterns().items():
        if pattern is not None:
            set_attention(model, pattern)
        each = {"case": name, "prompt": length} | measure(
            model, ids, options.new_tokens, options.repeats
        )
        found.append(each)
        agree = [a == b for a, b in zip(found[0]["tokens"], each["tokens"], strict=True)]
        each["tokens_as_sdpa"] = [*agree, False].index(False)
        print("  ".join(f"{key}={value}" for key, value in each.items() if key != "tokens"))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
