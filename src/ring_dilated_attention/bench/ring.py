"""Baselines that attend over a ring of ranks; they compute the dense pattern only.

``cp:allgather`` and ``cp:alltoall`` are torch's context_parallel with its two ways of rotating K
and V, cuDNN inside; on one rank they are that cuDNN call. ``ring-flash-attn:zigzag`` is the package
of that name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from .contender import (
    Attend,
    Contender,
    Site,
    by_reference,
    even_layout,
    flops_on,
    local_shapes,
    refuse_grouped_queries,
    refuse_other_dtypes,
    refuse_other_patterns,
)
from .workload import Workload

NAMES = ("cp:allgather", "cp:alltoall", "ring-flash-attn:zigzag")

_CONTEXT_PARALLEL = (  # where torch has kept it, newest first
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
_CONTEXT_PARALLEL_MEMBERS = ("context_parallel", "set_rotate_method", "_cp_options")


def baseline(name: str, workload: Workload, site: Site) -> Contender:
    """What one of `NAMES` runs for a workload.

    Raises:
        ValueError: it cannot compute such a workload; says why.
    """
    refuse_other_patterns(name, workload)
    site.refuse_cpu(name)
    refuse_other_dtypes(name, workload)
    kind, _, method = name.partition(":")
    if kind == "cp":
        return _context_parallel(name, workload, site, method)
    return _ring_flash_attention(name, workload, site)


def _sharded(
    workload: Workload, site: Site, attend: Attend, *, heads_first: bool = False, **options: Any
) -> Contender:
    layout = even_layout(workload, site.size)
    return Contender(
        attend=attend,
        shapes=local_shapes(workload, layout, site.rank, heads_first=heads_first),
        flops=flops_on(workload, site, layout),
        layout=layout,
        expected=by_reference(workload, workload.pattern),
        heads_first=heads_first,
        **options,
    )


def _check_even(name: str, workload: Workload, size: int) -> None:
    """Raise a `ValueError` unless every rank's chunks are equally long."""
    chunks = size * (2 if workload.is_causal else 1)
    if workload.seq_len % chunks:
        raise ValueError(
            f"{name} needs a length that is a multiple of {chunks} on {size} ranks; "
            f"got {workload.seq_len}"
        )


def _context_parallel(name: str, workload: Workload, site: Site, method: str) -> Contender:
    refuse_grouped_queries(name, workload)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Gradients are enabled even for forward alone: only then does SDPA return the lse, which
        # merging needs.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=workload.is_causal)

    inside: Any = nullcontext
    if site.size > 1:
        _check_even(name, workload, site.size)
        inside = partial(in_context_parallel, context_parallel_module(name), workload, site, method)
    return _sharded(workload, site, attend, heads_first=True, inside=inside)


def context_parallel_module(name: str) -> ModuleType:
    """The module of torch that has context_parallel and its options.

    Raises:
        ValueError: this torch has none.
    """
    for path in _CONTEXT_PARALLEL:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        if all(hasattr(module, member) for member in _CONTEXT_PARALLEL_MEMBERS):
            return module
    raise ValueError(f"{name} needs torch's context_parallel; torch {torch.__version__} has none")


@contextmanager
def in_context_parallel(module: Any, workload: Workload, site: Site, method: str) -> Iterator[None]:
    """Inside, torch's SDPA attends over the ring, to the shards that `even_layout` deals.

    The buffer that context_parallel is given to shard is that of the positions, as in a model that
    makes query, key and value from shards of its inputs; that it deals them as expected is checked.

    Args:
        module: see `context_parallel_module`.
        workload: what the ranks compute.
        site: the ranks, and where this one computes.
        method: ``"allgather"`` or ``"alltoall"``.

    Raises:
        RuntimeError: it deals positions otherwise.
    """
    assert isinstance(site.group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(site.group, site.device.type)
    positions = torch.arange(workload.seq_len, device=site.device)[None]
    layout = even_layout(workload, site.size)
    expected = layout.positions(site.rank, device=site.device)
    options, failure = module._cp_options, None
    balanced = options.enable_load_balance
    options.enable_load_balance = workload.is_causal  # it refuses to balance anything else
    module.set_rotate_method(method)
    try:
        with module.context_parallel(
            mesh, buffers=[positions], buffer_seq_dims=[1], no_restore_buffers={positions}
        ):
            # torch 2.11 leaves SDPA patched when an error passes through its context.
            try:
                if not torch.equal(positions[0], expected):
                    raise RuntimeError(f"context_parallel deals positions {positions[0]}")
                yield
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
    finally:
        options.enable_load_balance = balanced


def _ring_flash_attention(name: str, workload: Workload, site: Site) -> Contender:
    try:
        zigzag = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    except ImportError as error:
        raise ValueError(f"{name} needs the package ring-flash-attn ({error})") from None
    if not workload.is_causal:
        raise ValueError(f"{name} is causal only")
    if site.size == 1:
        raise ValueError(f"{name} needs 2 ranks or more")
    _check_even(name, workload, site.size)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = zigzag(query, key, value, causal=True, group=site.group)
        return out

    return _sharded(workload, site, attend)
