"""Every bad call is a clear error on every rank, and nothing hangs."""

# Arguments of wrong types are what is tested.
# mypy: disable-error-code="arg-type, call-overload, list-item, misc, type-var"

import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    detached_dilated_attention,
    dilated_attention,
    nn,
)
from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import hilbert_order, inverse_order


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
        ({"query": [1.0]}, TypeError, "query must be a tensor, got type list"),
        ({"query": torch.randn(6, 4, 8)}, ValueError, "query must have 4 dimensions"),
        ({"query": torch.ones(1, 6, 4, 8, dtype=torch.int64)}, TypeError, "got torch.int64"),
        (
            {"key": torch.randn(1, 6, 4, 8).double()},
            ValueError,
            "one dtype; got query torch.float32, key torch.float64, value torch.float32. Cast them",
        ),
        ({"key": torch.empty(1, 6, 4, 8, device="meta")}, ValueError, "one device; got query cpu"),
        ({"value": torch.randn(1, 6, 2, 8)}, ValueError, "key and value must have the same shape"),
        ({"query": torch.randn(2, 6, 4, 8)}, ValueError, "the same batch size"),
        ({"query": torch.randn(1, 5, 4, 8)}, ValueError, "the same local sequence length"),
        (
            {"query": torch.randn(1, 4, 6, 8)},
            ValueError,
            "value (1, 6, 4, 8). Shapes are (batch, local_sequence, heads, head_dim)",
        ),
        ({"query": torch.randn(1, 6, 4, 16)}, ValueError, "the same head_dim"),
        ({"query": torch.randn(1, 6, 6, 8)}, ValueError, "heads must be a multiple of kv_heads"),
        ({"shape": (1, 6, 0, 8)}, ValueError, "must be >= 1"),
        ({"shape": (1, 0, 4, 8)}, ValueError, "the sequence is empty"),
        (
            {"pattern": [(4, 2)]},
            TypeError,
            "as in DilatedPattern([2048, None], [1, 4]), got type list",
        ),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"return_lse": "yes"}, TypeError, "return_lse must be a bool"),
        ({"scale": "big"}, TypeError, "scale must be a float or None, got 'big'"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"workspace": "much"}, TypeError, "workspace must be a float or None, got 'much'"),
        ({"workspace": 0}, ValueError, "workspace must be > 0 and finite; got 0"),
        ({"layout": "zigzag"}, TypeError, "SequenceLayout.zigzag(length, ranks) makes one"),
        ({"layout": SequenceLayout.contiguous(6, 2)}, ValueError, "the group has 1: pass"),
        (
            {"layout": SequenceLayout.contiguous(7, 1)},
            ValueError,
            "layout.shard(tensor, rank, dim)",
        ),
        ({"exchange": "mail"}, ValueError, "exchange must be one of 'auto', 'ring', 'gather'"),
        ({"backend": "magic"}, ValueError, "backend must be one of 'auto', 'sdpa', 'fa4'"),
        ({"backend": "flash"}, ValueError, "backend='flash' cannot compute this attention"),
        ({"group": "world"}, TypeError, "group must be a torch.distributed ProcessGroup"),
        ({"group": [torch.zeros(9)]}, TypeError, "an Exchange or None; got type list"),
    ],
)
def test_one_process(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


BIG = 2**70
HUGE = 10**400  # has no float, and more than 300 digits
WHOLE = SequenceLayout.contiguous(6, 3)
ORDER = torch.tensor([0, 2, 1])


def strided(**changes):
    """A call with one argument of a shape that fits."""
    return lambda: call(**changes)


def layer(embed_dim=16, num_heads=2, **changes):
    arguments = {"segment_lengths": [4], "dilation_rates": [2], **changes}
    return nn.MultiheadDilatedAttention(embed_dim, num_heads, **arguments)


def multihead(**changes):
    module = layer()
    tensor = torch.randn(1, 6, 16)
    arguments = {"query": tensor, "key": tensor, "value": tensor, **changes}
    return lambda: module(**arguments)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.randn(6, 4, 8)])


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized tensors go
        return torch.quantize_per_tensor(torch.randn(1, 6, 4, 8), 0.1, 0, torch.qint8)


def per_argument(values, **others):
    return {
        f"{name}={text}": strided(**{name: value, **others})
        for name in ("query", "key", "value")
        for text, value in values.items()
    }


