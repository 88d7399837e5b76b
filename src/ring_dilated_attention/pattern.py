"""The dilated attention pattern: branches of (segment length, dilation rate), and head offsets.

Integers only. What a pattern means is defined in LongNet (Ding et al. 2023, arXiv 2307.02486),
section 2; `DilatedPattern` states it in this library's words.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

HeadOffsets: TypeAlias = Literal["interleaved", "blocked"]
HeadBranches: TypeAlias = Literal["all", "split"]
HEAD_OFFSETS: tuple[str, ...] = get_args(HeadOffsets)
HEAD_BRANCHES: tuple[str, ...] = get_args(HeadBranches)


class Window(NamedTuple):
    """A sliding window, in place of a branch's segment length: the positions around each query.

    Query i sees keys i - left to i + right, its own included; with a causal mask none behind it.
    flash-attn's ``window_size`` counts alike; transformers' ``sliding_window`` counts the query
    too: left is 1 less.

    Attributes:
        left: how many positions before the query, >= 0.
        right: how many positions behind it, >= 0; default 0.
    """

    left: int
    right: int = 0

    def seen(self, is_causal: bool) -> Window:
        """What is left of it under a causal mask."""
        return Window(self.left) if is_causal else self

    def __str__(self) -> str:
        return f"window {self.left}" + f"+{self.right}" * bool(self.right)


Length: TypeAlias = int | Window | None
"""Segments of that many positions; a window; or None: the whole document is one segment."""


class Branch(NamedTuple):
    """One branch of a pattern: a segment or window, and every `dilation_rate`-th position of it."""

    segment_length: Length
    dilation_rate: int

    @property
    def stride(self) -> int:
        """One in how many positions the branch gives keys to; a window gives keys to all."""
        return 1 if isinstance(self.segment_length, Window) else self.dilation_rate

    def __str__(self) -> str:
        length = "document" if self.segment_length is None else self.segment_length
        return f"({length}, {self.dilation_rate})"


class HeadOffset(NamedTuple):
    """A KV head that runs a branch, and the offset at which it starts in every segment."""

    head: int
    offset: int


class HeadSlice(NamedTuple):
    """KV heads `start` to `stop` (excluded) of the `total` of a layer, such as those of one rank.

    Tensor parallelism gives every rank a few heads. Their offsets and branches are those that they
    have among all heads.
    """

    start: int
    stop: int
    total: int


INT_LIMIT = 2**63
"""Positions, lengths and rates lie below it: operators of torch take no larger ints."""
MOST_BRANCHES = 1000
"""Of a pattern: planning these takes about a second. LongNet has 5."""
_SHOWN = 40


def in_brief(value: Any) -> str:
    """A value for a message of one line: small ones as they are written, of all others the type."""
    if isinstance(value, int) and not isinstance(value, bool):
        shown = value.bit_length() <= 4 * _SHOWN
        return repr(value) if shown else f"an int of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"type {module}{kind.__qualname__}"[: 2 * _SHOWN]


def shape_in_brief(tensor: Any) -> str:
    """The shape of a tensor for a message of one line."""
    return str(tuple(tensor.shape)) if tensor.ndim <= 8 else f"of {tensor.ndim} dimensions"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a `ValueError` that lists the valid values unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {allowed}; got {in_brief(value)}")


def check_bool(name: str, value: Any) -> None:
    """Raise a `TypeError` that names `value` unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {in_brief(value)}")


def check_positive_float(name: str, value: float) -> float:
    """Return `value` as a float > 0; a `TypeError` or `ValueError` names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {in_brief(value)}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and above 0; got {in_brief(value)}")
    return float(value)


def check_positive_int(name: str, value: Any) -> int:
    """Return `value` as an int >= 1; a `TypeError` or `ValueError` names it otherwise."""
    number = check_int(name, value)
    if number < 1:
        raise ValueError(f"{name} must be >= 1, got {in_brief(number)}")
    return number


def check_int(name: str, value: Any) -> int:
    """Return `value` as an int of 64 bits; a `TypeError` or `ValueError` names it otherwise."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {in_brief(value)}") from None
    if not -INT_LIMIT <= number < INT_LIMIT:
        raise ValueError(f"{name} must be below 2**63, got {in_brief(number)}")
    return number


