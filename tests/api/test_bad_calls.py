"""Every bad call is one clear line, on every rank, and nothing hangs."""

# Arguments of wrong types are what is tested.
# mypy: disable-error-code="arg-type, call-arg, call-overload, list-item, misc, type-var"

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import (
    AttentionOptions,
    DilatedPattern,
    ExchangeError,
    SequenceLayout,
    detached_dilated_attention,
    dilated_attention,
    nn,
)
from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.options import OptionFields

SHAPE = 2, 6, 4, 8
PATTERN = DilatedPattern([4, None], [2, 1])
MASK = torch.zeros(2, 6, dtype=torch.bool)
ORDER = torch.tensor([0, 2, 1])
THREE = SequenceLayout.contiguous(6, 3)
BIG = 2**70
HUGE = 10**400  # has no float, and more than 300 digits
LONG = "x" * 999
ARRAY = np.zeros(9999)


def call(group=None, **changes):
    shape = changes.pop("shape", SHAPE)
    tensors = {name: torch.randn(shape) for name in ("query", "key", "value")}
    arguments: dict[str, Any] = {**tensors, "pattern": PATTERN, "group": group, **changes}
    positional = [arguments.pop(name) for name in ("query", "key", "value", "pattern")]
    return dilated_attention(*positional, **arguments)


def layer(embed_dim=16, num_heads=2, **changes):
    arguments = {"segment_lengths": [4], "dilation_rates": [2], **changes}
    return nn.MultiheadDilatedAttention(embed_dim, num_heads, **arguments)


def multihead(**changes):
    tensor = torch.randn(1, 6, 16)
    return layer()(**{"query": tensor, "key": tensor, "value": tensor, **changes})


def refused(function, *arguments, **named):
    """The type and text of an error, which is one clear line."""
    with pytest.raises((TypeError, ValueError)) as found:
        function(*arguments, **named)
    text = str(found.value)
    assert 10 < len(text) <= 300, text
    assert "\n" not in text
    assert type(found.value) in (TypeError, ValueError)  # no UnicodeError and the like
    return type(found.value), text


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "query must be a tensor, got type list": {"query": [1.0]},
    "got torch.int64": {"query": torch.ones(SHAPE, dtype=torch.int64)},
    "DilatedPattern([2048, None], [1, 4]), got type list": {"pattern": [(4, 2)]},
    "is_causal must be a bool, got 1": {"is_causal": 1},
    "return_lse must be a bool": {"return_lse": "yes"},
    "scale must be a float or None, got 'big'": {"scale": "big"},
    "workspace must be a float or None, got 'much'": {"workspace": "much"},
    "SequenceLayout.zigzag(length, ranks) makes one": {"layout": "zigzag"},
    "group must be a torch.distributed ProcessGroup": {"group": "world"},
    "an Exchange or None; got type list": {"group": [torch.zeros(9)]},
    "dilated_attention has no option 'dropout'; AttentionOptions has is_causal": {"dropout": 0.1},
    "must be an AttentionOptions, or its fields by name; got True": {"options": True},
    "each of documents must be an int, got 2.0": {"documents": [0, 2.0, 18]},
    "each of documents must be an int, got True": {"documents": [0, True, 18]},
    "documents must be a list of ints or a 1-D tensor of them; got 18": {"documents": 18},
    "documents must be int32 or int64; got torch.float32": {"documents": torch.tensor([0.0, 18])},
    "key_padding_mask must be a dense tensor, got type list": {"key_padding_mask": [[False]]},
    "True where a position is padding; got torch.int64: pass": {"key_padding_mask": MASK.long()},
}
WRONG_VALUES: dict[str, dict[str, Any]] = {
    "query must have 4 dimensions": {"query": torch.randn(6, 4, 8)},
    "one dtype; got query torch.float32, key torch.float64, value torch.float32. Cast them": {
        "key": torch.randn(SHAPE).double()
    },
    "one device; got query cpu": {"key": torch.empty(SHAPE, device="meta")},
    "key and value must have the same shape": {"value": torch.randn(2, 6, 2, 8)},
    "the same batch size": {"query": torch.randn(1, 6, 4, 8)},
    "the same local sequence length": {"query": torch.randn(2, 5, 4, 8)},
    "value (2, 6, 4, 8). Shapes are (batch, local_sequence, heads, head_dim)": {
        "query": torch.randn(2, 4, 6, 8)
    },
    "the same head_dim": {"query": torch.randn(2, 6, 4, 16)},
    "heads must be a multiple of kv_heads": {"query": torch.randn(2, 6, 6, 8)},
    "must be >= 1": {"shape": (1, 6, 0, 8)},
    "the sequence is empty": {"shape": (1, 0, 4, 8)},
    "scale must be > 0": {"scale": float("nan")},
    "workspace must be > 0 and finite, got 0": {"workspace": 0},
    "the group has 1: make": {"layout": SequenceLayout.contiguous(6, 2)},
    "layout.shard(tensor, rank, dim)": {"layout": SequenceLayout.contiguous(7, 1)},
    "exchange must be one of 'auto', 'ring', 'gather'": {"exchange": "mail"},
    "backend must be one of 'auto', 'sdpa', 'fa4'": {"backend": "magic"},
    "backend='flash' cannot compute this attention": {"backend": "flash"},
    "branch_gradients must be one of 'exact', 'detached'": {"branch_gradients": "no_grad"},
    "as group or as mesh, not as both": {"group": "world", "mesh": "world"},
    "documents must rise from 0 to the sequence length 6; got (0, 3)": {"documents": [0, 3]},
    "length 6; got (1, 6)": {"documents": [1, 6]},
    "got (0, 4, 3, 6)": {"documents": [0, 4, 3, 6]},
    "got (0, 1, 2, 3, 4, 5, ..., 19) (20 borders)": {"documents": range(20)},
    "documents must not be empty": {"documents": []},
    "documents must be 1-D; got shape (1, 2)": {"documents": torch.tensor([[0, 18]])},
    "lengths must lie in [0, 6], the sequence length; got 7": {"lengths": [3, 7]},
    "lengths must lie in [0, 6], the sequence length; got -1": {"lengths": [-1, 3]},
    "lengths must hold one number for each of 2 rows; got (3,)": {"lengths": [3]},
    "sequence length 5 or more, up to 6; got (0, 4)": {"documents": [0, 4], "lengths": [1, 5]},
    "pass lengths or key_padding_mask, not both": {"lengths": [1, 2], "key_padding_mask": MASK},
    "(batch, local_sequence), (2, 6); got (2, 18)": {"key_padding_mask": MASK.repeat(1, 3)},
    "must be a right padding (dilated attention has no other masks): in row 0, position 0 is": {
        "key_padding_mask": torch.arange(6).expand(2, 6) < 3
    },
}


