"""What a ring on GPUs holds at most, counted: every tensor that is alive, but for what it computes.

A stand-in for flash-attn-4 allocates what that does, a stand-in for streams lets results live as
long as additions behind the compute do. On H200s torch's allocator said the same within 0.5%
(benchmarks/results/many_gpus.md).
"""

import pytest
import torch
from support.cut_rings import ROUND_PAIRS, set_round_pairs
from support.worlds import world
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.engine import RingCall, accumulate, compute, executor
from ring_dilated_attention.exchange import resolve_exchange
from ring_dilated_attention.plan import RankPlan
from ring_dilated_attention.tiles import Selection, TileBackend, backend_named

SCALE = 64
"""Sequence lengths and other numbers of rows are smaller by this factor than on GPUs."""
HEADS, HEAD_DIM = 16, 128


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return and that are alive."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.alive.values()))
        return result


class Streams:
    """What an `Accumulator` asks of streams: results live until somebody waits."""

    def run(self, add_all, into):
        add_all()

    def wait(self, done):
        pass


def no_forward(tile):
    batch, heads, rows, head_dim = tile.q.shape
    out = tile.q.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    return out, tile.q.new_empty(batch, heads, rows, dtype=torch.float32)


def no_backward_into(tile, gradients, dq, dk, dv):
    batch, heads, rows, head_dim = tile.q.shape
    nbytes = batch * heads * rows * backend_named("fa4").backward_workspace(head_dim)
    tile.q.new_empty(nbytes, dtype=torch.uint8)


def no_backward(tile, gradients):
    found = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in tile[:3]]
    no_backward_into(tile, gradients, *found)
    return tuple(found)


NOTHING = TileBackend(
    name="nothing",
    forward=no_forward,
    backward=no_backward,
    refusal=lambda *_: None,
    forward_into=lambda *_: None,
    backward_into=no_backward_into,
    backward_workspace=backend_named("fa4").backward_workspace,
)


def patch_like_a_gpu():
    """For the rest of this process."""

    def sum_dtype(query, additions):
        assert additions <= RankPlan.FEW_ADDITIONS
        return query.dtype

    patch = pytest.MonkeyPatch()
    patch.setattr(accumulate, "streams_of", lambda device: Streams())
    patch.setattr(executor, "sum_dtype", sum_dtype)
    patch.setattr(compute, "merge", lambda *_, **__: None)  # the kernel's temporaries: none
    for module, name, scale in (
        (compute, "WORKSPACE_FLOOR", SCALE),
        (compute, "SLICE_ROWS", SCALE),
        (compute, "LONG_FLOPS", SCALE**2),
    ):
        patch.setattr(module, name, getattr(module, name) // scale)
    set_round_pairs(patch, ROUND_PAIRS // SCALE**2)


def hold(rank, world_size, length):
    """Inputs and peak, of forward and of both; MiB on GPUs."""
    patch_like_a_gpu()
    layout = SequenceLayout.zigzag(length // SCALE, world_size)
    plan = plan_attention(DilatedPattern.dense(), layout, is_causal=True, num_heads=HEADS)
    rows = layout.local_length(rank)
    shape = 4, 1, rows, HEADS, HEAD_DIM
    query, key, value, dout = torch.zeros(shape, dtype=torch.bfloat16)
    ends = resolve_exchange(world() if world_size > 1 else None)
    call = RingCall(plan.rank(rank), 1, HEAD_DIM, Selection(NOTHING), 1.0, plan.gathers)
    with Held(query) as forward:
        out, lse = executor.ring_forward(query, key, value, call, ends)
    with Held(query, out, lse) as backward:
        executor.ring_backward(dout, query, key, value, out, lse, call, ends)
    inputs, results = 3 * query.nbytes, out.nbytes + lse.nbytes
    both = inputs + dout.nbytes + results + backward.most
    return [x * SCALE / 2**20 for x in (inputs + forward.most, both)]


@pytest.mark.parametrize(("ranks", "expected"), [(1, [4112, 8744]), (4, [1148, 2253])])
def test_ring_memory_is_bounded(ranks, expected):
    """Inputs and peak in MiB, of 262,144 tokens.

    benchmarks/results/many_gpus_x4.json says the same of one GPU, and 1,100 and 2,181 of four: each
    rank then fetched the rows of a head in two pieces.
    """
    by_rank = run_ranks(hold, ranks, 2**18)
    assert [max(one) for one in zip(*by_rank, strict=True)] == pytest.approx(expected, rel=5e-3)
