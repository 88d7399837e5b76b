"""`run_ranks` returns what ranks return, and says which rank failed however it ended."""

import errno
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ring_dilated_attention.checks import RankError, run_ranks


def end(rank, world_size, how):
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("no rows today")
        elif how == "hangs":
            time.sleep(100)
        elif how == "leaves":
            os._exit(0)
        elif how == "no answer":
            return lambda: 0
    if how in ("killed", "raises"):
        dist.barrier()  # waits for the rank that does not come
    return os.environ["MARK"], rank, torch.full((2,), rank)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("killed", RankError, "^rank 1 died without an answer: .*SIGKILL"),
        ("raises", RankError, r"(?s)^rank 1 failed:\nTraceback.*ValueError: no rows today$"),
        ("hangs", TimeoutError, r"^no answer from ranks \[.*1\] in 3 s$"),
        ("leaves", RankError, r"^ranks \[1\] ended without an answer$"),
        ("no answer", RankError, r"(?s)^rank 1 failed:\n.*pickle"),
    ],
)
def test_run_ranks_says_which_rank_failed(how, error, message, monkeypatch):
    monkeypatch.setenv("MARK", "of the caller")
    timeout = 3 if how == "hangs" else 100
    with pytest.raises(error, match=message):  # a TimeoutError if the others were waited for
        run_ranks(end, 2, how, timeout=timeout)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_run_ranks_returns_by_rank_and_passes_the_environment_on(monkeypatch):
    """It needs no /dev/shm, which is small in containers."""
    monkeypatch.setenv("MARK", "of the caller")
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", full)
    found = run_ranks(end, 3, "well")
    assert [(mark, rank) for mark, rank, _ in found] == [("of the caller", i) for i in range(3)]
    assert [tensor.tolist() for *_, tensor in found] == [[0, 0], [1, 1], [2, 2]]
    with pytest.raises(ValueError, match="wait_timeout must be a number where timeout is None"):
        run_ranks(end, 2, "well", timeout=None)


def interface_of_gloo(rank, world_size):
    dist.barrier()
    return os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize("asked", [None, "lo,lo"])
def test_ranks_of_this_host_listen_on_its_loopback_interface(monkeypatch, asked):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if asked:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", asked)
    assert run_ranks(interface_of_gloo, 2) == [asked or "lo"] * 2
