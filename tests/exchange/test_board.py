"""Agreements in shared memory."""

import os
import time
from contextlib import ExitStack
from itertools import compress, product
from random import Random

import pytest
import torch
from support.worlds import world

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.exchange import ProcessGroupExchange, groups
from ring_dilated_attention.exchange import board as board_module
from ring_dilated_attention.exchange.board import MOST_VALUES, Board, make_board
from ring_dilated_attention.exchange.calls import Call, Finding, LostPeerError

CPU = torch.device("cpu")
FOLDER = "/dev/shm"


def files():
    """In shared memory, but for semaphores: other processes of this host have theirs there."""
    return {name for name in os.listdir(FOLDER) if not name.startswith("sem.")}


def boards_made(patch):
    """The boards, or None, that groups of this process have from now on."""
    made = []

    def noted(*arguments):
        made.append(make_board(*arguments))
        return made[-1]

    patch.setattr(groups, "make_board", noted)
    return made


def calls(rank, world_size, repeats):
    """How many maxima were wrong: ranks are late now and then, and numbers are many or few."""
    boards = boards_made(pytest.MonkeyPatch())
    ends, own, wrong = ProcessGroupExchange(world()), Random(rank), 0
    for repeat in range(repeats):
        random = Random(repeat)  # alike on all ranks
        count = random.choice([1, 3, MOST_VALUES - 2])
        by_rank = [
            [random.randrange(-(2**62), 2**62) for _ in range(count)] for _ in range(world_size)
        ]
        if own.random() < 0.1:
            time.sleep(own.random() * 0.003)
        found = ends.maximum(by_rank[rank], CPU)
        wrong += found != [max(column) for column in zip(*by_rank, strict=True)]
    assert isinstance(boards[0], Board)
    return wrong


@pytest.mark.parametrize("world_size", [2, 5])
def test_every_rank_finds_the_maximum(world_size):
    assert run_ranks(calls, world_size, 300) == [0] * world_size


def test_nothing_is_left_behind():
    before = files()
    run_ranks(calls, 2, 3)
    assert files() <= before


def more_than_fit(rank, world_size):
    return ProcessGroupExchange(world()).maximum([rank] * (MOST_VALUES + 1), CPU)


def test_more_than_fit_a_row():
    assert run_ranks(more_than_fit, 2) == [[1] * (MOST_VALUES + 1)] * 2


def without_a_board(rank, world_size, change):
    """The maximum, and whether it came from a board, where one rank or all cannot have one."""
    patch = pytest.MonkeyPatch()
    if change == "no memory":
        patch.setattr(os, "memfd_create", refuse)
    elif change == "no such memory":
        patch.delattr(os, "memfd_create")
    elif change == "other host" and rank == 1:
        patch.setattr(board_module, "open", refuse, raising=False)
    elif change == "another file" and rank == 1:
        read = os.readlink
        patch.setattr(os, "readlink", lambda x: "/etc/passwd" if "/fd/" in x else read(x))
    elif change == "other token" and rank == 1:
        tokens = board_module.token_of
        patch.setattr(board_module, "token_of", lambda file: tokens(file)[::-1])
    boards = boards_made(patch)
    ends = ProcessGroupExchange(world())
    found = ends.maximum([rank, -rank], CPU), ends.share("x" * rank)
    return found, any(board is not None for board in boards)


def refuse(*args, **kwargs):
    raise PermissionError("no")


@pytest.mark.parametrize(
    "change", ["no memory", "no such memory", "other host", "another file", "other token"]
)
def test_ranks_without_a_board_agree_by_a_collective(change):
    before = files()
    everyone = ["", "x", "xx"]
    assert run_ranks(without_a_board, 3, change) == [(([2, 0], everyone), False)] * 3
    assert files() <= before


def share_objects(rank, world_size):
    """What ranks show of each other's objects, small, large and of several rows."""
    ends = ProcessGroupExchange(world())
    sizes = [0, 1, 7, 8, 9, 8 * MOST_VALUES, 8 * MOST_VALUES + 1, 20_000]
    return [ends.share({"rank": rank, "text": "y" * (size * (rank + 1))}) for size in sizes]


def test_every_rank_shares_objects():
    first, *rest = run_ranks(share_objects, 3)
    assert all(one == first for one in rest)
    assert [[one["rank"] for one in shared] for shared in first] == [[0, 1, 2]] * len(first)
    assert len(first[-1][2]["text"]) == 60_000


@pytest.fixture
def boards():
    """Boards of three ranks, all in this process, which has no lock on itself."""
    with board_module.create_file(Board.nbytes(3)) as file, ExitStack() as stack:
        files = [stack.enter_context(open(file.fileno(), "r+b", 0, closefd=False)) for _ in "123"]
        yield [Board(each, rank, 3) for rank, each in enumerate(files)]


def test_who_waits_is_not_at_fault(boards, monkeypatch):
    first, second, third = boards
    monkeypatch.setattr(Board, "has_gone", lambda self, rank: False)
    third.begin(Call(4, "a", "forward"))
    second.waits_for(2)
    lost = LostPeerError([1], 1.0)
    assert first.explain(lost).rank == 2
    second.waits_for(None)
    second.waits_for(2, on_stream=True)
    assert first.explain(lost).rank == 2
    third.waits_for(0)  # a circle: nobody else is to blame
    assert first.explain(lost).rank == 2
    second.waits_for(None, on_stream=True)
    assert first.explain(lost).rank == 1


def test_who_goes_because_another_failed_is_not_at_fault(boards, monkeypatch):
    """It may be refused before it begins a call, and then has no failure of its own."""
    first, _, third = boards
    monkeypatch.setattr(Board, "has_gone", lambda self, rank: rank == 1)
    assert first.explain(LostPeerError([1])).rank == 1
    third.fail(Finding(3, "rank 3 has gone"))
    assert first.explain(LostPeerError([1])).rank == 3


def test_what_a_rank_says_of_its_failure(boards, monkeypatch):
    first, second, third = boards
    monkeypatch.setattr(Board, "has_gone", lambda self, rank: False)
    assert first.failed() is None
    first.look([1, 2])
    finding = Finding(2, "rank 2 failed: " + "x" * 2000)
    second.fail(finding)
    for board in (first, second, third):
        failed = board.failed()
        assert failed is not None
        assert failed.rank == 2
        assert finding.text.startswith(failed.text)
        assert len(failed.text) > 300
    with pytest.raises(LostPeerError):
        first.look([1])


def test_a_row_half_written_does_not_count(monkeypatch):
    """Processors may see another's words in any order, and some of them late."""
    monkeypatch.setattr(Board, "has_gone", lambda self, rank: False)
    nbytes = Board.nbytes(2)
    with board_module.create_file(nbytes) as file:
        empty = os.pread(file.fileno(), nbytes, 0)
        Board(file, 1, 2).show([5, 6], 1.0)
        shown = os.pread(file.fileno(), nbytes, 0)
    words = [at for at in range(0, nbytes, 8) if empty[at : at + 8] != shown[at : at + 8]]
    assert len(words) == 5  # the round, a hash, how many, and the two numbers
    for seen in product((False, True), repeat=len(words)):
        with board_module.create_file(nbytes) as file:
            for at in compress(words, seen):
                os.pwrite(file.fileno(), shown[at : at + 8], at)
            board = Board(file, 0, 2)
            if all(seen):
                assert board.exchange([1, 2], 0.0) == [[1, 2], [5, 6]]
                continue
            with pytest.raises(LostPeerError):
                board.exchange([1, 2], 0.0)
