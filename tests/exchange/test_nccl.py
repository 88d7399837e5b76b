"""NCCL as torch.distributed has it, of which a build for CPUs has nothing: a stand-in for it."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_dilated_attention.exchange.calls import LostPeerError
from ring_dilated_attention.exchange.communicator import make_nccl, start_together

SETTINGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")


def settings():
    return [os.environ.get(name) for name in SETTINGS]


@pytest.mark.parametrize("given", [None, "3"])
def test_threads_of_torch_do_not_end_the_process_when_a_rank_has_gone(monkeypatch, given):
    """Which they do by default within 0.1 s, before anything can say which rank it is."""

    class Backend:
        def __init__(self, store, rank, world_size, options):
            self.options, self.reads = options, settings()

    def options(is_high_priority_stream):
        return SimpleNamespace(config=SimpleNamespace())

    setattr(Backend, "Options", staticmethod(options))  # noqa: B010
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    group: Any = SimpleNamespace(group_name="7")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [3, 4])
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    made = make_nccl(group, dist.HashStore(), timedelta(seconds=3))
    assert made.reads == ["0", "0"]
    assert settings() == [given, given]  # of the callers' groups
    assert made.options.group_name == "ring_dilated_attention 7"


class Messages:
    """A group of NCCL's is open between its start and its end; `error` is that of `recv`."""

    def __init__(self, error):
        self.error, self.is_open, self.done = error, False, []

    def _start_coalescing(self, device):
        assert not self.is_open
        self.is_open = True

    def _end_coalescing(self, device):
        assert self.is_open
        self.is_open = False
        return "work"

    def send(self, tensors, peer, tag):
        self.done.append(("send", peer))

    def recv(self, tensors, peer, tag):
        if self.error is not None:
            raise self.error
        self.done.append(("recv", peer))


def start(error):
    messages, tensor = Messages(error), torch.zeros(1)
    transfers = [(messages.send, 1, tensor), (messages.recv, 2, tensor)]
    try:
        return messages, start_together(messages, torch.device("cuda"), transfers)
    finally:
        assert not messages.is_open


def test_transfers_start_in_one_group():
    messages, work = start(None)
    assert (messages.done, work) == ([("send", 1), ("recv", 2)], "work")


def test_a_group_that_fails_is_closed():
    """It is the thread's, of all its communicators: nothing else would start."""
    with pytest.raises(TypeError):
        start(TypeError("no such dtype"))


def test_what_nccl_has_lost_is_a_peer():
    with pytest.raises(LostPeerError) as lost:
        start(dist.DistBackendError("NCCL error: remote process exited"))
    assert lost.value.peers == (2, 1)
