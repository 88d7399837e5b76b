"""`DilatedKVCache`: the rows of keys and values that later positions can still be shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from ..documents import Integers, as_ints, even_slices, in_words, packed_rows
from ..exchange import Exchange, Group, one_group, resolve_exchange, together
from ..functional import autocast_inputs
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_int, check_positive_int, in_brief
from ..plan import cache as kept_rows
from ..plan import plan_cache
from ..torch_op import refuse_tangents, validate_tensor

_NAME = "DilatedKVCache"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SHARD_BYTES = 128 << 20
"""Ranks of a group share caches from this size on. An H200 reads 128 MiB in 30 us, about as long as
it takes to bring the results of ranks together."""


class Prompt(NamedTuple):
    """Rows of a batch whose prompts are alike."""

    rows: slice  # of the prompt, evenly spaced: indexing with it gives a view
    to: slice  # the rows of the cache that take them, as many
    document: range  # the positions of the document that goes on, in the whole sequence


_Part: TypeAlias = tuple[Prompt, kept_rows.KeptRows, tuple[int, ...]]
"""Rows of a message, with the shape of their keys and values."""


class DeepOnly:
    """A base of classes that `copy.deepcopy` copies, and `copy.copy` refuses."""

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"a shallow copy of a {type(self).__name__} would share its rows, but not their number:"
            " take copy.deepcopy, which gives the copy rows of its own"
        )


class Lengths(NamedTuple):
    """The positions of each row's document, as the host knows them."""

    known: tuple[int, ...]  # positions of each row
    # the most of each row since it began: what its last segment's rows were overwritten by
    longest: tuple[int, ...]


