"""Agreements in shared memory."""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from worlds import world

from ring_dilated_attention import board as board_module
from ring_dilated_attention import exchange
from ring_dilated_attention.board import FOLDER, MOST_VALUES, Board, make_board
from ring_dilated_attention.exchange import ProcessGroupExchange
from ring_dilated_attention.testing import run_ranks

CPU = torch.device("cpu")


def files():
    """In shared memory, but for semaphores: other processes of this host have theirs there."""
    return {name for name in os.listdir(FOLDER) if not name.startswith("sem.")}


def calls(rank, world_size, repeats):
    """How many maxima were wrong: ranks are late now and then, and numbers are many or few."""
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
    assert isinstance(exchange._boards[world()], Board)
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
    if change == "no folder":
        patch.setattr(board_module, "FOLDER", "/nowhere")
    elif change == "not writable":
        patch.setattr(tempfile, "NamedTemporaryFile", refuse)
    elif change == "other host" and rank == 1:
        patch.setattr(board_module, "open", refuse, raising=False)
    elif change == "other file" and rank == 1:
        tokens = board_module._token
        patch.setattr(board_module, "_token", lambda file: tokens(file)[::-1])
    found = ProcessGroupExchange(world()).maximum([rank, -rank], CPU)
    return found, exchange._boards[world()] is not None


def refuse(*args, **kwargs):
    raise PermissionError("no")


@pytest.mark.parametrize("change", ["no folder", "not writable", "other host", "other file"])
def test_ranks_without_a_board_agree_by_a_collective(change):
    before = files()
    assert run_ranks(without_a_board, 3, change) == [([2, 0], False)] * 3
    assert files() <= before


def left_alone(rank, world_size, how):
    """What the others are told when the last rank does not come."""
    timeout = timedelta(seconds=60 if how == "gone" else 1)
    ends = ProcessGroupExchange(world())
    board = make_board(rank, world_size, ends.share, timeout)
    assert board is not None
    board.maximum([0])
    if rank == world_size - 1:
        if how == "gone":
            board = None  # as when its process ends
        else:
            dist.barrier()  # until the others have given up
        return ""
    told = "nothing was wrong"
    try:
        board.maximum([0])
    except RuntimeError as error:
        told = str(error)
    if how == "late":
        dist.barrier()
    return told


def test_a_rank_that_has_gone():
    *others, _ = run_ranks(left_alone, 3, "gone")
    for text in others:
        assert "has gone" in text  # not that it is late


def test_a_rank_that_does_not_come():
    text, _ = run_ranks(left_alone, 2, "late")
    assert text == "rank 1 did not make the call for which rank 0 waited 0:00:01"


def test_a_row_half_written_does_not_count(tmp_path):
    path = Path(tmp_path, "board")
    path.write_bytes(bytes(Board.nbytes(2)))
    with path.open("r+b", buffering=0) as file:
        board = Board(file, 0, 2, timedelta(seconds=1))
        board._calls = 1
        start = board._start(1)
        board._words[start] = 1
        assert board._look(1, 2) is None
        board._words[start + 1] = board._hash([5, 6])
        board._words[start + 2] = 5
        assert board._look(1, 2) is None
        board._words[start + 3] = 6
        assert board._look(1, 2) == [5, 6]
        assert board._look(1, 1) is None
