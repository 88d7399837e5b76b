"""Single rows recomputed from the defining sums."""

from typing import Any

import pytest
import torch
from support.bounds import SUMMED_IN_FLOAT32

from ring_dilated_attention import DilatedPattern, SequenceLayout, SoloExchange, dilated_attention
from ring_dilated_attention.checks import Shard, spot_check
from ring_dilated_attention.exchange import run_loopback

PATTERN = DilatedPattern([7, 20, 64, None], [1, 2, 6, 9])


def errors(layout, is_causal, head, change=None):
    borders = {border for ranges in layout.ranges for each in ranges for border in each}
    positions = sorted({0, 17, 63, 64, *(p for b in borders for p in (b - 1, b) if 0 <= p < 131)})

    def rank(ends):
        torch.manual_seed(ends.rank)
        shape = 1, layout.local_length(ends.rank), 4, 8
        query, key, value, dout = (torch.randn(shape) for _ in range(4))
        leaves = [x.requires_grad_() for x in (query, key, value)]
        options: dict[str, Any] = {"is_causal": is_causal, "group": ends, "layout": layout}
        out, lse = dilated_attention(query, key, value, PATTERN, return_lse=True, **options)
        tensors = [*leaves, out, lse, dout, *torch.autograd.grad(out, leaves, dout)]
        shard = Shard(*(x.detach() for x in tensors))
        if change is not None:
            changed = getattr(shard, change)
            (changed.transpose(1, 2) if change == "lse" else changed)[:, -1] += 1.0
        return spot_check(shard, PATTERN, layout, ends, positions, head=head, is_causal=is_causal)

    found = run_loopback(layout.world_size, rank)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_spot_check_finds_right_rows_right(world_size, is_causal):
    for head, make in ((0, SequenceLayout.contiguous), (3, SequenceLayout.zigzag)):
        found = errors(make(131, world_size), is_causal, head)
        assert set(found) == {"out", "lse", "dquery", "dkey", "dvalue"}
        assert max(found.values()) < SUMMED_IN_FLOAT32


@pytest.mark.parametrize("name", ["out", "lse", "dquery", "dkey", "dvalue"])
def test_spot_check_finds_a_wrong_row_at_a_border(name):
    assert errors(SequenceLayout.contiguous(131, 3), False, 0, change=name)[name] > 0.01


def test_spot_check_of_a_position_that_no_branch_shows_anything():
    query = torch.randn(1, 8, 1, 4, dtype=torch.float64)
    pattern, layout = DilatedPattern([8], [4]), SequenceLayout.contiguous(8, 1)
    out, lse = dilated_attention(query, query, query, pattern, return_lse=True)
    shard = Shard(query, query, query, out, lse)
    assert spot_check(shard, pattern, layout, SoloExchange(), [1]) == {"out": 0.0, "lse": 0.0}
    shard = shard._replace(out=out + 1)
    assert spot_check(shard, pattern, layout, SoloExchange(), [1]) == {"out": 2.0, "lse": 0.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": DilatedPattern([4], [2], zero_keys=True)}, "no zero keys"),
        ({"layout": SequenceLayout.contiguous(7, 1)}, "gives rank 0 a shard of 7 positions, got"),
        ({"positions": [3, 6]}, r"positions must lie in \[0, 6\); got 6"),
        ({"head": 2}, r"head must lie in \[0, 2\); got 2"),
        ({"key": torch.zeros(1, 6, 1, 4)}, r"key must have shape .* got \(1, 6, 1, 4\)"),
        ({"lse": torch.zeros(1, 6, 2)}, r"lse must have shape \(1, 2, 6\)"),
        ({"dout": torch.zeros(1, 6, 2, 4)}, "must all be given, or none"),
    ],
)
def test_spot_check_refuses(given, message):
    x = torch.zeros(1, 6, 2, 4)
    others = {name: value for name, value in given.items() if name in Shard._fields}
    call = {
        "shard": Shard(x, x, x, x, torch.zeros(1, 2, 6))._replace(**others),
        "pattern": DilatedPattern([4], [2]),
        "layout": SequenceLayout.contiguous(6, 1),
        "ends": SoloExchange(),
        "positions": [0],
        **{name: value for name, value in given.items() if name not in others},
    }
    with pytest.raises((TypeError, ValueError), match=message):
        spot_check(**call)
