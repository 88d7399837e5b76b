"""Which global positions each rank holds, and in which local order.

Plain integers; torch is imported only inside the helpers that handle tensors.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from .balance import balanced_ranges
from .pattern import (
    INT_LIMIT,
    DilatedPattern,
    check_choice,
    check_int,
    check_positive_int,
    in_brief,
    shape_in_brief,
)

if TYPE_CHECKING:
    import torch

LAYOUTS = ("auto", "contiguous", "zigzag")  # for commands and configs


def resolve_layout(name: str, world_size: int, *, is_causal: bool) -> str:
    """Choose for ``"auto"``: zigzag for causal work on several ranks, otherwise contiguous."""
    check_choice("layout", name, LAYOUTS)
    if name != "auto":
        return name
    return "zigzag" if is_causal and world_size > 1 else "contiguous"


class Piece(NamedTuple):
    """A run of consecutive positions that a rank holds in consecutive local rows."""

    start: int
    stop: int
    rank: int
    local: int  # the local row of position `start`


class SequenceLayout:
    """For every rank, the ranges of global positions it holds, in local order.

    Args:
        ranges: ``ranges[rank]`` is a list of ``(start, stop)`` pairs. Together they hold every
            position of ``range(length)`` exactly once; a rank may hold nothing, and its ranges
            may come in any order. Empty ranges are dropped and adjacent ones joined.

    Raises:
        TypeError: a bound is not an int.
        ValueError: a range is reversed or negative, or positions are missing or held twice.

    A few long ranges per rank are fast. Each pair of ranges that share a segment is a tile of its
    own, and m ranges take m launches or more for each branch: hundreds of ranges of one document on
    a rank take seconds to plan, and a striped layout (position i on rank i mod p) is correct but
    useless.

    Instances are immutable, hashable and compare by value. `flat` is a layout as ints (for every
    rank the number of its ranges, then their bounds), and `from_flat` reads it. `pieces` are all
    ranges of all ranks, sorted by position.
    """

    def __init__(self, ranges: Iterable[Iterable[Sequence[int]]]) -> None:
        if not isinstance(ranges, Iterable):
            raise TypeError(f"ranges must be lists of pairs, one a rank; got {in_brief(ranges)}")
        self.ranges = tuple(_joined(rank, rank_ranges) for rank, rank_ranges in enumerate(ranges))
        if not self.ranges:
            raise ValueError("a layout needs at least one rank; got an empty list of ranges")
        self._hash = hash(self.ranges)
        self.flat = tuple(
            number for own in self.ranges for number in (len(own), *itertools.chain(*own))
        )
        pieces = []
        for rank, own in enumerate(self.ranges):
            local = itertools.accumulate((stop - start for start, stop in own), initial=0)
            pieces += [Piece(*bounds, rank, row) for bounds, row in zip(own, local, strict=False)]
        self.pieces = tuple(sorted(pieces))
        expected = 0
        for piece in self.pieces:
            if piece.start != expected:
                what = "missing" if piece.start > expected else "held twice"
                low, high = sorted((piece.start, expected))
                raise ValueError(
                    "the ranges of a layout must hold every position from 0 on exactly once; "
                    f"positions {low} to {high - 1} are {what}"
                )
            expected = piece.stop
        if expected == 0:
            raise ValueError("a layout needs at least one position; every range is empty")
        self.length = expected

    @classmethod
    def contiguous(cls, length: int, world_size: int, *, multiple: int = 1) -> SequenceLayout:
        """Shards in the order of the ranks, as equal as possible.

        Args:
            length: number of positions of the whole sequence.
            world_size: number of ranks. Some hold nothing where there are few positions.
            multiple: every shard begins at a multiple of this number, and the first shards hold as
                many positions more than the others. With ``math.lcm(*pattern.dilation_rates)``
                heads of all offsets have equally many rows of a shard: fewer kernel calls.
                Default 1.

        Raises:
            TypeError, ValueError: a number is not an int, or below 1.
        """
        chunks = _chunks(length, check_positive_int("world_size", world_size), multiple)
        return cls([chunk] for chunk in chunks)

    @classmethod
    def zigzag(cls, length: int, world_size: int, *, multiple: int = 1) -> SequenceLayout:
        """Rank i of p holds chunks i and 2p-1-i of 2p nearly equal ones: balances causal work.

        Args:
            length: number of positions of the whole sequence.
            world_size: number of ranks p.
            multiple: every chunk begins at a multiple of this number. Default 1.

        Raises:
            TypeError, ValueError: a number is not an int, or below 1.
        """
        world_size = check_positive_int("world_size", world_size)
        chunks = _chunks(length, 2 * world_size, multiple)
        return cls([chunks[i], chunks[2 * world_size - 1 - i]] for i in range(world_size))

    @classmethod
    def named(cls, name: str, length: int, world_size: int, *, is_causal: bool) -> SequenceLayout:
        """A layout by name: ``"contiguous"``, ``"zigzag"``, or ``"auto"``: see `resolve_layout`.

        Raises:
            TypeError, ValueError: a value is not allowed.
        """
        is_zigzag = resolve_layout(name, world_size, is_causal=is_causal) == "zigzag"
        return (cls.zigzag if is_zigzag else cls.contiguous)(length, world_size)

    @classmethod
    def balanced(
        cls,
        documents: Sequence[int],
        world_size: int,
        pattern: DilatedPattern,
        *,
        is_causal: bool,
    ) -> SequenceLayout:
        """Documents packed in a sequence, dealt to ranks with equal work and about equal shards.

        Long documents are cut, at multiples of the least common multiple of the dilation rates.
        Where twice that is small beside a shard, no rank has more than 1.05 times the mean work, or
        1.10 times the mean number of positions. Shards are in general of different lengths.

        Args:
            documents: cumulative lengths ``[0, ..., n]``, as in `dilated_attention`.
            world_size: number of ranks.
            pattern: which keys a position sees, which decides how much work it is.
            is_causal: whether it sees only those before it.

        Raises:
            TypeError: a number is not an int.
            ValueError: `documents` do not rise from 0 to at least 1, or `world_size` is below 1.

        Examples:
            >>> SequenceLayout.balanced([0, 8, 12, 16], 2, DilatedPattern.dense(), is_causal=False)
            SequenceLayout([[(0, 4), (12, 16)], [(4, 12)]])
        """
        from .documents import as_ints, document_borders  # which import torch

        given = as_ints("documents", documents)
        borders = document_borders(given, None, given[-1] if given else 0)
        world_size = check_positive_int("world_size", world_size)
        return cls(balanced_ranges(borders, world_size, pattern, is_causal=is_causal))

    @classmethod
    def from_positions(cls, positions: torch.Tensor, world_size: int) -> SequenceLayout:
        """The layout of a sequence that was put in another order, and then cut into equal shards.

        Args:
            positions: the position of each row in the new order: integers, shape (n,), each of 0 to
                n - 1 once.
            world_size: number of ranks; divides n.

        Raises:
            TypeError: `positions` is no tensor of integers, or `world_size` is not an int.
            ValueError: it is not 1-D or no permutation, or `world_size` does not divide n.
        """
        import torch

        world_size = check_positive_int("world_size", world_size)
        if not isinstance(positions, torch.Tensor) or positions.is_floating_point():
            got = getattr(positions, "dtype", in_brief(positions))
            raise TypeError(f"positions must be a tensor of ints, got {got}")
        if positions.ndim != 1 or not len(positions) or len(positions) % world_size:
            raise ValueError(
                f"positions must be 1-D, and their number a multiple of {world_size} ranks; got "
                f"shape {shape_in_brief(positions)}"
            )
        ranges = []
        for own in positions.detach().to("cpu", torch.int64).chunk(world_size):
            breaks = (own.diff() != 1).nonzero().flatten() + 1
            starts = own[torch.cat([breaks.new_zeros(1), breaks])]
            stops = own[torch.cat([breaks, breaks.new_full((1,), len(own))]) - 1] + 1
            ranges.append(list(zip(starts.tolist(), stops.tolist(), strict=True)))
        return cls(ranges)

    @classmethod
    def from_load_balancer(cls, balancer: Any, world_size: int | None = None) -> SequenceLayout:
        """The layout of shards that torch's context parallelism makes with a load balancer.

        Args:
            balancer: of `torch.distributed.tensor.experimental`: head-tail, or one by processing
                time (PTRR), whose many short ranges are slow here.
            world_size: number of ranks; None: the balancer's.

        Raises:
            TypeError: it is no load balancer.
            ValueError: rows of a batch are balanced apart (a layout is for all of them), or see
                `from_positions`.
        """
        if not hasattr(balancer, "_generate_indices"):  # all that a balancer has
            raise TypeError(
                "balancer must be a load balancer of torch's context parallelism, got "
                f"{in_brief(balancer)}"
            )
        indices = balancer._generate_indices(restore=False)
        if indices is None or indices.ndim != 2 or (indices != indices[:1]).any():
            raise ValueError(
                "a layout is the same for all rows of a batch; this load balancer gives them "
                "different positions"
            )
        return cls.from_positions(indices[0], world_size or balancer.world_size)

    @classmethod
    def from_flat(cls, flat: Iterable[int]) -> SequenceLayout:
        """The layout that `flat` writes down."""
        numbers = iter(flat)
        return cls([(next(numbers), next(numbers)) for _ in range(count)] for count in numbers)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    def local_length(self, rank: int) -> int:
        """Number of positions that `rank` holds."""
        return sum(stop - start for start, stop in self.ranges[self._check_rank(rank)])

    def _check_rank(self, rank: int) -> int:
        if not 0 <= check_int("rank", rank) < len(self.ranges):
            raise ValueError(
                f"rank must lie in [0, {len(self.ranges)}), the layout's; got {in_brief(rank)}"
            )
        return rank

    def check_shard(self, rank: int, world_size: int, length: int, held: str) -> None:
        """Raise a `ValueError` unless a rank is to hold `length` positions: `held`, in words."""
        self.check_ranks(world_size)
        own = self.local_length(rank)
        if own != length:
            raise ValueError(
                f"the layout gives rank {rank} a shard of {own} positions, {held}. "
                "Pass this rank's part of the sequence, layout.shard(tensor, rank, dim), with a "
                f"layout of its length; this one is for {self.length} positions"
            )

    def check_ranks(self, world_size: int) -> None:
        """Raise a `ValueError` unless the layout is for a group of `world_size` ranks."""
        if self.world_size != world_size:
            raise ValueError(
                f"the layout is for {self.world_size} ranks; the group has {world_size}: make it "
                "for dist.get_world_size(group) ranks, and pass the group of the ranks that share "
                "the sequence"
            )

    @cached_property
    def max_local_length(self) -> int:
        """The largest number of positions that any rank holds."""
        return max(map(self.local_length, range(self.world_size)))

    @cached_property
    def digest(self) -> str:
        """A short text that equal layouts share across processes (unlike `hash`)."""
        return hashlib.blake2b(repr(self.ranges).encode(), digest_size=16).hexdigest()

    def positions(self, rank: int, *, device: torch.device | str | None = None) -> torch.Tensor:
        """The global position of each local row of `rank`: int64, shape (local_length,)."""
        import torch

        ranges = self.ranges[self._check_rank(rank)]
        parts = [torch.arange(*bounds, device=device) for bounds in ranges]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def shard(self, tensor: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """The rows of a whole sequence that `rank` holds, in local order.

        Args:
            tensor: any tensor with `length` rows along `dim`.
            rank: whose rows.
            dim: the sequence dimension.

        Returns:
            A tensor with ``local_length(rank)`` rows along `dim`; a view where the rank holds one
            range, a copy otherwise.
        """
        import torch

        ranges = self.ranges[self._check_rank(rank)]
        _check_size("the tensor", tensor, dim, self.length)
        parts = [tensor.narrow(dim, a, b - a) for a, b in ranges]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The inverse of `shard`: one shard per rank in, the whole sequence out (a copy)."""
        import torch

        if len(shards) != self.world_size:
            raise ValueError(f"need one shard per rank, {self.world_size}; got {len(shards)}")
        for rank, shard in enumerate(shards):
            _check_size(f"the shard of rank {rank}", shard, dim, self.local_length(rank))
        return torch.cat(
            [shards[p.rank].narrow(dim, p.local, p.stop - p.start) for p in self.pieces], dim
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SequenceLayout) and self.ranges == other.ranges)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if self.world_size > 8:
            return f"<SequenceLayout of {self.length} positions on {self.world_size} ranks>"
        return f"SequenceLayout({[list(ranges) for ranges in self.ranges]})"


