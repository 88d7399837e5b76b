"""Agreements over TCP."""

import errno
import os
import socket
import time
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from support.worlds import pretend_host, world

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import Case, make_layout, run_case, run_ranks
from ring_dilated_attention.exchange import ProcessGroupExchange, relay
from ring_dilated_attention.exchange.calls import LostPeerError
from ring_dilated_attention.exchange.relay import make_relay


class Roll:
    """Knows nothing of other ranks."""

    def look(self, peers):
        pass

    def seen(self):
        pass


def of(rank, world_size):
    """The relay of a rank."""
    share = ProcessGroupExchange(world()).share
    found = make_relay(rank, world_size, dist.HashStore(), share, Roll())
    assert found is not None
    return found


def maxima(rank, world_size, repeats):
    """How many maxima were wrong, of which some are waited for later, by ranks that are late."""
    found, own, wrong = of(rank, world_size), Random(rank), 0
    for repeat in range(repeats):
        random = Random(repeat)  # alike on all ranks
        by_rank = [[random.randrange(-(2**62), 2**62) for _ in range(5)] for _ in range(world_size)]
        if own.random() < 0.1:
            time.sleep(own.random() * 0.003)
        shown = found.show(by_rank[rank], 60)
        if random.random() < 0.5:
            while not shown.is_done():
                time.sleep(0)
        wrong += shown.wait() != [max(column) for column in zip(*by_rank, strict=True)]
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_finds_the_maximum(world_size):
    assert run_ranks(maxima, world_size, 200) == [0] * world_size


def share(rank, world_size):
    """Objects, small and of megabytes, which all ranks send at once."""
    found = of(rank, world_size)
    texts = [found.share("y" * (size * (rank + 1)), 60) for size in (0, 1, 70_000, 3_000_000)]
    return [list(map(len, each)) for each in texts]


def test_every_rank_shares_objects():
    sizes = (0, 1, 70_000, 3_000_000)
    assert run_ranks(share, 3) == [[[size, 2 * size, 3 * size] for size in sizes]] * 3


def left_alone(rank, world_size, how):
    """What the others are told when the last rank does not come."""
    found = of(rank, world_size)
    found.maximum([0], 60)
    if rank == world_size - 1:
        if how == "gone":
            found.forget()
        dist.barrier()
        return None
    begun = time.monotonic()
    try:
        found.maximum([0], 60 if how == "gone" else 1)
    except LostPeerError as lost:
        assert time.monotonic() - begun < 5
        dist.barrier()
        return lost.peers, lost.waited
    return "nothing was wrong"


@pytest.mark.parametrize(
    ("how", "said"), [("gone", [((2,), None)] * 2 + [None]), ("late", [((), 1), None])]
)
def test_a_rank_that_does_not_come(how, said):
    assert run_ranks(left_alone, len(said), how) == said


def test_a_stranger_is_no_rank(monkeypatch):
    """Who connects without the token is sent away, and a rank that comes later is found."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, token = listener.getsockname(), b"t" * 16
    stranger = socket.create_connection(address)
    stranger.sendall(b"s" * 16 + b"\0")
    own = socket.create_connection(address)
    own.sendall(token + b"\0")
    (found,) = relay.accepted(listener, token, 1).values()
    assert found.getpeername() == own.getsockname()
    assert stranger.recv(1) == b""
    for one in (listener, stranger, own, found):
        one.close()


def test_ranks_that_do_not_reach_each_other_say_so():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    answers = [lambda own: [own, (address, b"t" * 16)], lambda failure: [failure, ""]]
    with pytest.warns(UserWarning, match=r"wait for each other in every call.*rank 0 .*refused"):
        assert make_relay(0, 2, dist.HashStore(), lambda x: answers.pop(0)(x), Roll()) is None


def without_ports(rank, world_size, case):
    """A call of ranks that do not reach each other's ports, by collectives of the group."""
    patch = pytest.MonkeyPatch()
    if rank == 1:
        patch.setattr(socket, "create_server", refuse)
    pretend_host(patch, rank)
    exchange = ProcessGroupExchange(world())
    with pytest.warns(UserWarning, match="rank 1 cannot listen"):
        exchange.share(0)
    outcomes = [run_case(case, exchange) for _ in range(2)]
    assert exchange.waits == 0
    return [outcome.passes(case.dtype) for outcome in outcomes]


def refuse(*args, **kwargs):
    raise PermissionError("no")


def test_calls_without_ports():
    case = Case(pattern=DilatedPattern([8, None], [1, 2]), layout=make_layout("zigzag", 40, 2))
    assert run_ranks(without_ports, 2, case) == [[True, True]] * 2


def test_a_forked_process_does_not_keep_connections():
    first, second = socket.socketpair()
    ends = relay.Relay(0, 2, [first], [second], Roll())
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.write(writer, bytes([first.fileno() == -1 and second.fileno() == -1]))
        os._exit(0)
    os.waitpid(process, 0)
    assert os.read(reader, 1) == b"\x01"
    assert first.fileno() != -1
    ends.forget()


class Unreachable:
    """A connection to a host that has lost its power."""

    def setblocking(self, blocking):
        pass

    def close(self):
        pass

    def send(self, data):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    recv = send


def test_a_host_that_is_not_reached_any_more_is_a_lost_rank():
    """Else a rank would say that it has failed itself."""
    gone: Any = Unreachable()
    found = relay.Relay(0, 2, [gone], [gone], Roll())
    with pytest.raises(LostPeerError) as lost:
        found.maximum([0], 60)
    assert lost.value.peers == (1,)
