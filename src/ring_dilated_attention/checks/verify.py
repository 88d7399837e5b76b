"""Compare the sharded function with the reference over a sweep of cases. Behind `rda verify`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch

from ..exchange import Exchange
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..options import BranchGradients, Schedule
from ..pattern import DilatedPattern
from ..plan import AttentionPlan, costs, plan_attention
from ..tiles import Backend, accumulate_dtype
from .ranks import tell_progress, world_exchange
from .reference import reference_attention

BATCH, SEQUENCE, HEADS, HEAD_DIM = range(4)


class ViewKind(NamedTuple):
    """How a tensor (batch, sequence, heads, head_dim) lies in memory.

    Attributes:
        expanded: dimensions with stride 0: all that is along them is the same.
        window: a dimension each of whose rows begins one element behind the row before it, so that
            rows overlap; None: there is none.
        order: the dimensions, from that with the largest stride to that with the smallest.
        steps: of each dimension of the storage, every how many-th element is the tensor's.
        offset: elements of the storage before the tensor's first.
    """

    expanded: tuple[int, ...] = ()
    window: int | None = None
    order: tuple[int, ...] = (BATCH, SEQUENCE, HEADS, HEAD_DIM)
    steps: tuple[int, ...] = (1, 1, 1, 1)
    offset: int = 0

    @staticmethod
    def any(random: Random) -> ViewKind:
        """One of `named` half of the time, else a mixture."""
        if random.random() < 0.5:
            return random.choice(list(ViewKind.named().values()))
        order = random.sample(range(4), 4)
        if random.random() < 0.7:  # head_dim is innermost, as most callers have it
            order = [*(dim for dim in order if dim != HEAD_DIM), HEAD_DIM]
        return ViewKind(
            expanded=tuple(dim for dim in range(4) if random.random() < 0.15),
            window=random.choice([None] * 6 + [SEQUENCE, HEADS]),
            order=tuple(order),
            steps=tuple(random.choice([1, 1, 1, 2, 3]) for _ in range(4)),
            offset=random.choice([0, 0, 1, 8, 13]),
        )

    @staticmethod
    def named() -> dict[str, ViewKind]:
        """Kinds that callers have, and corners, by name."""
        return _KINDS

    @property
    def repeats_positions(self) -> bool:
        """Whether positions, or rows of the batch, share elements."""
        return BATCH in self.expanded or SEQUENCE in self.expanded or self.window == SEQUENCE

    def fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers of the same shape that views of this kind can hold, taken from `tensor`."""
        if self.window is not None and tensor.numel():
            # Row i holds the elements from i on of one long row: the first, and the others' ends.
            rows = tensor.movedim(self.window, 0)
            long = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1)
            windows = long.unfold(-1, tensor.shape[-1], 1)
            tensor = windows.movedim(-2, self.window)
        for dim in self.expanded:
            if tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, 1).expand_as(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this kind that holds what `tensor` holds, which is such that one can.

        Rows overlap only if those of `tensor` do, which a shard of several ranges is not made for.
        """
        shape = list(tensor.shape)
        if not tensor.numel():
            return tensor
        kept = [1 if dim in self.expanded else size for dim, size in enumerate(shape)]
        values = tensor[tuple(slice(size) for size in kept)]
        window = self.window if self.window not in self.expanded else None
        if window is not None and not _overlaps(values, window):
            window = None
        if window is not None:
            rows = values.movedim(window, 0)
            values = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1).unsqueeze(window)
        strides, room = [0] * 4, 1
        for dim in reversed(self.order):
            strides[dim] = room * self.steps[dim]
            room *= values.shape[dim] * self.steps[dim]
        filler = float("nan") if tensor.is_floating_point() else -1
        storage = tensor.new_full((self.offset + room + 1,), filler)
        storage.as_strided(values.shape, strides, self.offset).copy_(values)
        if window is not None:
            strides[window] = strides[HEAD_DIM]
        for dim in self.expanded:
            strides[dim] = 0
        view = storage.as_strided(shape, strides, self.offset)
        assert torch.equal(view.nan_to_num(), tensor.nan_to_num()), (self, "cannot hold the tensor")
        return view


def _overlaps(tensor: torch.Tensor, window: int) -> bool:
    """Whether each row along `window` holds the row before it, moved on by one element."""
    rows = tensor.nan_to_num().movedim(window, 0)
    return all(torch.equal(a[..., 1:], b[..., :-1]) for a, b in pairwise(rows))


_KINDS = {
    "contiguous": ViewKind(),
    "expanded batch": ViewKind(expanded=(BATCH,)),
    "expanded sequence": ViewKind(expanded=(SEQUENCE,)),
    "expanded heads": ViewKind(expanded=(HEADS,)),
    "expanded head_dim": ViewKind(expanded=(HEAD_DIM,)),
    "one number": ViewKind(expanded=(BATCH, SEQUENCE, HEADS, HEAD_DIM)),
    "heads first": ViewKind(order=(BATCH, HEADS, SEQUENCE, HEAD_DIM), offset=16),
    "sequence first": ViewKind(order=(SEQUENCE, BATCH, HEADS, HEAD_DIM)),
    "head_dim first": ViewKind(order=(BATCH, HEAD_DIM, HEADS, SEQUENCE), offset=3),
    "part of qkv": ViewKind(steps=(1, 3, 1, 1), offset=64),
    "part of a head": ViewKind(steps=(1, 1, 2, 1), offset=8),
    "every other number": ViewKind(steps=(1, 1, 1, 2), offset=1),
    "odd offset": ViewKind(offset=5),
    "windows over the sequence": ViewKind(window=SEQUENCE, offset=2),
    "windows over heads": ViewKind(window=HEADS, offset=7),
    "expanded heads of a transposed tensor": ViewKind(
        expanded=(HEADS,), order=(HEADS, SEQUENCE, BATCH, HEAD_DIM), steps=(2, 1, 1, 1), offset=9
    ),
}

INPUTS = ("query", "key", "value")
TENSORS = ("out", "lse", *(f"d{name}" for name in INPUTS))
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}
"""Largest relative error of a case by dtype, unless plain torch in that dtype errs as much."""


class References(NamedTuple):
    """What a case should find, as `Case.expected` returns it."""

    exact: dict[str, torch.Tensor]  # in float64
    plain: dict[str, torch.Tensor]  # in the case's dtype


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call to compare: a pattern, a layout, sizes and options. Inputs are drawn from `seed`.

    With `lengths`, everything in padded positions is NaN, dout included: none of it may be read
    (except where views share memory with other positions).

    Options are those of `dilated_attention`, sizes those of its arguments; `num_kv_heads` divides
    `num_heads`. `views` says how query, key, value and dout lie in memory (empty: contiguous),
    `wanted` of which inputs the gradients are computed, and `as_mask` whether `lengths` are passed
    as a `key_padding_mask`.
    """

    pattern: DilatedPattern
    layout: SequenceLayout
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 8
    batch: int = 1
    is_causal: bool = False
    documents: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    exchange: Schedule = "auto"
    backend: Backend = "auto"
    seed: int = 0
    device: str = "cpu"
    views: tuple[ViewKind, ...] = ()
    wanted: tuple[str, ...] = INPUTS
    scale: float | None = None
    workspace: float | None = None
    as_mask: bool = False
    branch_gradients: BranchGradients = "exact"

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Whole query, key, value and dout, float64 numbers that `dtype` represents exactly."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = (
            torch.randn(
                self.batch,
                self.layout.length,
                heads,
                self.head_dim,
                generator=generator,
                dtype=torch.float64,
            )
            .to(self.dtype)
            .to(self.device, torch.float64)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        )
        if not self.views:
            return tuple(tensors)
        return tuple(kind.fit(x) for kind, x in zip(self.views, tensors, strict=True))

    def roundoff(self) -> dict[str, float]:
        """How far an element of each result may be off where its terms cancel, by rounding alone.

        Where values are all the same (as in an expanded tensor) gradients are 0 but for rounding,
        so that their own size says nothing.
        """
        tensors = self.inputs()
        query, key, value, dout = (x.square().mean().sqrt().item() for x in tensors)
        # dout v^T sums terms that are all the same where neither varies along a row.
        is_constant = all(bool((x == x[..., :1]).all()) for x in tensors[2:])
        width = self.head_dim ** (1.0 if is_constant else 0.5)
        scale = self.head_dim**-0.5 if self.scale is None else abs(self.scale)
        # p = exp(score - lse) is as inexact as the larger of the two: scores of 4 standard
        # deviations, or lse, which is the logarithm of the number of keys where scores are small.
        of_many_keys = math.log(self.layout.length * len(self.pattern.branches))
        scores = 1 + max(4 * scale * self.head_dim**0.5 * query * key, of_many_keys)
        # One term: p (dout v^T - delta) is of this size, and as many queries share a key.
        ds = scores * scale * width * dout * value
        queries = (self.layout.length * self.num_heads / self.num_kv_heads) ** 0.5
        sizes = value, scores, ds * key, ds * query * queries, scores * dout * queries
        own, wide = torch.finfo(self.dtype), torch.finfo(accumulate_dtype(self.dtype))
        units = dict.fromkeys(TENSORS, own.eps / 2)
        units["lse"] = wide.eps / 2
        # Numbers this close to 0 have few bits, or none: those of sums, and those of results.
        least = wide.tiny + own.tiny * own.eps
        return {name: units[name] * size + least for name, size in zip(TENSORS, sizes, strict=True)}

    def plan(self, length: int | None = None) -> AttentionPlan:
        """The plan of its rows that have `length` valid positions; None: all positions."""
        return plan_attention(
            self.pattern,
            self.layout,
            is_causal=self.is_causal,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            documents=self.documents,
            length=length,
        )

    def expected(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Whole out, lse and gradients by brute force in `dtype`."""
        query, key, value, dout = (x.to(dtype) for x in self.inputs())
        leaves = [x.requires_grad_() for x in (query, key, value)]
        query, key, value = leaves
        out, lse = reference_attention(
            query,
            key,
            value,
            self.pattern,
            is_causal=self.is_causal,
            documents=self.documents,
            lengths=self.lengths,
            scale=self.scale,
            branch_gradients=self.branch_gradients,
        )
        gradients = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
        return dict(zip(TENSORS, (out.detach(), lse.detach(), *gradients), strict=True))

    def references(self) -> References:
        """`expected` in float64 and in `dtype`, computed on the CPU and moved to `device`."""
        on_cpu = replace(self, device="cpu")
        found = (on_cpu.expected(dtype) for dtype in (torch.float64, self.dtype))
        return References(*({name: x.to(self.device) for name, x in e.items()} for e in found))


@dataclass
class Outcome:
    """What one rank found in one case; outcomes of a case's ranks add up.

    Attributes:
        squares: per tensor, sums of squares of (error, expected, plain error): the plain error is
            that of the reference computed in the case's dtype, or `Case.roundoff` if that is more.
        sent_bytes: bytes that the exchange sent.
        planned_bytes: bytes that the plan says it sends.
        valid: no NaN, uncovered rows exactly (0, -inf), shapes and dtypes as documented.
    """

    squares: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    sent_bytes: int = 0
    planned_bytes: int = 0
    valid: bool = True

    def __add__(self, other: Outcome) -> Outcome:
        squares = {
            name: tuple(map(sum, zip(self.squares[name], other.squares[name], strict=True)))
            for name in self.squares
        }
        return Outcome(
            squares,  # type: ignore[arg-type]
            self.sent_bytes + other.sent_bytes,
            self.planned_bytes + other.planned_bytes,
            self.valid and other.valid,
        )

    def error(self, name: str) -> float:
        """Relative error of a tensor over all ranks added up."""
        error, size, _ = self.squares[name]
        return math.sqrt(error / size if size else error)

    def errors(self) -> dict[str, float]:
        """`error` of each tensor: out, lse, and the gradients that were computed."""
        return {name: self.error(name) for name in self.squares}

    def passes(self, dtype: torch.dtype) -> bool:
        """Whether everything is within bounds.

        A gradient can be a small difference of large numbers (a query that sees one key), so a
        tensor may instead err by 4 times what the reference computed plainly in `dtype` does.
        """
        within = all(
            self.error(name) <= TOLERANCE[dtype]
            or self.squares[name][0] <= 16 * self.squares[name][2]
            for name in self.squares
        )
        return within and self.valid and self.sent_bytes == self.planned_bytes


def run_case(case: Case, ends: Exchange, wanted: References | None = None) -> Outcome:
    """Run a case on this rank and compare this rank's shard with the reference.

    Args:
        case: the case, the same on every rank.
        ends: this rank's end of the group.
        wanted: `Case.references`, where ranks of one process share them; None: computed here.
    """
    query, key, value, dout = _shards(case, ends.rank)
    leaves = [
        x.requires_grad_()
        for x, name in zip((query, key, value), INPUTS, strict=True)
        if name in case.wanted
    ]
    options: dict[str, Any] = {"lengths": case.lengths}
    if case.as_mask and case.lengths is not None:
        padding = torch.arange(case.layout.length) >= torch.tensor(case.lengths)[:, None]
        mask = case.layout.shard(padding, ends.rank, 1).to(query.device)
        options = {"key_padding_mask": mask}
    before = ends.sent_bytes
    out, lse = dilated_attention(
        query,
        key,
        value,
        case.pattern,
        is_causal=case.is_causal,
        scale=case.scale,
        documents=case.documents,
        group=ends if ends.world_size > 1 else None,
        layout=case.layout,
        exchange=case.exchange,
        backend=case.backend,
        workspace=case.workspace,
        branch_gradients=case.branch_gradients,
        return_lse=True,
        **options,
    )
    gradients = torch.autograd.grad(out, leaves, dout) if leaves else ()
    names = (f"d{name}" for name in INPUTS if name in case.wanted)
    actual = {"out": out.detach(), "lse": lse, **dict(zip(names, gradients, strict=True))}
    outcome = Outcome(
        sent_bytes=ends.sent_bytes - before,
        planned_bytes=sum(
            _planned_bytes(case, ends, length, batch)
            for length, batch in Counter(case.lengths or [None] * case.batch).items()
        ),
    )
    _compare(outcome, case, ends.rank, actual, wanted or case.references())
    return outcome


def _shards(case: Case, rank: int) -> list[torch.Tensor]:
    """A rank's query, key, value and dout, in memory as `Case.views` says."""
    kinds = case.views or (ViewKind(),) * 4
    inputs = [x.to(case.dtype) for x in case.inputs()]
    for row, length in enumerate(case.lengths or ()):
        for x, kind in zip(inputs, kinds, strict=True):
            if not kind.repeats_positions:
                x[row, length:] = torch.nan
    shards = (case.layout.shard(x, rank, 1) for x in inputs)
    return [kind.view(x) for x, kind in zip(shards, kinds, strict=True)]


def _compare(
    outcome: Outcome, case: Case, rank: int, actual: dict[str, torch.Tensor], wanted: References
) -> None:
    """Write into `outcome` how far a rank's tensors are from what they should be."""
    roundoff = case.roundoff()
    uncovered = torch.isneginf(actual["lse"])
    for name, got in actual.items():
        dim = 2 if name == "lse" else 1
        want, rough = (case.layout.shard(x[name], rank, dim) for x in wanted)
        dtype = accumulate_dtype(case.dtype) if name == "lse" else case.dtype
        outcome.valid &= got.shape == want.shape and got.dtype == dtype
        if name == "lse":
            outcome.valid &= torch.equal(uncovered, torch.isneginf(want))
            got, want, rough = (x.masked_fill(torch.isneginf(x), 0) for x in (got, want, rough))
        elif name == "out":
            outcome.valid &= bool((got[uncovered.transpose(1, 2)] == 0).all())
        outcome.valid &= bool(torch.isfinite(got).all())
        outcome.squares[name] = (
            (got.double() - want).square().sum().item(),
            want.square().sum().item(),
            max((rough.double() - want).square().sum().item(), want.numel() * roundoff[name] ** 2),
        )


def _planned_bytes(case: Case, ends: Exchange, length: int | None, batch: int) -> int:
    """Bytes that a rank sends for `batch` rows of a batch, all of one length."""
    plan = case.plan(length)
    size = costs.TensorSize(batch=batch, head_dim=case.head_dim, element_size=case.dtype.itemsize)
    sent = partial(costs.sent_bytes, size=size)
    own, detached = plan.rank(ends.rank), case.branch_gradients == "detached"
    if not detached or not case.wanted or not case.pattern.mixes_branches:
        return sent(own, backward=bool(case.wanted))
    # Backward computes each branch by itself: forward again, and back.
    branches = [one.rank(ends.rank) for one in plan.single_branches]
    return sent(own, backward=False) + sum(sent(one, backward=True) for one in branches)


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    """Run every case on this rank, over the default process group; for `run_ranks`.

    Tells how many cases are done.
    """
    outcomes = []
    for case in cases:
        outcomes.append(run_case(case, world_exchange()))
        tell_progress(len(outcomes))
    return outcomes


def combine(by_rank: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """One outcome per case from those of every rank."""
    return [sum(outcomes[1:], outcomes[0]) for outcomes in map(list, zip(*by_rank, strict=True))]


def sweep(world_size: int, seed: int = 0) -> Iterator[Case]:
    """The cases of `rda verify`: each option with each corner of lengths and layouts.

    Args:
        world_size: number of ranks.
        seed: of the first case's inputs; each further one adds 1.
    """
    patterns = [
        DilatedPattern([4, 8, 16], [1, 2, 4]),
        DilatedPattern([5, 13, None], [2, 3, 6]),  # no rate-1 branch, nothing divides anything
        DilatedPattern([3, 11], [7, 4]),  # a rate beyond its segment
        DilatedPattern([6, 10, 31], [1, 3, 5], head_offsets="blocked"),
        DilatedPattern([4, 9, None], [1, 2, 3], head_branches="split"),
        DilatedPattern.dense(),
    ]
    heads = [(4, 4, 1), (6, 2, 1), (5, 1, 2), (3, 3, 2)]  # heads, KV heads, batch
    number = 0
    for pattern in patterns:
        for length in (53, 2 * world_size - 1, world_size, 2):
            for name in ("contiguous", "zigzag", "uneven"):
                is_causal = bool(number % 2)
                num_heads, num_kv_heads, batch = heads[number // 2 % len(heads)]
                options: dict[str, Any] = {
                    "exchange": ("ring", "gather")[(number // 3 + number // 12) % 2],
                    "backend": ("auto", "eager")[number // 5 % 2],
                    "dtype": (torch.float64, torch.float32)[number // 7 % 2],
                }
                yield Case(
                    pattern=pattern,
                    layout=make_layout(name, length, world_size),
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    batch=batch,
                    is_causal=is_causal,
                    seed=seed + number,
                    **options,
                    **_packing(number, batch, length),
                )
                number += 1


def _packing(number: int, batch: int, length: int) -> dict[str, Any]:
    """Documents and lengths of a case of the sweep: neither, one of them, or both."""
    packing: dict[str, Any] = {}
    if number % 3 == 1:
        cuts = {length * i * i // 9 for i in (1, 2)} | {1, length - 1}
        packing["documents"] = tuple(sorted({0, length} | {x for x in cuts if 0 < x < length}))
    if number % 4 > 1:
        packing["lengths"] = tuple((number * 7 + 5 * row) % (length + 1) for row in range(batch))
    return packing


def make_layout(name: str, length: int, world_size: int) -> SequenceLayout:
    """A layout by name: ``contiguous``, ``zigzag``, or ``uneven``.

    ``uneven`` deals ever longer ranges to the ranks in turn, the last rank coming away empty, and
    hands the ranges over in falling order, so that local order is not global order.
    """
    if name == "contiguous":
        return SequenceLayout.contiguous(length, world_size)
    if name == "zigzag":
        return SequenceLayout.zigzag(length, world_size)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    start, size = 0, 1
    while start < length:
        stop = min(start + size, length)
        ranges[size % max(world_size - 1, 1)].insert(0, (start, stop))
        start, size = stop, size + 1
    return SequenceLayout(ranges)
