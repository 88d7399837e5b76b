"""Compare the sharded function with brute force: whole calls (`Case`), or rows of long ones.

`rda verify` runs the cases of `sweep`. `spot_check` recomputes single rows from the defining sums,
for sequences too long for any reference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..exchange import Exchange, all_gather
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..options import BranchGradients, Schedule
from ..pattern import DilatedPattern, check_int
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

    def fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers of the same shape that views of this kind can hold, taken from `tensor`."""
        for dim in self.expanded:
            if tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, 1).expand_as(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this kind, in a storage of NaN, that holds what `tensor`, of `fit`, holds."""
        if not tensor.numel():
            return tensor
        values = tensor
        for dim in self.expanded:
            values = values.narrow(dim, 0, 1)
        strides, room = [0] * 4, 1
        for dim in reversed(self.order):
            strides[dim] = room * self.steps[dim]
            room *= values.shape[dim] * self.steps[dim]
        filler = float("nan") if tensor.is_floating_point() else -1
        storage = tensor.new_full((self.offset + room + 1,), filler)
        storage.as_strided(values.shape, strides, self.offset).copy_(values)
        for dim in self.expanded:
            strides[dim] = 0
        view = storage.as_strided(tensor.shape, strides, self.offset)
        assert torch.equal(view.nan_to_num(), tensor.nan_to_num()), (self, "cannot hold the tensor")
        return view


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
    `wanted` of which inputs the gradients are computed, `loss_of` which of ``"out"`` and ``"lse"``
    the loss depends on, and `as_mask` whether `lengths` are passed as a `key_padding_mask`.
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

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Whole query, key, value and dout, float64 numbers that `dtype` represents exactly."""
        generator = torch.Generator().manual_seed(self.seed)
        kinds = self.views or (ViewKind(),) * 4
        tensors = []
        for kind, heads in zip(
            kinds,
            (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads),
            strict=True,
        ):
            shape = self.batch, self.layout.length, heads, self.head_dim
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensors.append(kind.fit(drawn.to(self.dtype).to(self.device, torch.float64)))
        return tuple(tensors)

    def dlse(self) -> torch.Tensor:
        """Whole gradient of lse (batch, heads, n): numbers that the dtype of lse represents."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = self.batch, self.num_heads, self.layout.length
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.dtype).to(self.device, torch.float64)

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
        # One term: p (dout v^T - delta + dlse) is of this size, and as many queries share a key.
        dout *= "out" in self.loss_of
        ds = scores * scale * (width * dout * value + ("lse" in self.loss_of))
        queries = (self.layout.length * self.num_heads / self.num_kv_heads) ** 0.5
        sizes = value, scores, ds * key, ds * query * queries, scores * dout * queries
        own, wide = torch.finfo(self.dtype), torch.finfo(accumulate_dtype(self.dtype))
        units = dict.fromkeys(TENSORS, own.eps / 2) | {"lse": wide.eps / 2}
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

    @property
    def split(self) -> HeadSplit | None:
        """How rows are exchanged for heads; None: they are not."""
        heads = self.num_heads, self.num_kv_heads
        return head_split(self.exchange, self.pattern, self.layout, *heads)

    def expected(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Whole out, lse and gradients by brute force in `dtype`."""
        *leaves, dout = (x.to(dtype) for x in self.inputs())
        query, key, value = (x.requires_grad_() for x in leaves)
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
        losses = [(out, dout), (lse, self.dlse().to(dtype))]
        outputs, grads = zip(*self.in_loss(losses), strict=True)
        gradients = torch.autograd.grad(outputs, (query, key, value), grads, materialize_grads=True)
        return dict(zip(TENSORS, (out.detach(), lse.detach(), *gradients), strict=True))

    def in_loss(self, of_out_and_lse: Sequence[Any]) -> list[Any]:
        """Of a thing of out and one of lse, those of the results that the loss depends on."""
        return [x for name, x in zip(TENSORS, of_out_and_lse, strict=False) if name in self.loss_of]

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
            self.error(name) <= TOLERANCE[dtype] or error <= 16 * plain
            for name, (error, _, plain) in self.squares.items()
        )
        return within and self.valid and self.sent_bytes == self.planned_bytes


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
        is_causal=case.is_causal,
        scale=case.scale,
        documents=case.documents,
        group=ends if ends.world_size > 1 else None,
        layout=layout,
        exchange=case.exchange,
        backend=case.backend,
        workspace=case.workspace,
        branch_gradients=case.branch_gradients,
        return_lse=True,
        **options,
    )


