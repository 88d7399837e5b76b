"""No rank ever holds a tensor of global length, and the ring holds two remote shards at most."""

import threading
import weakref

import pytest
import torch
from cut_rings import rings_cut
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    compute,
    dilated_attention,
    plan_attention,
)
from ring_dilated_attention.testing import relative_error, run_loopback
from ring_dilated_attention.views import Block

WORLD_SIZE, LENGTH = 8, 8 * 32


class Largest(TorchDispatchMode):
    """Records the largest storage and dimension of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = self.dimension = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
                self.dimension = max(self.dimension, *tensor.shape, 0)
        return result


def run(function, pattern, exchange, is_causal=True):
    layout = SequenceLayout.zigzag(LENGTH, WORLD_SIZE)

    def rank(ends):
        query, key, value = torch.randn(3, 1, LENGTH // WORLD_SIZE, 4, 16).unbind(0)
        query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
        with function(ends) as watch:
            out = dilated_attention(
                query,
                key,
                value,
                pattern,
                is_causal=is_causal,
                group=ends,
                layout=layout,
                exchange=exchange,
            )
            out.sum().backward()
        return watch

    return run_loopback(WORLD_SIZE, rank)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("pattern", [DilatedPattern.dense(), DilatedPattern([32, None], [1, 4])])
def test_no_tensor_of_global_length(pattern, exchange):
    shard = LENGTH // WORLD_SIZE * 4 * 16 * 4
    for watch in run(lambda ends: Largest(), pattern, exchange):
        # The largest allowed is a message: K and V of one remote shard.
        assert watch.bytes <= 2 * shard
        # Largest dimension: rows of a message, which counts (row, head) pairs.
        assert watch.dimension <= LENGTH // WORLD_SIZE * 4


class Held:
    """Counts received K/V messages that are alive whenever a transfer starts."""

    def __init__(self, ends):
        self.ends, self.most, self.alive = ends, 0, []

    def __enter__(self):
        self.start, self.ends.start = self.ends.start, self.watch
        return self

    def __exit__(self, *_: object):
        self.ends.start = self.start

    def watch(self, send, receive):
        # Gradients come from the rank that we send rows to; rows from the one before us.
        if receive is not None and torch.is_tensor(receive[1]):
            self.alive.append((weakref.ref(receive[1]), receive[1].shape))
        pending = self.start(send, receive)
        held = [ref for ref, _ in self.alive if ref() is not None]
        self.most = max(self.most, len(held))
        return pending


def test_ring_holds_two_remote_shards_at_most():
    pattern = DilatedPattern.dense()
    rank = plan_attention(pattern, SequenceLayout.zigzag(LENGTH, WORLD_SIZE), is_causal=False).rank(
        0
    )
    assert sum(step.receive is not None for step in rank.steps()) == WORLD_SIZE - 1
    for exchange, forward_most in (("ring", 2), ("gather", WORLD_SIZE - 1)):

        def forward(ends, exchange=exchange):
            with Held(ends) as watch:
                x = torch.randn(1, LENGTH // WORLD_SIZE, 2, 8)
                layout = SequenceLayout.zigzag(LENGTH, WORLD_SIZE)
                dilated_attention(x, x, x, pattern, group=ends, layout=layout, exchange=exchange)
            return watch

        assert {watch.most for watch in run_loopback(WORLD_SIZE, forward)} == {forward_most}
    # In backward, one more buffer: gradients that come home for this rank's own rows.
    watches = run(Held, pattern, "ring", is_causal=False)
    assert {watch.most for watch in watches} == {3}


@pytest.mark.parametrize("slice_pairs", [None, 1])
def test_the_last_gradients_come_home_behind_local_tiles(slice_pairs, monkeypatch):
    """Those of the last two steps: nothing waits for them while there is something to compute."""
    events: dict[int, list[str]] = {}
    backward = compute.backward

    class Watched:
        def __init__(self, ends):
            self.ends, self.start = ends, ends.start

        def __enter__(self):
            self.ends.start = self.watch
            events[threading.get_ident()] = []

        def __exit__(self, *_: object):
            self.ends.start = self.start

        def watch(self, send, receive):
            pending = self.start(send, receive)
            wait = pending.wait

            def waits():
                events[threading.get_ident()].append("wait")
                wait()

            pending.wait = waits
            return pending

    def computes(*arguments, **options):
        events[threading.get_ident()].append("compute")
        backward(*arguments, **options)

    monkeypatch.setattr(compute, "backward", computes)
    with rings_cut(slice_pairs):
        run(Watched, DilatedPattern.dense(), "ring", is_causal=False)
    assert len(events) == WORLD_SIZE
    for of_rank in events.values():
        assert of_rank[-3:] == ["compute", "wait", "wait"]


def test_workspace_bounds_what_kernels_allocate(monkeypatch):
    """And changes nothing else."""
    torch.manual_seed(0)
    pattern = DilatedPattern([16, 64], [1, 2])
    *inputs, dout = torch.randn(4, 1, 256, 4, 8, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    calls: list[int] = []
    slices = Block.slices

    def counted(block, most_rows):
        calls.extend(part.rows for part in slices(block, most_rows))
        return slices(block, most_rows)

    monkeypatch.setattr(Block, "slices", counted)
    results = {}
    for workspace in (None, 0.1):
        calls.clear()
        query, key, value = leaves
        out = dilated_attention(query, key, value, pattern, workspace=workspace)
        gradients = torch.autograd.grad(out, leaves, dout)
        results[workspace] = [out.detach(), *gradients], list(calls)
    for a, b in zip(results[None][0], results[0.1][0], strict=True):
        assert relative_error(a, b) < 1e-13
    # Forward allocates out and lse, backward three gradients: of a tenth of query's rows at most.
    rows = 256 * 4
    assert max(results[0.1][1]) <= 0.1 * rows < max(results[None][1]) == rows
