"""What is kept on the device from call to call: while its plan lives, and not without bound."""

import gc
import sys
import threading
from functools import partial
from typing import NamedTuple

import pytest
import torch
from support.tolerances import FLOAT32

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.engine import device_tables
from ring_dilated_attention.engine.device_tables import KEPT_BYTES, KEPT_CALLS, DeviceTables

CPU = torch.device("cpu")


class Owner:
    pass


class Table(NamedTuple):
    rows: torch.Tensor

    @property
    def tensors(self):
        return tuple(self)


def made(log, nbytes):
    log.append(nbytes)
    return Table(torch.empty(nbytes, dtype=torch.uint8))


def test_tables_are_made_once():
    tables, owner = DeviceTables(), Owner()
    log: list[int] = []
    first = tables.get(owner, ("forward", 1), CPU, partial(made, log, 100))
    assert tables.get(owner, ("forward", 1), CPU, partial(made, log, 100)) is first
    tables.get(owner, ("backward", 1), CPU, partial(made, log, 600))
    assert log == [100, 600]
    assert tables.nbytes == 512 + 1024  # what a CUDA device gives


@pytest.mark.parametrize("warms_up", [False, True])
def test_tables_are_no_part_of_the_memory_of_a_graph(warms_up, monkeypatch):
    """What a thread allocates then may be; another thread's is not."""
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    if warms_up:
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", sys)
    threads = []

    def make():
        threads.append(threading.get_ident())
        return Table(torch.empty(1))

    tables, owner = DeviceTables(), Owner()
    tables.get(owner, 0, CPU, make)
    assert (threads == [threading.get_ident()]) == (not warms_up)


@pytest.mark.parametrize("captures", [False, True])
def test_a_graph_that_is_captured_has_memory_of_its_own(captures, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert device_tables.may_be_of_graph(torch.device("cuda", 0)) == captures


def test_tables_go_with_their_owner():
    tables, owner = DeviceTables(), Owner()
    tables.get(owner, 0, CPU, partial(made, [], 100))
    del owner
    gc.collect()
    assert tables.nbytes == 0


@pytest.mark.parametrize("nbytes", [KEPT_BYTES // 8, KEPT_BYTES])
def test_long_unused_tables_are_dropped_where_they_are_large(nbytes):
    tables, old, steady = DeviceTables(), Owner(), Owner()
    log: list[int] = []
    tables.get(old, 0, CPU, partial(made, log, nbytes))
    for _ in range(2 * KEPT_CALLS):
        tables.start_call()
        tables.get(steady, 0, CPU, partial(made, log, 512))
    assert log == [nbytes, 512]  # what is used stays, and as little as this in all
    assert tables.nbytes == (512 if nbytes == KEPT_BYTES else nbytes + 512)
    tables.get(old, 0, CPU, partial(made, log, nbytes))
    assert len(log) == (3 if nbytes == KEPT_BYTES else 2)


def test_a_call_of_more_tables_than_are_kept_makes_them_once():
    tables, owners = DeviceTables(), [Owner() for _ in range(5)]
    log: list[int] = []
    for _ in range(3 * KEPT_CALLS):
        tables.start_call()
        for owner in owners:
            tables.get(owner, 0, CPU, partial(made, log, KEPT_BYTES))
    assert len(log) == 5


def test_what_no_call_comes_back_to_is_dropped_at_once():
    tables, steady, log = DeviceTables(), Owner(), list[int]()
    owners = [Owner() for _ in range(8)]
    for owner in owners:
        tables.start_call()
        tables.get(owner, 0, CPU, partial(made, log, 2 * KEPT_BYTES))
        tables.get(steady, 0, CPU, partial(made, log, 512))
        assert tables.nbytes <= 4 * KEPT_BYTES + 512  # of this call and the one before
    assert len(log) == 9
    tables.get(owners[0], 0, CPU, partial(made, log, 2 * KEPT_BYTES))
    assert len(log) == 10


@pytest.mark.parametrize("calls", [3, KEPT_CALLS // 2])
def test_a_step_of_many_large_tables_makes_them_twice(calls):
    tables, owners, log = DeviceTables(), [Owner() for _ in range(calls)], list[int]()
    for _ in range(5):
        for owner in owners:
            tables.start_call()
            tables.get(owner, 0, CPU, partial(made, log, KEPT_BYTES))
    assert len(log) <= 2 * calls
    rare = Owner()
    for _ in range(2):  # too seldom to be worth the bytes
        tables.start_call()
        tables.get(rare, 0, CPU, partial(made, log, KEPT_BYTES))
        for number in range(2 * KEPT_CALLS):
            tables.start_call()
            tables.get(owners[number % calls], 0, CPU, partial(made, log, KEPT_BYTES))
            assert tables.nbytes == (calls + (number < 1)) * KEPT_BYTES
    assert len(log) <= 2 * calls + 2


def test_calls_of_ever_new_shapes(monkeypatch):
    """The same results, and no more tables than those of the latest calls."""
    tables = DeviceTables()
    for name in ("torch_op.operator", "engine.parts", "engine.transfer", "engine.compute"):
        monkeypatch.setattr(f"ring_dilated_attention.{name}.TABLES", tables)
    monkeypatch.setattr(device_tables, "KEPT_BYTES", 0)
    monkeypatch.setattr(device_tables, "KEPT_CALLS", 4)
    pattern, held = DilatedPattern([16, None], [1, 3]), []
    for length in (*range(33, 43), 33):  # more than twice as many calls as tables are kept for
        query, key, value = torch.randn(3, 1, length, 2, 8, requires_grad=True)
        results = {}
        for backend in ("triton", "eager"):
            out = dilated_attention(query, key, value, pattern, backend=backend)
            results[backend] = out, *torch.autograd.grad(out.square().sum(), (query, key, value))
        for got, want in zip(*results.values(), strict=True):
            assert relative_error(got, want) < FLOAT32
        held.append(tables.nbytes)
    assert max(held) <= 2 * held[0]
