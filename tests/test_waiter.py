"""Waits that another thread takes over: what comes of them, and what ends them."""

import gc
import threading
from functools import partial

import pytest

from ring_dilated_attention.calls import LostPeerError
from ring_dilated_attention.waiter import Waiter, waiting


def fail(error):
    raise error


@pytest.mark.parametrize(
    "error", [LostPeerError([1]), RuntimeError("reset by peer"), TimeoutError()], ids=repr
)
@pytest.mark.parametrize(("timeout", "waited"), [(0.0, 0.0), (1e6, None)])
def test_a_lost_wait_says_how_long_it_was(error, timeout, waited):
    """A rank whose own timeout broke the others' connections may hear of them first."""
    with pytest.raises(LostPeerError) as lost, waiting([1], timeout):
        raise error
    assert (lost.value.peers, lost.value.waited) == ((1,), waited)
    assert lost.value.__cause__ is error


def test_who_is_lost_is_kept():
    with pytest.raises(LostPeerError) as lost, waiting([1], 0.0):
        raise LostPeerError([2, 3])
    assert lost.value.peers == (2, 3)


def test_results_and_errors_of_another_thread():
    waiter = Waiter()
    assert waiter.run(threading.current_thread, lambda: None) is not threading.current_thread()
    with pytest.raises(KeyError, match="here"):
        waiter.run(partial(fail, KeyError("here")), lambda: None)
    assert waiter.run(lambda: 3, lambda: None) == 3


def test_a_wait_is_left_behind():
    """The other ranks are looked at; the thread still ends with its object."""
    end, threads = threading.Event(), []

    def never():
        threads.append(threading.current_thread())
        end.wait()

    waiter = Waiter()
    with pytest.raises(LostPeerError):
        waiter.run(never, partial(fail, LostPeerError([1])))
    assert threads[0].is_alive()
    del waiter
    gc.collect()  # an error and its frames hold each other
    end.set()
    threads[0].join(60)
    assert not threads[0].is_alive()