@pytest.mark.parametrize("message", [*WRONG_TYPES, *WRONG_VALUES])
def test_one_process(message):
    kind, text = refused(call, **{**WRONG_TYPES, **WRONG_VALUES}[message])
    assert kind is (TypeError if message in WRONG_TYPES else ValueError)
    assert message in text


TENSORS = [
    *([1.0] * 10_000, np.zeros(SHAPE), None, LONG, torch.randn(SHAPE).to_sparse()),
    torch.randn(SHAPE, device="meta"),
    torch.randn(SHAPE, dtype=torch.complex64),
    torch.zeros(2, 0, 4, 8),
]
INTEGERS = [
    *([0, BIG], torch.tensor([0, 2**63 - 1]), [0, 6.0], [0, True], ["0" * 10_000], []),
    *(np.arange(10_000), torch.zeros(10_000), torch.zeros(2, 10_000, dtype=torch.int64)),
    torch.eye(3, dtype=torch.int64).to_sparse(),
    torch.zeros(3, dtype=torch.int64, device="meta"),
    list(range(5, 10_000)),
]
MASKS = [ARRAY, torch.zeros(2, 6), torch.zeros(9, 9).bool(), MASK.to_sparse()]
ODD_VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(("query", "key", "value"), TENSORS),
    **dict.fromkeys(("documents", "lengths"), INTEGERS),
    "scale": [HUGE, -HUGE, 1e308, -0.3, 0.0, 1e-40, 2.0**65, float("nan"), "1" * 999, [1.0], True],
    "workspace": [HUGE, float("inf"), -1, "1" * 999, [1.0], True],
    "backend": [LONG, None, ARRAY, ["auto"], 3, "cudnn", "fa4"],
    "exchange": [LONG, None, ARRAY],
    "pattern": [None, LONG, [(4, 2)] * 999, ARRAY],
    "layout": [LONG, [[(0, 6)]] * 999, THREE, SequenceLayout.contiguous(BIG >> 8, 1)],
    "key_padding_mask": MASKS,
    "options": [LONG, ARRAY, {"is_causal": True}],
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_odd_values_of_an_argument(name):
    for value in ODD_VALUES[name]:
        refused(call, **{name: value})


