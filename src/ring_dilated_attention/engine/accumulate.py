"""Add the results of tiles into strided views of the whole, in float32 arithmetic.

On CUDA each is one pass of a Triton kernel over the rows touched; without Triton, and on other
devices, plain torch operations do the same. Adding is bound by memory and attention by arithmetic,
so an `Accumulator` runs the one behind the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch

from .. import kernels
from ..kernels import runs_triton
from ..plan import RankPlan
from ..tiles import accumulate_dtype


def merge_(
    out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor
) -> None:
    """Merge one tile's result into `out` and `lse`, in place.

    Two softmaxes over disjoint keys combine to one over their union:
    ``lse' = logaddexp(lse, tile_lse)`` and ``out' = out + w * (tile_out - out)`` with
    ``w = exp(tile_lse - lse')``, computed as ``sigmoid(tile_lse - lse)``: the two weights then add
    up to 1 however large the lse and its rounding are.

    Args:
        out: (..., rows, head_dim), any floating dtype; may be a strided view.
        lse: (..., rows), natural log, float32 or float64; -inf where nothing has been seen yet.
        tile_out: (..., rows, head_dim), any floating dtype.
        tile_lse: (..., rows), natural log; -inf where the tile shows nothing.
    """
    weight = torch.sigmoid(tile_lse - lse)
    # Where neither side has seen a key, (-inf) - (-inf) is NaN; what is there stays.
    weight.masked_fill_(torch.isneginf(tile_lse), 0)
    if out.dtype == weight.dtype:
        out.lerp_(tile_out.to(out.dtype), weight.unsqueeze(-1))
    else:
        out.copy_(torch.lerp(out.to(weight.dtype), tile_out.to(weight.dtype), weight.unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, tile_lse))


_NOTHING = nullcontext()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts now; None where it is off, or knows no such device."""
    try:  # before torch 2.13, torch.compile cannot trace is_autocast_available
        enabled = torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return None
    return torch.get_autocast_dtype(device_type) if enabled else None


def kernels_on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels compute in the dtypes that they are given, on the device of what they are given.

    Those that Triton launches run on the current device, which may be another one.
    """
    casts = autocast_dtype(device.type) is not None
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if not casts and not elsewhere:
        return _NOTHING
    both = ExitStack()
    if casts:
        both.enter_context(torch.autocast(device.type, enabled=False))
    if elsewhere:
        both.enter_context(torch.cuda.device(device))
    return both


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    tile_out: torch.Tensor,
    tile_lse: torch.Tensor,
    *,
    store: bool,
) -> None:
    """`merge_` of (outer, inner, rows, head_dim) views; `store`: write over what is there."""
    if runs_triton(out):
        kernels.rows.merge_rows(out, lse, tile_out, tile_lse, store=store)
    elif store:
        out.copy_(tile_out)
        lse.copy_(tile_lse)
    else:
        merge_(out, lse, tile_out, tile_lse)


def add(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, store: bool) -> None:
    """Add each part (outer, inner, rows, head_dim) to its total, in place; or `store` it there.

    The totals are disjoint views, at least one, of tensors of one device, all float64 or none.
    """
    if runs_triton(totals[0]):
        kernels.rows.add_rows(totals, parts, store=store)
        return
    for total, part in zip(totals, parts, strict=True):
        if store:
            total.copy_(part)
        else:
            total.add_(part)  # torch adds half precision in float32 too


def sum_dtype(query: torch.Tensor, additions: float) -> torch.dtype:
    """The dtype in which results of tiles are summed up.

    On CUDA that of the inputs, which needs no second tensor: each addition is made in float32 and
    rounds once. With more than a few additions to most rows rounding would show: then float32, as
    on other devices. float64 for float64 inputs.
    """
    if query.is_cuda and additions <= RankPlan.FEW_ADDITIONS:
        return query.dtype
    return accumulate_dtype(query.dtype)


def row_sums(dout: torch.Tensor, out: torch.Tensor, into: torch.Tensor) -> None:
    """Write ``delta = rowsum(dout * out)`` of (batch, sequence, heads, head_dim).

    `into` is (batch, heads, sequence), float32 or float64, contiguous.
    """
    if runs_triton(out):
        kernels.rows.row_sums(dout.transpose(1, 2), out.transpose(1, 2), into)
    else:
        into.copy_((dout.to(into.dtype) * out).sum(-1).transpose(1, 2))


class Streams:
    """The current stream of a CUDA device, which computes, and a side stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _main(self) -> torch.cuda.Stream:  # not asked for in calls that have nothing to add behind
        return torch.cuda.current_stream(self._device)

    def run(self, add_all: Callable[[], None], into: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Queue `add_all` on the side stream, after all that the computing stream has queued.

        It changes `into`. It is called at once, its work may be done later: `wait` for the result.
        """
        main, side = self._main, side_stream(self._main)
        side.wait_stream(main)
        try:  # `with torch.cuda.stream(side)` takes three times as long
            torch.cuda.set_stream(side)
            add_all()
        finally:
            torch.cuda.set_stream(main)
        done: torch.cuda.Event = side.record_event()
        return done

    def wait(self, done: torch.cuda.Event) -> None:
        """Make what the computing stream queues from now on wait for what `run` has queued."""
        self._main.wait_event(done)

    def outlast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have nobody get the memory of tensors before all that `run` has queued is done."""
        for tensor in tensors:
            tensor.record_stream(side_stream(self._main))


@lru_cache(maxsize=64)
def side_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of a stream that computes, one for each: groups do not wait for each other.

    It has priority: its short kernels are to slip in between those of a long one.
    """
    return torch.cuda.Stream(main.device, priority=-1)  # type: ignore[no-untyped-call]


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device for the thread that asks; None where a device has none."""
    return Streams(device) if device.type == "cuda" else None


class _Behind(NamedTuple):
    done: Any  # for `Streams.wait`
    tensors: tuple[torch.Tensor, ...]  # that must live until then
    into: Sequence[torch.Tensor]  # what is added to
    targets: frozenset[int]  # its storages
    kind: Literal["result", "launch", "started"]  # see `Accumulator.run` and `start`


class Accumulator:
    """Adds results into the whole; where there are streams, on one of its own behind the compute.

    One rule decides what goes to the side stream: results of kernel calls that are long enough for
    the host to have the time for it, what must be waited for, and, so that additions keep their
    order, whatever is added behind these. Calls use one as a context: after an error, nobody gets
    the memory of what is queued before it is done.

    Args:
        device: where the tensors are; the current stream there is the compute's.

    Attributes:
        most_held: the largest number of calls whose results are held at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self.most_held = 1 if self._streams is None else 2
        self._behind: deque[_Behind] = deque()
        self._started: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Accumulator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._streams is not None:
            # To wait for it could be to wait for ranks that will never send.
            for behind in self._behind:
                self._streams.outlast((*behind.tensors, *behind.into))

    def run(
        self,
        add_all: Callable[[], None],
        *tensors: torch.Tensor,
        into: Sequence[torch.Tensor],
        is_long: bool = False,
        holds: bool = True,
    ) -> None:
        """Add results of tiles, in the order of the calls.

        Args:
            add_all: queues the additions: calls `merge` and `add`, or launches a kernel that
                computes small tiles and adds them.
            tensors: inputs of `add_all`, kept alive until it is done on the device.
            into: totals that are added to, and further tensors that `join` is to wait for.
            is_long: whether the kernel call that made them takes so long that the host has time to
                queue the additions behind the next one.
            holds: whether the tensors are results of tiles, of which `most_held` calls' are alive.
        """
        # Short ones too where others are queued, so that additions keep their order.
        if self._streams is None or not (is_long or self._behind):
            add_all()
            return
        self._run_behind(add_all, tensors, into, "result" if holds else "launch")
        if holds and sum(behind.kind == "result" for behind in self._behind) == self.most_held:
            while self._wait().kind != "result":  # frees the oldest result, and all before it
                pass

    def start(
        self, add_all: Callable[[], None], *tensors: torch.Tensor, into: Sequence[torch.Tensor]
    ) -> None:
        """Add what other ranks send, behind the compute that follows.

        Args:
            add_all: waits for the transfers and adds what has come.
            tensors: what is sent and received, kept alive until `finish`.
            into: totals that are added to.
        """
        if self._streams is None:
            self._started.append(add_all)
        else:
            self._run_behind(add_all, tensors, into, "started")

    def finish(self) -> None:
        """Make the current stream wait for what was started; without streams, do it now."""
        while self._started:
            self._started.popleft()()
        started = sum(behind.kind == "started" for behind in self._behind)
        while started:
            started -= self._wait().kind == "started"

    def join(self, *totals: torch.Tensor) -> None:
        """Make the current stream wait for additions to `totals`; none: for all, started or run."""
        if not self._behind:
            return
        wanted = set(map(_storage, totals))
        while any(not wanted or wanted & behind.targets for behind in self._behind):
            self._wait()

    def _run_behind(
        self,
        add_all: Callable[[], None],
        tensors: tuple[torch.Tensor, ...],
        into: Sequence[torch.Tensor],
        kind: Literal["result", "launch", "started"],
    ) -> None:
        """Queue `add_all` on the side stream, and remember when it is done."""
        assert self._streams is not None
        try:
            done = self._streams.run(add_all, into)
        except BaseException:  # kernels that it has queued before may still use the tensors
            self._streams.outlast((*tensors, *into))
            raise
        self._behind.append(_Behind(done, tensors, into, frozenset(map(_storage, into)), kind))

    def _wait(self) -> _Behind:
        """Wait for the oldest additions."""
        # What is freed here is reused by the current stream alone, after this wait.
        behind = self._behind.popleft()
        assert self._streams is not None
        self._streams.wait(behind.done)
        return behind


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