def run_case(case: Case, ends: Exchange, wanted: References | None = None) -> Outcome:
    """Run a case on this rank and compare this rank's shard with the reference.

    Args:
        case: the case, the same on every rank.
        ends: this rank's end of the group.
        wanted: `Case.references`, where ranks of one process share them; None: computed here.
    """
    inputs = dict(zip((*INPUTS, "dout"), _shards(case, ends.rank), strict=True))
    leaves = [inputs[name].requires_grad_() for name in INPUTS if name in case.wanted]
    query, key, value, dout = inputs.values()
    options: dict[str, Any] = {"lengths": case.lengths}
    if case.as_mask and case.lengths is not None:
        padding = torch.arange(case.layout.length) >= torch.tensor(case.lengths)[:, None]
        options = {"key_padding_mask": case.layout.shard(padding, ends.rank, 1).to(dout.device)}
    before = ends.sent_bytes
    out, lse = attend(case, query, key, value, case.layout, ends, **options)
    gradients: Sequence[torch.Tensor] = ()
    if leaves:
        grads = case.in_loss([dout, _shard_of_dlse(case, ends.rank).to(lse.dtype)])
        gradients = torch.autograd.grad(case.in_loss([out, lse]), leaves, grads)
    names = (f"d{name}" for name in INPUTS if name in case.wanted)
    actual = {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}
    rows = Counter(case.lengths or [None] * case.batch)  # the rows of each length
    outcome = Outcome(
        sent_bytes=ends.sent_bytes - before,
        planned_bytes=sum(_planned_bytes(case, ends.rank, *each) for each in rows.items()),
    )
    _compare(outcome, case, ends.rank, actual, wanted or case.references())
    return outcome


def _shards(case: Case, rank: int) -> list[torch.Tensor]:
    """A rank's query, key, value and dout, in memory as `Case.views` says."""
    kinds = case.views or (ViewKind(),) * 4
    inputs = [x.to(case.dtype) for x in case.inputs()]
    for row, length in enumerate(case.lengths or ()):
        for x, kind in zip(inputs, kinds, strict=True):
            if not {BATCH, SEQUENCE}.intersection(kind.expanded):
                x[row, length:] = torch.nan
    shards = (case.layout.shard(x, rank, 1) for x in inputs)
    return [kind.view(x) for x, kind in zip(shards, kinds, strict=True)]