TRIPLE = SequenceLayout([[(0, 2)], [(2, 4)], [(4, 6)]])
OTHERS: list[Any] = [
    *(partial(DilatedPattern, *x) for x in (([BIG], [1]), ([1], [BIG]), ([1] * 1001, [1] * 1001))),
    partial(DilatedPattern, [4], [1], head_offsets=ARRAY),
    *(partial(SequenceLayout, ranges) for ranges in ([[(0, BIG)]], [[(0, 0)]], 3)),
    partial(SequenceLayout.contiguous, BIG, 2),
    *(partial(TRIPLE.shard, torch.zeros(6), rank, 0) for rank in (-1, 5)),
    partial(TRIPLE.shard, [0] * 9999, 0, 0),
    partial(TRIPLE.shard, torch.zeros(6), 0, 4),
    partial(TRIPLE.unshard, [[0, 1]] * 3, 0),
    partial(TRIPLE.local_length, "0"),
    partial(layer, HUGE),
    partial(layer, 16, 4, num_kv_heads=3),
    partial(layer, segment_lengths="4" * 999),
    partial(multihead, query=[1.0] * 9999),
    partial(multihead, query=torch.zeros(1, 6, 16).to_sparse()),
    partial(multihead, need_weights=ARRAY),
    partial(multihead, attn_mask=torch.zeros(6, 6)),
    partial(nn.DilatedAttention, PATTERN, dropout=0.1),
    *(partial(nn.RotaryEmbedding, 8, theta=theta) for theta in (HUGE, "1" * 999)),
    partial(nn.RotaryEmbedding(8), [0, 1] * 9999),
    partial(detached_dilated_attention, [1.0] * 9999, ORDER, ORDER, PATTERN),
]


@pytest.mark.parametrize("function", OTHERS)
def test_other_calls(function):
    refused(function)


