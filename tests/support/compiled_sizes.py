"""Compile the attention kernels for a GPU that need not be there; print their shared memory.

Run by itself, without TRITON_INTERPRET: `python tests/support/compiled_sizes.py 80`.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ring_dilated_attention.kernels import backward, decode, device_profile, forward
from ring_dilated_attention.kernels.device_profile import H200
from ring_dilated_attention.kernels.launch import Launcher


def launched(module, *arguments):
    """The kernel that a module launches with arguments of these names."""
    kernels = [x.kernel for x in vars(module).values() if isinstance(x, Launcher)]
    (found,) = (kernel for kernel in kernels if {*arguments} <= {*kernel.arg_names})
    return found


KERNELS: dict[str, Any] = {
    "forward": launched(forward, "cells"),
    "dq": launched(backward, "cells", "dq"),
    "dkdv": launched(backward, "cells", "dk"),
    "own_forward": launched(forward, "ranges"),
    "own_dq": launched(backward, "ranges", "dq"),
    "own_dkdv": launched(backward, "ranges", "dk"),
    "decode": launched(decode, "q"),
}
TABLES = {
    **dict.fromkeys(("cells", "table"), "*i64"),
    **dict.fromkeys(("programs", "ranges", "branches", "order"), "*i32"),
    **dict.fromkeys(("parts",), "*fp32"),
}
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "new_k", "new_v")
DECODED = [(2, 128), (4, 256)]
"""Bytes of an element and head_dims for which decoding is compiled, as for a smaller GPU."""


def shared_bytes(name, itemsize, head_dim, config, capability, *, overlaps=False):
    kernel = KERNELS[name]
    constants = {
        "UNIT": 8,
        **device_profile.head_dim_constants(head_dim, config.tail),
        **device_profile.copies_of(config),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee",
        "IS_CAUSAL": True,
        "BLOCK_NEW": 64,
        "WITH_NEW": True,
        **dict.fromkeys(("WIDE", "STORE", "ZERO_KEYS", "DETACHED"), False),
        "OVERLAPS": overlaps,
    }
    constants = {x: value for x, value in constants.items() if x in kernel.arg_names}
    element = {2: "*fp16", 4: "*fp32"}[itemsize]
    types = {**TABLES, **dict.fromkeys(TENSORS, element), "lse": "*fp32", "delta": "*fp32"}
    types |= {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {x: types.get(x, "i32") for x in kernel.arg_names}
    pointers = [i for i, x in enumerate(kernel.arg_names) if signature[x].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(x),): value for x, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    options["launch_pdl"] = overlaps
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


if __name__ == "__main__":
    found = []
    for (name, itemsize, head_dim), (needed, smaller) in device_profile.LARGE.items():
        config = device_profile.CONFIGS[name, itemsize, head_dim]
        sizes = [
            shared_bytes(name, itemsize, head_dim, each, int(sys.argv[1]))
            for each in (config, smaller)
        ]
        found.append([name, needed, *sizes])
    config = device_profile.default_config("forward", 128, torch.float16, queries=4096, keys=4096)
    found.append(["forward", 0, 0, shared_bytes("forward", 2, 128, config, int(sys.argv[1]))])
    small = replace(H200, shared_bytes=99 << 10)
    for itemsize, head_dim in DECODED:
        dtype = {2: torch.float16, 4: torch.float32}[itemsize]
        vars(device_profile)["profile_of"] = lambda device: small
        config = device_profile.decode_config(
            head_dim, dtype, queries=256, keys=4096, device=torch.device("cpu")
        )
        size = shared_bytes("decode", itemsize, head_dim, config, int(sys.argv[1]))
        found.append(["decode", 0, 0, size])
        size = shared_bytes("decode", itemsize, head_dim, config, 90, overlaps=True)
        assert size <= H200.shared_bytes
    print(json.dumps(found))