def check_head_slice(value: Any) -> HeadSlice:
    """Return `value` as a `HeadSlice`; a `TypeError` or `ValueError` says what is wrong with it."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        length = f" of length {len(value)}" if isinstance(value, (list, tuple)) else ""
        raise TypeError(
            "head_slice must be (start, stop, total), KV heads start to stop (excluded) of total; "
            f"got {in_brief(value)}{length}"
        )
    start, stop, total = (check_int("head_slice", number) for number in value)
    if not 0 <= start < stop <= total:
        raise ValueError(
            "head_slice must be (start, stop, total) with 0 <= start < stop <= total; got "
            f"({in_brief(start)}, {in_brief(stop)}, {in_brief(total)})"
        )
    return HeadSlice(start, stop, total)


def band_pairs(queries: int, keys: int, low: int, high: int) -> int:
    """How many pairs of query i and key j there are with ``low <= j - i <= high``."""

    def up_to(high: int) -> int:
        first = min(max(-high, 0), queries)  # the first query with such a key
        all_seen = min(max(keys - high - 1, first), queries)  # the first that has all keys
        some = all_seen - first
        return (first + all_seen - 1) * some // 2 + some * (high + 1) + (queries - all_seen) * keys

    return max(up_to(high) - up_to(low - 1), 0)


def pairs_of(queries: int, keys: int, is_causal: bool, band: tuple[int, int] | None) -> int:
    """Number of (query, key) pairs in a tile, of one head and segment."""
    if band is not None:
        return band_pairs(queries, keys, *band)
    return queries * (queries + 1) // 2 if is_causal else queries * keys


def _check_length(value: Any) -> Length:
    """Return the length of a branch as it is kept; an error names it unless it is one."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        return check_positive_int("a segment length", value)
    if len(value) != 2:
        raise TypeError(f"a window must be (left, right); got {len(value)} numbers")
    window = Window(*(check_int("a window", x) for x in value))
    if min(window) < 0:
        raise ValueError(f"a window must not have negative sides; got {tuple(window)}")
    return window