def _chunks(length: int, count: int, unit: int) -> list[tuple[int, int]]:
    unit = check_positive_int("multiple", unit)
    small, larger = divmod(-(-check_positive_int("length", length) // unit), count)
    bounds = (min((i * small + min(i, larger)) * unit, length) for i in range(count + 1))
    return list(itertools.pairwise(bounds))


def _check_size(name: str, tensor: torch.Tensor, dim: int, size: int) -> None:
    """Raise a `TypeError` or `ValueError` unless dimension `dim` of a tensor has `size` rows."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
    is_dim = isinstance(dim, int) and -tensor.ndim <= dim < tensor.ndim
    if not is_dim or tensor.shape[dim] != size:
        raise ValueError(
            f"dimension {in_brief(dim)} of {name} must have {size} positions; got shape "
            f"{shape_in_brief(tensor)}"
        )


def _joined(rank: int, ranges: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for bounds in ranges if isinstance(ranges, Iterable) else [ranges]:
        if not isinstance(bounds, Sequence) or len(bounds) != 2 or {*map(type, bounds)} != {int}:
            is_pair = isinstance(bounds, Sequence) and len(bounds) == 2
            raise TypeError(
                "the ranges of a rank must be (start, stop) pairs of ints, as in "
                "SequenceLayout([[(0, 500)], [(500, 1000)]]); got "
                f"{' and '.join(map(in_brief, bounds)) if is_pair else in_brief(bounds)} for rank "
                f"{rank}"
            )
        start, stop = bounds
        if not 0 <= start <= stop < INT_LIMIT:
            raise ValueError(
                f"a range needs 0 <= start <= stop < 2**63; rank {rank}: "
                f"({in_brief(start)}, {in_brief(stop)})"
            )
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
