"""Rows and agreements over gloo, and of threads."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
import torch.distributed as dist
from support.worlds import world

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.exchange import (
    ExchangeError,
    ProcessGroupExchange,
    SoloExchange,
    agree,
    all_gather,
    run_loopback,
    settle,
    together,
)

CPU = torch.device("cpu")


def many_transfers(ends, repeats=40, device=CPU):
    """Messages of all sizes, several in flight, ranks ahead of others; how many arrived broken."""
    rank, world_size, broken = ends.rank, ends.world_size, 0
    for repeat in range(repeats):
        random, flights = Random(repeat), []  # alike on all ranks
        with ends.calls.enter("test", "rows") as scope:
            settle(scope, ends, device, later=True)
            for number in range(random.randrange(1, 5)):
                step = random.randrange(1, world_size)
                sizes = [random.choice([None, 1, 1000, 300_000]) for _ in range(world_size)]
                to, source = (rank + step) % world_size, (rank - step) % world_size
                send = receive = None
                if device.type == "cuda" and (repeat + number + rank) % 3 == 0:
                    torch.cuda._sleep(2_000_000)  # about 1 ms
                sent, wanted = (100.0 * repeat + 10 * number + x for x in (rank, source))
                if sizes[rank] is not None:
                    send = to, torch.full((sizes[rank],), sent, device=device)
                if sizes[source] is not None:
                    receive = source, torch.full((sizes[source],), -1.0, device=device)
                flights.append((wanted, receive, ends.start(send, receive)))
                del send  # the transfer keeps it
            for wanted, receive, pending in flights:
                pending.wait()
                if receive is not None:
                    broken += bool((receive[1] != wanted).any())
    return broken


def collectives(ends):
    """Agreements and shared objects, small and of megabytes."""
    found = [ends.share("y" * (size * (ends.rank + 1))) for size in (0, 1, 70_000, 1_000_000)]
    assert [len(x) for x in found[3]] == [1_000_000 * (r + 1) for r in range(ends.world_size)]
    with ends.calls.enter("test", "rows") as scope:
        settle(scope, ends, CPU)
        own = torch.full((ends.rank + 1, 2), float(ends.rank))
        shapes = [(rank + 1, 2) for rank in range(ends.world_size)]
        for rank, rows in enumerate(all_gather(ends, own, shapes)):
            assert torch.equal(rows, torch.full((rank + 1, 2), float(rank)))


def error_of(function):
    try:
        function()
    except (ExchangeError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagreements(ends):
    """What ranks are told that differ in a call of their own; they go on after each."""
    rank, said = ends.rank, []

    def apart(name, words, fails=False, advice=""):
        def call():
            with together(name, ends, CPU, advice=advice) as agreed:
                if fails:
                    raise MemoryError("no memory")
                agreed.on(words)

        said.append(error_of(call))

    def in_calls(name, share, of=0):
        def call():
            with ends.calls.enter(name, "forward", of) as scope:
                if share:
                    ends.share(rank)
                else:
                    settle(scope, ends, CPU, later=True)

        said.append(error_of(call))

    apart("same", {"x": 1})
    apart("other", {"x": rank == 1, "y": 2}, advice="Look.")
    apart("refused", {}, fails=rank == 1)
    in_calls("f" if rank == 1 else "g", False)
    in_calls("f", rank == 1)  # one rank shares, and the others agree
    in_calls("f" if rank == 1 else "g", True)
    in_calls("f", False, of=3 + (rank == 1))
    said.append(error_of(lambda: agree("again", ends, {}, None, CPU)))
    collectives(ends)
    return said


def check_disagreements(by_rank):
    for rank, said in enumerate(by_rank):
        assert said[0] == said[-1] == "nothing"
        assert said[1] == (
            "ValueError: other was called with different arguments on different ranks: "
            "x is False on ranks 0, 2, True on rank 1. Look."
        )
        refused = "ValueError: refused was refused on other ranks: rank 1: MemoryError: no memory"
        assert said[2] == ("MemoryError: no memory" if rank == 1 else refused)
        for text in (said[3], said[5], said[6]):
            assert text.startswith("ExchangeError: ranks are in different calls")
            assert "; rank 1 in call " in text
        assert "f, forward of call 4" in said[6]
        assert said[4] != "nothing"


def run_rank(rank, world_size):
    ends = ProcessGroupExchange(world())
    collectives(ends)
    said = disagreements(ends)
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
    mine = [ProcessGroupExchange(group) for ranks, group in groups if rank in ranks]
    return said, [many_transfers(each) for each in [ends, *mine, ends]]


def test_gloo():
    found = run_ranks(run_rank, 3)
    check_disagreements([said for said, _ in found])
    for _, broken in found:
        assert not any(broken)


def run_on_gpus(rank, world_size):
    return many_transfers(ProcessGroupExchange(world()), 100, torch.device("cuda", rank))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl():
    assert not any(run_ranks(run_on_gpus, torch.cuda.device_count(), backend="nccl"))


def test_loopback():
    check_disagreements(run_loopback(3, disagreements))
    assert not any(run_loopback(3, many_transfers))


def test_one_rank():
    ends = SoloExchange()
    collectives(ends)
    with pytest.raises(MemoryError), together("f", ends, CPU):
        raise MemoryError
    agree("f", ends, {"x": 1}, None, CPU)


def test_a_rank_that_fails_alone_ends_the_others():
    def rank(ends):
        with ends.calls.enter("f", "forward") as scope:
            settle(scope, ends, CPU, later=True)
            if ends.rank == 1:
                raise MemoryError("no memory")
            ends.start(None, (1, torch.empty(1))).wait()

    with pytest.raises(MemoryError):
        run_loopback(3, rank)

    def caught(ends):
        said = error_of(lambda: rank(ends))
        return said, error_of(lambda: rank(ends))

    for number, (said, again) in enumerate(run_loopback(3, caught)):
        why = "rank 1 failed in call 1 (f, forward): MemoryError: no memory"
        assert said == (
            "MemoryError: no memory"
            if number == 1
            else f"ExchangeError: {why}; this is rank {number} in call 1 (f, forward)"
        )
        assert again.startswith(
            f"ExchangeError: this group of 3 ranks cannot be used any more: {why}"
        )


def test_two_threads_of_a_rank():
    """Their calls are in no order: the second one raises, and the others hear of it."""

    def rank(ends):
        with ends.calls.enter("f", "forward") as scope:
            settle(scope, ends, CPU)
            if ends.rank == 0:
                ends.start(None, (1, torch.empty(1))).wait()
            with ThreadPoolExecutor(1, "user") as pool:
                pool.submit(ends.calls.enter, "g", "forward").result()

    for said in run_loopback(2, lambda ends: error_of(lambda: rank(ends))):
        assert "on rank 1, threads 'ThreadPoolExecutor" in said
        assert "and 'user_0' both use a group" in said
