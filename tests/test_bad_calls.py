"""Every bad call is a clear error on every rank, and nothing hangs."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.testing import run_loopback, run_ranks


def call(group=None, **changes):
    shape = changes.pop("shape", (1, 6, 4, 8))
    arguments = {
        "query": torch.randn(shape),
        "key": torch.randn(shape),
        "value": torch.randn(shape),
        "pattern": DilatedPattern([4], [2]),
        "group": group,
        **changes,
    }
    positional = [arguments.pop(name) for name in ("query", "key", "value", "pattern")]
    return dilated_attention(*positional, **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "query must be a tensor, got [1.0]"),
        ({"query": torch.randn(6, 4, 8)}, ValueError, "query must have 4 dimensions"),
        ({"query": torch.ones(1, 6, 4, 8, dtype=torch.int64)}, TypeError, "got torch.int64"),
        (
            {"key": torch.randn(1, 6, 4, 8).double()},
            ValueError,
            "one dtype; got query torch.float32",
        ),
        ({"key": torch.empty(1, 6, 4, 8, device="meta")}, ValueError, "one device; got query cpu"),
        ({"value": torch.randn(1, 6, 2, 8)}, ValueError, "key and value must have the same shape"),
        ({"query": torch.randn(2, 6, 4, 8)}, ValueError, "the same batch size"),
        ({"query": torch.randn(1, 5, 4, 8)}, ValueError, "the same local sequence length"),
        ({"query": torch.randn(1, 6, 4, 16)}, ValueError, "the same head_dim"),
        ({"query": torch.randn(1, 6, 6, 8)}, ValueError, "heads must be a multiple of kv_heads"),
        ({"shape": (1, 6, 0, 8)}, ValueError, "must be >= 1"),
        ({"shape": (1, 0, 4, 8)}, ValueError, "the sequence is empty"),
        ({"pattern": [(4, 2)]}, TypeError, "pattern must be a DilatedPattern"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"return_lse": "yes"}, TypeError, "return_lse must be a bool"),
        ({"scale": "big"}, TypeError, "scale must be a float or None, got 'big'"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"workspace": "much"}, TypeError, "workspace must be a float or None, got 'much'"),
        ({"workspace": 0}, ValueError, "workspace must be > 0 and finite, got 0"),
        ({"layout": [(0, 6)]}, TypeError, "layout must be a SequenceLayout"),
        ({"layout": SequenceLayout.contiguous(6, 2)}, ValueError, "for 2 ranks; the group has 1"),
        ({"layout": SequenceLayout.contiguous(7, 1)}, ValueError, "gives rank 0 7 positions"),
        ({"exchange": "mail"}, ValueError, "exchange must be one of 'auto', 'ring', 'gather'"),
        ({"backend": "magic"}, ValueError, "backend must be one of 'auto', 'sdpa', 'fa4'"),
        ({"backend": "flash"}, ValueError, "backend='flash' cannot compute this attention"),
        ({"group": "world"}, TypeError, "group must be a torch.distributed ProcessGroup"),
    ],
)
def test_one_process(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


DIFFERENCES = {
    "batch is 1 on ranks 0, 2, 2 on rank 1": {"shape": (2, 6, 4, 8)},
    "layout is 6 positions on each rank on ranks 0, 2": {"shape": (1, 5, 4, 8)},
    "heads is 4 on ranks 0, 2, 2 on rank 1": {"shape": (1, 6, 2, 8)},
    "head_dim is 8 on ranks 0, 2, 16 on rank 1": {"shape": (1, 6, 4, 16)},
    "pattern is (4, 2) on ranks 0, 2, (4, 3) on rank 1": {"pattern": DilatedPattern([4], [3])},
    "is_causal is False on ranks 0, 2, True on rank 1": {"is_causal": True},
    "scale is None on ranks 0, 2, 0.5 on rank 1": {"scale": 0.5},
    "exchange is auto on ranks 0, 2, ring on rank 1": {"exchange": "ring"},
    "backend is auto on ranks 0, 2, eager on rank 1": {"backend": "eager"},
    "layout is": {"layout": SequenceLayout.zigzag(18, 3)},
    "dtype is torch.float32 on ranks 0, 2, torch.float64 on rank 1": {
        name: torch.randn(1, 6, 4, 8, dtype=torch.float64) for name in ("query", "key", "value")
    },
    "needs gradients is False on ranks 0, 2, True on rank 1": {
        "query": torch.randn(1, 6, 4, 8, requires_grad=True)
    },
    # What one rank refuses by itself is an error on all.
    "head_dim": {"key": torch.randn(1, 6, 4, 16)},
    "scale must be finite": {"scale": float("inf")},
    "rank 1 6 positions, its query has a local sequence length of 5": {
        "layout": SequenceLayout.contiguous(18, 3),
        "shape": (1, 5, 4, 8),
    },
}


def attempt(ends, rank, changes):
    try:
        call(ends, **(changes if rank == 1 else {}))
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("message", DIFFERENCES)
def test_ranks_that_differ(message):
    changes = DIFFERENCES[message]

    def rank(ends):
        call(ends)  # a good call first: nothing that was seen before may hide the difference
        return attempt(ends, ends.rank, changes)

    for text in run_loopback(3, rank):
        assert message in text, text


def _processes(rank, world_size):
    group = dist.group.WORLD
    texts = []
    for changes in DIFFERENCES.values():
        texts.append(attempt(group, rank, changes))
        assert call(group).shape == (1, 6, 4, 8)  # the group still works
    pair = dist.new_group([0, 2])
    row = init_device_mesh("cpu", (3, 1))
    for bad in (pair, row):
        try:
            call(bad)
            texts.append("no error")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_ranks_that_differ_over_gloo():
    by_rank = run_ranks(_processes, 3)
    for rank, texts in enumerate(by_rank):
        *differences, not_member, not_flat = texts
        for message, text in zip(DIFFERENCES, differences, strict=True):
            assert message in text
        assert ("rank 1 is not a member" in not_member) == (rank == 1)
        assert "group must be a 1-D DeviceMesh; got 2 dimensions" in not_flat


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    def rank(ends):
        if ends.rank == 1:
            raise KeyError("lost")
        return call(ends)

    with pytest.raises(KeyError, match="lost"):
        run_loopback(3, rank)
