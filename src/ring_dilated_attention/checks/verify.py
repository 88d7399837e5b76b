"""Compare calls of the sharded function (`Case`) with brute force: `rda verify` runs `sweep`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..choice import choose_exchange
from ..exchange import Exchange, all_gather
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..options import BranchGradients, Schedule
from ..pattern import DilatedPattern
from ..plan import AttentionPlan, HeadSplit, costs, head_split, plan_attention
from ..tiles import Backend, accumulate_dtype
from .ranks import world_exchange
from .reference import reference_attention

BATCH, SEQUENCE, HEADS, HEAD_DIM = range(4)


class ViewKind(NamedTuple):
    """How a tensor (batch, sequence, heads, head_dim) lies in memory.

    Attributes:
        expanded: dimensions with stride 0: all that is along them is the same.
        order: the dimensions, from that with the largest stride to that with the smallest.
        steps: of each dimension of the storage, every how many-th element is the tensor's.
        offset: elements of the storage before the tensor's first.
    """

    expanded: tuple[int, ...] = ()
    order: tuple[int, ...] = (BATCH, SEQUENCE, HEADS, HEAD_DIM)
    steps: tuple[int, ...] = (1, 1, 1, 1)
    offset: int = 0

    @staticmethod
    def named() -> dict[str, ViewKind]:
        """Kinds that callers have, and corners, by name."""
        return _KINDS

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this kind of the numbers of `tensor`, in a storage of NaN.

        Along expanded dimensions these are the tensor's first ones.
        """
        if not tensor.numel():
            return tensor
        values = tensor
        for dim in self.expanded:
            values = values.narrow(dim, 0, 1)
        strides, room = [0] * 4, 1
        for dim in reversed(self.order):
            strides[dim] = room * self.steps[dim]
            room *= values.shape[dim] * self.steps[dim]
        storage = tensor.new_full((self.offset + room + 1,), torch.nan)
        storage.as_strided(values.shape, strides, self.offset).copy_(values)
        for dim in self.expanded:
            strides[dim] = 0
        return storage.as_strided(tensor.shape, strides, self.offset)


_KINDS = {
    "contiguous": ViewKind(),
    "expanded batch": ViewKind(expanded=(BATCH,)),
    "expanded sequence": ViewKind(expanded=(SEQUENCE,)),
    "expanded heads": ViewKind(expanded=(HEADS,)),
    "one number": ViewKind(expanded=(BATCH, SEQUENCE, HEADS, HEAD_DIM)),
    "heads first": ViewKind(order=(BATCH, HEADS, SEQUENCE, HEAD_DIM), offset=16),
    "sequence first": ViewKind(order=(SEQUENCE, BATCH, HEADS, HEAD_DIM)),
    "head_dim first": ViewKind(order=(BATCH, HEAD_DIM, HEADS, SEQUENCE), offset=3),
    "part of qkv": ViewKind(steps=(1, 3, 1, 1), offset=64),
    "part of a head": ViewKind(steps=(1, 1, 2, 1), offset=8),
    "every other number": ViewKind(steps=(1, 1, 1, 2), offset=1),
    "odd offset": ViewKind(offset=5),
    "expanded heads of a transposed tensor": ViewKind(
        expanded=(HEADS,), order=(HEADS, SEQUENCE, BATCH, HEAD_DIM), steps=(2, 1, 1, 1), offset=9
    ),
}

