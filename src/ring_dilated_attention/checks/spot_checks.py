"""Recompute single rows of a sharded result in float64, from the defining sums.

For sequences too long for any reference: what a row needs are the positions that its branches show
it, a few thousand however long the sequence is. Ranks share those rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..exchange import Exchange, all_gather
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_int, in_brief


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


def positions_to_check(
    pattern: DilatedPattern, layout: SequenceLayout, *, seed: int, each: int = 2
) -> list[int]:
    """Positions at random, `each` in every branch and on both sides of every border of ranks.

    A position is in a branch where head 0 takes part in it there.
    """
    generator = torch.Generator().manual_seed(seed)
    length = layout.length

    def draw(stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=generator))

    positions = {0, length - 1}
    count = 1 if pattern.head_slice is None else pattern.head_slice.stop - pattern.head_slice.start
    for branch, (w, rate) in enumerate(pattern.branches):
        w = length if w is None else min(w, length)
        heads = pattern.heads(branch, count)
        offset = next((o for head, o in heads if head == 0), None)
        for _ in range(each if offset is not None and offset < w else 0):
            start = draw(-(-length // w)) * w
            rows = range(start + (offset or 0), min(start + w, length), rate)
            if rows:
                positions.add(rows[draw(len(rows))])
    for ranges in layout.ranges:
        for start, stop in ranges:
            positions |= {p for p in (start - 1, start, stop - 1, stop) if 0 <= p < length}
    return sorted(positions)


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

    dK and dV are recomputed from the queries that see the position, with their lse and out as the
    call returned them.

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
        TypeError, ValueError: an argument has the wrong type, or is not as described above.
    """
    _check(shard, pattern, layout, ends, positions, head)
    rows = _Rows(shard, layout, ends, head)
    squares: dict[str, list[float]] = {}
    for position in positions:
        seen = _seen(pattern, layout.length, position, head, shard.query.shape[2])
        before = [p for p in seen if p <= position] if is_causal else seen
        behind = [p for p in seen if p >= position] if is_causal else seen
        got = rows.at([position])
        want = _expected(got, rows.at(before), rows.at(behind))
        for name, expected in want.items():
            errors = squares.setdefault(name, [0.0, 0.0])
            own = got[name][0]  # both lse are -inf at a position that no branch shows anything
            errors[0] += float(torch.where(own == expected, 0.0, own - expected).square().sum())
            errors[1] += float(expected.nan_to_num(neginf=0.0).square().sum())
    # Where nothing is expected, what there is is the error.
    return {name: (error / (size or 1.0)) ** 0.5 for name, (error, size) in squares.items()}


def _check(
    shard: Shard,
    pattern: DilatedPattern,
    layout: SequenceLayout,
    ends: Exchange,
    positions: Sequence[int],
    head: int,
) -> None:
    """Raise unless `spot_check` can tell what the rows should be."""
    for name, value, kind in (
        ("shard", shard, Shard),
        ("pattern", pattern, DilatedPattern),
        ("layout", layout, SequenceLayout),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {in_brief(value)}")
    if pattern.zero_keys:
        raise ValueError("pattern must have no zero keys, which a spot check leaves out")
    shape = shard.query.shape
    if len(shape) != 4 or shape[0] != 1 or not shape == shard.key.shape == shard.value.shape:
        raise ValueError(
            "a spot check takes a batch of 1 and as many KV heads as query heads; got query "
            f"{tuple(shape)}, key {tuple(shard.key.shape)}, value {tuple(shard.value.shape)}"
        )
    layout.check_shard(ends.rank, ends.world_size, shape[1], f"got a query of shape {tuple(shape)}")
    for name, tensor in shard._asdict().items():
        expected = (1, shape[2], shape[1]) if name == "lse" else tuple(shape)
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} must have shape {expected}, as query has {tuple(shape)}; got "
                f"{tuple(tensor.shape)}"
            )
    missing = [x is None for x in (shard.dout, shard.dquery, shard.dkey, shard.dvalue)]
    if any(missing) and not all(missing):
        raise ValueError("dout, dquery, dkey and dvalue must all be given, or none of them")
    if not 0 <= check_int("head", head) < shape[2]:
        raise ValueError(f"head must lie in [0, {shape[2]}); got {head}")
    for position in positions:
        if not 0 <= check_int("positions", position) < layout.length:
            raise ValueError(f"positions must lie in [0, {layout.length}); got {position}")


class _Rows:
    """Rows of one head of a sharded call, wherever they are held."""

    def __init__(self, shard: Shard, layout: SequenceLayout, ends: Exchange, head: int) -> None:
        self._ends, self._ranges = ends, layout.ranges[ends.rank]
        self._tensors = {
            name: (x if name == "lse" else x.transpose(1, 2))[0, head]
            for name, x in shard._asdict().items()
            if x is not None
        }

    def at(self, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Every tensor's rows at `positions`, float64: (rows, head_dim), lse (rows,)."""
        local: list[int] = []
        places: list[int] = []
        before = 0
        for start, stop in self._ranges:
            mine = [(i, p) for i, p in enumerate(positions) if start <= p < stop]
            places.extend(i for i, _ in mine)
            local.extend(before + p - start for _, p in mine)
            before += stop - start
        found = {}
        for name, tensor in self._tensors.items():
            rows = torch.zeros(
                len(positions), *tensor.shape[1:], dtype=torch.float64, device=tensor.device
            )
            rows[places] = tensor[local].double()
            with self._ends.calls.enter("spot_check", "rows"):
                found[name] = torch.stack(all_gather(self._ends, rows)).sum(0)
        return found


def _seen(
    pattern: DilatedPattern, length: int, position: int, head: int, num_heads: int
) -> list[int]:
    """The positions that a head's branches show at `position`, each as often as they do."""
    seen: list[int] = []
    for branch, (w, rate) in enumerate(pattern.branches):
        w = length if w is None else min(w, length)
        start = position - position % w
        for number, offset in pattern.heads(branch, num_heads):
            rows = range(start + offset, min(start + w, length), rate)
            if number == head and position in rows:
                seen.extend(rows)
    return seen


def _expected(
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
