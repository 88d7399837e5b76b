"""What a benchmark of several ranks times: this library, and what else attends over a ring.

``cp:allgather`` and ``cp:alltoall`` are torch's context_parallel with its two ways of rotating K
and V, cuDNN inside; on one rank they are that cuDNN call. ``ring-flash-attn:zigzag`` is the package
of that name. They compute the dense pattern only. ``ours:messages`` is this library with rows that
travel as messages of NCCL between GPUs of one host too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..exchange import Group, ProcessGroupExchange
from ..functional import Schedule, dilated_attention
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice
from .case import Case
from .peers import OURS, Attend

MESSAGES = "ours:messages"
PEERS = ("cp:allgather", "cp:alltoall", "ring-flash-attn:zigzag", MESSAGES)
LAYOUTS = ("auto", "contiguous", "zigzag")

_HALVES = ("float16", "bfloat16")
_CONTEXT_PARALLEL = (  # where torch has kept it, newest first
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
_CONTEXT_PARALLEL_MEMBERS = ("context_parallel", "set_rotate_method", "_cp_options")


@dataclass(frozen=True, kw_only=True)
class RingContender:
    """Something that computes a case on the ranks of a group.

    Attributes:
        attend: this rank's query, key, value -> this rank's out.
        layout: which rank holds which positions.
        heads_first: whether tensors are (batch, heads, local_sequence, head_dim), as the contender
            likes them, instead of (batch, local_sequence, heads, head_dim).
        inside: the context in which it attends and differentiates.
    """

    attend: Attend
    layout: SequenceLayout
    heads_first: bool = False
    inside: Callable[[], AbstractContextManager[None]] = nullcontext


def ring_contender(
    name: str,
    case: Case,
    group: Group,
    size: int,
    device: torch.device,
    *,
    layout: str = "auto",
    exchange: Schedule = "auto",
) -> RingContender:
    """What `name` (`OURS`, or one of `PEERS`) runs for a case on one rank of a group.

    Args:
        name: the contender.
        case: what all ranks compute together; its length is that of the whole sequence.
        group: the ranks; a ProcessGroup for peers; None for one rank.
        size: their number.
        device: where the tensors are.
        layout: one of `LAYOUTS`, for ours: ``"auto"`` is zigzag for causal cases.
        exchange: of `dilated_attention`, for ours.

    Raises:
        ValueError: the name is unknown, or it cannot compute such a case; says why.
    """
    if name == OURS:
        return _ours(case, group, size, layout, exchange)
    check_choice("peer", name, PEERS)
    dense = DilatedPattern.dense()
    if name != MESSAGES and case.pattern != dense:
        raise ValueError(f"{name} computes the dense pattern {dense}; got {case.pattern}")
    if device.type != "cuda":
        raise ValueError(f"{name} runs on cuda, the inputs are on {device.type}")
    if name == MESSAGES:
        if size == 1:
            raise ValueError(f"{name} needs several ranks: on one it is {OURS}")
        assert isinstance(group, dist.ProcessGroup)
        by_messages = ProcessGroupExchange(group, peer_memory=False)
        return _ours(case, by_messages, size, layout, exchange)
    if case.dtype not in _HALVES:
        raise ValueError(f"{name} takes {', '.join(_HALVES)}; got {case.dtype}")
    kind, _, method = name.partition(":")
    attend = _context_parallel if kind == "cp" else _ring_flash_attention
    return attend(name, case, group, size, device, method)


def even_layout(case: Case, size: int) -> SequenceLayout:
    """Zigzag for a causal case, else contiguous."""
    deal = SequenceLayout.zigzag if case.is_causal else SequenceLayout.contiguous
    return deal(case.length, size)


def _ours(case: Case, group: Group, size: int, layout: str, exchange: Schedule) -> RingContender:
    check_choice("layout", layout, LAYOUTS)
    if layout == "auto":
        dealt = even_layout(case, size)
    else:
        dealt = getattr(SequenceLayout, layout)(case.length, size)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dilated_attention(
            query,
            key,
            value,
            case.pattern,
            is_causal=case.is_causal,
            group=group,
            layout=dealt,
            exchange=exchange,
            backend=case.backend,
        )

    return RingContender(attend=attend, layout=dealt)


def _check_even(name: str, case: Case, size: int) -> None:
    """Raise a `ValueError` unless every rank's chunks are equally long."""
    chunks = size * (2 if case.is_causal else 1)
    if case.length % chunks:
        raise ValueError(
            f"{name} needs a length that is a multiple of {chunks} on {size} ranks; "
            f"got {case.length}"
        )


def _context_parallel(
    name: str, case: Case, group: Group, size: int, device: torch.device, method: str
) -> RingContender:
    if case.num_kv_heads != case.heads:
        raise ValueError(
            f"{name} has no grouped queries; got {case.heads} heads and "
            f"{case.num_kv_heads} KV heads"
        )

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # With gradients also where nobody asks for them: merging needs the lse anyway, which SDPA
        # leaves out without.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=case.is_causal)

    made = partial(RingContender, attend=attend, layout=even_layout(case, size), heads_first=True)
    if size == 1:
        return made()
    _check_even(name, case, size)
    assert isinstance(group, dist.ProcessGroup)
    module = context_parallel_module(name)
    inside = partial(in_context_parallel, module, group, case, size, device, method)
    return made(inside=inside)


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
def in_context_parallel(
    module: Any, group: dist.ProcessGroup, case: Case, size: int, device: torch.device, method: str
) -> Iterator[None]:
    """Inside, torch's SDPA attends over the ring, to the shards that `even_layout` deals.

    The buffer that context_parallel is given to shard is that of the positions, as in a model that
    makes query, key and value from shards of its inputs; that it deals them as expected is checked.

    Args:
        module: see `context_parallel_module`.
        group: the ranks.
        case: what they compute.
        size: their number.
        device: where this one computes.
        method: ``"allgather"`` or ``"alltoall"``.

    Raises:
        RuntimeError: it deals positions otherwise.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    positions = torch.arange(case.length, device=device)[None]
    expected = even_layout(case, size).positions(dist.get_rank(group), device=device)
    options, failure = module._cp_options, None
    balanced = options.enable_load_balance
    options.enable_load_balance = case.is_causal  # it refuses to balance anything else
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


def _ring_flash_attention(
    name: str, case: Case, group: Group, size: int, device: torch.device, method: str
) -> RingContender:
    try:
        zigzag = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    except ImportError as error:
        raise ValueError(f"{name} needs the package ring-flash-attn ({error})") from None
    if not case.is_causal:
        raise ValueError(f"{name} is causal only")
    if size == 1:
        raise ValueError(f"{name} needs 2 ranks or more")
    _check_even(name, case, size)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = zigzag(query, key, value, causal=True, group=group)
        return out

    return RingContender(attend=attend, layout=even_layout(case, size))
