"""No rank ever holds a tensor of global length, and the ring holds two remote shards at most."""

import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.late_streams import late_streams
from support.tolerances import FLOAT64
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    dilated_attention,
    plan_attention,
)
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.engine import executor
from ring_dilated_attention.engine.blocks import Block
from ring_dilated_attention.exchange import run_loopback

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


def run_all(function, pattern, exchange, is_causal=True, deal=SequenceLayout.zigzag):
    layout = deal(LENGTH, WORLD_SIZE)

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
    for watch in run_all(lambda ends: Largest(), pattern, exchange):
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
    # In backward, one more buffer: returned gradients of this rank's own rows.
    watches = run_all(Held, pattern, "ring", is_causal=False)
    assert {watch.most for watch in watches} == {3}


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
        assert relative_error(a, b) < FLOAT64
    with late_streams(0, 0.0):  # the results of two slices are there at a time
        calls.clear()
        with torch.no_grad():
            dilated_attention(inputs[0], inputs[1], inputs[2], pattern, workspace=0.1)
        assert max(calls) <= 0.05 * 256 * 4
    # Forward allocates out and lse, backward three gradients: of a tenth of query's rows at most.
    rows = 256 * 4
    assert max(results[0.1][1]) <= 0.1 * rows < max(results[None][1]) == rows


@pytest.mark.parametrize(("exchange", "most"), [("ring", 2), ("gather", 3)])
def test_returned_gradients_are_added_before_they_are_many(exchange, most, monkeypatch):
    """In a ring behind the next step, in a gather while they are no more than a rank's own rows."""
    in_flight: dict[int, list[int]] = {}
    run = executor.Backward
    send, add = run.do_return, run.do_add

    def noted(function):
        def note(self, action):
            function(self, action)
            in_flight.setdefault(threading.get_ident(), []).append(len(self._returning))

        return note

    monkeypatch.setattr(run, "do_return", noted(send))
    monkeypatch.setattr(run, "do_add", noted(add))
    run_all(lambda ends: nullcontext(), DilatedPattern.dense(), exchange, is_causal=False)
    for counts in in_flight.values():
        assert len(counts) == 2 * (WORLD_SIZE - 1)
        assert max(counts) <= most
        assert counts[-1] == 0