@dataclass(frozen=True)
class DilatedPattern:
    """Which keys each head's queries see: a list of (segment length, dilation rate) branches.

    Branch (w, r) cuts every document into segments of w positions counted from its start; the last
    may be shorter. A head with offset o in that branch sees, within each segment, only the
    positions `range(segment_start + o, segment_stop, r)`, as queries and as keys alike. Its output
    at a position is one softmax over the union of the keys of all its branches there, where a key
    of two branches counts twice (LongNet, arXiv 2307.02486, eq. 9-10). There are no divisibility
    constraints.

    A branch may be a sliding window in place of segments. Then every query, of every head that runs
    the branch, sees the keys of its document at most `Window.left` positions before it and at most
    `Window.right` behind it, every r-th counted from the query. A window has no head offsets and no
    zero keys.

    Args:
        segment_lengths: one length per branch, in positions; None means the whole document, a
            `Window` (or two ints) a sliding window.
        dilation_rates: one rate per branch, in positions.
        head_offsets: offset of KV head h of H in a branch of rate r: ``"interleaved"`` is
            h mod r (the LongNet paper), ``"blocked"`` is h // ceil(H / r) (torchscale).
        head_branches: ``"all"``: every head runs every branch (the paper). ``"split"``: the heads
            are cut into one contiguous group per branch, the first H mod G of the G groups one
            head larger, and all heads of group g take offset g mod r (dilated-attention-pytorch);
            `head_offsets` must then keep its default, since the group decides the offset.
        zero_keys: whether segments with too few keys for a head are filled up with keys of score 0
            and value 0, which count in the softmax (torchscale pads with zeros and does not mask
            them). In each segment a head then has ceil(min(w, document length) / r) keys; those
            that do not exist, in a short last segment or where r does not divide it, are zero keys.
            They come last, so causal queries do not see them. False, the default: there are none
            (the paper).
        head_slice: the KV heads that the pattern is for, of how many; see `of_heads`. None, the
            default: all of those that a call has.

    Raises:
        TypeError: a length or rate is not an int, a window not made of two ints, `zero_keys` not a
            bool, or `head_slice` not made of three ints.
        ValueError: a length or rate is below 1 or not below 2**63, a side of a window is negative,
            the lists differ in length, are empty or hold more than 1000 branches, or an option has
            an unknown value.

    Examples:
        >>> DilatedPattern([2048, 4096, None], [1, 2, 4]).branches[1].dilation_rate
        2
        >>> print(DilatedPattern([Window(1023), None], [1, 64]))
        (window 1023, 1) (document, 64)
    """

    segment_lengths: Sequence[Length]  # kept as a tuple
    dilation_rates: Sequence[int]  # kept as a tuple
    _: KW_ONLY
    head_offsets: HeadOffsets = "interleaved"
    head_branches: HeadBranches = "all"
    zero_keys: bool = False
    head_slice: Sequence[int] | None = None  # kept as a HeadSlice

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise TypeError(
                    f"{name} must be a list of ints, one per branch; got {in_brief(values)}"
                )
        count = len(self.segment_lengths)
        if count != len(self.dilation_rates) or not 1 <= count <= MOST_BRANCHES:
            raise ValueError(
                "segment_lengths and dilation_rates need one value each per branch, and at least "
                f"one branch and at most {MOST_BRANCHES}; got {count} and "
                f"{len(self.dilation_rates)} of them"
            )
        check_choice("head_offsets", self.head_offsets, HEAD_OFFSETS)
        check_choice("head_branches", self.head_branches, HEAD_BRANCHES)
        if self.head_branches == "split" and self.head_offsets != "interleaved":
            raise ValueError(
                "head_branches='split' takes each head's offset from its group, so head_offsets "
                f"must keep its default 'interleaved'; got {self.head_offsets!r}"
            )
        check_bool("zero_keys", self.zero_keys)
        kept = {
            "segment_lengths": tuple(map(_check_length, self.segment_lengths)),
            "dilation_rates": tuple(
                check_positive_int("a dilation rate", r) for r in self.dilation_rates
            ),
            "head_slice": None if self.head_slice is None else check_head_slice(self.head_slice),
        }
        for field, value in kept.items():
            object.__setattr__(self, field, value)

    @classmethod
    def dense(cls) -> DilatedPattern:
        """Dense attention over the whole document: one branch, ``(None, 1)``."""
        return cls([None], [1])

    @classmethod
    def window(cls, left: int, right: int = 0, dilation_rate: int = 1) -> DilatedPattern:
        """A sliding window: one branch, in which every query sees the positions around it.

        Args:
            left: how many positions before itself a query sees; >= 0. A model's ``sliding_window``
                of w, which counts the query, is ``left = w - 1``.
            right: how many positions behind itself; >= 0. With a causal mask none, whatever it is.
            dilation_rate: of these positions every r-th, counted from the query.

        Raises:
            TypeError, ValueError: an argument is not as described above.

        Examples:
            >>> print(DilatedPattern.window(1023))
            (window 1023, 1)
        """
        return cls([Window(left, right)], [dilation_rate])

    @classmethod
    def geometric(
        cls,
        length: int,
        first: int = 2048,
        factor: int = 2,
        *,
        head_offsets: HeadOffsets = "interleaved",
        zero_keys: bool = False,
    ) -> DilatedPattern:
        """The series of LongNet's paper, continued until a segment spans the sequence.

        Branch i has segments of ``first * factor**i`` positions and rate ``factor**i``, so that a
        head has `first` keys in a segment of every branch (arXiv 2307.02486, section 2.4). The last
        branch is the first one whose segments have at least `length` positions. Where ``first >=
        length`` there is one branch, which is dense attention.

        All positions influence each other within a few layers, which they never do where segments
        are nested and the longest is shorter than the sequence: with LongNet's five branches,
        positions of different blocks of 32,768. With a causal mask, the last positions of a
        segment may influence no later segment: the branches that cross its end may skip them.

        Args:
            length: of the longest sequence (or document), in positions. A longer one is cut into
                blocks of the longest segment.
            first: length of the shortest segments, in positions, 2048 as in LongNet; a multiple of
                `factor`, so that the next branch connects the first positions of all segments.
            factor: ratio of segment lengths, and of rates, of two consecutive branches; >= 2.
            head_offsets: see `DilatedPattern`.
            zero_keys: see `DilatedPattern`.

        Raises:
            TypeError, ValueError: an argument is not as described above.

        Examples:
            >>> print(DilatedPattern.geometric(100_000, first=16_384))
            (16384, 1) (32768, 2) (65536, 4) (131072, 8)
        """
        length, width = check_positive_int("length", length), check_positive_int("first", first)
        factor = check_positive_int("factor", factor)
        if factor == 1 or width % factor:
            raise ValueError(
                "factor must be >= 2, or no segment would span the sequence, and first a multiple "
                f"of factor; got first {in_brief(width)} and factor {in_brief(factor)}"
            )
        rates = [1]
        while width * rates[-1] < length:
            rates.append(factor * rates[-1])
        lengths = [width * rate for rate in rates]
        return cls(lengths, rates, head_offsets=head_offsets, zero_keys=zero_keys)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The (segment length, dilation rate) pairs, in the order given."""
        return tuple(map(Branch, self.segment_lengths, self.dilation_rates))

    @property
    def mixes_branches(self) -> bool:
        """Whether a head may run more than one branch."""
        return len(self.dilation_rates) > 1 and self.head_branches == "all"

    @property
    def heads_are_alike(self) -> bool:
        """Whether all heads see the same keys: they run all branches, and none has offsets."""
        return self.head_branches == "all" and all(x.stride == 1 for x in self.branches)

    @property
    def has_windows(self) -> bool:
        """Whether a branch is a sliding window."""
        return any(isinstance(x, Window) for x in self.segment_lengths)

    def single_branches(self) -> Iterator[DilatedPattern]:
        """The pattern of each branch by itself, where heads run all of them."""
        for segment_length, rate in self.branches:
            yield replace(self, segment_lengths=(segment_length,), dilation_rates=(rate,))

    def slice_for(
        self, head_slice: Sequence[int] | None, num_kv_heads: int
    ) -> Sequence[int] | None:
        """The `head_slice` of the pattern of a call; None where all heads are alike.

        Args:
            head_slice: as given to the call: (start, stop, total); None: that of the pattern.
            num_kv_heads: KV heads of the call.

        Raises:
            TypeError, ValueError: it is not three ints, or names other heads than the call or the
                pattern has.
        """
        if head_slice is None:
            return self.head_slice
        given = check_head_slice(head_slice)
        if given.stop - given.start != num_kv_heads:
            raise ValueError(
                f"head_slice {tuple(given)} names {given.stop - given.start} of {given.total} KV "
                f"heads; the call has {num_kv_heads}"
            )
        if self.head_slice is not None and self.head_slice != given:
            raise ValueError(
                f"the pattern is for head_slice {tuple(self.head_slice)}; the call has "
                f"head_slice {tuple(given)}"
            )
        return None if self.heads_are_alike or num_kv_heads == given.total else given

    def of_heads(self, head_slice: Sequence[int] | None, num_kv_heads: int) -> DilatedPattern:
        """The pattern of some of a layer's KV heads, counted from 0 in it; see `slice_for`."""
        found = self.slice_for(head_slice, num_kv_heads)
        return self if found == self.head_slice else replace(self, head_slice=found)

    def heads(self, branch: int, num_kv_heads: int) -> tuple[HeadOffset, ...]:
        """The KV heads that run branch number `branch`, in order, each with its offset.

        An offset lies in [0, dilation rate); one at or past a segment's end sees nothing in it.

        Raises:
            ValueError: the pattern is for another number of heads than `num_kv_heads`.
        """
        start, stop, total = self.head_slice or (0, num_kv_heads, num_kv_heads)
        if num_kv_heads != stop - start:
            raise ValueError(
                f"the pattern is for {stop - start} KV heads (head_slice {start, stop, total}); "
                f"the call has {num_kv_heads}"
            )
        rate = self.branches[branch].stride
        if self.head_branches == "split":
            small, larger = divmod(total, len(self.dilation_rates))
            first = branch * small + min(branch, larger)
            count = small + (branch < larger)
            every = [(head, branch % rate) for head in range(first, first + count)]
        elif self.head_offsets == "blocked":
            every = [(head, head // -(-total // rate)) for head in range(total)]
        else:
            every = [(head, head % rate) for head in range(total)]
        return tuple(HeadOffset(h - start, o) for h, o in every if start <= h < stop)

    def __str__(self) -> str:
        given = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.kw_only}
        options = "".join(
            f", {name}={tuple(value) if name == 'head_slice' else value!r}"
            for name, (value, default) in given.items()
            if value != default
        )
        return " ".join(map(str, self.branches)) + options
