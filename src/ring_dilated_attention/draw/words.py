"""Numbers and branches as pictures write them."""

from __future__ import annotations

from ..pattern import Branch
from ..plan import AttentionPlan, costs
from ..terminal import in_bytes
from .mask import rows_sent

MOST_SUMMED_RANKS = 128
"""Whose bytes are added up, pair by pair of ranks, in less than a second or so."""


def in_units(position: int) -> str:
    """A position; multiples of 1,024 from 4K on as the options take them, such as 256K or 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if position >= 1 << 12 and position % size == 0:
            return f"{position // size:,}{unit}"
    return f"{position:,}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that suits a time, and how many of it a second has."""
    for name, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return name, factor
    return "µs", 1e6


def branch_in_words(branch: Branch) -> str:
    """Which keys a branch shows."""
    length, rate = branch
    where = "the whole document" if length is None else f"segments of {length:,}"
    return f"{where}, {'every key' if rate == 1 else f'every {_ordinal(rate)} key'}"


def _ordinal(number: int) -> str:
    teens = number % 100 in (11, 12, 13)
    return f"{number:,}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def plan_in_words(plan: AttentionPlan, layout_name: str | None = None) -> str:
    """What a picture shows: length, ranks and their layout, causal or not, documents."""
    ranks, count = plan.layout.world_size, len(plan.documents) - 1
    words = [f"{plan.layout.length:,} positions"]
    if layout_name is not None:
        words.append("1 rank" if ranks == 1 else f"{ranks:,} ranks ({layout_name})")
    words.append("causal" if plan.is_causal else "not causal")
    if count > 1:
        words.append(f"{count:,} documents")
    return ", ".join(words)


def sent_in_words(plan: AttentionPlan, size: costs.TensorSize, drawn: range) -> str:
    """How many bytes of K and V the ranks send each other in forward, in all and at most.

    Args:
        plan: of all ranks.
        size: what turns rows into bytes.
        drawn: the first ranks; the numbers are theirs where there are more than
            `MOST_SUMMED_RANKS`, and those of all ranks elsewhere.
    """
    count = plan.layout.world_size
    is_whole = count <= max(MOST_SUMMED_RANKS, len(drawn))
    sent = rows_sent(plan, range(count) if is_whole else drawn)
    nbytes = [size.key_value_bytes(int(rows)) for rows in sent.ravel()]
    scope = "in all" if is_whole else f"among the first {len(drawn):,} of {count:,} ranks"
    one = "one rank to another" if is_whole else "one of them to another"
    return f"{in_bytes(sum(nbytes))} {scope}; at most {in_bytes(max(nbytes))} from {one}"


def kv_head_of(plan: AttentionPlan, head: int) -> int:
    """The KV head of a query head.

    Raises:
        ValueError: there is no such head.
    """
    if not 0 <= head < plan.num_heads:
        raise ValueError(
            f"a head to draw must lie in [0, {plan.num_heads}), the query heads; got {head}"
        )
    return head // (plan.num_heads // plan.num_kv_heads)