INPUTS = ("query", "key", "value")
TENSORS = ("out", "lse", *(f"d{name}" for name in INPUTS))
# Those of the reference, too.
_OPTIONS = ("is_causal", "scale", "softcap", "documents", "branch_gradients")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest relative error of a case by dtype, unless plain torch in that dtype errs as much."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call to compare: a pattern, a layout, sizes and options. Inputs are drawn from `seed`.

    With `lengths`, everything in padded positions is NaN, dout included: none of it may be read
    (except where views share memory with other positions).

    Options are those of `dilated_attention`, sizes those of its arguments; `num_kv_heads` divides
    `num_heads`. `views` says how query, key, value and dout lie in memory (empty: contiguous),
    `wanted` of which inputs the gradients are computed, `loss_of` which of ``"out"`` and ``"lse"``
    the loss depends on, and `as_mask` whether `lengths` are passed as a `key_padding_mask`. With
    `has_sink` every head has a sink, drawn too, whose gradient, "dsink", is computed.
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
    loss_of: tuple[str, ...] = ("out",)
    scale: float | None = None
    workspace: float | None = None
    as_mask: bool = False
    branch_gradients: BranchGradients = "exact"
    softcap: float | None = None
    has_sink: bool = False

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Whole query, key, value and dout, float64 numbers that `dtype` represents exactly."""
        generator = torch.Generator().manual_seed(self.seed)
        own, kv = self.num_heads, self.num_kv_heads
        tensors = []
        for kind, heads in zip(self.views or (ViewKind(),) * 4, (own, kv, kv, own), strict=True):
            shape = self.batch, self.layout.length, heads, self.head_dim
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            tensors.append(kind.view(drawn.to(self.device, torch.float64)).contiguous())
        return tuple(tensors)

    def dlse(self) -> torch.Tensor:
        """Whole gradient of lse (batch, heads, n): numbers that the dtype of lse represents."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = self.batch, self.num_heads, self.layout.length
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.dtype).to(self.device, torch.float64)

    def sink(self) -> torch.Tensor | None:
        """The heads' sinks, (heads,) numbers of float32; None: they have none."""
        if not self.has_sink:
            return None
        generator = torch.Generator().manual_seed(self.seed + 2)
        drawn = 2 * torch.randn(self.num_heads, generator=generator)
        return drawn.to(self.device, torch.float64)

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
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        # p = exp(score - lse) is as inexact as the larger of the two: scores of 4 standard
        # deviations, or lse, which is the logarithm of the number of keys where scores are small.
        of_many_keys = math.log(self.layout.length * len(self.pattern.branches))
        scores = 1 + max(4 * scale * self.head_dim**0.5 * query * key, of_many_keys)
        # One term: p (dout v^T - delta + dlse) is of this size, and as many queries share a key.
        dout *= "out" in self.loss_of
        ds = scores * scale * (width * dout * value + ("lse" in self.loss_of))
        queries = (self.layout.length * self.num_heads / self.num_kv_heads) ** 0.5
        sizes = value, scores, ds * key, ds * query * queries, scores * dout * queries
        rows = (self.batch * self.layout.length) ** 0.5  # of the sum that a sink's gradient is
        of_sink = scores * rows * (width * dout * value + ("lse" in self.loss_of))
        own, wide = torch.finfo(self.dtype), torch.finfo(accumulate_dtype(self.dtype))
        names = *TENSORS, "dsink"
        units = dict.fromkeys(names, own.eps / 2) | {"lse": wide.eps / 2}
        # Numbers this close to 0 have few bits, or none: those of sums, and those of results.
        least = wide.tiny + own.tiny * own.eps
        pairs = zip(names, (*sizes, of_sink), strict=True)
        return {name: units[name] * size + least for name, size in pairs}

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

    @property
    def split(self) -> HeadSplit | None:
        """How rows are exchanged for heads, on one host; None: they are not."""
        heads, exchange = (self.num_heads, self.num_kv_heads), self.exchange
        if exchange == "auto" and self.layout.world_size > 1:
            size = costs.TensorSize(
                batch=self.batch, head_dim=self.head_dim, element_size=self.dtype.itemsize
            )
            exchange = choose_exchange(self.plan(max(self.lengths or [self.layout.length])), size)
        return head_split(exchange, self.pattern, self.layout, *heads)

    def expected(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Whole out, lse and gradients by brute force in `dtype`."""
        *leaves, dout = (x.to(dtype) for x in self.inputs())
        sink = self.sink()
        if sink is not None:
            leaves.append(sink.to(dtype if dtype == torch.float64 else torch.float32))
        query, key, value, *sinks = (x.requires_grad_() for x in leaves)
        options = {name: getattr(self, name) for name in ("lengths", *_OPTIONS)}
        options["sink"] = sinks[0] if sinks else None
        out, lse = reference_attention(query, key, value, self.pattern, **options)
        losses = [(out, dout), (lse, self.dlse().to(dtype))]
        outputs, grads = zip(*self.in_loss(losses), strict=True)
        gradients = torch.autograd.grad(outputs, leaves, grads, materialize_grads=True)
        found = out.detach(), lse.detach(), *gradients
        return dict(zip((*TENSORS, "dsink"), found, strict=False))

    def in_loss(self, of_out_and_lse: Sequence[Any]) -> list[Any]:
        """Of a thing of out and one of lse, those of the results that the loss depends on."""
        return [x for name, x in zip(TENSORS, of_out_and_lse, strict=False) if name in self.loss_of]

    def references(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """`expected` in float64 and in `dtype`, computed on the CPU and moved to `device`."""
        on_cpu = replace(self, device="cpu")
        exact, plain = (
            {name: x.to(self.device) for name, x in on_cpu.expected(dtype).items()}
            for dtype in (torch.float64, self.dtype)
        )
        return exact, plain


@dataclass
class Outcome:
    """What one rank found in one case; outcomes of a case's ranks add up."""

    # per tensor, sums of squares of (error, expected, plain error): the plain error is that
    # of the reference computed in the case's dtype, or `Case.roundoff` if that is more
    squares: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    sent_bytes: int = 0  # bytes that the exchange sent
    planned_bytes: int = 0  # bytes that the plan says it sends
    valid: bool = True  # no NaN, uncovered rows exactly (0, -inf), shapes and dtypes as documented

    def __add__(self, other: Outcome) -> Outcome:
        sums: Any = {
            name: tuple(map(sum, zip(squares, other.squares[name], strict=True)))
            for name, squares in self.squares.items()
        }
        sent, planned = self.sent_bytes + other.sent_bytes, self.planned_bytes + other.planned_bytes
        return Outcome(sums, sent, planned, self.valid and other.valid)

    def error(self, name: str) -> float:
        """Relative error of a tensor over all ranks added up."""
        error, size, _ = self.squares[name]
        return math.sqrt(error / size if size else error)

    def errors(self) -> dict[str, float]:
        """`error` of each tensor: out, lse, and the gradients that were computed."""
        return {name: self.error(name) for name in self.squares}

    def wrong(self, dtype: torch.dtype) -> list[str]:
        """The tensors that are out of bounds.

        A gradient can be a small difference of large numbers (a query that sees one key), so a
        tensor may instead err by 4 times what the reference computed plainly in `dtype` does.
        """
        return [
            name
            for name, (error, _, plain) in self.squares.items()
            if not (self.error(name) <= TOLERANCE[dtype] or error <= 16 * plain)
        ]

    def passes(self, dtype: torch.dtype) -> bool:
        """Whether everything is within bounds, and the bytes sent are those of the plan."""
        return self.valid and not self.wrong(dtype) and self.sent_bytes == self.planned_bytes


def attend(
    case: Case,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout,
    ends: Exchange,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of the call that a case describes, on one rank of a layout."""
    return dilated_attention(
        query,
        key,
        value,
        case.pattern,
        group=ends if ends.world_size > 1 else None,
        layout=layout,
        return_lse=True,
        **{name: getattr(case, name) for name in (*_OPTIONS, "exchange", "backend", "workspace")},
        **options,
    )


def run_case(case: Case, ends: Exchange, wanted: Sequence[Any] | None = None) -> Outcome:
    """Run a case on this rank and compare this rank's shard with the reference.

    `wanted` is `Case.references`, where ranks of one process share them; None: computed here.
    """
    rank, names = ends.rank, [f"d{name}" for name in INPUTS if name in case.wanted]
    *inputs, dout, dlse = _shards(case, rank)
    leaves = [
        x.requires_grad_() for name, x in zip(INPUTS, inputs, strict=True) if f"d{name}" in names
    ]
    query, key, value = inputs
    options: dict[str, Any] = {"lengths": case.lengths}
    sink = case.sink()
    if sink is not None:
        wide = accumulate_dtype(case.dtype)
        options["sink"] = sink.to(wide).requires_grad_()
        leaves, names = [*leaves, options["sink"]], [*names, "dsink"]
    if case.as_mask and case.lengths is not None:
        padding = torch.arange(case.layout.length) >= torch.tensor(case.lengths)[:, None]
        options["key_padding_mask"] = case.layout.shard(padding, rank, 1).to(dout.device)
        options["lengths"] = None
    before = ends.sent_bytes
    out, lse = attend(case, query, key, value, case.layout, ends, **options)
    gradients: Sequence[torch.Tensor] = ()
    if leaves:
        grads = case.in_loss([dout, dlse.to(lse.dtype)])
        gradients = torch.autograd.grad(case.in_loss([out, lse]), leaves, grads)
    sent = ends.sent_bytes - before
    actual = {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}
    if sink is not None:
        actual["dsink"] = sum(all_gather(ends, actual["dsink"]), torch.zeros_like(sink)).to(wide)

    def shard(name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name == "dsink" else case.layout.shard(x, rank, 1 + (name == "lse"))

    exact, plain = (
        {name: shard(name, x[name]) for name in actual} for x in wanted or case.references()
    )
    outcome = compare(case, actual, exact, plain)
    outcome.sent_bytes = sent
    rows = Counter(case.lengths or [None] * case.batch)  # the rows of each length
    outcome.planned_bytes = sum(_planned_bytes(case, rank, *each) for each in rows.items())
    return outcome


def _shards(case: Case, rank: int) -> list[torch.Tensor]:
    """A rank's query, key, value and dout, in memory as `Case.views` says, and its dlse."""
    kinds = case.views or (ViewKind(),) * 4
    *inputs, dlse = *(x.to(case.dtype) for x in case.inputs()), case.dlse()
    for row, length in enumerate(case.lengths or ()):
        dlse[row, :, length:] = torch.nan
        for x, kind in zip(inputs, kinds, strict=True):
            if not {BATCH, SEQUENCE}.intersection(kind.expanded):
                x[row, length:] = torch.nan
    shards = (case.layout.shard(x, rank, 1) for x in inputs)
    views = [kind.view(x) for x, kind in zip(shards, kinds, strict=True)]
    return [*views, case.layout.shard(dlse, rank, 2)]


def compare(
    case: Case,
    actual: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
) -> Outcome:
    """How far tensors of a case are from what they should be; see `Outcome.squares`."""
    outcome, roundoff, uncovered = Outcome(), case.roundoff(), torch.isneginf(actual["lse"])
    for name, got in actual.items():
        want, rough = exact[name], plain[name]
        dtype = accumulate_dtype(case.dtype) if name in ("lse", "dsink") else case.dtype
        outcome.valid &= got.shape == want.shape and got.dtype == dtype
        if name == "lse":
            outcome.valid &= torch.equal(uncovered, torch.isneginf(want))
            got, want, rough = (x.masked_fill(torch.isneginf(x), 0) for x in (got, want, rough))
        elif name == "out":
            outcome.valid &= bool((got[uncovered.transpose(1, 2)] == 0).all())
        outcome.valid &= bool(torch.isfinite(got).all())
        outcome.squares[name] = (
            (got.double() - want).square().sum().item(),
            want.double().square().sum().item(),
            max((rough.double() - want).square().sum().item(), want.numel() * roundoff[name] ** 2),
        )
    return outcome


def _planned_bytes(case: Case, rank: int, length: int | None, batch: int) -> int:
    """Bytes that a rank sends for `batch` rows of a batch, all of one length."""
    plan, split = case.plan(length), case.split
    one = plan.rank(rank) if split is None else split.plan_of(plan, rank)
    size = costs.TensorSize(batch=batch, head_dim=case.head_dim, element_size=case.dtype.itemsize)
    # The gradient of lse is in the first of eight more columns.
    wide = replace(size, head_dim=size.head_dim + 8) if "lse" in case.loss_of else size
    forward = costs.traffic(one, size).forward_sent
    backward = costs.traffic(one, wide).backward_sent
    if case.branch_gradients == "detached" and case.pattern.mixes_branches:
        # Backward computes each branch by itself: forward again, and back.
        branches = [costs.traffic(each.rank(one.index), size) for each in one.plan.single_branches]
        backward = sum(each.forward_sent + each.backward_sent for each in branches)
    if split is not None:
        forward += split.traffic(rank, size)[0]
        backward += split.traffic(rank, wide)[1]
    return forward + backward * bool(case.wanted or case.has_sink)


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    """Run every case on this rank, over the default process group; for `run_ranks`."""
    return [run_case(case, world_exchange()) for case in cases]


def combine(by_rank: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """One outcome per case from those of every rank."""
    return [sum(outcomes[1:], outcomes[0]) for outcomes in map(list, zip(*by_rank, strict=True))]


def sweep(world_size: int, seed: int = 0) -> Iterator[Case]:
    """The cases of `rda verify`: each option with each corner of lengths and layouts.

    `seed` is that of the first case's inputs; each further one adds 1.
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
    lengths, layouts = (53, 2 * world_size - 1, world_size, 2), ("contiguous", "zigzag", "uneven")
    corners = [(p, length, name) for p in patterns for length in lengths for name in layouts]
    for number, (pattern, length, name) in enumerate(corners):
        num_heads, num_kv_heads, batch = heads[number // 2 % len(heads)]
        options: dict[str, Any] = {  # every two of them meet, since no two change in step
            "exchange": ("ring", "gather", "heads")[(number // 3 + number // 12) % 3],
            "backend": ("auto", "eager")[number // 5 % 2],
            "dtype": (torch.float64, torch.float32)[number // 7 % 2],
            "is_causal": bool(number % 2),
            "softcap": (None, 1.5)[number // 2 % 4 == 1],
            "has_sink": number % 5 > 2,
        }
        if number % 3 == 1:
            cuts = {length * i * i // 9 for i in (1, 2)} | {1, length - 1}
            options["documents"] = tuple(sorted({0, length, *(x for x in cuts if 0 < x < length)}))
        if number % 4 > 1:
            rows = range(number * 7, number * 7 + 5 * batch, 5)
            options["lengths"] = tuple(row % (length + 1) for row in rows)
        yield Case(
            pattern=pattern,
            layout=make_layout(name, length, world_size),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            batch=batch,
            seed=seed + number,
            **options,
        )


def make_layout(name: str, length: int, world_size: int) -> SequenceLayout:
    """A layout by name: ``contiguous``, ``zigzag``, or ``uneven``.

    ``uneven`` deals ever longer ranges to the ranks in turn, the last rank coming away empty, and
    hands the ranges over in falling order, so that local order is not global order.
    """
    if name != "uneven":
        return SequenceLayout.named(name, length, world_size, is_causal=False)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    start, size = 0, 1
    while start < length:
        stop = min(start + size, length)
        ranges[size % max(world_size - 1, 1)].insert(0, (start, stop))
        start, size = stop, size + 1
    return SequenceLayout(ranges)
