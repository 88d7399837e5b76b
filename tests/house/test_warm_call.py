"""A call like an earlier one looks up what that was resolved to: it passes through few files."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ring_dilated_attention
from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import run_ranks

PACKAGE = str(Path(ring_dilated_attention.__file__).parent)
MOST = {1: 18, 2: 20}  # by ranks


def files_of_a_warm_call(rank, ranks, pattern):
    """The files of the package whose functions run in the third forward of a kind."""
    query, group = torch.randn(1, 64 // ranks, 2, 16), dist.group.WORLD if ranks > 1 else None
    files = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    for number in range(3):
        sys.setprofile(note if number == 2 else None)
        dilated_attention(query, query, query, pattern, group=group)
        sys.setprofile(None)
    return sorted(files)


@pytest.mark.parametrize("pattern", [DilatedPattern.dense(), DilatedPattern([32, 64], [1, 2])])
@pytest.mark.parametrize("ranks", MOST)
def test_a_warm_call_passes_through_few_files(ranks, pattern):
    for files in run_ranks(files_of_a_warm_call, ranks, pattern):
        assert "/functional.py" in files
        assert len(files) <= MOST[ranks], files