def ints(name):
    """What neither documents nor lengths can be."""
    values = {
        "2**70": [0, BIG],
        "tensor of 2**63 - 1": torch.tensor([0, 2**63 - 1]),
        "a float": [0, 6.0],
        "a bool": [0, True],
        "texts": ["0" * 10_000],
        "nothing": [],
        "an array": np.arange(10_000),
        "a float tensor": torch.zeros(10_000),
        "2-D": torch.zeros(2, 10_000, dtype=torch.int64),
        "sparse": torch.eye(3, dtype=torch.int64).to_sparse(),
        "meta": torch.zeros(3, dtype=torch.int64, device="meta"),
        "thousands": list(range(5, 10_000)),
    }
    return {f"{name}={text}": strided(**{name: value}) for text, value in values.items()}


def options(name, *values):
    return {f"{name}={str(value)[:20]}": strided(**{name: value}) for value in values}


def patterns(**values):
    return {
        f"pattern {text}": lambda arguments=arguments: DilatedPattern(*arguments)
        for text, arguments in values.items()
    }


BAD = {
    **per_argument(
        {
            "a list": [1.0] * 10_000,
            "an array": np.zeros((1, 6, 4, 8)),
            "None": None,
            "text": "x" * 10_000,
            "sparse": torch.randn(1, 6, 4, 8).to_sparse(),
            "nested": nested(),
            "quantized": quantized(),
            "meta": torch.randn(1, 6, 4, 8, device="meta"),
            "complex": torch.randn(1, 6, 4, 8, dtype=torch.complex64),
            "no rows": torch.zeros(1, 0, 4, 8),
        }
    ),
    **ints("documents"),
    **ints("lengths"),
    **options("scale", HUGE, -HUGE, 1e308, -1e308, 2.0**65, float("nan"), "1" * 999, [1.0], True),
    **options("workspace", HUGE, float("inf"), -1, "1" * 999, [1.0], True),
    **options("is_causal", np.zeros(9999), None, "yes" * 999, 1),
    **options("return_lse", np.zeros(9999), None),
    **options("backend", "x" * 999, None, np.zeros(9999), ["auto"], 3, "cudnn", "fa4"),
    **options("exchange", "x" * 999, None, np.zeros(9999)),
    **options("pattern", None, "x" * 999, [(4, 2)] * 999, np.zeros(9999)),
    **options("layout", "x" * 999, [[(0, 6)]] * 999, WHOLE, SequenceLayout.contiguous(BIG >> 8, 1)),
    **options("key_padding_mask", np.zeros(9999), torch.zeros(1, 6), torch.zeros(9, 9).bool()),
    "mask that is sparse": strided(key_padding_mask=torch.zeros(1, 6).bool().to_sparse()),
    "mask and lengths": strided(key_padding_mask=torch.zeros(1, 6).bool(), lengths=[6]),
    "mask on the left": strided(key_padding_mask=torch.arange(6)[None] < 3),
    "documents that fall": strided(documents=[0, 4, 2, 6]),
    "documents that end early": strided(documents=[0, 4]),
    "lengths that are negative": strided(lengths=[-1]),
    **patterns(
        big=([BIG], [1]),
        big_rate=([1], [BIG]),
        zero=([4], [0]),
        a_float=([4.0], [1]),
        a_bool=([True], [1]),
        a_number=(4, 1),
        empty=([], []),
        uneven=([1] * 9999, [1]),
        many=([1] * 10_000, [1] * 10_000),
        none_rate=([4], [None]),
    ),
    "head_offsets": lambda: DilatedPattern([4], [1], head_offsets="x" * 999),
    "head_branches": lambda: DilatedPattern([4], [1], head_branches=None),
    "zero_keys": lambda: DilatedPattern([4], [1], zero_keys=np.zeros(9999)),
    "split and blocked": lambda: DilatedPattern(
        [4], [1], head_branches="split", head_offsets="blocked"
    ),
    "layout of nothing": lambda: SequenceLayout([]),
    "layout of a number": lambda: SequenceLayout(3),
    "layout of numbers": lambda: SequenceLayout([0, 6]),
    "layout of no pairs": lambda: SequenceLayout([[0, 6]]),
    "layout of triples": lambda: SequenceLayout([[(0, 6, 9)]]),
    "layout of floats": lambda: SequenceLayout([[(0, 6.0)]]),
    "layout of 2**70": lambda: SequenceLayout([[(0, BIG)]]),
    "layout of empty ranges": lambda: SequenceLayout([[(0, 0)]]),
    "contiguous 2**70": lambda: SequenceLayout.contiguous(BIG, 2),
    "contiguous on 0": lambda: SequenceLayout.contiguous(6, 0),
    "zigzag on -1": lambda: SequenceLayout.zigzag(6, -1),
    "zigzag of a float": lambda: SequenceLayout.zigzag(6.0, 1),
    "shard -1": lambda: WHOLE.shard(torch.zeros(6), -1, 0),
    "shard 5 of 3": lambda: WHOLE.shard(torch.zeros(6), 5, 0),
    "shard of a list": lambda: WHOLE.shard([0] * 9999, 0, 0),
    "shard of another length": lambda: WHOLE.shard(torch.zeros(7), 0, 0),
    "shard of dimension 4": lambda: WHOLE.shard(torch.zeros(6), 0, 4),
    "unshard of two": lambda: WHOLE.unshard([torch.zeros(2)] * 2, 0),
    "unshard of lists": lambda: WHOLE.unshard([[0, 1]] * 3, 0),
    "unshard of dimension 4": lambda: WHOLE.unshard([torch.zeros(2)] * 3, 4),
    "positions of -1": lambda: WHOLE.positions(-1),
    "positions of 3": lambda: WHOLE.positions(3),
    "local_length of -1": lambda: WHOLE.local_length(-1),
    "local_length of a text": lambda: WHOLE.local_length("0"),
    "hilbert of a list": lambda: hilbert_order([[0, 1]] * 9999),
    "hilbert of bools": lambda: hilbert_order(torch.zeros(4, 2).bool()),
    "hilbert of 4-D points": lambda: hilbert_order(torch.zeros(4, 4)),
    "hilbert of NaN": lambda: hilbert_order(torch.full((4, 2), torch.nan)),
    "hilbert of sparse": lambda: hilbert_order(torch.eye(2).to_sparse()),
    "hilbert of meta": lambda: hilbert_order(torch.zeros(4, 2, device="meta")),
    "inverse of a list": lambda: inverse_order([0, 1] * 9999),
    "inverse of floats": lambda: inverse_order(torch.zeros(4)),
    "inverse of no permutation": lambda: inverse_order(torch.tensor([0, 0, 2])),
    "inverse beyond the end": lambda: inverse_order(ORDER + 1),
    "inverse of negatives": lambda: inverse_order(ORDER - 1),
    "module: embed_dim": lambda: layer(HUGE),
    "module: num_heads": lambda: layer(16, 3),
    "module: num_kv_heads": lambda: layer(16, 4, num_kv_heads=3),
    "module: segment_lengths": lambda: layer(segment_lengths="4" * 999),
    "module: scale": lambda: layer(scale=HUGE),
    "module: scale of text": lambda: layer(scale="1" * 999),
    "module: branch_gradients": lambda: layer(branch_gradients="x" * 999),
    "module: a list": multihead(query=[1.0] * 9999),
    "module: an array": multihead(key=np.zeros((1, 6, 16))),
    "module: another width": multihead(value=torch.zeros(1, 6, 17)),
    "module: sparse": multihead(query=torch.zeros(1, 6, 16).to_sparse()),
    "module: need_weights": multihead(need_weights=np.zeros(9999)),
    "module: attn_mask": multihead(attn_mask=torch.zeros(6, 6)),
    "module: positions as rope": multihead(rope=torch.arange(6)),
    "rope: head_dim": lambda: nn.RotaryEmbedding(7),
    "rope: theta": lambda: nn.RotaryEmbedding(8, theta=HUGE),
    "rope: theta of text": lambda: nn.RotaryEmbedding(8, theta="1" * 999),
    "rope: positions": lambda: nn.RotaryEmbedding(8)([0, 1] * 9999),
    "detached: query": lambda: detached_dilated_attention(
        [1.0] * 9999, ORDER, ORDER, DilatedPattern([4, 8], [1, 2])
    ),
    "detached: pattern": lambda: detached_dilated_attention(ORDER, ORDER, ORDER, [(4, 2)] * 999),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_line(name):
    with pytest.raises((TypeError, ValueError)) as found:
        BAD[name]()
    text = str(found.value)
    assert 10 < len(text) <= 300, text
    assert "\n" not in text
    assert type(found.value) in (TypeError, ValueError)  # no UnicodeError and the like


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
        for options in ({}, {"zero_keys": True}, {"head_offsets": "blocked"}):
            got = run(DilatedPattern(lengths, rates, **options))
            small = [w and min(w, 6) for w in lengths], [min(r, 6) for r in rates]
            if "blocked" in str(options):
                continue  # offsets depend on the rate
            for a, b in zip(got, run(DilatedPattern(*small, **options)), strict=True):
                assert torch.equal(a, b)


DIFFERENCES = {
    "batch is 1 on ranks 0, 2, 2 on rank 1": {"shape": (2, 6, 4, 8)},
    "layout is None (a shard of 6 positions) on ranks 0, 2": {"shape": (1, 5, 4, 8)},
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
    "rank 1 a shard of 6 positions, its query has a local sequence length of 5": {
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
