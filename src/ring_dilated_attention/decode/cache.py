"""`DilatedKVCache`: the rows of keys and values that later positions can still be shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch

from ..documents import Integers, as_ints, even_slices, in_words, packed_rows
from ..exchange import Exchange, Group, Shared, resolve_exchange, settle
from ..functional import validate_tensors
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_int, check_positive_int, in_brief
from ..plan import CachePlan, plan_cache
from .hand_over import Prompt, Slots, hand_over, keep_new

SHARD_BYTES = 128 << 20
"""Of one cache, from which on the ranks of a group share it. An H200 reads that many in 30 us, about
what bringing the results of ranks together takes."""

_NAME = "DilatedKVCache"


class EqualRows(NamedTuple):
    """Rows of a batch that hold equally many positions.

    Attributes:
        rows: which, evenly spaced: indexing with it gives a view.
        length: the positions of each.
    """

    rows: slice
    length: int


class DilatedKVCache:
    """The KV cache of one attention layer: what later queries can still be shown, and no more.

    In a branch (w, r) a causal query sees rows of its own segment, every r-th. So of a branch at
    most ceil(w / r) rows a head are of any use to later positions, however long the text is; a new
    segment overwrites the one before. A branch whose segment is the whole document keeps n / r
    rows. A row that two branches show is kept for each: every branch's rows lie side by side, in
    the order in which they are read.

    `prefill` takes the keys and values of a prompt, of which each rank of a group may hold a shard;
    `cached_attention` adds those of new positions and attends. A batch row holds one document; of
    several packed in a prompt, the last one goes on.

    Args:
        pattern: which keys each head sees. Zero keys are never visible to causal queries.
        batch: rows of the batch.
        num_kv_heads: key and value heads.
        head_dim: of keys and values.
        max_length: the most positions of a document, those of the prompt included; see `reserve`.
            None, the default: any number; not for patterns with a segment length of None, which
            keep rows of the whole document.
        max_rewind: the most positions that `rewind` may take back at a time, 0 by default. It costs
            up to ``ceil(max_rewind / r)`` rows in a branch of rate r.
        dtype: of keys and values; None: torch's default.
        device: where they are; None: torch's default.
        group: the ranks that generate together: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`, or
            None for one process.
        sharded: whether the ranks share the rows, the same number on each; else each keeps all of
            them, and `cached_attention` needs no communication. None, the default: from 128 MiB on.

    Attributes:
        plan: what is kept, and where.
        keys: (batch, rows, head_dim): of every branch, head and slot.
        values: like `keys`.
        lengths: (batch,) int64, on the device: the positions so far of each row's document; what
            the next position is numbered.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or `max_length` is missing.

    Example:
        LongNet's pattern keeps 11,608 rows a head, after a thousand positions or a billion.

        >>> pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
        >>> cache = DilatedKVCache(pattern, 1, 12, 64, dtype=torch.bfloat16)
        >>> cache.plan.rows // 12
        11607
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_length: int | None = None,
        max_rewind: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group = None,
        sharded: bool | None = None,
    ) -> None:
        if not isinstance(pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern, got {in_brief(pattern)}")
        for name, value in (
            ("batch", batch), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)
        ):  # fmt: skip
            check_positive_int(name, value)
        if max_length is not None:
            check_positive_int("max_length", max_length)
        if check_int("max_rewind", max_rewind) < 0:
            raise ValueError(f"max_rewind must be >= 0, got {max_rewind}")
        if sharded is not None and not isinstance(sharded, bool):
            raise TypeError(f"sharded must be a bool or None, got {in_brief(sharded)}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self._exchange = resolve_exchange(group)
        self.plan = plan_cache(pattern, num_kv_heads, max_length, max_rewind)
        if sharded is None:
            sharded = self.plan.nbytes(batch, head_dim, dtype.itemsize) >= SHARD_BYTES
        shards = self._exchange.world_size if sharded else 1
        self.plan = plan_cache(pattern, num_kv_heads, max_length, max_rewind, shards)
        shape = (batch, self.plan.rows, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.keys.device)
        self._lengths = [0] * batch
        self._longest = [0] * batch
        self.table: tuple[CachePlan, torch.Tensor] | None = None  # what `by_kernel` made of a plan

    # What there is.

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank: ``plan.nbytes`` of the same shape."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def exchange(self) -> Exchange:
        """This rank's end of the group."""
        return self._exchange

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share the rows."""
        return self.plan.shards > 1

    @property
    def shard(self) -> int:
        """Which share of the rows this rank has; 0 where it has them all."""
        return self._exchange.rank if self.is_sharded else 0

    @property
    def slots(self) -> Slots:
        """The rows as `hand_over` and attention take them."""
        return Slots(self.plan, self.keys, self.values)

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """`lengths` as ints, without waiting for the device; see `advanced`."""
        return tuple(self._lengths)

    def equal_rows(self) -> Iterator[EqualRows]:
        """The rows of the batch, those of equal lengths together as far as evenly spaced."""
        rows_of: dict[int, list[int]] = {}
        for row, length in enumerate(self._lengths):
            rows_of.setdefault(length, []).append(row)
        for length, found in rows_of.items():
            for rows in even_slices(found):
                yield EqualRows(rows, length)

    # What becomes of it.

    def prefill(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layout: SequenceLayout | None = None,
        documents: Integers | None = None,
        lengths: Integers | None = None,
    ) -> None:
        """Begin anew with a prompt, of which each rank of the group holds a shard.

        Every rank hands the others the rows that they keep, and no others: a collective. Rows that
        were in the cache are dropped.

        Args:
            key: (batch, local_sequence, kv_heads, head_dim), rotated where the model does that, in
                the dtype and on the device of the cache.
            value: like `key`.
            layout: which positions each rank holds; None: contiguous equal shards.
            documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole prompt
                of n positions: ints, or a 1-D int32 or int64 tensor. The last one of each row goes
                on. None: one document.
            lengths: (batch,) ints, or a tensor as above: row b holds that many valid positions of
                the whole prompt, and padding behind them. None: no padding.

        Raises:
            TypeError, ValueError: an argument is not allowed, or the ranks disagree about one;
                raised on every rank of the group.
            ExchangeError: a rank is missing, has failed, or makes another call than the rest.
            RuntimeError: a CUDA graph is being captured.
        """
        ends, device = self._exchange, self.keys.device
        shared, failure, found = None, None, None
        try:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{_NAME}.prefill cannot be captured in a CUDA graph")
            layout, found = self._prompts(key, value, layout, documents, lengths)
            shared = Shared.of(self._words(layout, found))
        except Exception as error:  # whatever it is, the other ranks are to be told
            failure = error
        with torch.no_grad(), ends.calls.enter(_NAME, "prefill") as scope:
            settle(scope, ends, device, shared, failure)
            assert layout is not None
            assert found is not None
            hand_over(ends, (key, value), self.slots, layout, found)
        self.reset()
        for prompt in found:
            for row in range(len(self._lengths))[prompt.rows]:
                self._lengths[row] = self._longest[row] = len(prompt.document)
        self.lengths.copy_(torch.tensor(self._lengths))

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the keys and values of new positions, without attention; every rank has them all.

        Args:
            key: (batch, m, kv_heads, head_dim), of the next m positions of every row.
            value: like `key`.

        Raises:
            TypeError, ValueError: a tensor does not fit, or a document becomes longer than
                `max_length`.
        """
        self.check_new(key, value)
        count = key.shape[1]
        with torch.no_grad():
            for rows, length in self.equal_rows():
                keep_new(self.slots, (key, value), rows, length, self.shard)
        self.advanced(count)
        self.lengths += count

    def rewind(self, count: int | Sequence[int]) -> None:
        """Take back the newest positions, as speculative decoding does with those it rejects.

        Args:
            count: of every row, or one number for each row: at most `max_rewind` less than the
                most positions that a row had.

        Raises:
            TypeError: `count` is not an int, or not ints.
            ValueError: it is negative, or more than can be taken back.
        """
        counts = [count] * len(self._lengths) if isinstance(count, int) else list(count)
        if len(counts) != len(self._lengths):
            raise ValueError(
                f"count must be one number, or one for each of {len(self._lengths)} rows; got "
                f"{len(counts)} of them"
            )
        for row, (length, longest) in enumerate(zip(self._lengths, self._longest, strict=True)):
            most = min(length, length - longest + self.plan.max_rewind)
            if not 0 <= check_int("count", counts[row]) <= most:
                raise ValueError(
                    f"of row {row} between 0 and {most} positions can be taken back: it has "
                    f"{length}, had up to {longest}, and max_rewind is {self.plan.max_rewind}; got "
                    f"{counts[row]}. Make the cache with a larger max_rewind"
                )
        self._lengths = [n - taken for n, taken in zip(self._lengths, counts, strict=True)]
        self.lengths.copy_(torch.tensor(self._lengths))

    def reset(self) -> None:
        """Drop all rows: the next position is the first of a document."""
        self._lengths = [0] * len(self._lengths)
        self._longest = [0] * len(self._lengths)
        self.lengths.zero_()

    def select(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Make the batch of these rows of it, as beam search does: a row may be taken repeatedly.

        Args:
            rows: ints, or a 1-D tensor of them; any number, in any order.

        Raises:
            ValueError: a row is not in the batch, or there is none.
        """
        found = [int(row) for row in rows]
        if not found or not all(0 <= row < len(self._lengths) for row in found):
            raise ValueError(
                f"rows must be numbers of rows in [0, {len(self._lengths)}), one at least; got "
                f"{found}"
            )
        index = torch.tensor(found, device=self.keys.device)
        self.keys, self.values, self.lengths = (
            x.index_select(0, index) for x in (self.keys, self.values, self.lengths)
        )
        self._lengths, self._longest = (
            [known[row] for row in found] for known in (self._lengths, self._longest)
        )

    def reserve(self, max_length: int) -> None:
        """Make room for longer documents; no less than before. Copies the rows where there are more.

        Args:
            max_length: the most positions of a document.
        """
        plan, old = self.plan, self.slots
        if plan.max_length is None or max_length <= plan.max_length:
            return
        self.plan = plan_cache(
            plan.pattern, plan.num_kv_heads, max_length, plan.max_rewind, plan.shards
        )
        if self.plan.rows == plan.rows:
            return
        self.keys, self.values = (
            x.new_empty(x.shape[0], self.plan.rows, x.shape[2]) for x in (self.keys, self.values)
        )
        before = {branch.index: branch for branch in plan.branches}
        for branch in self.plan.branches:
            known = before.get(branch.index)
            if known is None:
                continue
            # Only a branch that had one segment gets more slots: its members stay where they were.
            # And more heads, whose offsets lie behind the former length.
            places = [branch.heads.index(head) for head in known.heads]
            for to, source in zip(self.slots.of_branch(branch), old.of_branch(known), strict=True):
                to[:, places, : known.slots] = source

    def advanced(self, count: int) -> None:
        """Say that a kernel has moved `lengths` on the device, by `count` for every row.

        A captured CUDA graph does that when it is replayed, and cannot tell: whoever replays it
        calls this, so that a document longer than `max_length` is refused.

        Args:
            count: new positions.

        Raises:
            ValueError: a document is longer than `max_length` now.
        """
        self._lengths = [n + count for n in self._lengths]
        self._longest = [max(pair) for pair in zip(self._lengths, self._longest, strict=True)]
        self._check_lengths(self._lengths)

    # What is refused.

    def check_new(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise unless keys and values are those of new positions of this cache.

        Args:
            key: (batch, m, kv_heads, head_dim).
            value: like `key`.

        Raises:
            TypeError, ValueError: they are not, or a document becomes longer than `max_length`.
        """
        self._check_rows(key, value)
        if key.shape[1] == 0:
            raise ValueError("there must be one new position at least; key has no rows")
        self._check_lengths([n + key.shape[1] for n in self._lengths])

    def _check_rows(self, key: torch.Tensor, value: torch.Tensor) -> None:
        validate_tensors(key, key, value)
        batch, _, head_dim = self.keys.shape
        wanted = (batch, key.shape[1], self.plan.num_kv_heads, head_dim)
        held = f"key and value must have shape (batch, positions, kv_heads, head_dim) {wanted}"
        if key.shape != wanted:
            raise ValueError(f"{held}, as the cache has them; got {tuple(key.shape)}")
        if key.dtype != self.keys.dtype or key.device != self.keys.device:
            raise ValueError(
                f"key and value must be {self.keys.dtype} on {self.keys.device}, as the cache is; "
                f"got {key.dtype} on {key.device}"
            )

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        most = self.plan.max_length
        if most is not None and max(lengths) > most:
            raise ValueError(
                f"a document would have {max(lengths)} positions, and the cache has room for "
                f"max_length={most}; make it with a larger one, or call its reserve({max(lengths)})"
            )

    def _prompts(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout | None,
        documents: Integers | None,
        lengths: Integers | None,
    ) -> tuple[SequenceLayout, list[Prompt]]:
        """The layout of a prompt, and the documents that go on."""
        if layout is not None and not isinstance(layout, SequenceLayout):
            raise TypeError(f"layout must be a SequenceLayout or None, got {in_brief(layout)}")
        self._check_rows(key, value)
        rank, world = self._exchange.rank, self._exchange.world_size
        if layout is None:
            layout = SequenceLayout.contiguous(key.shape[1] * world, world)
        held = f"its key has a local sequence length of {key.shape[1]}"
        layout.check_shard(rank, world, key.shape[1], held)
        borders = () if documents is None else tuple(as_ints("documents", documents))
        valid = () if lengths is None else tuple(as_ints("lengths", lengths))
        found = [
            Prompt(rows, range(*ends[-2:]) if len(ends) > 1 else range(0))
            for rows, ends in packed_rows(borders, valid, len(self._lengths), layout.length)
        ]
        self._check_lengths([len(prompt.document) for prompt in found])
        return layout, found

    def _words(self, layout: SequenceLayout, prompts: Sequence[Prompt]) -> dict[str, str]:
        """What must be equal on all ranks."""
        found = [f"{prompt.document} of rows {prompt.rows}" for prompt in prompts]
        digest = blake2b(repr(found).encode(), digest_size=4).hexdigest()
        return {
            "cache": self.described,
            "layout": f"{layout!r} ({layout.digest[:8]})",
            "documents and lengths": f"{', '.join(found[:3])} ({digest})",
        }

    @property
    def described(self) -> str:
        """What must be equal on all ranks of a group."""
        plan, (batch, _, head_dim) = self.plan, self.keys.shape
        return (
            f"{plan.pattern}, {batch} rows of {plan.num_kv_heads} heads of {head_dim}, "
            f"{self.keys.dtype}, max_length={plan.max_length}, max_rewind={plan.max_rewind}, "
            f"on {plan.shards} ranks"
        )

    def __repr__(self) -> str:
        return f"{_NAME}({self.described}; lengths {in_words(self._lengths)})"
