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
    assert tables.nbytes == 100 + 600


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
def test_unused_tables_are_dropped_where_they_are_large(nbytes):
    """When others are made."""
    tables, old, log = DeviceTables(), Owner(), list[int]()
    for _ in range(2):
        tables.calls += 1
        tables.get(old, 0, CPU, partial(made, log, nbytes))
    others = [Owner(), Owner()]
    tables.calls += KEPT_CALLS
    tables.get(others[0], 0, CPU, partial(made, log, 512))
    assert tables.nbytes == nbytes + 512
    tables.calls += 1
    tables.get(others[1], 0, CPU, partial(made, log, 512))
    assert tables.nbytes == 1024 + nbytes * (nbytes < KEPT_BYTES)
    assert log == [nbytes, 512, 512]


@pytest.mark.parametrize("owners", [1, 5, KEPT_CALLS // 2])
def test_what_calls_come_back_to_is_made_once(owners):
    """However large it is, and whether one call uses it all or several do."""
    tables, kept, log = DeviceTables(), [Owner() for _ in range(owners)], list[int]()
    for number in range(3 * KEPT_CALLS):
        tables.calls += 1
        for owner in kept if owners == 5 else [kept[number // 2 % owners]]:
            tables.get(owner, 0, CPU, partial(made, log, KEPT_BYTES))
    assert len(log) == owners


def test_calls_of_ever_new_shapes(monkeypatch):
    """The same results, and no more tables than those of the latest calls."""
    tables = DeviceTables()
    for name in ("executor", "transfer", "compute", "own_rows"):
        monkeypatch.setattr(f"ring_dilated_attention.engine.{name}.TABLES", tables)
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
