"""Layouts of packed documents: as much work on every rank, and about as many positions."""

import random
from itertools import pairwise

import pytest

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.plan import costs, plan_attention

SIZE = costs.TensorSize(batch=1, head_dim=1, element_size=1)


def packing(seed: int, length: int = 131_072) -> list[int]:
    draw = random.Random(seed)
    borders = [0]
    while borders[-1] < length:
        borders.append(min(borders[-1] + int(2 ** draw.uniform(10, 15)), length))
    return borders


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 8, 17, 64])
def test_ranks_have_as_much_work_and_about_as_many_positions(world_size):
    patterns = DilatedPattern.dense(), DilatedPattern([2048, 8192, None], [1, 4, 16])
    for seed in range(20):
        documents, pattern = packing(seed), patterns[seed % 2]
        is_causal = seed % 3 > 0
        layout = SequenceLayout.balanced(documents, world_size, pattern, is_causal=is_causal)
        plan = plan_attention(
            pattern, layout, is_causal=is_causal, num_heads=16, documents=documents
        )
        work = costs.flops_by_rank(plan, SIZE)
        assert max(work) <= 1.055 * sum(work) / world_size  # heads differ by their offsets
        assert layout.max_local_length <= 1.1 * layout.length / world_size + 1


def test_documents_that_fit_are_not_cut():
    documents = [0, 4, 4, 8, 12, 16]
    layout = SequenceLayout.balanced(documents, 2, DilatedPattern.dense(), is_causal=True)
    held = [
        (low, high)
        for ranges in layout.ranges
        for low, high in ranges
        for start, stop in pairwise(documents)
        if max(low, start) < min(high, stop) and not low <= start <= stop <= high
    ]
    assert layout.length == 16
    assert not held


@pytest.mark.parametrize(
    ("documents", "message"),
    [([0], "at least one position"), ([], "must not be empty"), ([0, 4, 2], "must rise")],
)
def test_what_is_no_packing(documents, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.balanced(documents, 2, DilatedPattern.dense(), is_causal=True)
