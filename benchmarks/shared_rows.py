"""Rows that branches share in a message: torch's index operations beside our kernels, on one GPU.

    python benchmarks/shared_rows.py                     # a GigaPath layer of rank 0 of two
    python benchmarks/shared_rows.py --tiles 45680 --ranks 4
    python benchmarks/shared_rows.py --small             # CPU, interpreted: TRITON_INTERPRET=1

What a rank packs, spreads, sums and adds in a forward and backward pass of one layer. Each round
times all of them one after the other; a row is the median of the rounds, the least and the largest.
GB/s are the bytes of rows that must be read and written. The difference is relative to a sum in
float64: torch adds half precision by atomics, which round each time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from decode_kernel import milliseconds

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.engine.transfer import received_rows, sent_rows
from ring_dilated_attention.kernels.rows import add_to_rows, sum_slots, take_rows
from ring_dilated_attention.named_patterns import named
from ring_dilated_attention.plan import Message, plan_attention


class Timed(NamedTuple):
    """An operation, in both ways, each of which returns what it makes."""

    name: str
    rows: int  # read or written, whichever are more
    nbytes: int
    by_torch: Callable[[], torch.Tensor]
    by_kernel: Callable[[], torch.Tensor]


def sender(message: Message, key: torch.Tensor, value: torch.Tensor) -> list[Timed]:
    """What is done with rows that are sent: packed, twice; their gradients are added."""
    table = sent_rows(message, key.shape[2], key.device).table
    assert table is not None, "branches share no row of this message"
    positions, heads = table
    dkey, dvalue = torch.randn_like(key), torch.randn_like(value)
    returned = torch.randn_like(torch.stack([key[:, positions, heads]] * 2))

    def pack_by_torch() -> torch.Tensor:
        return torch.stack([tensor[:, positions, heads] for tensor in (key, value)])

    def pack_by_kernel() -> torch.Tensor:
        packed = torch.empty_like(returned)
        take_rows((key, value), packed, positions, heads)
        return packed

    def add_by_torch() -> torch.Tensor:
        flat = positions * dkey.shape[2] + heads
        for gradient, part in zip((dkey, dvalue), returned, strict=True):
            total = gradient.flatten(1, 2)
            summed = total.index_select(1, flat) + part
            total.index_copy_(1, flat, summed.to(total.dtype))
        return dkey

    def add_by_kernel() -> torch.Tensor:
        add_to_rows((dkey, dvalue), returned, positions, heads)
        return dkey

    return [
        Timed("pack, forward and backward", message.rows, 2 * returned.nbytes, pack_by_torch,
              pack_by_kernel),
        Timed("add what was returned", message.rows, 3 * returned.nbytes, add_by_torch,
              add_by_kernel),
    ]  # fmt: skip


def receiver(message: Message, key: torch.Tensor) -> list[Timed]:
    """What is done with rows that are received: spread, twice; gradients of slots are summed."""
    table, head_dim = received_rows(message, key.shape[2], key.device).table, key.shape[3]
    assert table is not None, "branches share no row of this message"
    packed = key.new_empty(2, 1, message.rows, head_dim).normal_()
    slots = key.new_empty(2, 1, message.slots, head_dim).normal_()

    def spread_by_torch() -> torch.Tensor:
        return packed.index_select(2, table.row_of_slot)

    def spread_by_kernel() -> torch.Tensor:
        found = torch.empty_like(slots)
        take_rows((packed[0], packed[1]), found, table.row_of_slot)
        return found

    def sum_by_torch() -> torch.Tensor:
        return torch.zeros_like(packed).index_add_(2, table.row_of_slot, slots)

    def sum_by_kernel() -> torch.Tensor:
        sums = torch.empty_like(packed)
        sum_slots(slots, sums, table.slots, table.starts)
        return sums

    want = torch.zeros_like(packed, dtype=torch.float64)
    want.index_add_(2, table.row_of_slot, slots.double())
    for name, found in (("torch", sum_by_torch()), ("kernel", sum_by_kernel())):
        print(f"sum by {name}: differs by {float((found - want).norm() / want.norm()):.1e}")
    nbytes = packed.nbytes + slots.nbytes
    return [
        Timed("spread, forward and backward", message.slots, nbytes, spread_by_torch,
              spread_by_kernel),
        Timed("sum gradients of slots", message.slots, nbytes, sum_by_torch, sum_by_kernel),
    ]  # fmt: skip


def check(timed: Timed) -> None:
    """Copies are the same, and what is added or summed differs by rounding alone."""
    if "add" in timed.name:  # in place, twice: what is added is the same
        before = timed.by_torch().clone()
        after = timed.by_torch().clone()
        again = timed.by_kernel()
        difference = (again - after).float() - (after - before).float()
    else:
        after = timed.by_torch()
        difference = after.float() - timed.by_kernel().float()
    error = float(difference.norm() / after.float().norm())
    assert error < 2e-3, f"{timed.name}: {error}"
    assert error == 0 or "sum" in timed.name or "add" in timed.name, timed.name


def main() -> None:
    """Check and time all of them; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--small", action="store_true", help="few tiles, on the CPU")
    options = parser.parse_args()
    if options.small:
        options.tiles, options.rounds = 200, 1
    device = torch.device("cpu" if options.small else "cuda")
    torch.manual_seed(0)
    pattern = named("gigapath")
    layout = SequenceLayout.contiguous(options.tiles + 1, options.ranks)
    heads = pattern.num_heads
    plan = plan_attention(pattern.pattern, layout, is_causal=False, num_heads=heads)
    step = next(iter(plan.rank(0).steps()))
    assert step.send is not None
    assert step.receive is not None
    shape = 1, layout.local_length(0), heads, pattern.head_dim
    key, value = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(2))
    operations = [*sender(step.send, key, value), *receiver(step.receive, key)]
    for each in operations:
        check(each)
    taken: dict[str, list[tuple[float, float]]] = {each.name: [] for each in operations}
    for _ in range(options.rounds + 1):
        for each in operations:
            both = milliseconds(each.by_torch, device), milliseconds(each.by_kernel, device)
            taken[each.name].append(both)
    print(f"{options.tiles + 1:,} positions on {options.ranks} ranks, {heads} x {shape[3]}, fp16")
    print(f"{'':30} {'rows':>9}  {'torch ms':26}  {'kernel ms':26}  GB/s")
    layer = [0.0, 0.0]
    for each in operations:
        columns = list(zip(*taken[each.name][-options.rounds :], strict=True))
        times = 2 if "backward" in each.name else 1
        layer = [x + times * statistics.median(y) for x, y in zip(layer, columns, strict=True)]
        cells = [f"{statistics.median(x):.4f} [{min(x):.4f} .. {max(x):.4f}]" for x in columns]
        rate = each.nbytes / statistics.median(columns[1]) / 1e6
        print(f"{each.name:30} {each.rows:9,}  {cells[0]:26}  {cells[1]:26}  {rate:,.0f}")
    print(f"{'all of a layer':41}{layer[0]:.4f}{'':22}{layer[1]:.4f}")


if __name__ == "__main__":
    main()
