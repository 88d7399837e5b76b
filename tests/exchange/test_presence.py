"""Whether processes of other ranks still run, told by the ports that they listen on."""

import multiprocessing as mp
import os
import signal
import socket
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from ring_dilated_attention.exchange.presence import Presence, make_presence


def listening():
    return socket.create_server(("127.0.0.1", 0))


@contextmanager
def process_with(listener):
    """A process that holds a port, which this one closes."""
    process = mp.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    listener.close()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def found_gone(presence, rank):
    for _ in range(50):
        if presence.gone_since(rank) is not None:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("is_known", [True, False], ids=["connected before", "never connected"])
def test_a_process_that_ends_is_gone_and_one_that_is_stopped_is_not(is_known):
    listener = listening()
    presence = Presence(listening(), [("127.0.0.1", 1), listener.getsockname()])
    with process_with(listener) as process:
        os.kill(process.pid, signal.SIGSTOP)
        if is_known:
            assert presence.reach(1) == ""
            assert not found_gone(presence, 1)
        process.kill()
        process.join()
        assert found_gone(presence, 1)
        since = presence.gone_since(1)
        assert since is not None
        assert since == presence.gone_since(1)
        assert since <= time.monotonic()


def test_a_connection_that_breaks_is_not_a_process_that_ends():
    other = listening()
    presence = Presence(listening(), [("127.0.0.1", 1), other.getsockname()])
    assert presence.reach(1) == ""
    other.accept()[0].close()
    assert not found_gone(presence, 1)
    presence.forget()
    other.close()


def test_a_forked_process_does_not_keep_the_port():
    """A worker that loads data may live on for a while."""
    own = listening()
    presence = Presence(own, [own.getsockname()])
    with process_with(listening()):
        looks = Presence(listening(), [own.getsockname()])
        assert looks.reach(0) == ""
        presence.forget()
        assert found_gone(looks, 0)


def test_what_a_rank_says_is_heard_after_its_end():
    """By those connected before it spoke, and by those who connect between two words."""
    own = listening()
    address = own.getsockname()
    presence = Presence(own, [address])
    early, late = (Presence(listening(), [address]) for _ in range(2))
    assert early.reach(0) == ""
    assert not late.is_known(0)
    presence.tell("waits", "3")
    assert late.reach(0) == ""
    assert late.is_known(0)
    presence.tell("failed", "why\n" * 3000)
    presence.forget()
    for one in early, late:
        assert found_gone(one, 0)
        assert one.said(0) == {"waits": "3", "failed": "why\n" * 3000}


@pytest.mark.parametrize("name", [None, "no-such-host.invalid"])
def test_ranks_meet_without_a_store_that_has_a_host(name, monkeypatch):
    if name is not None:
        monkeypatch.setattr(socket, "gethostname", lambda: name)
    presence = make_presence(0, 1, dist.HashStore(), lambda value: [value])
    assert presence is not None
    assert not found_gone(presence, 0)


@pytest.mark.parametrize("listens", [True, False])
def test_ranks_that_do_not_reach_each_other_say_so(listens):
    with listening() as closed:
        address = closed.getsockname() if listens else None
    failure = "" if listens else "rank 1 cannot listen: why"
    said = "rank 0 does not reach rank 1 at .*127.0.0.1.*refused" if listens else failure
    answers = [lambda own: [own, address], lambda own: [own, failure]]
    with pytest.warns(UserWarning, match=said):
        assert make_presence(0, 2, dist.HashStore(), lambda x: answers.pop(0)(x)) is None
