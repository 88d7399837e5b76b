"""Works side by side; on CUDA devices: test_gpu, test_gpu_ranks."""

import pytest
import torch

from ring_dilated_attention.lanes import LANES, side_by_side

CPU = torch.device("cpu")


def steps(name, count, seen):
    for number in range(count):
        seen.append((name, number))
        yield
    seen.append((name, "end"))


def test_works_go_on_in_turns_until_all_have_ended():
    seen: list[tuple[str, object]] = []
    side_by_side([steps("a", 1, seen), steps("b", 3, seen)], CPU)
    assert seen == [
        ("a", 0), ("b", 0), ("a", "end"), ("b", 1), ("b", 2), ("b", "end"),
    ]  # fmt: skip


def test_one_work_and_none():
    seen: list[tuple[str, object]] = []
    side_by_side([], CPU)
    side_by_side([steps("a", 2, seen)], CPU)
    assert seen == [("a", 0), ("a", 1), ("a", "end")]


def test_an_error_is_raised():
    def fails():
        yield
        raise KeyError("a bug")

    seen: list[tuple[str, object]] = []
    with pytest.raises(KeyError, match="a bug"):
        side_by_side([steps("a", 3, seen), fails()], CPU)
    assert seen == [("a", 0), ("a", 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lanes_see_what_was_there_and_the_caller_what_they_made():
    device = torch.device("cuda", 0)
    given = torch.zeros(LANES, 1 << 20, device=device)
    made = torch.zeros_like(given)
    streams = []

    def work(lane):
        streams.append(torch.cuda.current_stream(device))
        torch.cuda._sleep(20_000_000)  # 10 ms at 2 GHz
        made[lane] = given[lane] + lane
        yield

    torch.cuda._sleep(20_000_000)
    given.fill_(7)
    side_by_side([work(lane) for lane in range(LANES)], device)
    assert (made.sum(1) / (1 << 20)).tolist() == [7 + lane for lane in range(LANES)]
    assert len({torch.cuda.current_stream(device), *streams}) == LANES + 1
