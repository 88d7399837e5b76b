"""Waits that another thread takes over: what comes of them, and what ends them."""

import gc
import subprocess
import sys
import threading
from functools import partial

import pytest

from ring_dilated_attention.exchange.calls import LostPeerError
from ring_dilated_attention.exchange.waiter import Waiter, waiting


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


def test_a_process_ends_in_order_with_a_wait_left_behind():
    """torch's waits end the process by SIGABRT if they come back while Python is ending."""
    script = """
import time
from datetime import timedelta
import torch.distributed as dist
from ring_dilated_attention.exchange.waiter import Waiter

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # Python is ending; other threads may run

def wait():
    dist.HashStore().wait(["a key that nobody sets"], timedelta(seconds=0.5))

def look():
    raise KeyError

kept, waiter = Late(), Waiter()
try:
    waiter.run(wait, look)
except KeyError:
    print("left")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr
