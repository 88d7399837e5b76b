"""What ranks leave in the store that they met in, and what becomes of it when that is gone."""

import multiprocessing as mp
import os
import signal
import time

import pytest
import torch.distributed as dist

from ring_dilated_attention.exchange.processes import Notices


def hold(queue):
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    queue.put(store.port)
    time.sleep(600)


@pytest.fixture
def holder():
    """A process that holds a store, and its port."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=hold, args=(queue,), daemon=True)
    process.start()
    yield process, queue.get(timeout=120)
    process.kill()
    process.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["ended", "stopped"])
def test_nobody_waits_for_a_store_that_does_not_answer(holder, number):
    process, port = holder
    notices = Notices(dist.TCPStore("127.0.0.1", port, 2, False))
    notices.leave("a", "text")
    assert notices.read("a") == "text"
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.join()
    else:
        os.waitpid(process.pid, os.WUNTRACED)  # a signal takes a moment to stop a process
    assert notices.read("a") is None
    assert notices.are_lost
    assert notices.holder_has_ended is (number == signal.SIGKILL)
    notices.leave("a", "other")
    notices.remove("a")
    assert notices.read("a") is None