def _shard_of_dlse(case: Case, rank: int) -> torch.Tensor:
    """A rank's gradient of lse, NaN in padded positions."""
    dlse = case.dlse()
    for row, length in enumerate(case.lengths or ()):
        dlse[row, :, length:] = torch.nan
    return case.layout.shard(dlse, rank, 2)


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
    return forward + backward * bool(case.wanted)


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    """Run every case on this rank, over the default process group; for `run_ranks`."""
    return [run_case(case, world_exchange()) for case in cases]


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
    lengths, layouts = (53, 2 * world_size - 1, world_size, 2), ("contiguous", "zigzag", "uneven")
    corners = [(p, length, name) for p in patterns for length in lengths for name in layouts]
    for number, (pattern, length, name) in enumerate(corners):
        num_heads, num_kv_heads, batch = heads[number // 2 % len(heads)]
        options: dict[str, Any] = {  # every two of them meet, since no two change in step
            "exchange": ("ring", "gather")[(number // 3 + number // 12) % 2],
            "backend": ("auto", "eager")[number // 5 % 2],
            "dtype": (torch.float64, torch.float32)[number // 7 % 2],
            "is_causal": bool(number % 2),
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


# --- single rows of calls that are too long for a reference


class Shard(NamedTuple):
    """One rank's tensors of a call: batch 1, as many KV heads as query heads.

    query, key, value, out, dout, dquery, dkey, dvalue (1, local_sequence, heads, head_dim); lse
    (1, heads, local_sequence). The gradients are None where only out is to be checked.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor | None = None
    dquery: torch.Tensor | None = None
    dkey: torch.Tensor | None = None
    dvalue: torch.Tensor | None = None


def spot_check(
    shard: Shard,
    pattern: DilatedPattern,
    layout: SequenceLayout,
    ends: Exchange,
    positions: Sequence[int],
    *,
    head: int = 0,
    is_causal: bool = False,
) -> dict[str, float]:
    """Relative errors of a head's rows at `positions`, over all of them together.

    A row is recomputed in float64 from the positions that its branches show it: a few thousand
    however long the sequence is, which the ranks share. dK and dV are recomputed from the queries
    that see the position, with their lse and out as the call returned them.

    Args:
        shard: this rank's tensors, of a call without documents and lengths.
        pattern: of the call; without zero keys.
        layout: of the call.
        ends: this rank's end of the group; every rank calls.
        positions: of the whole sequence, the same on every rank.
        head: which head.
        is_causal: of the call.

    Returns:
        ``out`` and ``lse``, and where `shard` has gradients ``dquery``, ``dkey`` and ``dvalue``:
        each ``|got - want| / |want|``, or ``|got|`` where all that is wanted is 0, the same on
        every rank.

    Raises:
        ValueError: an argument is not as described above.
    """
    _check_spots(shard, pattern, layout, ends, positions, head)
    squares: dict[str, list[float]] = {}
    for position in positions:
        seen = _seen(pattern, layout.length, position, head, shard.query.shape[2])
        before = [p for p in seen if p <= position] if is_causal else seen
        behind = [p for p in seen if p >= position] if is_causal else seen
        own, keys, queries = (
            _rows_at(shard, layout, ends, head, places) for places in ([position], before, behind)
        )
        for name, want in _expected_rows(own, keys, queries).items():
            got = own[name][0]  # both lse are -inf at a position that no branch shows anything
            errors = squares.setdefault(name, [0.0, 0.0])
            errors[0] += float(torch.where(got == want, 0.0, got - want).square().sum())
            errors[1] += float(want.nan_to_num(neginf=0.0).square().sum())
    # Where nothing is expected, what there is is the error.
    return {name: (error / (size or 1.0)) ** 0.5 for name, (error, size) in squares.items()}


def _check_spots(
    shard: Shard,
    pattern: DilatedPattern,
    layout: SequenceLayout,
    ends: Exchange,
    positions: Sequence[int],
    head: int,
) -> None:
    """Raise unless `spot_check` can tell what the rows should be."""
    if pattern.zero_keys:
        raise ValueError("pattern must have no zero keys, which a spot check leaves out")
    shape = tuple(shard.query.shape)
    if len(shape) != 4 or shape[0] != 1:
        raise ValueError(f"a spot check takes a batch of 1; got query {shape}")
    layout.check_shard(ends.rank, ends.world_size, shape[1], f"got a query of shape {shape}")
    for name, tensor in shard._asdict().items():
        expected = (1, shape[2], shape[1]) if name == "lse" else shape
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}; got {tuple(tensor.shape)}")
    if len({x is None for x in shard[5:]}) > 1:
        raise ValueError("dout, dquery, dkey and dvalue must all be given, or none of them")
    limits = [("head", head, shape[2]), *(("positions", p, layout.length) for p in positions)]
    for name, number, stop in limits:
        if not 0 <= check_int(name, number) < stop:
            raise ValueError(f"{name} must lie in [0, {stop}); got {number}")


def _rows_at(
    shard: Shard, layout: SequenceLayout, ends: Exchange, head: int, positions: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Rows of a head at `positions` from all ranks, float64: (rows, head_dim), lse (rows,).

    Each rank puts the rows of its shard among zeros, and all ranks' are added up.
    """
    held = [
        (place, piece.local + position - piece.start)
        for place, position in enumerate(positions)
        for piece in layout.pieces
        if piece.rank == ends.rank and piece.start <= position < piece.stop
    ]
    places, local = ([pair[i] for pair in held] for i in (0, 1))
    found = {}
    for name, tensor in shard._asdict().items():
        if tensor is None:
            continue
        of_head = (tensor if name == "lse" else tensor.transpose(1, 2))[0, head]
        rows = of_head.new_zeros(len(positions), *of_head.shape[1:], dtype=torch.float64)
        rows[places] = of_head[local].double()
        with ends.calls.enter("spot_check", "rows"):
            found[name] = torch.stack(all_gather(ends, rows)).sum(0)
    return found


def _seen(
    pattern: DilatedPattern, length: int, position: int, head: int, num_heads: int
) -> list[int]:
    """The positions that a head's branches show at `position`, each as often as they do."""
    seen: list[int] = []
    for branch, (w, rate) in enumerate(pattern.branches):
        w = length if w is None else min(w, length)
        start = position - position % w
        offset = dict(pattern.heads(branch, num_heads)).get(head, w)
        rows = range(start + offset, min(start + w, length), rate)
        seen.extend(rows if position in rows else ())
    return seen


def _expected_rows(
    own: dict[str, torch.Tensor], keys: dict[str, torch.Tensor], queries: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a position's rows should be, from the keys it sees and the queries that see it."""
    scale = own["query"].shape[-1] ** -0.5
    q, k, v = own["query"][0], own["key"][0], own["value"][0]
    p = (scale * keys["key"] @ q).softmax(0)
    out = p @ keys["value"]
    expected = {"out": out, "lse": torch.logsumexp(scale * keys["key"] @ q, 0)}
    if "dout" in own:
        dout = own["dout"][0]
        ds = p * (keys["value"] @ dout - dout @ out)
        expected["dquery"] = scale * ds @ keys["key"]
        p = torch.exp(scale * queries["query"] @ k - queries["lse"])
        delta = (queries["dout"] * queries["out"]).sum(-1)
        ds = p * (queries["dout"] @ v - delta)
        expected["dkey"] = scale * ds @ queries["query"]
        expected["dvalue"] = p @ queries["dout"]
    return expected