class DilatedKVCache(DeepOnly):
    """The KV cache of one attention layer: only what later queries can still attend to.

    In a branch (w, r) a causal query sees rows of its own segment, every r-th. So of a branch at
    most ceil(w / r) rows a head are of any use to later positions, however long the text is; a new
    segment overwrites the one before. A branch whose segment is the whole document keeps n / r
    rows, and a sliding window, which must not be dilated, its last left + 1. A row that two
    branches show is kept for each: every branch's rows lie side by side, in the order in which they
    are read.

    `prefill` takes the keys and values of a prompt, of which each rank of a group may hold a shard;
    `cached_attention` adds those of new positions and attends. A batch row holds one document; of
    several packed in a prompt, the last one goes on.

    A call that is refused changes nothing. One that fails after that, because a rank is lost, say,
    leaves the rows that it was to change empty, as `reset` does. `copy.deepcopy` gives a cache of
    the same group with rows of its own.

    Args:
        pattern: which keys each head sees. Zero keys are never visible to causal queries.
        batch: rows of the batch.
        num_kv_heads: key and value heads.
        head_dim: of keys and values.
        max_length: the most positions of a document, those of the prompt included; see `reserve`.
            None, the default: any number; not for patterns with a segment length of None, which
            keep rows of the whole document.
        max_rewind: the most positions that `rewind` may take back, counted from the most that a row
            has had; 0 by default. A branch (w, r) has room for the rows of w + `max_rewind`
            positions: about ``max_rewind / r`` rows more.
        dtype: of keys and values, float64, float32, bfloat16 or float16; None: torch's default.
        device: where they are; None: torch's default.
        group: the ranks that generate together: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`, or
            None for one process.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        sharded: whether the ranks share the rows, the same number on each; else each keeps all of
            them, and `cached_attention` needs no communication. None, the default: from 128 MiB on.
        head_slice: (start, stop, total): the KV heads are heads start to stop (excluded) of a layer
            with total of them. None: they are all.

    Attributes:
        plan: what is kept, and where.
        branches: `plan` as a table on the device: see `kernels.decode.strips_of_cache`.
        keys: (batch, rows, head_dim): of every branch, head and slot.
        values: like `keys`.
        lengths: (batch,) int64, on the device: the positions so far of each row's document, which
            is the number of its next position.
        exchange: this rank's end of the group.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, `max_length` is missing, or a window is dilated.

    Examples:
        LongNet's pattern keeps 11,606 rows a head, after a thousand positions or a billion.

        >>> pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
        >>> cache = DilatedKVCache(pattern, 1, 12, 64, dtype=torch.bfloat16)
        >>> cache.plan.rows // 12
        11606
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
        mesh: Group = None,
        sharded: bool | None = None,
        head_slice: Sequence[int] | None = None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern, got {in_brief(pattern)}")
        if check_int("max_rewind", max_rewind) < 0:
            raise ValueError(f"max_rewind must be >= 0, got {max_rewind}")
        if dtype not in _DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}; got {dtype!r}")
        if sharded is not None and not isinstance(sharded, bool):
            raise TypeError(f"sharded must be a bool or None, got {in_brief(sharded)}")
        batch = check_positive_int("batch", batch)
        num_kv_heads = check_positive_int("num_kv_heads", num_kv_heads)
        head_dim = check_positive_int("head_dim", head_dim)
        pattern = pattern.of_heads(head_slice, num_kv_heads)
        if max_length is not None:
            max_length = check_positive_int("max_length", max_length)
        self.exchange: Exchange = resolve_exchange(one_group(group, mesh))
        plan = plan_cache(pattern, num_kv_heads, max_length, max_rewind)
        if sharded is None:  # small caches are whole on every rank: no exchange in each step
            sharded = plan.nbytes(batch, head_dim, dtype.itemsize) >= _SHARD_BYTES
        if sharded:
            shards = self.exchange.world_size
            plan = plan_cache(pattern, num_kv_heads, max_length, max_rewind, shards)
        shape = (batch, plan.rows, head_dim)
        with torch.inference_mode(False):  # tensors that may be written to in any mode
            self.keys = torch.empty(shape, dtype=dtype, device=device)
            self.values = torch.empty_like(self.keys)
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.keys.device)
        self._lengths = Lengths((0,) * batch, (0,) * batch)
        self._set_plan(plan)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank: ``plan.nbytes`` of the same shape."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share the rows."""
        return self.plan.shards > 1

    @property
    def shard(self) -> int:
        """Number of the share of the rows that this rank has; 0 where it has all rows."""
        return self.exchange.rank if self.is_sharded else 0

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """`lengths` as ints, without waiting for the device; see `advanced`."""
        return self._lengths.known

    @property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.keys, self.values, self.lengths

    @property
    def _batch(self) -> int:
        return len(self._lengths.known)

    def known(self) -> Lengths:
        """The lengths as the host knows them, for `set_known`."""
        return self._lengths

    def set_known(self, lengths: Lengths, written: int = 1) -> None:
        """Take `written` positions back, at most `max_rewind` + 1, to lengths known before them.

        One more than `max_rewind`: the last of them has dropped no more keys than the next position
        of the row will.
        """
        longest = map(max, lengths.longest, (n + written - 1 for n in lengths.known))
        self._set_lengths(Lengths(lengths.known, tuple(longest)))

    def check_room(self, count: int) -> None:
        """Raise a `ValueError` unless there is room for `count` more positions of every row."""
        self._check_length(max(self.known_lengths) + count)

    def _check_length(self, length: int) -> None:
        if self.plan.max_length is not None and length > self.plan.max_length:
            raise ValueError(
                f"a document would have {length} positions, and the cache has room for "
                f"max_length={self.plan.max_length}; make it with a larger one, or call its "
                f"reserve({length})"
            )

    def equal_rows(self) -> Iterator[tuple[slice, int]]:
        """The rows of the batch as (evenly spaced rows, their length): indexing gives views."""
        by_length: dict[int, list[int]] = {}
        for row, length in enumerate(self._lengths.known):
            by_length.setdefault(length, []).append(row)
        for length, found in by_length.items():
            for rows in even_slices(found):
                yield rows, length

    def prefill(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rows: Integers | None = None,
        layout: SequenceLayout | None = None,
        documents: Integers | None = None,
        lengths: Integers | None = None,
    ) -> None:
        """Begin anew with a prompt, of which each rank of the group holds a shard.

        Every rank hands the others the rows that they keep, and no others: a collective. Rows that
        were in the cache are dropped. Under autocast the tensors are cast, as the inputs of
        `dilated_attention` are.

        Args:
            key: (batch, local_sequence, kv_heads, head_dim), rotated where the model does that, in
                the dtype and on the device of the cache.
            value: like `key`.
            rows: those of the batch that begin anew, one for each row of `key`, which has only
                these; the others go on. None: all.
            layout: which positions each rank holds; None: contiguous equal shards.
            documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole prompt
                of n positions: ints, or a 1-D int32 or int64 tensor. The last one of each row goes
                on. None: one document.
            lengths: one int for each row of `key`, or a tensor as above: the valid positions of
                the whole prompt in that row, with padding behind them. None: no padding.

        Raises:
            TypeError, ValueError: an argument is not allowed, or the ranks disagree about one;
                raised on every rank of the group.
            ExchangeError: a rank is missing, has failed, or makes another call than the rest.
            NotImplementedError: an input has a tangent: there is no forward-mode derivative.
            RuntimeError: a gradient is asked for: there is none. Or a CUDA graph is being captured.
        """
        ends, device = self.exchange, self.keys.device
        with ends.calls.enter(f"{_NAME}.prefill", "forward") as scope:
            with together(scope, ends, device) as agreed:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(f"{_NAME}.prefill cannot be captured in a CUDA graph")
                key, value = autocast_inputs(key, value)
                to = self._rows_in(rows)
                self._check_rows(key, value, len(to))
                layout = _resolve_layout(layout, key.shape[1], ends)
                found = _find_prompts(documents, lengths, layout.length, to)
                self._check_length(max(len(prompt.document) for prompt in found))
                agreed.on({"cache": self.described} | _words_of(layout, found, self._batch))
            with torch.no_grad():
                begun = {row: len(x.document) for x in found for row in range(self._batch)[x.to]}
                self._begin(dict.fromkeys(begun, 0))  # half a prompt, where a rank is lost, is none
                self._hand_over((key, value), layout, found)
        self._begin(begun)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the keys and values of new positions, without attention; every rank has them all.

        Args:
            key: (batch, m, kv_heads, head_dim), of the next m positions of every row.
            value: like `key`.

        Raises:
            TypeError, ValueError: a tensor does not fit, or a document becomes longer than
                `max_length`.
            NotImplementedError, RuntimeError: see `prefill`.
        """
        key, value = autocast_inputs(key, value)
        self.check_new(key, value)
        self.write(key, value)
        self.count(key.shape[1])

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write rows that `check_new` allows, without counting them: see `count`."""
        try:
            with torch.no_grad():
                for rows, length in self.equal_rows():
                    for kept in self.plan.appended(length, key.shape[1], self.shard):
                        self.keep(rows, kept, [_rows_of(x, rows, kept) for x in (key, value)])
        except BaseException:
            if key.shape[1] > 1:  # rows of one new position overwrite nothing that is still needed
                self.reset()
            raise

    def of_branch(self, branch: kept_rows.CachedBranch) -> list[torch.Tensor]:
        """Keys and values of a branch: each (batch, heads, slots, head_dim), a view."""
        heads, slots = len(branch.heads), branch.slots
        shape = len(self.keys), heads, slots, self.keys.shape[2]
        rows = slice(branch.first_row, branch.first_row + heads * slots)
        return [x[:, rows].view(shape) for x in (self.keys, self.values)]

    def keep(self, rows: slice, kept: kept_rows.KeptRows, both: Sequence[torch.Tensor]) -> None:
        """Write keys and values, each (batch rows, heads, members, head_dim)."""
        for target, source in zip(self.of_branch(kept.branch), both, strict=True):
            for places, to in runs_of_slots(kept.members, kept.branch.slots):
                target[rows, kept.heads, to] = source[:, :, places]

    def _hand_over(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        layout: SequenceLayout,
        prompts: Sequence[Prompt],
    ) -> None:
        """Give every rank the rows of this rank's keys and values that it keeps; keep its own.

        One message to each other rank, inside of a call; one is under way at a time, so that a
        large cache does not take twice its memory. `prompts` have the same order on every rank.
        """
        ends = self.exchange
        for prompt, kept, _ in self._parts(layout, prompts, ends.rank, ends.rank):
            self.keep(prompt.to, kept, [_rows_of(x, prompt.rows, kept) for x in tensors])
        packed: torch.Tensor | None = None
        for step in range(1, ends.world_size):
            to, source = (ends.rank + step) % ends.world_size, (ends.rank - step) % ends.world_size
            if packed is None or self.is_sharded:  # else all get the same
                outgoing = self._parts(layout, prompts, ends.rank, to)
                packed = self.keys.new_empty(sum(prod(shape) for *_, shape in outgoing))
                for prompt, kept, both in _views(packed, outgoing):
                    for part, tensor in zip(both, tensors, strict=True):
                        part.copy_(_rows_of(tensor, prompt.rows, kept))
            incoming = self._parts(layout, prompts, source, ends.rank)
            buffer = self.keys.new_empty(sum(prod(shape) for *_, shape in incoming))
            send = (to, packed) if packed.numel() else None
            receive = (source, buffer) if buffer.numel() else None
            if send or receive:
                ends.start(send, receive).wait()
            for prompt, kept, both in _views(buffer, incoming):
                self.keep(prompt.to, kept, both.unbind(0))

    def _parts(
        self, layout: SequenceLayout, prompts: Sequence[Prompt], source: int, to: int
    ) -> list[_Part]:
        """The message from rank `source` to rank `to`."""
        found, shard = list[_Part](), to if self.is_sharded else 0
        for prompt in prompts:
            rows = len(range(self._batch)[prompt.to])
            for kept in self.plan.handed_over(layout, prompt.document, source, shard):
                heads = len(range(len(kept.branch.heads))[kept.heads])
                shape = 2, rows, heads, len(kept.members), self.keys.shape[2]
                found.append((prompt, kept, shape))
        return found

    def count(self, count: int) -> None:
        """Count new positions of every row, which were written."""
        self.advanced(count)
        self.lengths += count

    def rewind(self, count: int | Integers) -> None:
        """Take back the newest positions, as speculative decoding does with those it rejects.

        Args:
            count: of every row; or ints, or a 1-D tensor of them, one for each row. A row that has
                had n positions since it began keeps n - `max_rewind` of them at least.

        Raises:
            TypeError: `count` is not an int, or not ints.
            ValueError: it is negative, or more than can be taken back; nothing is.
        """
        if isinstance(count, torch.Tensor | list | tuple | range):
            counts = as_ints("count", count)
        else:
            counts = [check_int("count", count)] * self._batch
        if len(counts) != self._batch:
            raise ValueError(
                f"count must be one number, or one for each of {self._batch} rows; "
                f"got {in_words(counts)}"
            )
        for row, (known, longest, back) in enumerate(zip(*self._lengths, counts, strict=True)):
            most = min(known, known - longest + self.plan.max_rewind)
            if not 0 <= back <= most:
                raise ValueError(
                    f"at most {most} positions of row {row} can be taken back: it has {known}, had "
                    f"{longest} at most, and max_rewind is {self.plan.max_rewind}; got {back}"
                )
        left = (n - back for n, back in zip(self._lengths.known, counts, strict=True))
        self._set_lengths(self._lengths._replace(known=tuple(left)))

    def reset(self, rows: Integers | None = None) -> None:
        """Drop rows: the next position is the first of a document.

        Args:
            rows: those of the batch that begin anew, while the others go on; None: all.

        Raises:
            TypeError, ValueError: a row is not in the batch.
        """
        self._begin(dict.fromkeys(self._rows_in(rows), 0))

    def select(self, rows: Integers) -> None:
        """Make the batch of these rows of it, as beam search does: a row may be taken repeatedly.

        Where there are as many rows as before, `keys`, `values` and `lengths` stay the same
        tensors, as a captured CUDA graph needs it.

        Args:
            rows: ints, or a 1-D tensor of them; any number, in any order.

        Raises:
            TypeError, ValueError: a row is not in the batch, or there is none.
        """
        found = self._rows_in(rows)
        with torch.inference_mode(False), torch.no_grad():
            index = torch.tensor(found, device=self.keys.device)
            chosen = [x.index_select(0, index) for x in self._tensors]
            if len(found) == self._batch:
                for to, source in zip(self._tensors, chosen, strict=True):
                    to.copy_(source)
            else:
                self.keys, self.values, self.lengths = chosen
        self._lengths = Lengths(*(tuple(x[row] for row in found) for x in self._lengths))

    def reserve(self, max_length: int) -> None:
        """Make room for longer documents; on every rank of a group alike.

        Does nothing where there is room. Otherwise rows are copied to larger tensors, while both
        are in memory: growing by half each time copies a row two or three times in all.

        Args:
            max_length: the most positions of a document.

        Raises:
            TypeError, ValueError: it is not an int, or below 1.
        """
        max_length, plan = check_positive_int("max_length", max_length), self.plan
        if plan.max_length is None or max_length <= plan.max_length:
            return
        grown = plan_cache(
            plan.pattern, plan.num_kv_heads, max_length, plan.max_rewind, plan.shards
        )
        if grown.rows > plan.rows:
            held = {x.index: (x, self.of_branch(x)) for x in plan.branches}
            shape = self._batch, grown.rows, self.keys.shape[2]
            with torch.inference_mode(False), torch.no_grad():
                self.keys, self.values = (x.new_empty(shape) for x in (self.keys, self.values))
                for branch in grown.branches:
                    if branch.index not in held:
                        continue
                    # A branch that gets more slots had one for each member: they stay where they
                    # were. Heads that it gets have offsets behind the former max_length.
                    known, rows = held[branch.index]
                    places = [branch.heads.index(head) for head in known.heads]
                    for to, source in zip(self.of_branch(branch), rows, strict=True):
                        to[:, places, : known.slots] = source
        self._set_plan(grown)

    def advanced(self, count: int) -> None:
        """Say that a kernel moves `lengths` on the device, by `count` for every row.

        A captured CUDA graph does that when it is replayed, and cannot tell: whoever replays it
        calls this before, so that a document longer than `max_length` is refused.

        Args:
            count: new positions.

        Raises:
            ValueError: a document would be longer than `max_length`; nothing is changed.
        """
        self.check_room(count)
        known = tuple(length + count for length in self.known_lengths)
        self._lengths = Lengths(known, tuple(map(max, known, self._lengths.longest)))

    def __deepcopy__(self, memo: Any) -> DilatedKVCache:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        with torch.inference_mode(False):
            twin.keys, twin.values, twin.lengths = (x.clone() for x in self._tensors)
        return twin

    def _begin(self, lengths: dict[int, int]) -> None:
        """Some rows of the batch begin a document, of which that many positions are there."""
        known, longest = (list(x) for x in self._lengths)
        for row, length in lengths.items():
            known[row] = longest[row] = length
        self._set_lengths(Lengths(tuple(known), tuple(longest)))

    def _set_plan(self, plan: kept_rows.CachePlan) -> None:
        self.plan = plan
        with torch.inference_mode(False):
            self.branches = _table(plan).to(self.keys.device)

    def _set_lengths(self, lengths: Lengths) -> None:
        # The copy waits for the device, and raises if a rank is lost: its rows are not counted.
        self.lengths.copy_(torch.tensor(lengths.known, device="cpu"))
        self._lengths = lengths

    def check_new(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise unless keys and values can be those of new positions: see `append`."""
        self._check_rows(key, value, self._batch)
        if key.shape[1] == 0:
            raise ValueError("there must be one new position at least; key has no rows")
        self.check_room(key.shape[1])

    def _check_rows(self, key: torch.Tensor, value: torch.Tensor, batch: int) -> None:
        """Raise unless keys and values fit the cache and have this number of batch rows."""
        for name, tensor in (("key", key), ("value", value)):
            validate_tensor(name, tensor)
        refuse_tangents(_NAME, key, value)
        held, heads, head_dim = self.keys, self.plan.num_kv_heads, self.keys.shape[2]
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape != (batch, key.shape[1], heads, head_dim):
                raise ValueError(
                    f"{name} must have shape (batch, positions, kv_heads, head_dim) = ({batch}, "
                    f"{key.shape[1]}, {heads}, {head_dim}); got {tuple(tensor.shape)}"
                )
            if tensor.dtype != held.dtype or tensor.device != held.device:
                cast = " (cast by autocast)" * torch.is_autocast_enabled(held.device.type)
                raise ValueError(
                    f"{name} must be {held.dtype} on {held.device}, as the cache is; got "
                    f"{tensor.dtype}{cast} on {tensor.device}"
                )
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise RuntimeError(
                    f"{_NAME} has no gradient, and {name} requires one: fill it under "
                    "torch.no_grad() or torch.inference_mode()"
                )

    def _rows_in(self, rows: Integers | None) -> list[int]:
        """Rows of the batch as ints; None: all. Raises unless they are there."""
        found = list(range(self._batch)) if rows is None else as_ints("rows", rows)
        if not all(0 <= row < self._batch for row in found):
            raise ValueError(
                f"rows must be numbers of rows in [0, {self._batch}); got {in_words(found)}"
            )
        return found

    @property
    def described(self) -> str:
        """Plan, sizes and dtype as text, which must be equal on all ranks of a group."""
        return f"{self.plan}, {self._batch} rows, head_dim {self.keys.shape[2]}, {self.keys.dtype}"

    def __repr__(self) -> str:
        return f"{_NAME}({self.described}; lengths {in_words(self._lengths.known)})"


def _resolve_layout(layout: SequenceLayout | None, count: int, ends: Exchange) -> SequenceLayout:
    """The layout of a prompt, of which this rank holds `count` positions; raises if it is not."""
    if layout is None:
        return SequenceLayout.contiguous(count * ends.world_size, ends.world_size)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None, got {in_brief(layout)}")
    held = f"its key has a local sequence length of {count}"
    layout.check_shard(ends.rank, ends.world_size, count, held)
    return layout


def _find_prompts(
    documents: Integers | None, lengths: Integers | None, total: int, rows: Sequence[int]
) -> list[Prompt]:
    """The last document of each row of a prompt of `total` positions, for these rows of a cache.

    Raises a `TypeError` or `ValueError` where documents, lengths or rows are not allowed.
    """
    if len(set(rows)) < len(rows):
        raise ValueError(f"rows must differ, to take a prompt each; got {tuple(rows)}")
    borders = () if documents is None else tuple(as_ints("documents", documents))
    valid = () if lengths is None else tuple(as_ints("lengths", lengths))
    in_order = list(rows) == list(range(len(rows)))
    found = []
    for some, ends in packed_rows(borders, valid, len(rows), total):
        document = range(*ends[-2:]) if len(ends) > 1 else range(0)
        if in_order:  # `some` may be all rows: of these, not of the cache
            found.append(Prompt(some, slice(*some.indices(len(rows))), document))
            continue
        for row in range(len(rows))[some]:
            to = slice(rows[row], rows[row] + 1)
            found.append(Prompt(slice(row, row + 1), to, document))
    return found


def _words_of(layout: SequenceLayout, prompts: Sequence[Prompt], batch: int) -> dict[str, str]:
    """The arguments of a prompt that must be equal on all ranks, for a cache of `batch` rows."""
    found = [
        f"{document.start} to {document.stop} in rows {list(range(batch)[to])}"
        for _, to, document in prompts
    ]
    digest = blake2b(repr(found).encode(), digest_size=4).hexdigest()
    return {
        "layout": f"{layout!r} ({layout.digest[:8]})",
        "the document that goes on": f"{', '.join(found[:3])} ({digest})",
    }


def _table(plan: kept_rows.CachePlan) -> torch.Tensor:
    """See `kernels.decode.strips_of_cache`."""
    rows = []
    for branch in plan.branches:
        offsets, bases = [-1] * plan.num_kv_heads, [0] * plan.num_kv_heads
        for place, (head, offset) in enumerate(branch.heads):
            offsets[head] = offset
            bases[head] = branch.first_row + place * branch.slots
        own = branch.segment_length, branch.dilation_rate, branch.window, branch.slots
        rows.append([*own, *offsets, *bases])
    return torch.tensor(rows, dtype=torch.int64)


def _rows_of(tensor: torch.Tensor, rows: slice, kept: kept_rows.KeptRows) -> torch.Tensor:
    """The kept rows, (batch, heads, rows, head_dim), of (batch, sequence, kv_heads, head_dim)."""
    return tensor[rows, kept.rows, kept.kv_heads].transpose(1, 2)


def runs_of_slots(members: range, slots: int) -> Iterator[tuple[slice, slice]]:
    """The slots of consecutive members, at most one per slot: one or two (places, slots)."""
    first = members.start % slots
    before_end = min(len(members), slots - first)
    yield slice(0, before_end), slice(first, first + before_end)
    if before_end < len(members):
        yield slice(before_end, len(members)), slice(0, len(members) - before_end)


def _views(
    packed: torch.Tensor, parts: Sequence[_Part]
) -> Iterator[tuple[Prompt, kept_rows.KeptRows, torch.Tensor]]:
    """The parts of a message, each with its keys and values: (2, batch, heads, rows, head_dim)."""
    pieces = torch.split(packed, [prod(shape) for *_, shape in parts])
    for (prompt, kept, shape), piece in zip(parts, pieces, strict=True):
        yield prompt, kept, piece.view(shape)