def test_options_are_one_object_or_its_fields():
    """The two lists of names and types are one; an object serves like fields, which replace it."""
    hints = dict(AttentionOptions.__annotations__)
    hints["mesh"] = hints["mesh"].removeprefix("InitVar[").removesuffix("]")
    assert hints == {x: y.__forward_arg__ for x, y in OptionFields.__annotations__.items()}
    tensors = torch.randn(3, *SHAPE).unbind(0)
    options = AttentionOptions(is_causal=True, scale=0.3, exchange="ring")
    want = dilated_attention(*tensors, PATTERN, is_causal=True, scale=0.3)
    assert torch.equal(dilated_attention(*tensors, PATTERN, options), want)
    assert torch.equal(nn.DilatedAttention(PATTERN, options)(*tensors), want)
    other = dilated_attention(*tensors, PATTERN, options, is_causal=False)
    assert torch.equal(other, dilated_attention(*tensors, PATTERN, scale=0.3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.scale = 1.0
    layer = nn.DilatedAttention(PATTERN, options, is_causal=False)
    assert torch.equal(layer(*tensors), other)
    with pytest.raises(ValueError, match="exchange must be one of"):
        nn.DilatedAttention(PATTERN, options, exchange="mail")

    def rank(ends):
        by_mesh = AttentionOptions(mesh=ends, scale=0.3)
        assert by_mesh.group is ends
        by_fields = dilated_attention(*tensors, PATTERN, group=ends, scale=0.3)
        return torch.equal(dilated_attention(*tensors, PATTERN, by_mesh), by_fields)

    assert all(run_loopback(2, rank))


def test_large_numbers_that_are_allowed():
    """A segment or a rate that no sequence is as long as: the rows of such a branch are few."""
    torch.manual_seed(0)
    large = 2**62
    tensors = torch.randn(4, 1, 6, 4, 8, dtype=torch.float64).unbind(0)

    def run(pattern):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out = dilated_attention(leaves[0], leaves[1], leaves[2], pattern)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    for lengths, rates in (([large], [1]), ([None], [large]), ([large], [large]), ([3], [large])):
        for zero_keys in (False, True):
            got = run(DilatedPattern(lengths, rates, zero_keys=zero_keys))
            small = [w and min(w, 6) for w in lengths], [min(r, 6) for r in rates]
            for a, b in zip(got, run(DilatedPattern(*small, zero_keys=zero_keys)), strict=True):
                assert torch.equal(a, b)
        run(DilatedPattern(lengths, rates, head_offsets="blocked"))  # offsets depend on the rate


DIFFERENCES: dict[str, dict[str, Any]] = {
    "batch is 2 on ranks 0, 2, 3 on rank 1": {"shape": (3, 6, 4, 8)},
    "layout is None (a shard of 6 positions) on ranks 0, 2": {"shape": (2, 5, 4, 8)},
    "heads is 4 on ranks 0, 2, 2 on rank 1": {"shape": (2, 6, 2, 8)},
    "head_dim is 8 on ranks 0, 2, 16 on rank 1": {"shape": (2, 6, 4, 16)},
    "pattern is (4, 2) (document, 1) on ranks 0, 2, (4, 3) on rank 1": {
        "pattern": DilatedPattern([4], [3])
    },
    "branch_gradients is exact on ranks 0, 2, detached on rank 1": {"branch_gradients": "detached"},
    "is_causal is False on ranks 0, 2, True on rank 1": {"is_causal": True},
    "scale is None on ranks 0, 2, 0.5 on rank 1": {"scale": 0.5},
    "exchange is auto (heads:3) on ranks 0, 2, ring on rank 1": {"exchange": "ring"},
    "backend is auto on ranks 0, 2, eager on rank 1": {"backend": "eager"},
    "layout is": {"layout": SequenceLayout.zigzag(18, 3)},
    "dtype is torch.float32 on ranks 0, 2, torch.float64 on rank 1": {
        name: torch.randn(SHAPE, dtype=torch.float64) for name in ("query", "key", "value")
    },
    "needs gradients is False on ranks 0, 2, True on rank 1": {
        "query": torch.randn(SHAPE, requires_grad=True)
    },
    "documents is None on ranks 0, 2, (0, 5, 18) on rank 1": {"documents": [0, 5, 18]},
    "lengths is None on ranks 0, 2, (4, 5) on rank 1": {"lengths": (4, 5)},
    "ranks are in different calls": {"key_padding_mask": MASK},
    "documents is None on ranks 0, 2, (0, 1, 2, 3, 4, 5, ..., 18) (19 borders)": {
        "documents": range(19)
    },
    # What one rank refuses by itself is an error on all.
    "head_dim": {"key": torch.randn(2, 6, 4, 16)},
    "scale must be > 0": {"scale": float("inf")},
    "has no option 'dropout'": {"dropout": 0.1},
    "documents must rise from 0 to the sequence length 18; got (0, 3, 6)": {"documents": [0, 3, 6]},
    "lengths must lie in [0, 18], the sequence length; got 19": {"lengths": [3, 19]},
    "key_padding_mask must be boolean": {"key_padding_mask": MASK.long()},
    "rank 1 a shard of 6 positions, its query has a local sequence length of 5": {
        "layout": SequenceLayout.contiguous(18, 3),
        "shape": (2, 5, 4, 8),
    },
}
NOT_RIGHT = {
    "in row 0, position 0 is padding and position 17 is not": (0, slice(0, 3)),
    "in row 1, position 7 is padding and position 17 is not": (1, slice(7, 8)),
}


def attempt(ends, **changes):
    try:
        call(ends, **changes)
    except (ValueError, TypeError, ExchangeError) as error:
        return str(error)
    return "no error"


def differ(ends, rank):
    """The messages of all bad calls of rank 1; the group works behind each."""
    texts = []
    for changes in DIFFERENCES.values():
        texts.append(attempt(ends, **(changes if rank == 1 else {})))
        assert call(ends).shape == SHAPE
    for row, columns in NOT_RIGHT.values():
        mask = torch.zeros(2, 18, dtype=torch.bool)
        mask[row, columns] = True
        texts.append(attempt(ends, key_padding_mask=mask[:, 6 * rank : 6 * rank + 6]))
    return texts


def _processes(rank, world_size):
    texts = differ(dist.group.WORLD, rank)
    bad = dist.new_group([0, 2]), init_device_mesh("cpu", (3, 1))
    return texts, [attempt(group) for group in bad]


@pytest.mark.parametrize("over", ["loopback", "gloo"])
def test_ranks_that_differ(over):
    by_rank = (
        run_loopback(3, lambda ends: (differ(ends, ends.rank), None))
        if over == "loopback"
        else run_ranks(_processes, 3)
    )
    for rank, (texts, of_groups) in enumerate(by_rank):
        for message, text in zip((*DIFFERENCES, *NOT_RIGHT), texts, strict=True):
            assert message in text, text
        if of_groups is not None:
            assert ("rank 1 is not a member" in of_groups[0]) == (rank == 1)
            assert "group must be a 1-D DeviceMesh; got 2 dimensions" in of_groups[1]
