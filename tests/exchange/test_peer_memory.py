"""Outboxes of ranks, run by streams that are queues: no device takes part."""

from __future__ import annotations

import re
import threading
import warnings
from functools import lru_cache
from random import Random
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.cut_rings import rings_cut
from support.outbox_host import Host, HostExchange
from support.sweep_sample import sweep_sample
from support.worlds import world

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import Case, combine, run_case, run_ranks, sweep
from ring_dilated_attention.exchange import (
    ProcessGroupExchange,
    peer_memory,
    run_loopback,
    transports,
)
from ring_dilated_attention.exchange.peer_memory import DevicePlace, Outboxes, out_of_reach
from ring_dilated_attention.exchange.transports import Site, make_transport


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(peer_memory, "SLOT_BYTES", 64)


@pytest.mark.parametrize("slots", [1, peer_memory.SLOTS])
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_arrive_in_any_order_of_streams(world_size, streams, slots, monkeypatch):
    monkeypatch.setattr(peer_memory, "SLOTS", slots)
    for seed in range(10):
        random = Random(seed)
        host = Host(world_size, streams, seed)
        sent, received = [], []
        for _ in range(12):
            step = random.randrange(1, world_size)
            for _ in range(world_size):
                # Each pair draws its own size; some exchange nothing.
                sent.append(
                    torch.randint(256, (random.choice([0, 1, 63, 64, 65, 1000]),)).to(torch.uint8)
                )
                received.append(torch.zeros_like(sent[-1]))
            first = len(sent) - world_size
            for rank in range(world_size):
                to, source = (rank + step) % world_size, (rank - step) % world_size
                send, receive = (to, sent[first + rank]), (source, received[first + source])
                host.transfer(
                    rank,
                    send if send[1].numel() else None,
                    receive if receive[1].numel() else None,
                )
        while host.step():
            pass
        host.assert_empty()
        for a, b in zip(sent, received, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("streams", "slots"), [(1, 1), (2, peer_memory.SLOTS)])
@pytest.mark.parametrize(("world_size", "round_pairs"), [(2, None), (4, 300), (7, None)])
def test_calls_through_outboxes(world_size, round_pairs, streams, slots, monkeypatch):
    """One after the other, of many shapes, patterns and layouts, forward and backward.

    Of more ranks than two as many as have every option: other ones for each number of streams.
    """
    monkeypatch.setattr(peer_memory, "SLOTS", slots)
    lock, expected = threading.Lock(), lru_cache(maxsize=8)(Case.expected)

    def once(*of_case):  # not by every rank
        with lock:
            return expected(*of_case)

    monkeypatch.setattr(Case, "expected", once)
    cases = list(sweep(world_size))
    if world_size > 2:
        cases = [cases[number] for number in sweep_sample(world_size, seed=streams)]
    host = Host(world_size, streams, seed=0)

    def rank(ends):
        exchange = HostExchange(host, ends)
        return [run_case(case, exchange) for case in cases]

    with rings_cut(round_pairs):
        outcomes = combine(run_loopback(world_size, rank))
    assert not [case for case, x in zip(cases, outcomes, strict=True) if not x.passes(case.dtype)]
    host.assert_empty()


def test_an_outbox_does_not_grow_with_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr(peer_memory, "SLOT_BYTES", 8 << 20)
    assert Outboxes.nbytes(64) < 1.01 * Outboxes.nbytes(2)


def place(host, device, *reads):
    return DevicePlace(host, device, frozenset(reads))


PAIR = [place("a", "0", "1"), place("a", "1", "0")]


def test_who_can_reach_whom():
    assert out_of_reach(dict(enumerate(PAIR))) is None
    assert out_of_reach(dict(enumerate(PAIR[:1]))) is None


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([PAIR[0], place("a", "1")], r"rank 1 \(device 1 of a\) cannot read that of rank 0"),
        ([PAIR[0], place("b", "1", "0")], "rank 0 .* cannot read that of rank 1 .*of b"),
        ([place("a", "0"), place("a", "0")], ".*device 0 of a.*device 0 of a"),
        ([*PAIR, place("a", "2", "0", "1")], "rank 0 .* rank 2"),
        ([place("a", "cpu"), place("a", "cpu")], ".*device cpu"),
    ],
)
def test_who_cannot(places, named):
    assert re.match(named, out_of_reach(dict(enumerate(places))) or "")


def ask_for_copies_on_the_cpu(rank, world_size):
    x = torch.zeros(1, 4, 1, 8)
    ends = ProcessGroupExchange(world(), peer_memory=True)
    try:
        dilated_attention(x, x, x, DilatedPattern.dense(), group=ends)
    except ValueError as error:
        return str(error)
    return ""


def test_copies_are_refused_without_gpus():
    for message in run_ranks(ask_for_copies_on_the_cpu, 2):
        assert "peer_memory=True needs ranks on CUDA devices" in message
        assert "device cpu" in message


def choices(rank, world_size, cases):
    return [choose(rank, *case) for case in cases]


def choose(rank, peer_memory, names, broken, is_one_host=True):
    """What moves rows of ranks on CUDA devices, of which there are none here; the warnings.

    Args:
        rank: this rank.
        peer_memory: as of `ProcessGroupExchange`.
        names: of the host that each rank's device is in.
        broken: ranks that cannot share memory.
        is_one_host: whether all ranks are on one.
    """

    def share(rank, world_size, share, *rest):
        share(None)
        if rank in broken:
            raise RuntimeError("no permission")
        return f"copies of {world_size}"

    others = [str(other) for other in range(len(names)) if other != rank]
    here = place(names[rank], str(rank), *others)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(transports, "place_of", lambda device: here)
        patch.setattr(transports, "PeerMemory", share)
        patch.setattr(transports, "Communicator", lambda *args: f"messages to {sorted(args[-1])}")
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        group: Any = dist.new_group()
        ends, roll = ProcessGroupExchange(group), cast("Any", None)
        site = Site(group, is_one_host, ends.share, ends.calls, roll, 60.0, "")
        try:
            found: Any = make_transport(site, torch.device("cuda", 0), peer_memory=peer_memory)
            return found, [str(one.message) for one in warned]
        except (RuntimeError, ValueError) as error:
            return type(error).__name__, [str(error)]


def test_what_moves_rows():
    cases = [(None, "aa"), (None, "ab"), (False, "aa"), (True, "aa"), (True, "ab")]
    first, second = run_ranks(choices, 2, [(*case, []) for case in cases])
    assert [found for found, _ in first] == [
        "copies of 2", "messages to [1]", "messages to [1]", "copies of 2", "ValueError"
    ]  # fmt: skip
    assert [found for found, _ in second] == [
        "copies of 2", "messages to [0]", "messages to [0]", "copies of 2", "ValueError"
    ]  # fmt: skip
    assert not any(warned for _, warned in first[:-1])


def test_memory_that_one_rank_cannot_share():
    for rank, (automatic, asked_for) in enumerate(
        run_ranks(choices, 2, [(None, "aa", [1]), (True, "aa", [1])])
    ):
        assert automatic[0] == f"messages to [{1 - rank}]"
        assert asked_for[0] == "RuntimeError"
        for _, (text,) in (automatic, asked_for):
            assert "['rank 1: no permission']" in text


def test_hosts_of_one_rank_each_have_nothing_to_copy():
    for found in run_ranks(choices, 2, [(None, "aa", [], False), (True, "aa", [], False)]):
        (kind, _), (error, (text,)) = found
        assert (kind[:8], error) == ("messages", "ValueError")
        assert "they are on several hosts" in text
